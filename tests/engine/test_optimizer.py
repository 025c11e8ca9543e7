"""The update alone: sharded AdamW and SGD against torch's own, on gradients made here, without a model that computes.

A flat parameter of five tensors of uneven sizes, which shards cut in the middle of tensors. Gradients are set through
`Gradient`, as in training, so groups, step counts, clipping and overflow are tested one at a time.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.kernels.host_loops import FlatKernels
from ftkit.engine.model import ShardedModel
from ftkit.engine.optim.adamw import ShardedAdamW
from ftkit.engine.optim.loss_scale import LossScale
from ftkit.engine.optim.sgd import ShardedSGD
from ftkit.engine.shard import shard
from ftkit.hf.kernels.flat import FLAT_KERNELS
from ftkit.spec.strategy import Strategy
from tests.engine import gradients

SHAPES = {"a": (67, 50), "b": (50,), "c": (90, 61), "d": (), "e": (3001,)}
STEPS = 4
OURS = {
    "adamw": lambda units, groups: ShardedAdamW(units, groups, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1),
    "sgd": lambda units, groups: ShardedSGD(units, groups, lr=1e-2, momentum=0.9, weight_decay=0.1),
}
PLAIN = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.1),
}


class OneBlock(nn.Module):
    """Five parameters on one flat parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.block = nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()})


def sharded(strategy: Strategy | None = None) -> tuple[OneBlock, ShardedModel]:
    model = OneBlock()
    comm = Communicator(torch.device("cpu"))
    return model, shard(model, [("block", model.block)], comm=comm, strategy=strategy or Strategy.of(debug=True))


def gradient(name: str, step: int, rank: int) -> Tensor:
    seed = 100 * step + 10 * rank + list(SHAPES).index(name)
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


def give(units: ShardedModel, step: int, names: str = "abcde", scale: float = 1.0) -> None:
    """Give this rank's gradients of some tensors."""
    (flat,) = units.flats
    named = {segment.name[-1]: index for index, segment in enumerate(flat.layout.segments)}
    rank = units.comm.rank
    gradients.give(
        units.gradient_of[flat],
        {index: gradient(name, step, rank) * scale for name, index in named.items() if name in names},
    )


def two_groups(model: OneBlock) -> list[dict[str, Any]]:
    """Neighbours on the flat parameter in different groups, and one tensor in none."""
    at = model.block
    return [
        {"params": [at["a"], at["d"]], "weight_decay": 0.3},
        {"params": [at["b"], at["c"]], "lr": 3e-3, "weight_decay": 0.0},
    ]


def one_group(model: OneBlock) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters())}]


GROUPS = {"one": one_group, "two": two_groups}


def compare(
    kind: str,
    groups: str,
    turns: list[str],
    limit: float,
    strategy: Strategy | None = None,
    kernels: FlatKernels | None = None,
    *,
    reference: bool = False,
) -> None:
    """On every rank: make steps in which `turns` get a gradient, here and in torch; compare norms and weights."""
    model, units = sharded(strategy)
    units.flat_kernels = kernels
    plain = OneBlock()
    ours, theirs = OURS[kind](units, GROUPS[groups](model)), PLAIN[kind](GROUPS[groups](plain))
    if reference:
        ours.update_piece = ours.reference_update
    world = units.comm.world_size
    for step, names in enumerate(turns):
        give(units, step, names)
        for name, parameter in plain.block.items():
            means = torch.stack([gradient(name, step, rank) for rank in range(world)]).mean(0)
            parameter.grad = means if name in names else None
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), limit)
        assert ours.clip_grad_norm_(limit).item() == pytest.approx(norm.item(), rel=1e-5)
        for optimizer in (ours, theirs):
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            optimizer.step()
        ours.zero_grad()
    state = units.state_dict()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("turns", [["abcde"] * STEPS, ["abcde", "ace", "be", "abcd"]], ids=["all", "some"])
@pytest.mark.parametrize("world", [1, 2])
def test_as_torchs_own(worlds, world, turns, groups, kind):
    worlds[world].run(compare, kind, groups, turns, math.inf)


@pytest.mark.parametrize("kind", OURS)
def test_the_reference_update_matches_torch(world2, kind):
    world2.run(partial(compare, reference=True), kind, "two", ["abcde", "ace", "be"], 0.5)


@pytest.mark.parametrize("kind", OURS)
def test_clipped_as_by_torch(world2, kind):
    world2.run(compare, kind, "two", ["abcde", "abc", "cde"], 0.5)


def clips_huge_gradients(stage: int) -> None:
    """A norm whose square no float holds: exact, and so is what it clips to."""
    _, units = sharded(Strategy.of(stage=stage))
    optimizer, before = ShardedSGD(units, None, lr=0.5), units.state_dict()
    give(units, 0, scale=1e25)
    means = {n: torch.stack([gradient(n, 0, r) * 1e25 for r in range(units.comm.world_size)]).mean(0) for n in SHAPES}
    norm = torch.cat([mean.reshape(-1) for mean in means.values()]).double().norm().item()
    assert optimizer.clip_grad_norm_(2.0).item() == pytest.approx(norm, rel=1e-6)
    optimizer.step()
    for name, tensor in units.state_dict().items():
        torch.testing.assert_close(tensor, before[name] - 0.5 * (means[name[-1]].double() * (2 / norm)).float())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_norm_whose_square_no_float_holds_clips_exactly(worlds, stage):
    for world in (1, 2):
        worlds[world].run(clips_huge_gradients, stage)


def clips_what_is_not_finite(scale: float) -> None:
    """Gradients of which some are not finite: as torch clips them."""
    _, units = sharded()
    plain, ours = OneBlock(), ShardedSGD(units, None, lr=0.5)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
    give(units, 0)
    (given,) = units.gradients
    given.memory[: plain.block["a"].numel()] *= scale
    for name, parameter in plain.block.items():
        parameter.grad = gradient(name, 0, 0) * (scale if name == "a" else 1.0)
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.testing.assert_close(ours.clip_grad_norm_(1.0), norm, equal_nan=True)
    for optimizer in (ours, theirs):
        optimizer.step()
    state = units.state_dict()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), equal_nan=True)


@pytest.mark.parametrize("scale", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_clips_as_torchs_does(world1, scale):
    world1.run(clips_what_is_not_finite, scale)


def compare_with_kernels(turns: list[str], limit: float) -> None:
    """On every rank: `compare`, through what a GPU is given; here the kernels are their references."""
    calls: list[int] = []

    def counted(*args: Any, **constants: Any) -> None:
        calls.append(1)
        FLAT_KERNELS.adamw(*args, **constants)

    compare("adamw", "two", turns, limit, kernels=replace(FLAT_KERNELS, adamw=counted))
    assert calls


@pytest.mark.parametrize("limit", [0.5, math.inf])
def test_kernels_that_were_brought_do_as_torch_does(world2, limit):
    world2.run(compare_with_kernels, ["abcde", "ace", "be"], limit)


def test_a_kernels_square_is_not_finite_where_an_element_is_not():
    assert FLAT_KERNELS.square_sum(torch.tensor([1.0, 2.0]).half()).item() == 5
    assert not math.isfinite(FLAT_KERNELS.square_sum(torch.tensor([1.0, math.nan]).half()))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_whole_copies_follow_the_shards(world2, stage):
    world2.run(compare, "adamw", "two", ["abcde", "ace"], 1.0, Strategy.of(stage=stage))


def one_rank_has_no_gradient() -> None:
    """A tensor that only rank 1 used is updated everywhere; one that nobody used nowhere."""
    _, units = sharded()
    optimizer = ShardedAdamW(units, None, weight_decay=0.5)
    before = units.state_dict()
    give(units, 0, "ab" if units.comm.rank == 0 else "ac")
    optimizer.step()
    after = units.state_dict()
    changed = [name[-1] for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["a", "b", "c"]
    assert optimizer.state_of(units.flats[0]).steps == [1, 1, 1, 0, 0]


def test_a_tensor_is_updated_if_any_rank_used_it(world2):
    world2.run(one_rank_has_no_gradient)


def overflows(stage: int) -> None:
    """One rank overflows: nobody updates, the scale falls; the next step is clean."""
    _, units = sharded(Strategy.of(stage=stage, dtype="fp16"))
    optimizer = ShardedAdamW(units, None, loss_scale=LossScale(64.0, dynamic=True))
    before = units.state_dict()
    give(units, 0, scale=math.inf if units.comm.rank == units.comm.world_size - 1 else 1.0)
    assert optimizer.clip_grad_norm_(1.0).item() == math.inf
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.step_was_skipped
    assert optimizer.loss_scale.value == 32.0
    after = units.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    give(units, 1, scale=32.0)
    norm = optimizer.grad_norm()
    means = [torch.stack([gradient(n, 1, r) for r in range(units.comm.world_size)]).mean(0) for n in SHAPES]
    assert norm == pytest.approx(torch.cat([m.reshape(-1) for m in means]).norm().item(), rel=1e-3)
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert all(tensor.isfinite().all() for tensor in units.state_dict().values())


@pytest.mark.parametrize("stage", [1, 3])
def test_an_overflow_on_one_rank_skips_the_step_on_all(world2, stage):
    world2.run(overflows, stage)


def shares_groups() -> None:
    model, units = sharded()
    theirs = torch.optim.AdamW(two_groups(model), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(theirs, lambda step: 0.5**step)
    ours = ShardedAdamW(units, None)
    ours.take_groups(theirs.param_groups)
    assert all(one is other for one, other in zip(ours.param_groups, theirs.param_groups, strict=True))
    theirs.step()
    scheduler.step()
    assert [group["lr"] for group in ours.param_groups] == [5e-3, 1.5e-3]
    before = units.state_dict()
    give(units, 0)
    ours.step()
    after = units.state_dict()
    moved = {name[-1]: (after[name] - before[name]).abs().max().item() for name in before}
    assert moved["e"] == 0.0  # in no group
    assert moved["b"] == moved["c"] == pytest.approx(1.5e-3, rel=1e-2)  # Adam's first step is the learning rate
    assert moved["a"] > 5e-3  # and there is decay
    foreign = [{"params": [nn.Parameter(torch.zeros(3, 5))], "lr": 1e-3}]
    with pytest.raises(ValueError, match=r"shape \(3, 5\) does not belong"):
        ours.take_groups(foreign)


def test_groups_are_shared_with_another_optimizer(world2):
    world2.run(shares_groups)


def test_another_models_parameters_are_refused():
    _, units = sharded()
    with pytest.raises(ValueError, match="does not belong to the sharded model"):
        ShardedAdamW(units, OneBlock().parameters())
