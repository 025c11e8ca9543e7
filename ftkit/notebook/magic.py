"""The cell magic `%%ranks`: a cell of Python that runs on every rank.

    %%ranks            on the ranks that were started last
    %%ranks NAME       on those that a variable of the notebook holds

It refuses a name that holds none. What it costs: what the cell does, on every rank.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from IPython.core.magic import Magics, cell_magic, magics_class

from ftkit.notebook.failures import Refused


@runtime_checkable
class RunsCells(Protocol):
    """`Ranks`, as far as the magic knows them."""

    def run(self, source: str, *, name: str | None = None) -> Any:
        """Run a cell on every rank."""


@magics_class
class RanksMagics(Magics):
    """What `%%ranks` does in one shell.

    Attributes:
        ranks: The ranks that were started last.
    """

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.ranks: RunsCells | None = None

    @cell_magic("ranks")  # type: ignore[arg-type]  # its types are of functions, not of methods
    def run(self, line: str, cell: str) -> Any:
        """Run a cell on every rank; the value of its last expression on rank 0 is the cell's."""
        name = line.strip()
        shell: Any = self.shell  # IPython types it as possibly absent
        ranks = shell.user_ns.get(name) if name else self.ranks
        if not isinstance(ranks, RunsCells):
            found = f"%%ranks: {name!r} holds no ranks" if name else "%%ranks: no ranks were started"
            raise Refused(f"{found}; first, in a cell: from ftkit.notebook import Ranks; ranks = Ranks(2).start()")
        running = shell.displayhook.exec_result  # newer shells count on before a cell runs
        number = getattr(running, "execution_count", None) or shell.execution_count
        return ranks.run(cell, name=f"cell [{number}]")


def register(shell: Any) -> RanksMagics:
    """Give a shell the magic, unless it has it; returns what holds it."""
    known = shell.magics_manager.registry.get(RanksMagics.__name__)
    if known is None:
        known = RanksMagics(shell)
        shell.register_magics(known)
    return known
