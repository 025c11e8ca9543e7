"""`ftkit.notebook`: ranks behind a notebook that live across cells. They are engines of ipyparallel.

    from ftkit.notebook import Ranks
    ranks = Ranks(2).start()          # or: with Ranks(2) as ranks
    ranks.finetune("tiny-cpu")
    ranks.generate(["What does `os.path.join` do?"])

The cell magic `%%ranks` runs a cell on every rank of the variable `ranks`; `%%ranks NAME` on those of another variable.
`Ranks.start` defines it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftkit.notebook.ranks import Ranks

__all__ = ["Ranks"]


def __getattr__(name: str) -> Any:
    """Import `Ranks` when it is first used. The processes behind a notebook import this package without it."""
    if name != "Ranks":
        raise AttributeError(f"module 'ftkit.notebook' has no attribute {name!r}")
    from ftkit.notebook.ranks import Ranks

    return Ranks


def load_ipython_extension(shell: Any) -> None:
    """Define `%%ranks` in an IPython shell. IPython calls this for `%load_ext ftkit.notebook`."""

    def ranks(line: str, cell: str) -> None:
        shell.ev(line.strip() or "ranks").run(cell)

    shell.register_magic_function(ranks, "cell")
