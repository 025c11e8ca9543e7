"""Collectives among the ranks that share a model. The rest of the engine does not use `torch.distributed`.

All ranks run the same collectives in the same order. `totals` compares their names since the last comparison, so that ranks
that run different blocks end before the optimizer uses their gradients. Every wait ends at the timeout of the process group.

gloo moves about 1 GB/s between two CPU ranks of a machine, and a copy moves several times that. CPU ranks of one machine
exchange large tensors through shared memory (`SharedStage`), and gloo carries the barriers. They read
tensors that are in memory from `share` in place.

`bytes_sent` counts the bytes of a ring for each operation, as the ZeRO paper does (arXiv:1910.02054, section 7): (W-1)/W of
the gathered bytes for a gather or a scatter, twice that for an all-reduce.
"""

from __future__ import annotations

import atexit
import os
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import zip_longest
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ftkit.engine.comm.shared_stage import SharedStage, open_stage
from ftkit.errors import UserError

GROUP_TIMEOUT = timedelta(minutes=10)
"""Timeout of the process groups that ftkit initialises: the longest wait of a rank for another one."""

RECENT = 4096
"""Names of collectives that a rank remembers, to report the first one in which ranks differ."""

# torch 2.13 renamed both.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Communicator:
    """The ranks that share one model, and the collectives among them.

    Every collective takes `of`, the name of the exchanged tensor or value, for error messages.

    Args:
        device: Device of the tensors. CPU ranks of one machine use shared memory.
        group: A process group; None takes the default group, or a world of one if no process group is initialised.

    Raises:
        RuntimeError: A launcher started several ranks, and no process group is initialised.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.device = device
        self.bytes_sent: Counter[str] = Counter()  # by name of the operation
        live = dist.is_initialized()
        if not live and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RuntimeError(
                f"a launcher started {os.environ['WORLD_SIZE']} ranks, but they have no process group, so each would train "
                "a model of its own: call torch.distributed.init_process_group() (and torch.cuda.set_device(local_rank)) "
                "before ftkit.shard()"
            )
        self.rank = dist.get_rank(group) if live else 0
        self.world_size = dist.get_world_size(group) if live else 1
        nccl = live and device.type == "cuda" and "cuda:nccl" in dist.get_backend_config(group)
        # NCCL multiplies by 1/W in the tensor's dtype before it adds. Only for powers of two that is exact in 16 bits.
        self._averages = nccl and self.world_size & (self.world_size - 1) == 0
        self._stage: SharedStage | None = None
        self._recent: deque[str] = deque(maxlen=RECENT)
        if self.world_size > 1 and device.type == "cpu":
            atexit.register(_end_group)
            self._stage = open_stage(self)

    @contextmanager
    def _collective(self, operation: str, of: str, full: Tensor | None = None, times: int = 1) -> Iterator[None]:
        """Note the name of a collective, count its bytes, and add its name to the message of a failure."""
        name = f"{operation} of {of}" if of else operation
        self._recent.append(name)
        if full is not None:
            self._count(operation, full, times)
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            hint = "another rank may have ended, or run other blocks or calls than this one"
            raise RuntimeError(f"{name}: {error} ({hint})") from error

    def _count(self, operation: str, full: Tensor, times: int = 1) -> None:
        self.bytes_sent[operation] += times * full.nbytes * (self.world_size - 1) // self.world_size

    def share(self, size_bytes: int) -> Tensor | None:
        """Return memory for tensors that other ranks read in place: `size_bytes` zeros, uint8. A collective.

        Args:
            size_bytes: The same on all ranks.

        Returns:
            None on all ranks if they are not CPU ranks of one machine, or cannot share the memory.
        """
        return self._stage.share(self, size_bytes) if self._stage else None

    def await_readers(self) -> None:
        """Wait until no rank reads memory from `share`. A collective. Cost: a barrier, if ranks may still read it."""
        if self._stage is not None and self._stage.reading:
            with self._collective("barrier", "readers of shared memory"):
                self._stage.meet()

    # --- large tensors

    def all_gather(self, full: Tensor, shard: Tensor, of: str = "") -> None:
        """Fill `full` (W*S,) with the shards (S,) of all ranks, in rank order. `shard` may be this rank's part of `full`.

        If `shard` (or `full`, if `shard` is part of it) is in memory from `share`, it has the same place there on all ranks.
        Call `await_readers` before writing it.

        Raises:
            RuntimeError: A rank ended, or did not come before the timeout. The other collectives raise the same.
        """
        if self.world_size == 1:
            if full.data_ptr() != shard.data_ptr():
                full.copy_(shard)
            return
        with self._collective("all_gather", of, full):
            if self._stage:
                self._stage.all_gather(full, shard)
            else:
                _all_gather(full, shard, group=self.group)

    def reduce_scatter_mean(self, shard: Tensor, full: Tensor, of: str = "") -> None:
        """Put the mean over ranks of this rank's part of `full` (W*S,) into `shard` (S,). Overwrites `full`.

        `shard` may be this rank's part of `full`. For `full` in memory from `share` see `all_gather`.
        """
        if self.world_size == 1:
            if full.data_ptr() != shard.data_ptr():
                shard.copy_(full)
            return
        with self._collective("reduce_scatter", of, full):
            if self._stage:
                self._stage.reduce_scatter_mean(shard, full)
                return
            if self._averages:
                _reduce_scatter(shard, full, op=dist.ReduceOp.AVG, group=self.group)
                return
            narrow = full.dtype != torch.float32
            if narrow:  # a sum of 16-bit gradients can overflow although their mean does not
                full.div_(self.world_size)
            if self.device.type == "cpu":  # gloo's reduce-scatter is slower than its all-reduce
                dist.all_reduce(full, group=self.group)
                shard.copy_(full.view(self.world_size, -1)[self.rank])
            else:
                _reduce_scatter(shard, full, group=self.group)
            if not narrow:
                shard.div_(self.world_size)

    def all_reduce_mean(self, full: Tensor, of: str = "") -> None:
        """Replace `full` (n,) by its mean over ranks."""
        if self.world_size == 1:
            return
        with self._collective("all_reduce", of, full, times=2):
            if self._stage:
                self._stage.all_reduce_mean(full)
            else:
                if not self._averages:
                    full.div_(self.world_size)
                dist.all_reduce(full, op=dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM, group=self.group)

    def broadcast(self, tensor: Tensor, of: str = "") -> None:
        """Replace `tensor` (n,) by rank 0's. Cost: its bytes, through the process group."""
        if self.world_size == 1:
            return
        with self._collective("broadcast", of, tensor):
            dist.broadcast(tensor, group=self.group, group_src=0)

    # --- a few numbers

    def sum(self, numbers: Tensor, of: str = "") -> Tensor:
        """Replace a few `numbers` (n,) by their sums over ranks and return them, without a host wait."""
        if self.world_size == 1:
            return numbers
        with self._collective("sum", of, numbers, times=2):
            if self._stage:
                self._stage.sum(numbers)
            else:
                dist.all_reduce(numbers, group=self.group)
        return numbers

    def totals(self, numbers: Tensor, of: str = "") -> list[float]:
        """Return the sums over ranks of a few `numbers` (n,), made in fp64, and compare the ranks' collectives.

        Raises:
            UserError: The ranks have run different collectives since the last comparison.

        Cost: one small all-reduce and a host wait.
        """
        if self.world_size == 1:
            return [float(number) for number in numbers.tolist()]
        course = "\n".join([*self._recent, of])
        digest = float(zlib.crc32(course.encode()) & 0xFFFF)  # its square is exact in fp64
        digests = torch.tensor([digest, digest**2], dtype=torch.float64, device=numbers.device)
        *summed, first, square = self.sum(torch.cat([numbers.reshape(-1).double(), digests]), of).tolist()
        # The mean of squares equals the square of the mean only for equal numbers.
        if self.world_size * square != first * first:
            self._raise_difference()
        self._recent.clear()
        return summed

    def _raise_difference(self) -> NoReturn:
        """Raise a UserError that names the first collective since the last comparison in which the ranks differ."""
        courses = self.all(list(self._recent))
        steps = zip_longest(*courses, fillvalue="no further collective")
        names = next((step for step in steps if len(set(step)) > 1), ())
        found = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
        raise UserError(f"the ranks run different blocks ({found}): run the same blocks in the same order on every rank")

    def any(self, flag: bool, of: str = "a flag") -> bool:
        """Return whether `flag` is true on any rank. Cost: as `totals`; nothing on one rank."""
        if self.world_size == 1:
            return flag
        return self.totals(torch.tensor([float(flag)], device=self.device), of)[0] > 0

    # --- small values

    def same(self, value: Any, of: str = "a value of rank 0") -> Any:
        """Return rank 0's `value` on every rank: a small picklable object that ftkit itself made."""
        return self.all(value if self.rank == 0 else None, of)[0]

    def all(self, value: Any, of: str = "a value of each rank") -> list[Any]:
        """Return every rank's `value` in rank order: small picklable objects that ftkit itself made.

        Cost: two small all-gathers, each with a host wait.
        """
        values = [value] * self.world_size
        if self.world_size > 1:
            with self._collective("exchange", of):
                dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self, of: str = "") -> None:
        """Wait until every rank has come here."""
        if self.world_size > 1:
            with self._collective("barrier", of):
                dist.barrier(group=self.group)


def _end_group() -> None:
    """End the default process group before the interpreter ends: gloo's threads would abort the process."""
    if dist.is_initialized():
        dist.destroy_process_group()
