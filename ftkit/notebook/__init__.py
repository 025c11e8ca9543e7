"""`ftkit.notebook`: several ranks behind one notebook, which live across its cells.

    from ftkit.notebook import Ranks
    ranks = Ranks(2).start()          # or: with Ranks(2) as ranks
    ranks.finetune("tiny-cpu")
    ranks.generate(["What does `os.path.join` do?"])

`%load_ext ftkit.notebook` gives the cell magic `%%ranks`, which runs a cell on every rank; `Ranks` loads it by itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftkit.notebook.failures import Interrupted, RankFailed, Refused
    from ftkit.notebook.ranks import Ranks

_HOMES = {
    "Interrupted": "ftkit.notebook.failures",
    "RankFailed": "ftkit.notebook.failures",
    "Ranks": "ftkit.notebook.ranks",
    "Refused": "ftkit.notebook.failures",
}

__all__ = ["Interrupted", "RankFailed", "Ranks", "Refused"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: a worker imports this package, too, and needs none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ftkit.notebook' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def load_ipython_extension(shell: Any) -> None:
    """Give an IPython shell the cell magic `%%ranks`: what `%load_ext ftkit.notebook` calls."""
    import_module("ftkit.notebook.magic").register(shell)
