"""Each update rule against its formula, written again in float64: the plain optimizer, and the sharded one on 1 and 2 ranks.

The gradients are given, so nothing but the rule is compared: twenty steps with a falling learning rate and decay, of
tensors that the shards of two ranks cut. On a rank the compiled loop, the PyTorch operations that a GPU uses, and state on
NVMe are compared with the same formula.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.memory.flat_file import FlatFile
from ftkit.engine.memory.tiers import Tiers
from ftkit.engine.optim import plain, stable_adamw
from ftkit.engine.shard import shard
from ftkit.hf.trainer.optimizers import KNOWN, SHARDED
from ftkit.spec.strategy import Strategy
from ftkit.spec.update_rules import RULES
from tests.engine import gradients

STEPS, CLOSE = 20, 1e-6
SHAPES = {"a": (67, 50), "b": (50,), "c": (90, 61)}
State = dict[str, Tensor]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("adamw", {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": ("sgd", {"lr": 1e-2, "weight_decay": 0.1}),
    "momentum": ("sgd", {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": ("sgd", {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "lion": ("lion", {"lr": 1e-3, "weight_decay": 0.1}),
    "adagrad": ("adagrad", {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.1}),
    "rmsprop": ("rmsprop", {"lr": 1e-3, "weight_decay": 0.1}),
    "rmsprop-all": ("rmsprop", {"lr": 1e-3, "momentum": 0.8, "centered": True, "weight_decay": 0.1}),
    "ademamix": ("ademamix", {"lr": 1e-3, "weight_decay": 0.1}),
    "ademamix-warm": ("ademamix", {"lr": 1e-3, "t_alpha": 12, "t_beta3": 15, "weight_decay": 0.1}),
    "stable_adamw": ("stable_adamw", {"lr": 1e-2, "weight_decay": 0.1}),
}
PLAIN = {"lion": plain.Lion, "adagrad": plain.Adagrad, "ademamix": plain.AdEMAMix, "stable_adamw": plain.StableAdamW}


# --- the formulas, in float64


def adamw(p: Tensor, g: Tensor, s: State, t: int, lr: float, betas: Any, eps: float, weight_decay: float) -> Tensor:
    """Loshchilov and Hutter, algorithm 2."""
    s["m"] = betas[0] * s["m"] + (1 - betas[0]) * g
    s["v"] = betas[1] * s["v"] + (1 - betas[1]) * g**2
    mean, variance = s["m"] / (1 - betas[0] ** t), s["v"] / (1 - betas[1] ** t)
    return p - lr * weight_decay * p - lr * mean / (variance.sqrt() + eps)


def sgd(p: Tensor, g: Tensor, s: State, t: int, lr: float, momentum: float, nesterov: bool, weight_decay: float) -> Tensor:
    """torch.optim.SGD."""
    g = g + weight_decay * p
    s["m"] = momentum * s["m"] + g
    return p - lr * (g + momentum * s["m"] if nesterov else s["m"])


def lion(p: Tensor, g: Tensor, s: State, t: int, lr: float, betas: Any, weight_decay: float) -> Tensor:
    """Chen et al., program 1."""
    update = (betas[0] * s["m"] + (1 - betas[0]) * g).sign()
    s["m"] = betas[1] * s["m"] + (1 - betas[1]) * g
    return p - lr * (update + weight_decay * p)


def adagrad(p: Tensor, g: Tensor, s: State, t: int, lr: float, lr_decay: float, eps: float, weight_decay: float) -> Tensor:
    """torch.optim.Adagrad."""
    g = g + weight_decay * p
    s["v"] = s["v"] + g**2
    return p - lr / (1 + (t - 1) * lr_decay) * g / (s["v"].sqrt() + eps)


def rmsprop(p: Tensor, g: Tensor, s: State, t: int, lr: float, alpha: float, eps: float, **more: Any) -> Tensor:
    """torch.optim.RMSprop."""
    g = g + more["weight_decay"] * p
    s["v"] = alpha * s["v"] + (1 - alpha) * g**2
    s["mean"] = alpha * s["mean"] + (1 - alpha) * g
    variance = s["v"] - s["mean"] ** 2 if more["centered"] else s["v"]
    s["m"] = more["momentum"] * s["m"] + g / (variance.sqrt() + eps)
    return p - lr * s["m"]


def ademamix(p: Tensor, g: Tensor, s: State, t: int, lr: float, betas: Any, eps: float, **more: Any) -> Tensor:
    """Pagliardini et al., algorithm 1 with the schedules of alpha and beta3."""
    first, last, alpha = betas[0], more["beta3"], more["alpha"]
    if more["t_alpha"]:
        alpha = min(t * alpha / more["t_alpha"], alpha)
    beta3 = last
    if more["t_beta3"]:
        share, low, high = t / more["t_beta3"], math.log(first), math.log(last)
        beta3 = min(math.exp(low * high / ((1 - share) * high + share * low)), last)
    s["m"] = first * s["m"] + (1 - first) * g
    s["slow"] = beta3 * s["slow"] + (1 - beta3) * g
    s["v"] = betas[1] * s["v"] + (1 - betas[1]) * g**2
    step = (s["m"] / (1 - first**t) + alpha * s["slow"]) / ((s["v"] / (1 - betas[1] ** t)).sqrt() + eps)
    return p - lr * (step + more["weight_decay"] * p)


def stable(p: Tensor, g: Tensor, s: State, t: int, lr: float, betas: Any, eps: float, weight_decay: float) -> Tensor:
    """Wortsman et al., algorithm 2: betas that include the correction of the bias, and the step divided by the RMS."""
    first, second = (beta * (1 - beta ** (t - 1)) / (1 - beta**t) for beta in betas)
    s["m"] = first * s["m"] + (1 - first) * g
    s["v"] = second * s["v"] + (1 - second) * g**2
    rms = (g**2 / s["v"].clamp_min(eps**2)).mean().sqrt()
    lr = lr / max(1.0, float(rms))
    return p - lr * weight_decay * p - lr * s["m"] / (s["v"].sqrt() + eps)


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "adamw": adamw, "sgd": sgd, "lion": lion, "adagrad": adagrad, "rmsprop": rmsprop, "ademamix": ademamix,
    "stable_adamw": stable,
}  # fmt: skip


# --- runs


class OneBlock(nn.Module):
    """Three parameters on one flat parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.block = nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()})


def gradient(name: str, step: int, rank: int = 0) -> Tensor:
    """Return a rank's gradient. It grows tenfold in the middle, where StableAdamW shrinks its step."""
    seed = 100 * step + 10 * rank + list(SHAPES).index(name)
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed)) * (10 if step == STEPS // 2 else 1)


def mean_gradient(name: str, step: int, world: int) -> Tensor:
    """Return the mean over ranks, in fp32."""
    return torch.stack([gradient(name, step, rank) for rank in range(world)]).mean(0)


def by_formula(case: str, world: int) -> dict[str, Tensor]:
    """Return the weights after all steps in float64."""
    name, settings = CASES[case]
    found = {}
    for key, parameter in OneBlock().block.items():
        p = parameter.detach().double()
        state = {kind: torch.zeros_like(p) for kind in ("m", "v", "mean", "slow")}
        numbers = {**RULES[name].settings, **settings}
        for step in range(STEPS):
            p = FORMULAS[name](p, mean_gradient(key, step, world).double(), state, step + 1, **numbers)
            numbers["lr"] *= 0.9
        found[key] = p
    return found


def assert_close(found: dict[str, Tensor], case: str, world: int) -> None:
    """Compare weights with the formula: relative to the largest weight of a tensor."""
    for name, wanted in by_formula(case, world).items():
        far = float((found[name].double() - wanted).abs().max() / wanted.abs().max())
        assert far <= CLOSE, f"{case}, {name}: {far:.1e} away"


def fall(optimizer: torch.optim.Optimizer) -> None:
    """Lower the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


def run(case: str, *, reference: bool = False, **choices: Any) -> None:
    """On every rank: make the steps on the engine, and compare.

    Args:
        case: Key of `CASES`.
        reference: Use the PyTorch operations that a GPU without a kernel uses.
        choices: Of the strategy.
    """
    name, settings = CASES[case]
    model, comm = OneBlock(), Communicator(torch.device("cpu"))
    strategy = Strategy.of(debug=True, **choices)
    with tempfile.TemporaryDirectory() as folder:
        tiers = Tiers.open(comm, strategy, folder)
        units = shard(model, [("block", model.block)], comm=comm, strategy=strategy, tiers=tiers)
        optimizer = SHARDED[name](units, **settings)
        if reference:
            optimizer.update_piece = optimizer.reference_update
        (flat,) = units.flats
        for step in range(STEPS):
            named = {index: segment.name[-1] for index, segment in enumerate(flat.layout.segments)}
            given = {index: gradient(key, step, comm.rank) for index, key in named.items()}
            gradients.give(units.gradient_of[flat], given)
            optimizer.step()
            optimizer.zero_grad()
            fall(optimizer)
        assert set(optimizer.state_of(flat).moments) == set(RULES[name].of(settings).moments)
        found = {key[-1]: tensor for key, tensor in units.state_dict().items()}
        tiers.close()
    assert_close(found, case, comm.world_size)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", [1, 2])
def test_a_rule_is_its_formula(worlds, world, case):
    worlds[world].run(run, case)


def by_reference(case: str) -> None:
    """On every rank: see `run`."""
    run(case, reference=True)


@pytest.mark.parametrize("case", CASES)
def test_so_is_the_reference_that_a_gpu_uses(world1, case):
    world1.run(by_reference, case)


TRANSFER = FlatFile._transfer


def written_late(file: FlatFile, call: Any, data: Any, start: int, doing: str) -> None:
    """Move data as `FlatFile` does, but begin a write of second moments late."""
    if doing == "writing" and "exp_avg_sq" in file.path.name:
        time.sleep(0.05)
    TRANSFER(file, call, data, start, doing)


def small_pieces_on(case: str, tier: str, stage: int, deferred: bool) -> None:
    """On every rank: see `run`. Pieces of the sums over tensors have 4096 elements, and second moments are written late."""
    before = stable_adamw.PIECE_NUMEL
    stable_adamw.PIECE_NUMEL = 4096
    try:
        placed = {"gradients": tier if stage > 1 else "device", "state": tier}
        with mock.patch.object(FlatFile, "_transfer", written_late):
            run(case, stage=stage, update="deferred" if deferred else "now", **placed)
    finally:
        stable_adamw.PIECE_NUMEL = before


@pytest.mark.parametrize("case", ["ademamix-warm", "stable_adamw"])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(
    ("tier", "stage"), [("device", 0), ("device", 3), ("host", 2), ("host", 3), ("nvme", 3), ("nvme", 1)]
)
def test_a_rule_is_its_formula_on_every_tier(worlds, tier, stage, deferred, case):
    worlds[3 if deferred else 2].run(small_pieces_on, case, tier, stage, deferred)


@pytest.mark.parametrize("case", [case for case, (name, _) in CASES.items() if name in PLAIN])
def test_a_plain_optimizer_is_the_formula(case):
    name, settings = CASES[case]
    model = OneBlock()
    optimizer = PLAIN[name](model.parameters(), **settings)
    for step in range(STEPS):
        for key, parameter in model.block.items():
            parameter.grad = gradient(key, step)
        optimizer.step()
        fall(optimizer)
    assert_close({key: parameter.detach() for key, parameter in model.block.items()}, case, 1)


def test_every_class_of_a_plain_optimizer_has_a_sharded_form():
    assert {known.sharded for known in KNOWN.values()} == set(SHARDED.values())
    assert set(SHARDED) == set(RULES)


def test_a_setting_that_a_rule_has_not_is_refused():
    with pytest.raises(ValueError, match="nesterov is not a setting of lion; it has lr, betas, weight_decay"):
        plain.Lion([nn.Parameter(torch.zeros(2))], nesterov=True)


def groups_of_their_own() -> None:
    """A setting that needs a moment, in one group alone."""
    model, comm = OneBlock(), Communicator(torch.device("cpu"))
    units = shard(model, [("block", model.block)], comm=comm, strategy=Strategy.of())
    parameters = list(model.parameters())
    optimizer = SHARDED["sgd"](units, [{"params": parameters[:1], "momentum": 0.9}, {"params": parameters[1:]}])
    assert optimizer.rule.moments == ("momentum_buffer",)


def test_a_group_may_need_a_moment_that_the_others_do_not(world1):
    world1.run(groups_of_their_own)
