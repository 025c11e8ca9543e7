"""Collectives return the right numbers for every size, dtype and transport, and however late a rank comes.

The same cases go through the window of shared memory and through gloo alone, against sums made here. Waits are tested by
ranks that come late: without a barrier a punctual rank would read what the late one has not written yet, or write over
what the late one has not read.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ftkit.engine.comm import communicator, shared_memory
from ftkit.engine.comm import shared_stage as stage_module
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.comm.shared_stage import SharedStage
from ftkit.engine.memory.arena import PAGE_BYTES
from ftkit.engine.memory.tiers import Tiers
from ftkit.errors import UserError
from ftkit.spec.sizes import STAGE_BYTES
from ftkit.spec.strategy import Strategy
from tests.worlds import PATIENCE, World

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = (1, 7, 4096, STAGE_BYTES // 4 + 5)
"""Elements of a shard: one, odd ones, a page, and more than a half of the stage holds (in 32 bits; half of it in 16)."""
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def connect(transport: str) -> Communicator:
    """Return a communicator that uses shared memory, or gloo alone."""
    comm = Communicator(CPU)
    if transport == "gloo":
        comm._stage = None
    assert (comm._stage is not None) == (comm.world_size > 1 and transport == "shared memory")
    return comm


def shared(comm: Communicator, tensor: Tensor) -> Tensor:
    """Return a copy of a tensor (n,) in memory that the other ranks read in place."""
    memory = comm.share(tensor.nbytes)
    assert memory is not None
    return memory.view(tensor.dtype).copy_(tensor)


def drawn(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers of a rank, which every rank can make; exact in every dtype."""
    return (torch.arange(numel).mul_(rank + 7).add_(13 * rank).remainder_(251).to(torch.float32).sub_(125) / 16).to(dtype)


def mean(world: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.stack([drawn(rank, numel, dtype) for rank in range(world)]).double().mean(0)


def gathers(transport: str, dtype: torch.dtype) -> None:
    comm = connect(transport)
    world = comm.world_size
    for numel in SIZES:
        expected = torch.cat([drawn(rank, numel, dtype) for rank in range(world)])
        full = torch.full((world * numel,), torch.nan, dtype=dtype)
        comm.all_gather(full, drawn(comm.rank, numel, dtype))
        assert torch.equal(full, expected)
        full.fill_(torch.nan)
        own = full[comm.rank * numel : (comm.rank + 1) * numel]
        own.copy_(drawn(comm.rank, numel, dtype))
        comm.all_gather(full, own)  # in place
        assert torch.equal(full, expected)


def reduces(transport: str, dtype: torch.dtype) -> None:
    comm = connect(transport)
    world = comm.world_size
    near = {"rtol": 2 * TOLERANCE[dtype], "atol": 16 * TOLERANCE[dtype], "check_dtype": False}  # numbers up to 8
    for numel in SIZES:
        expected = mean(world, world * numel, dtype)[comm.rank * numel : (comm.rank + 1) * numel]
        shard = torch.full((numel,), torch.nan, dtype=dtype)
        comm.reduce_scatter_mean(shard, drawn(comm.rank, world * numel, dtype))
        torch.testing.assert_close(shard.double(), expected, **near)
        full = drawn(comm.rank, world * numel, dtype)
        own = full[comm.rank * numel : (comm.rank + 1) * numel]
        comm.reduce_scatter_mean(own, full)  # in place
        assert torch.equal(own, shard)
        full = drawn(comm.rank, world * numel + 1, dtype)  # ragged
        comm.all_reduce_mean(full)
        torch.testing.assert_close(full.double(), mean(world, world * numel + 1, dtype), **near)
    large = torch.full((2 * world,), 6e4, dtype=torch.float16)  # the sum overflows, the mean does not
    comm.all_reduce_mean(large)
    assert large.isfinite().all()


@pytest.mark.quick(5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transport", ["shared memory", "gloo"])
@pytest.mark.parametrize("case", [gathers, reduces])
@pytest.mark.parametrize("world", [2, 3])
def test_large_tensors(worlds, world, case, transport, dtype):
    worlds[world].run(case, transport, dtype)


@pytest.mark.parametrize("case", [gathers, reduces])
def test_one_rank_has_nobody_to_ask(world1, case):
    world1.run(case, "gloo", torch.float32)


def narrow_means() -> list[list[float]]:
    """Average bf16 numbers whose sum is not a bf16 number."""
    comm = connect("shared memory")
    numbers = torch.full((comm.world_size,), (256.0, 1.0, 1.0)[comm.rank], dtype=torch.bfloat16)
    shard = torch.empty(1, dtype=torch.bfloat16)
    comm.reduce_scatter_mean(shard, numbers.clone())
    comm.all_reduce_mean(numbers)
    return [shard.tolist(), numbers.tolist()]


def test_bf16_numbers_are_summed_in_fp32_over_shared_memory(world3):
    assert world3.run(narrow_means) == [[[86.0], [86.0] * 3]] * 3  # sums in bf16 give 85.5


def sums_in_rank_order() -> list[Tensor]:
    """Reduce numbers whose sum depends on the order."""
    comm = connect("shared memory")
    numbers = drawn(comm.rank, 3000, torch.float32) * torch.pi * 10.0 ** (4 * comm.rank)
    everywhere = numbers.clone()
    comm.all_reduce_mean(everywhere)
    return [numbers, everywhere]


def test_sums_over_shared_memory_are_the_same_bits_everywhere(world3):
    told = world3.run(sums_in_rank_order)
    first, second, third = (numbers for numbers, _ in told)
    for _, everywhere in told:
        assert torch.equal(everywhere, (first + second + third) / 3)


# --- waits


class Late(SharedStage):
    """Leaves barriers late on one rank."""

    who, seconds = 0, 0.0

    def meet(self) -> None:
        super().meet()
        time.sleep(self.seconds * (self.rank == self.who))


def waits(who: int, arrives: float, leaves: float) -> None:
    comm = connect("shared memory")
    comm._stage.__class__ = Late
    comm._stage.who, comm._stage.seconds = who, leaves
    numel = 3 * STAGE_BYTES // 4 + 1  # four pieces
    for turn in range(2):
        time.sleep(arrives * (comm.rank == who))
        full = torch.empty(comm.world_size * numel)
        comm.all_gather(full, drawn(comm.rank, numel, torch.float32) + turn)
        expected = [drawn(rank, numel, torch.float32) + turn for rank in range(comm.world_size)]
        assert torch.equal(full, torch.cat(expected))
        time.sleep(arrives * (comm.rank == who))
        shard = torch.empty(STAGE_BYTES // 4)
        numbers = drawn(comm.rank, comm.world_size * shard.numel(), torch.float32) + turn
        comm.reduce_scatter_mean(shard, numbers)
        means = mean(comm.world_size, numbers.numel(), torch.float32) + turn
        own = means.view(comm.world_size, -1)[comm.rank]
        torch.testing.assert_close(shard.double(), own, rtol=1e-5, atol=1e-5)


@pytest.mark.quick(2)
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("arrives, leaves", [(0.1, 0.0), (0.0, 0.03)], ids=["arrives late", "leaves late"])
def test_late_ranks_are_waited_for(world2, who, arrives, leaves):
    world2.run(waits, who, arrives, leaves)


# --- small things


def small() -> None:
    comm = Communicator(CPU)
    world = comm.world_size
    told = comm.sum(torch.tensor([1.0, float(comm.rank)]))
    assert told.tolist() == [world, world * (world - 1) / 2]
    assert comm.any(comm.rank == world - 1)
    assert not comm.any(False)
    assert comm.same(f"rank {comm.rank}") == "rank 0"
    assert comm.all({"rank": comm.rank}) == [{"rank": rank} for rank in range(world)]
    comm.barrier()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_small_things(worlds, world):
    worlds[world].run(small)


def flags_in_16_bits(transport: str) -> None:
    comm = connect(transport)
    standard = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        for turn in range(20):
            assert comm.any(turn % 3 == comm.rank) == (turn % 3 < comm.world_size)
            assert comm.totals(torch.tensor([200.0, 1.0])) == [200.0 * comm.world_size, comm.world_size]
    finally:
        torch.set_default_dtype(standard)


@pytest.mark.parametrize("transport", ["shared memory", "gloo"])
def test_a_default_dtype_of_16_bits_parts_no_ranks(world2, transport):
    world2.run(flags_in_16_bits, transport)


def sent(transport: str) -> dict[str, int]:
    comm = connect(transport)
    full, shard = torch.zeros(6 * comm.world_size), torch.zeros(6)
    comm.all_gather(full, shard)
    comm.reduce_scatter_mean(shard, full)
    comm.reduce_scatter_mean(shard.half(), full.half())
    comm.all_reduce_mean(full)
    comm.sum(torch.zeros(3))
    return dict(comm.bytes_sent)


@pytest.mark.parametrize("transport", ["shared memory", "gloo"])
@pytest.mark.parametrize("world", [2, 3])
def test_bytes_are_counted_as_a_ring_sends_them(worlds, world, transport):
    shards = 6 * (world - 1)  # (W-1)/W of 6*W elements
    expected = {"all_gather": 4 * shards, "reduce_scatter": (4 + 2) * shards, "all_reduce": 2 * 4 * shards}
    for told in worlds[world].run(sent, transport):
        assert told.pop("sum") == 2 * 12 * (world - 1) // world
        assert told == expected


@contextmanager
def refused(reason: str) -> Iterator[None]:
    """Make sharing fail in the body: no file on rank 0, no mapping on rank 1, or rank 1 on another machine."""

    def fails(*args, **keywords):
        raise OSError("refused")

    rank, patch = torch.distributed.get_rank(), pytest.MonkeyPatch()
    with patch.context() as patched:
        if reason == "no file":
            patched.setattr(shared_memory.os, "memfd_create", fails)
        elif reason == "no mapping" and rank == 1:
            patched.setattr(shared_memory.mmap, "mmap", fails)
        elif reason == "elsewhere":
            patched.setattr(stage_module, "machine", lambda: (str(rank),))
        yield


def without_shared_memory(reason: str) -> bool:
    """Return whether a communicator has no stage."""
    with refused(reason):
        return Communicator(CPU)._stage is None


@pytest.mark.parametrize("reason", ["no file", "no mapping", "elsewhere"])
def test_ranks_that_cannot_share_memory_use_gloo(world2, reason):
    assert world2.run(without_shared_memory, reason) == [True, True]


def gathers_staged(reason: str) -> bool:
    """Make tiers where shards cannot be shared. Return whether they are gathered through the stage."""
    comm = connect("shared memory")
    tiers = Tiers.open(comm, Strategy.of())
    with refused(reason):
        tiers.reserve("parameters", [(1000, torch.float32)])
    store = tiers.make("parameters", "a", 1000, torch.float32)
    store.tensor.copy_(drawn(comm.rank, 1000, torch.float32))
    full = torch.empty(1000 * comm.world_size)
    comm.all_gather(full, store.tensor)
    assert torch.equal(full, torch.cat([drawn(rank, 1000, torch.float32) for rank in range(comm.world_size)]))
    return comm._stage._in_place(store.tensor) is None


@pytest.mark.parametrize("reason", ["no file", "no mapping"])
def test_shards_that_cannot_be_shared_are_gathered_through_the_stage(world2, reason):
    assert world2.run(gathers_staged, reason) == [True, True]


# --- shards in shared memory


def writes_while_a_rank_reads(operation: str) -> list[float]:
    """Read shared memory in place, slowly on rank 1, and write it at once. Return what was read."""
    comm = connect("shared memory")
    full = shared(comm, torch.full((comm.world_size,), float(comm.rank)))
    shard, meet = shared(comm, torch.tensor([float(comm.rank)])), SharedStage.meet
    result = torch.empty(1 if operation == "reduce" else comm.world_size)

    def slow(stage: SharedStage) -> None:
        meet(stage)
        time.sleep(0.2 * (comm.rank == 1))

    with mock.patch.object(SharedStage, "meet", slow):
        if operation == "gather shards":
            comm.all_gather(result, shard)
        elif operation == "gather full tensors":
            comm.all_gather(full, full[comm.rank : comm.rank + 1])
            result.copy_(full)
        else:
            comm.reduce_scatter_mean(result, full)
    comm.await_readers()
    full.fill_(9)
    shard.fill_(9)
    return result.tolist()


@pytest.mark.parametrize(
    ("operation", "read"), [("gather shards", [0, 1]), ("gather full tensors", [0, 1]), ("reduce", [0.5])]
)
def test_a_writer_waits_for_the_readers_of_its_memory(world2, operation, read):
    assert world2.run(writes_while_a_rank_reads, operation) == [read, read]


def gathers_in_place(dtype: torch.dtype) -> None:
    """Gather shards of several sizes from shared memory, write them after a collective, and gather them again."""
    comm = connect("shared memory")
    tiers = Tiers.open(comm, Strategy.of())
    tiers.reserve("parameters", [(numel, dtype) for numel in SIZES])
    shards = [tiers.make("parameters", str(numel), numel, dtype).tensor for numel in SIZES]
    assert all(shard.count_nonzero() == 0 for shard in shards)
    for turn in range(3):
        for shard in shards:
            shard.copy_(drawn(comm.rank + turn, shard.numel(), dtype))
        for shard in shards:
            assert comm._stage._in_place(shard) is not None
            full = torch.full((comm.world_size * shard.numel(),), torch.nan, dtype=dtype)
            comm.all_gather(full, shard)
            staged = torch.full_like(full, torch.nan)
            comm.all_gather(staged, shard.clone())
            assert torch.equal(full, staged)
            expected = [drawn(rank + turn, shard.numel(), dtype) for rank in range(comm.world_size)]
            assert torch.equal(full, torch.cat(expected))
            whole = shared(comm, torch.full_like(full, torch.nan))
            own = whole[comm.rank * shard.numel() : (comm.rank + 1) * shard.numel()].copy_(shard)
            comm.all_gather(whole, own)
            assert torch.equal(whole, full)
        comm.totals(torch.ones(1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_shards_in_shared_memory_are_gathered_in_place(worlds, world, dtype):
    worlds[world].run(gathers_in_place, dtype)


def writes_late(operation: str) -> None:
    """Write shared memory late on one rank. What the other rank reads in place must wait for it."""
    comm = connect("shared memory")
    own = comm.share(PAGE_BYTES).view(torch.float32)
    part = own.view(comm.world_size, -1)[comm.rank]
    result = torch.empty(part.numel() if operation == "reduce" else comm.world_size * own.numel())
    for turn in range(4):
        time.sleep(0.1 * (comm.rank == turn % 2))
        own.fill_(10 * turn + comm.rank)
        if operation == "gather shards":
            comm.all_gather(result, own)
            found, expected = result.view(comm.world_size, -1)[:, 7].tolist(), [10 * turn, 10 * turn + 1]
        elif operation == "gather full tensors":
            comm.all_gather(own, part)
            found, expected = own.view(comm.world_size, -1)[:, 7].tolist(), [10 * turn, 10 * turn + 1]
        else:
            comm.reduce_scatter_mean(result, own)
            found, expected = [result[7].item()], [10 * turn + 0.5]
        assert found == expected
        comm.totals(torch.ones(1))  # as the norm of a step


@pytest.mark.parametrize("operation", ["gather shards", "gather full tensors", "reduce"])
def test_readers_in_place_wait_for_late_writers(world2, operation):
    world2.run(writes_late, operation)


def counted(mib: int) -> float:
    """Gather a tensor of `mib` MiB in shared memory. Return the MiB by which this rank's own shared memory grew."""

    def own() -> float:
        comm.all(None)  # both ranks have read the other's tensor
        status = Path("/proc/self/status").read_text()
        resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssShmem"))
        size = resident / 1024 - shared_memory.of_other_ranks() / 2**20
        comm.all(None)  # both ranks have counted
        return size

    comm = connect("shared memory")
    before = own()
    full = comm.share(mib << 20).view(torch.float32).fill_(1)
    comm.all_gather(full, full.view(comm.world_size, -1)[comm.rank])
    return own() - before


def test_shared_memory_counts_once(world2):
    assert world2.run(counted, 64) == pytest.approx([64, 64], rel=0.1)


def mapped_after_release() -> list[int]:
    """Return how many mappings are added by a shared row that is used, and by one that is released."""

    def count() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("/memfd:ftkit")

    comm = connect("shared memory")
    before, shard = count(), comm.share(PAGE_BYTES)
    used = count() - before
    del shard
    return [used, count() - before]


def test_shared_memory_ends_with_its_last_tensor(world2):
    assert world2.run(mapped_after_release) == [[1, 0], [1, 0]]


# --- bits


def plain_mean(fulls: list[Tensor], rank: int) -> Tensor:
    """Return a rank's part of the mean: the fp32 sum in rank order, divided, and rounded once."""
    parts = [full.view(len(fulls), -1)[rank].float() for full in fulls]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return torch.div(total, len(fulls)).to(fulls[0].dtype)


def bits_of_a_mean(dtype: torch.dtype) -> None:
    """Compare a reduction with plain torch: odd sizes, more than a piece, subnormal and infinite numbers, nan."""
    comm = connect("shared memory")
    world = comm.world_size
    for numel in (1, 257, STAGE_BYTES // dtype.itemsize + 3):
        random = torch.Generator().manual_seed(numel)
        fulls = [torch.randn(world * numel, generator=random) * 10.0**scale for scale in range(-1, world - 1)]
        for full in fulls:
            full[:: max(1, numel // 5)] *= 2.0**-20  # subnormal in fp16
        if numel > 1:
            for position, value in enumerate((torch.inf, -torch.inf, torch.nan, torch.finfo(dtype).max)):
                fulls[position % world][position::numel] = value
            fulls[0][3::numel] = torch.finfo(dtype).max
        fulls = [full.to(dtype) for full in fulls]
        expected = plain_mean(fulls, comm.rank)
        shard, own = torch.empty(numel, dtype=dtype), fulls[comm.rank].clone()
        for full in (own, shared(comm, own)):
            shard.fill_(7)
            comm.reduce_scatter_mean(shard, full)
            torch.testing.assert_close(shard, expected, rtol=0, atol=0, equal_nan=True)
        part = full[comm.rank * numel : (comm.rank + 1) * numel]
        comm.reduce_scatter_mean(part, full)  # in place
        torch.testing.assert_close(part, expected, rtol=0, atol=0, equal_nan=True)
        everywhere = fulls[comm.rank].clone()
        comm.all_reduce_mean(everywhere)
        means = torch.cat([plain_mean(fulls, rank) for rank in range(world)])
        torch.testing.assert_close(everywhere, means, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_a_mean_has_the_bits_of_an_fp32_sum_in_rank_order(worlds, world, dtype):
    worlds[world].run(bits_of_a_mean, dtype)


# --- order


def goes_elsewhere(transport: str) -> str:
    """Gather a different block on each rank; return the error of the next sum."""
    comm = connect(transport)
    assert not comm.any(False)  # a comparison clears the names so far
    comm.all_gather(torch.zeros(8 * comm.world_size), torch.ones(8), f"model.layers.{comm.rank}")
    with pytest.raises(UserError) as caught:
        comm.totals(torch.ones(2), "the gradient norm")
    return str(caught.value)


@pytest.mark.parametrize("transport", ["shared memory", "gloo"])
def test_the_norm_compares_the_order_of_collectives(world2, transport):
    difference = "rank 0: all_gather of model.layers.0, rank 1: all_gather of model.layers.1"
    for message in world2.run(goes_elsewhere, transport):
        assert difference in message


def waits_alone() -> str:
    """Gather on rank 0 only, with a timeout of a few seconds. Return the error."""
    group = torch.distributed.new_group(timeout=timedelta(seconds=3 * PATIENCE))
    comm = Communicator(CPU, group)
    began = time.monotonic()
    text = ""
    if comm.rank == 0:
        with pytest.raises(RuntimeError) as caught:
            comm.all_gather(torch.zeros(2), torch.ones(1), "model.layers.3")
        text = str(caught.value)
    torch.distributed.barrier()
    assert time.monotonic() - began < 15 * PATIENCE
    return text


def test_a_collective_of_one_rank_ends_at_the_timeout_and_is_named():
    world = World(2)  # its group is broken afterwards
    try:
        assert "all_gather of model.layers.3: " in world.run(waits_alone)[0]
    finally:
        world.close()


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_nccl_averages_where_that_is_exact(monkeypatch, world, dtype):
    """NCCL rounds 1/W to the tensor's dtype, so 16-bit means of three ranks would be off by one factor."""
    asked: list[tuple[float, object]] = []

    def reduce_scatter(shard: Tensor, full: Tensor, op: object = None, group: object = None) -> None:
        asked.append((full[0].item(), op))

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: world)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(communicator, "_reduce_scatter", reduce_scatter)
    Communicator(torch.device("cuda", 0)).reduce_scatter_mean(
        torch.empty(4, dtype=dtype), torch.full((4 * world,), 6.0, dtype=dtype)
    )
    if world == 3:
        assert asked == [(2.0 if dtype == torch.float16 else 6.0, None)]
    else:
        assert asked == [(6.0, dist.ReduceOp.AVG)]
