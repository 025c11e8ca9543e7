"""Weights in the precision of their source, from sharding until the optimizer has made master weights of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.core.placeholder import is_absent
from ftkit.engine.memory.tiers import MemoryStore


class ExactWeights:
    """fp32 values of this rank's shard. Construct it before the flat parameter is allocated in a narrower dtype.

    Args:
        flat: The flat parameter. Parameters without values (on meta) are skipped.
        device: Device that keeps the values: that of the optimizer state.

    Cost: 4 bytes per element of the shard.
    """

    def __init__(self, flat: FlatParameter, device: torch.device) -> None:
        self.flat = flat
        self.known = [not is_absent(parameter) for parameter in flat.parameters]
        self.values = torch.zeros(flat.layout.shard_numel, dtype=torch.float32, device=device)
        flat.fill(MemoryStore(self.values), flat.copy_value)

    @staticmethod
    def needed(flat: FlatParameter) -> bool:
        """Return whether the compute dtype of a trained flat parameter is narrower than that of its parameters."""
        widths = [parameter.dtype.itemsize for parameter in flat.parameters if not is_absent(parameter)]
        return flat.trainable and max(widths, default=0) > flat.dtype.itemsize

    def agree(self) -> None:
        """Take rank 0's values if all ranks have the same shard. A collective."""
        if self.flat.owners == 1:
            values = self.values.to(self.flat.comm.device)
            self.flat.comm.broadcast(values, self.flat.name)
            self.values.copy_(values)

    def __call__(self, start: int, out: Tensor) -> None:
        """Write known values to `out` (n,): elements [start, start + n) of the shard."""
        first, stop = self.flat.layout.shard_range(self.flat.rank)
        begin = first + start
        for span in self.flat.layout.spans(begin, min(begin + out.numel(), stop)):
            if self.known[span.index]:
                out[span.start - begin : span.stop - begin].copy_(self.values[span.start - first : span.stop - first])
