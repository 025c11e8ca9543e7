"""`ftkit.notebook`: ranks behind a notebook that live across cells. They are engines of ipyparallel.

    from ftkit.notebook import Ranks
    ranks = Ranks(2).start()          # or: with Ranks(2) as ranks
    ranks.finetune("tiny-cpu")
    ranks.generate(["What does `os.path.join` do?"])

The cell magic `%%ranks` runs a cell on every rank of the variable `ranks`; `%%ranks NAME` on those of another variable.
`Ranks.start` defines it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftkit.notebook.failures import Interrupted, RankFailed, Refused
    from ftkit.notebook.ranks import Ranks

_HOMES = {"Interrupted": "failures", "RankFailed": "failures", "Ranks": "ranks", "Refused": "failures"}

__all__ = ["Interrupted", "RankFailed", "Ranks", "Refused"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used. An engine imports this package too and needs none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ftkit.notebook' has no attribute {name!r}")
    return getattr(import_module(f"ftkit.notebook.{_HOMES[name]}"), name)


def load_ipython_extension(shell: Any) -> None:
    """Define `%%ranks` in an IPython shell. IPython calls this for `%load_ext ftkit.notebook`."""

    def ranks(line: str, cell: str) -> None:
        shell.ev(line.strip() or "ranks").run(cell)

    shell.register_magic_function(ranks, "cell")
