"""Count the bytes of live tensor storages by tier, and their peaks.

A `Meter` is a mode of torch's dispatcher. It sees the tensors that every operation returns, in forward and backward, and
notes when each storage is made and freed. It works on real and on fake tensors.

It does not see temporary memory inside an operation, storages made by other threads, and the overhead of an allocator.

Cost: some microseconds per operation.
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
    """One storage: its bytes, its tier, and its lifetime.

    Time counts storages made and freed. `died` is None while the storage is alive.
    """

    size_bytes: int
    tier: str
    born: int
    died: int | None = None

    def lives_at(self, time: int) -> bool:
        """Return whether the storage is alive at a time."""
        return self.born <= time and (self.died is None or time < self.died)


class Meter(TorchDispatchMode):
    """Count the bytes of storages by tier while the mode is on.

    Args:
        tier_of: Returns the tier of a tensor.

    Attributes:
        live: Current bytes of each tier.
        peaks: Peak bytes of each tier.
        peak_at: Time of each tier's peak.
    """

    def __init__(self, tier_of: Callable[[Tensor], str]) -> None:
        super().__init__()
        self.tier_of = tier_of
        self.live: Counter[str] = Counter()
        self.peaks: Counter[str] = Counter()
        self.peak_at: dict[str, int] = defaultdict(int)
        self.lifetimes: list[Lifetime] = []
        self._time = 0
        self._known: dict[int, tuple[weakref.ref[Any], Lifetime]] = {}  # by the storage's address

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the operation and note its results."""
        result = func(*args, **(kwargs or {}))
        for tensor in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return result

    def lifetime(self, tensor: Tensor) -> Lifetime | None:
        """Return the lifetime of a tensor's storage, or None if it was made while the meter was off."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    def at_peak(self, tier: str) -> list[Lifetime]:
        """Return the storages that are alive at a tier's peak."""
        return [each for each in self.lifetimes if each.tier == tier and each.lives_at(self.peak_at[tier])]

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size, tier = storage.nbytes(), self.tier_of(tensor)
        if not size:
            return
        self._time += 1
        lifetime = Lifetime(size, tier, self._time)
        self.lifetimes.append(lifetime)
        self._known[key] = weakref.ref(storage, partial(self._gone, key)), lifetime
        self.live[tier] += size
        if self.live[tier] > self.peaks[tier]:
            self.peaks[tier], self.peak_at[tier] = self.live[tier], self._time

    def _gone(self, key: int, storage: object) -> None:
        _, lifetime = self._known.pop(key)
        self._time += 1
        lifetime.died = self._time
        self.live[lifetime.tier] -= lifetime.size_bytes
