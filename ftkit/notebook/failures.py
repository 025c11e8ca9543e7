"""The errors that a cell shows: short, with the rank's name, and without the frames of this package.

IPython asks an exception for `_render_traceback_` and shows that in place of a traceback; elsewhere they are errors like
others. What a rank refused stays a `UserError`.
"""

from __future__ import annotations

from ftkit.errors import RankError, UserError

OPTIONS = {
    "--resume auto": 'resume="auto"',
    "--resume PATH": 'resume="PATH"',
    "--resume:": "resume:",
    "--resume": "resume=",
    "--overwrite": "overwrite=True",
    "--set output.dir=PATH": 'settings=["output.dir=PATH"]',
    "use --nproc ": "use Ranks(n) with n = ",
}
"""What the command line calls things, and what they are called in a notebook."""


def in_notebook(text: str) -> str:
    """Return a message with the options of the command line named as a notebook gives them."""
    for option, name in OPTIONS.items():
        text = text.replace(option, name)
    return text


class _Short:
    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the text is the whole story."""
        return str(self).splitlines()


class RankFailed(_Short, RankError):
    """A rank raised, died, stopped answering or waits for what will not come; the text names it.

    Args:
        rank: The rank.
        text: One screen for the user.
    """


class Refused(_Short, UserError):
    """What the user gave cannot be used; the text says what to change."""


class Interrupted(_Short, KeyboardInterrupt):
    """The user interrupted the kernel; the text says what the ranks still hold."""
