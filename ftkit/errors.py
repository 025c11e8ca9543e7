"""The errors a user is meant to read.

Whatever is wrong with what the user gave (a recipe, a row, a folder, a machine too small) is a `UserError`: the door
prints its text on one screen and exits with its code, which is 2. Everything else is a fault of the program; the door puts
its traceback into a file. It is a `ValueError`, so that code which uses ftkit as a library catches it without knowing this
file. Three kinds have codes of their own: `MemoryShort` and `EndedEarly`, because a script may start such a run again, and
`Diverged`. What it costs: the one who raises must write the whole message (what was found, what was needed, what to change),
because nobody downstream adds to it.
"""

from __future__ import annotations

from typing import Any

RESUME_ME = 75
"""Exit code of a run that ended early, by wish or by the memory guard, and goes on with --resume: sysexits' EX_TEMPFAIL."""
NOTHING_SAVED = 71
"""Exit code of a run that the memory guard ended before it had saved anything: sysexits' EX_OSERR."""

DIVERGED = 65
"""Exit code of a run that ended because its loss went wrong: sysexits' EX_DATAERR."""
UNEXPECTED = 70
"""Exit code of a command that met a fault of ftkit: sysexits' EX_SOFTWARE."""


class UserError(ValueError):
    """Input that the user can put right; the text says what was found, what was needed and what to change."""

    exit_code = 2


class MemoryShort(UserError):
    """The memory guard ended the run before the kernel would have.

    Args:
        text: The report.
        resumable: Whether the run saved a checkpoint to continue from.
    """

    def __init__(self, text: str, resumable: bool):
        super().__init__(text)
        self.resumable = resumable
        self.exit_code = RESUME_ME if resumable else NOTHING_SAVED

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.resumable)


class EndedEarly(UserError):
    """The user asked the run to end, and it saved a checkpoint to continue from."""

    exit_code = RESUME_ME


class Diverged(UserError):
    """The loss went wrong: the recipe says to end there, or the run ended with a loss that is not finite."""

    exit_code = DIVERGED


def refusal(text: str, exit_code: int) -> UserError:
    """Return the error that a rank ended with, from its text and its exit code."""
    if exit_code == DIVERGED:
        return Diverged(text)
    if exit_code in (RESUME_ME, NOTHING_SAVED):
        return MemoryShort(text, exit_code == RESUME_ME)
    return UserError(text)
