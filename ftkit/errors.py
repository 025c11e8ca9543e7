"""Errors whose text is shown to the user, and exit codes.

A command prints the text of a `UserError` and exits with its code. `RankError` and `StoppedError` end a run that a rank or
the user ended. Any other error is an error in ftkit: the command prints its traceback.

A text states what was found, what was needed and what to change. No caller adds to it.
"""

from __future__ import annotations

from typing import Any

RESUME_ME = 75
"""Exit code of a run that ended early, on request or by the memory guard, with a checkpoint: sysexits' EX_TEMPFAIL."""
NOTHING_SAVED = 71
"""Exit code of a run that the memory guard ended before it had saved anything: sysexits' EX_OSERR."""
DIVERGED = 65
"""Exit code of a run that ended because its loss went wrong: sysexits' EX_DATAERR."""
UNEXPECTED = 70
"""Exit code of a command that failed on an error in ftkit: sysexits' EX_SOFTWARE."""


class UserError(ValueError):
    """Input that the user can correct: a recipe, a row, a folder, a machine that is too small."""

    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: the text without a traceback."""
        return str(self).splitlines()


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
    """The loss diverged: the recipe says to stop then, or the last loss of the run is not finite."""

    exit_code = DIVERGED


def refusal(text: str, exit_code: int) -> UserError:
    """Return the error that a rank ended with, from its text and its exit code."""
    if exit_code == DIVERGED:
        return Diverged(text)
    if exit_code in (RESUME_ME, NOTHING_SAVED):
        return MemoryShort(text, exit_code == RESUME_ME)
    return UserError(text)


class RankError(RuntimeError):
    """A rank failed; the text names it and shows its error.

    Args:
        rank: The rank that failed first.
        text: Text for the user.
    """

    asked = False
    """Whether the user had asked the run to end before."""
    _render_traceback_ = UserError._render_traceback_

    def __init__(self, rank: int, text: str):
        self.rank = rank
        super().__init__(text)


class StoppedError(RuntimeError):
    """The user ended the run at once, by a second signal."""
