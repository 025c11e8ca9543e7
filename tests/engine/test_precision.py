"""16 bits: bf16, fp16 with a loss scale, sums of gradients in fp32, and autocast, against the same in plain PyTorch.

The reference keeps fp32 master weights and a 16-bit model, one process, no engine. It walks each rank's rows of each
micro-batch by themselves, and rounds where the engine's definition says so: a rank's gradient is in 16 bits, the mean
over ranks is made in fp32 and rounded to 16 bits, micro-batches are added up in the gradient dtype. A CPU may still sum in
another order, and the last bit of a master weight can decide to which 16-bit neighbour it is rounded: losses agree to half
of the dtype's epsilon, gradient norms to two of them, master weights to 2 % of the way they went.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ftkit.engine.core.dtypes import DTYPES
from ftkit.engine.optim.adamw import ShardedAdamW
from ftkit.engine.optim.loss_scale import LossScale
from ftkit.spec.strategy import Strategy
from tests.engine import families
from tests.engine.families import token_loss
from tests.engine.nets import Block, Net
from tests.engine.trajectory import MAX_NORM, Row, differences, run_plain, run_sharded, shard_model, split

STEPS = 8
OVERFLOW_STEP = 3
HYPER = {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.01}
EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Setting:
    """How a 16-bit run is made."""

    dtype: torch.dtype
    world: int
    stage: int = 3
    activations: str = "recompute"
    accumulation: int = 1
    parts: int = 1
    gradient_dtype: torch.dtype | None = None
    debug: bool = True

    def __str__(self) -> str:
        words = [str(self.dtype), f"W{self.world}", f"stage{self.stage}", self.activations, f"acc{self.accumulation}"]
        words += [f"parts{self.parts}"] * (self.parts > 1)
        return "-".join(word.removeprefix("torch.") for word in [*words, str(self.gradient_dtype or "")] if word)

    @property
    def loss_scale(self) -> LossScale:
        """For fp16 one that grows and falls within the run."""
        return LossScale(2.0**10, dynamic=True, growth_steps=2) if self.dtype == torch.float16 else LossScale()


@dataclass
class Trace:
    """A 16-bit run: losses, norms, loss scales after each step, and the masters at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    masters: dict[str, Tensor] = field(default_factory=dict)


def factor(setting: Setting, step: int, rank: int) -> float:
    """Return what the loss is multiplied with: in one fp16 step, on the last rank, too much."""
    planted = setting.dtype == torch.float16 and (step, rank) == (OVERFLOW_STEP, setting.world - 1)
    return 1e30 if planted else 1.0


def train(setting: Setting) -> Trace:
    """Train on the engine; on every rank."""
    model = families.build("llama")
    strategy = Strategy.of(
        stage=setting.stage,
        activations=setting.activations,
        dtype=NAMES[setting.dtype],
        gradient_dtype="fp32" if setting.gradient_dtype else "compute",
        accumulate_in="unit" if setting.parts > 1 else "step",
        accumulation=setting.parts,
        debug=setting.debug,
    )
    units = shard_model(model, strategy)
    assert {p.dtype for p in model.parameters()} == {setting.dtype}
    optimizer = ShardedAdamW(units, None, loss_scale=setting.loss_scale, **HYPER)
    trace = Trace()
    for step in range(STEPS):
        rows = families.batch("llama", step)
        tokens, total = families.label_tokens(rows), torch.zeros(())
        for micro in range(setting.accumulation):
            rank = units.comm.rank
            own = split(split(rows, setting.accumulation, micro), setting.world, rank)
            loss = token_loss(model, own, tokens)
            optimizer.scale(loss * setting.world * factor(setting, step, rank)).backward()
            total += loss.detach()
        trace.norms.append(optimizer.clip_grad_norm_(MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        trace.losses.append(units.comm.sum(total).item())
        trace.scales.append(optimizer.loss_scale.value)
        assert optimizer.step_was_skipped == (setting.dtype == torch.float16 and step == OVERFLOW_STEP)
    for flat in units.flats:  # the masters, whole: gathered in fp32 in the same layout
        full = flat.collect(optimizer.state_of(flat).master)
        for segment in flat.layout.segments:
            trace.masters[segment.name] = full[segment.start : segment.stop].view(segment.shape)
    return trace


def narrow(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the parameters, and leave the buffers (rotary tables) in fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def mean_gradient(setting: Setting, model: nn.Module, step: int, scale: float, trace: Trace) -> list[Tensor]:
    """Return the step's gradients in fp32, still scaled, as ranks would make them; note the loss."""
    if setting.parts > 1:
        return mean_gradient_of_parts(setting, model, step, scale, trace)
    parameters = list(model.parameters())
    rows = families.batch("llama", step)
    tokens, world = families.label_tokens(rows), setting.world
    total = 0.0
    sums = [torch.zeros(p.shape, dtype=setting.gradient_dtype or setting.dtype) for p in parameters]
    for micro in range(setting.accumulation):
        means = [torch.zeros(p.shape) for p in parameters]
        for rank in range(world):
            loss = token_loss(model, split(split(rows, setting.accumulation, micro), world, rank), tokens)
            (loss * world * factor(setting, step, rank) * scale).backward()
            total += loss.item()
            for mean, parameter in zip(means, parameters):
                mean += parameter.grad
                parameter.grad = None
        for sum_, mean in zip(sums, means):
            sum_ += (mean / world).to(setting.dtype)
    trace.losses.append(total)
    return [sum_.float() for sum_ in sums]


def mean_gradient_of_parts(setting: Setting, model: nn.Module, step: int, scale: float, trace: Trace) -> list[Tensor]:
    """The same where blocks divide the batch: each rank adds up its 16-bit gradients, and the mean is of the sums.

    What lies outside blocks sees a rank's rows in one piece.
    """
    named = dict(model.named_parameters())
    inside = {f"{name}.{each}" for name, block in families.blocks(model) for each, _ in block.named_parameters()}
    wide = setting.gradient_dtype or setting.dtype
    means = {name: torch.zeros(p.shape) for name, p in named.items()}
    rows, total = families.batch("llama", step), 0.0
    tokens = families.label_tokens(rows)
    for rank in range(setting.world):
        own = split(rows, setting.world, rank)
        sums = {name: torch.zeros(p.shape, dtype=wide if name in inside else setting.dtype) for name, p in named.items()}
        parts = [split(own, setting.parts, number) for number in range(setting.parts)]
        for part, names in [(own, set(named) - inside), *((part, inside) for part in parts)]:
            loss = token_loss(model, part, tokens)
            (loss * setting.world * factor(setting, step, rank) * scale).backward()
            total += loss.item() if names is inside else 0.0
            for name, parameter in named.items():
                if name in names:
                    sums[name] += parameter.grad
                parameter.grad = None
        for name, sum_ in sums.items():
            means[name] += sum_.float() / setting.world
    trace.losses.append(total)
    return [mean.to(wide if name in inside else setting.dtype).float() for name, mean in means.items()]


def train_plain(setting: Setting, steps: int = STEPS) -> Trace:
    """Train in plain PyTorch: a 16-bit model, fp32 masters, and the loss scale by hand."""
    model = families.build("llama")
    masters = [p.detach().clone() for p in model.parameters()]  # as exact as the model came
    narrow(model, setting.dtype)
    optimizer = torch.optim.AdamW(masters, fused=True, **HYPER)
    scale, clean, trace = setting.loss_scale.value, 0, Trace()
    for step in range(steps):
        for master, gradient in zip(masters, mean_gradient(setting, model, step, scale, trace)):
            master.grad = gradient / scale
        norm = torch.nn.utils.clip_grad_norm_(masters, MAX_NORM).item()
        trace.norms.append(norm)
        if torch.isfinite(torch.tensor(norm)):
            optimizer.step()
            clean += 1
            if setting.loss_scale.dynamic and clean == setting.loss_scale.growth_steps:
                scale, clean = scale * 2, 0
        else:
            scale, clean = scale / 2, 0
        trace.scales.append(scale)
        for parameter, master in zip(model.parameters(), masters):
            parameter.data.copy_(master)
    trace.masters = dict(zip((name for name, _ in model.named_parameters()), masters))
    return trace


def too_far(ours: Trace, plain: Trace, dtype: torch.dtype) -> list[str]:
    """Return where two runs part by more than rounding; a NaN does."""
    found = []
    for step, (one, other) in enumerate(zip(ours.losses, plain.losses, strict=True)):
        if not abs(one - other) <= EPSILON[dtype] / 2 * other:
            found.append(f"losses[{step}]: {one}, plain PyTorch has {other}")
    for step, (one, other) in enumerate(zip(ours.norms, plain.norms, strict=True)):
        overflow = dtype == torch.float16 and step == OVERFLOW_STEP
        if not (math.isinf(one) if overflow else abs(one - other) <= EPSILON[dtype] * 2 * other):
            found.append(f"norms[{step}]: {one}, plain PyTorch has {other}")
    way = apart = 0.0
    for name, start in families.build("llama").named_parameters():
        way += float((plain.masters[name] - start.detach()).square().sum())
        apart += float((plain.masters[name] - ours.masters[name]).square().sum())
    if not (apart / way) ** 0.5 <= 0.02:
        found.append(f"masters: {(apart / way) ** 0.5:.1%} of their way apart")
    return found


BF16, FP16 = torch.bfloat16, torch.float16
SETTINGS = [
    Setting(BF16, 1),
    Setting(BF16, 2),
    Setting(BF16, 3, activations="keep", accumulation=4),
    Setting(BF16, 2, accumulation=4, gradient_dtype=torch.float32),
    Setting(BF16, 2, stage=0),
    Setting(BF16, 2, parts=4, gradient_dtype=torch.float32),
    Setting(FP16, 2, parts=2, activations="keep", gradient_dtype=torch.float32),
    Setting(BF16, 1, parts=2, stage=2),
    Setting(BF16, 3, stage=2, accumulation=4, gradient_dtype=torch.float32),
    Setting(FP16, 1, activations="keep"),
    Setting(FP16, 2, activations="keep", debug=False),
    Setting(FP16, 3),
    Setting(FP16, 2, accumulation=4, gradient_dtype=torch.float32),
    Setting(FP16, 3, stage=1),
    Setting(FP16, 2, stage=2, accumulation=4),
]


@pytest.mark.quick(5)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_16_bits_train_as_in_plain_pytorch(worlds, setting):
    ours, plain = worlds[setting.world].run(train, setting)[0], train_plain(setting)
    assert ours.scales == plain.scales
    assert ours.losses[0] == pytest.approx(plain.losses[0], rel=EPSILON[setting.dtype] / 8)
    # A CPU without 16-bit arithmetic may sum in another order, so the dtype of sums shows by comparison, not by a limit.
    if setting.gradient_dtype is not None and setting.accumulation > 1:
        narrow = train_plain(replace(setting, gradient_dtype=None), steps=1)
        assert abs(ours.norms[0] - plain.norms[0]) < abs(ours.norms[0] - narrow.norms[0])
    assert too_far(ours, plain, setting.dtype) == []


class Scale(GradientCheckpointingLayer):
    """Multiplies its input by one number."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, hidden_states):
        return hidden_states * self.weight


def norm_of_four_parts() -> float:
    """The norm of a gradient that is 259 if its four parts are summed in fp32, and 256 if they are summed in bf16."""
    model = nn.Sequential(Scale())
    strategy = Strategy.of(dtype="bf16", gradient_dtype="fp32", accumulate_in="unit", accumulation=4)
    optimizer = ShardedAdamW(shard_model(model, strategy), None)
    model(torch.tensor([[256.0], [1.0], [1.0], [1.0]], dtype=BF16)).float().sum().backward()
    return optimizer.grad_norm()


def test_parts_of_a_batch_are_summed_in_fp32(world2):
    assert world2.run(norm_of_four_parts) == [259.0, 259.0]


def under_autocast(dtype, model, rows, tokens):
    with torch.autocast("cpu", dtype=dtype):
        return token_loss(model, rows, tokens)


def autocast_agrees(row: Row, dtype: torch.dtype) -> list[str]:
    """On every rank: train under autocast both ways, the plain run on each rank's rows by themselves; compare."""
    loss = partial(under_autocast, dtype)
    ours = run_sharded(row, None, loss, steps=3)
    plain = run_plain(row, None, loss, steps=3, parts=row.world)
    wide = run_plain(row, steps=3)
    assert differences(ours, wide) != []
    return differences(ours, plain, limit=5e-4, tensor_limit=4e-3)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("world", [1, 2])
def test_autocast_is_restored_in_recomputation(worlds, world, activations, dtype):
    row = Row("llama", world=world, activations=activations, debug=True)
    assert worlds[world].run(autocast_agrees, row, dtype) == [[]] * world


class TwoTypes(Block):
    """A norm in fp32 beside layers in bf16: two flat parameters in one block."""

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x.float()).bfloat16())))


class TwoTypesNet(Net):
    def __init__(self):
        super().__init__(TwoTypes)
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                parameter.data = parameter.data.bfloat16()

    def forward(self, input_ids, attention_mask=None):
        x = self.run_blocks(self.embed(input_ids), input_ids)
        return SimpleNamespace(logits=self.head(self.norm(x.float()).bfloat16()))


def two_types_agree(row: Row) -> tuple[list[str], list[str]]:
    """On every rank: one step; the names of the flat parameters, and the differences of gradient norm and loss."""
    torch.manual_seed(3)
    model = TwoTypesNet()
    plain = run_plain(row, copy.deepcopy(model), steps=1, parts=row.world)
    ours = run_sharded(row, model, steps=1)
    plain.weights = ours.weights = {}
    return differences(ours, plain, limit=2e-3), sorted({str(p.dtype) for p in model.parameters()})


@pytest.mark.parametrize(("world", "activations"), [(1, "recompute"), (2, "recompute"), (3, "keep")])
def test_a_block_of_two_dtypes(worlds, world, activations):
    row = Row("llama", world=world, activations=activations, debug=True)
    for problems, dtypes in worlds[world].run(two_types_agree, row):
        assert problems == []
        assert dtypes == ["torch.bfloat16", "torch.float32"]


def test_the_loss_scale_grows_falls_and_never_ends():
    scale = LossScale(4.0, dynamic=True, growth_steps=2)
    values = []
    for overflow in (False, False, False, True, False, False, True, True, True, True):
        scale.update(overflow=overflow)
        values.append(scale.value)
    assert values == [4, 8, 8, 4, 4, 8, 4, 2, 1, 0.5]
    assert scale.skipped_steps == 5
    for _ in range(100):
        scale.update(overflow=True)
    assert scale.value > 0
    for _ in range(300):
        scale.update(overflow=False)
    assert math.isfinite(scale.value)


def test_a_loss_in_fp16_is_scaled_within_its_range():
    scale = LossScale(2.0**16, dynamic=True, growth_steps=1)
    scale.fit(torch.tensor(1.0))
    assert scale.value == 2.0**16
    scale.fit(torch.tensor(1.0, dtype=torch.float16))
    for _ in range(3):
        scale.update(overflow=False)
    assert scale.value == 2.0**15
    assert torch.isfinite(torch.tensor(1.0, dtype=torch.float16) * scale.value)


def test_only_fp16_scales():
    assert [LossScale.for_dtype(d).dynamic for d in (None, torch.float32, BF16, FP16)] == [False, False, False, True]
    still = LossScale.for_dtype(BF16)
    still.update(overflow=True)
    assert still.value == 1.0
