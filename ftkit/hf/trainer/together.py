"""What all ranks of a Trainer do together: they come to it at once, and hear why another rank does not come.

accelerate's own collectives (the mean of the logged loss, the gathering of predictions) know neither names nor numbers. So
ranks meet before an evaluation, and a connection that is lost in such a collective is explained here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ftkit.engine.core.shard import Units


@contextmanager
def explained(units: Callable[[], Units | None]) -> Iterator[None]:
    """Run the body; say which rank is dead, and where it was, if the connection to it is lost meanwhile.

    Args:
        units: returns the units of the model, once it is sharded.

    Raises:
        LostRank: instead of the backend's own error.
    """
    try:
        yield
    except RuntimeError as error:
        known = units()
        told = known.comm.explain(error) if known is not None else None
        if told is None:
            raise
        raise told from None  # one message: the backend would blame a rank that is not to blame


def meet(units: Units | None, what: str) -> None:
    """Wait for all ranks before `what`, which all must call. Cost: a barrier.

    Raises:
        RanksDiffer: If a rank does something else.
    """
    if units is not None:
        units.comm.barrier(what)
