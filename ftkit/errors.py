"""The one error a user is meant to read.

Whatever is wrong with what the user gave (a recipe, a row, a folder, a machine too small) is a `UserError`: the door
prints its text on one screen and exits with 2. Everything else is a fault of the program and keeps its traceback.
It is a `ValueError`, so that code which uses ftkit as a library catches it without knowing this file. What it costs:
the one who raises must write the whole message (what was found, what was needed, what to change), because nobody
downstream adds to it.
"""


class UserError(ValueError):
    """Input that the user can put right; the text says what was found, what was needed and what to change."""
