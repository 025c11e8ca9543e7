"""Bytes of tensors as they come and go: every storage that torch makes, its tier, and who made it; and the peaks.

A `Meter` is a mode of torch's dispatcher: it sees the tensors that every operation returns, forward and backward, notes
each storage it has not seen, and when that goes. It works on tensors with memory behind them and on fake ones alike.

What it does not see: what an operation needs inside itself and frees again, storages made while it is not on (in other
threads), and what an allocator adds (fragments, rounding). What it costs: some microseconds an operation.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Lifetime:
    """One storage: its bytes, its tier, the operation that made it, and the moments between which it lived.

    Moments count storages made and let go; `died` is None as long as it lives.
    """

    size_bytes: int
    tier: str
    operation: str
    born: int
    died: int | None = None

    def lives_at(self, moment: int) -> bool:
        """Whether it is there at a moment."""
        return self.born <= moment and (self.died is None or moment < self.died)


class Meter(TorchDispatchMode):
    """Counts the bytes of storages by tier while it is on.

    Args:
        tier_of: returns the tier of a tensor.

    Attributes:
        live: bytes that each tier holds now.
        peaks: most bytes that each tier held.
        peak_at: number of the moment at which each tier held most; each allocation and each release is a moment.
    """

    def __init__(self, tier_of: Callable[[Tensor], str]) -> None:
        super().__init__()
        self.tier_of = tier_of
        self.live: Counter[str] = Counter()
        self.peaks: Counter[str] = Counter()
        self.peak_at: dict[str, int] = defaultdict(int)
        self.lifetimes: list[Lifetime] = []
        self._moment = 0
        self._known: dict[int, tuple[weakref.ref[Any], Lifetime]] = {}  # by the storage's address

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the operation and note what it made."""
        result = func(*args, **(kwargs or {}))
        for tensor in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor, func)
        return result

    def lifetime(self, tensor: Tensor) -> Lifetime | None:
        """Return what is known of a tensor's storage; None if it was made while the meter was off."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    def at_peak(self, tier: str) -> list[Lifetime]:
        """Return the storages that a tier held when it held most."""
        moment = self.peak_at[tier]
        return [each for each in self.lifetimes if each.tier == tier and each.lives_at(moment)]

    def _note(self, tensor: Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size, tier = storage.nbytes(), self.tier_of(tensor)
        if not size:
            return
        self._moment += 1
        lifetime = Lifetime(size, tier, str(func), self._moment)
        self.lifetimes.append(lifetime)
        self._known[key] = weakref.ref(storage, partial(self._gone, key)), lifetime
        self.live[tier] += size
        if self.live[tier] > self.peaks[tier]:
            self.peaks[tier], self.peak_at[tier] = self.live[tier], self._moment

    def _gone(self, key: int, storage: object) -> None:
        _, lifetime = self._known.pop(key)
        self._moment += 1
        lifetime.died = self._moment
        self.live[lifetime.tier] -= lifetime.size_bytes
