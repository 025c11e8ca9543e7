"""Collectives return the right numbers for every size, dtype and transport, and however late a rank comes.

The same cases go through the window of shared memory and through gloo alone, against sums made here. Waits are tested by
ranks that come late: without a barrier a punctual rank would read what the late one has not written yet, or write over
what the late one has not read.
"""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from ftkit.engine.comm import shared_stage as stage_module
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.comm.shared_stage import STAGE_BYTES, SharedStage
from ftkit.errors import UserError
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
    assert comm.all_numbers(10 - comm.rank) == [10 - rank for rank in range(world)]
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


def without_shared_memory(reason: str) -> bool:
    """Open a communicator where /dev/shm is full on rank 0, or rank 1 is elsewhere; return whether it has no stage."""
    if reason == "full":

        def full(*args):
            raise OSError("no room")

        original, stage_module.os.posix_fallocate = stage_module.os.posix_fallocate, full
        try:
            return Communicator(CPU)._stage is None
        finally:
            stage_module.os.posix_fallocate = original
    original_machine = stage_module.machine
    stage_module.machine = lambda: (str(torch.distributed.get_rank()), "")
    try:
        return Communicator(CPU)._stage is None
    finally:
        stage_module.machine = original_machine


@pytest.mark.parametrize("reason", ["full", "elsewhere"])
def test_ranks_that_cannot_share_memory_use_gloo(world2, reason):
    assert world2.run(without_shared_memory, reason) == [True, True]


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
