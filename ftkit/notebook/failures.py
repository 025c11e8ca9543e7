"""The errors that a cell shows, without a traceback of this package.

IPython shows what `_render_traceback_` returns. Outside IPython these are ordinary exceptions.
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
"""Options of the command line, and the arguments that replace them in a notebook."""


def in_notebook(text: str) -> str:
    """Return a message with the options of the command line replaced by arguments."""
    for option, name in OPTIONS.items():
        text = text.replace(option, name)
    return text


class _Short:
    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class RankFailed(_Short, RankError):
    """A rank raised an error or died. The text names the rank."""


class Refused(_Short, UserError):
    """The user's input cannot be used. The text says what to change."""


class Interrupted(_Short, KeyboardInterrupt):
    """The user interrupted the kernel. The text says what the ranks keep."""
