"""16 bits: bf16, fp16 with a loss scale, sums of gradients in fp32, and autocast, against the same in plain PyTorch.

The reference keeps fp32 master weights and a 16-bit model, one process, no engine. It walks each rank's rows of each
micro-batch by themselves, and rounds where the engine's definition says so: a rank's gradient is in 16 bits, the mean over
ranks is made in fp32 and rounded to 16 bits, micro-batches are added up in the gradient dtype. Then every matrix product
sees the same numbers, and the two runs part by no more than the order of additions in the norm and the optimizer's last bit
(which a weight's rounding to 16 bits may blow up to one unit in its last place): limits of a tenth of the dtype's epsilon on
losses and norms hold. Against the reference that takes the global batch in one piece, the epsilon itself is the measure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from ftkit.engine.flat import Policy
from ftkit.engine.optimizer import LossScale, ShardedAdamW
from tests.engine import families
from tests.engine.families import token_loss
from tests.engine.trajectory import MAX_NORM, shard_model, split

STEPS = 8
OVERFLOW_STEP = 3
HYPER = {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.01}
EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Setting:
    """How a 16-bit run is made."""

    dtype: torch.dtype
    world: int
    stage: int = 3
    activations: str = "recompute"
    accumulation: int = 1
    gradient_dtype: torch.dtype | None = None
    debug: bool = True

    def __str__(self) -> str:
        words = [str(self.dtype), f"W{self.world}", f"stage{self.stage}", self.activations, f"acc{self.accumulation}"]
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
    policy = Policy(
        stage=setting.stage,
        activations=setting.activations,
        compute_dtype=setting.dtype,
        gradient_dtype=setting.gradient_dtype,
        debug=setting.debug,
    )
    units = shard_model(model, policy)
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
    for flat in units.flats:  # the masters, whole: gathered through fp32 lines of the same layout
        full = torch.zeros(flat.layout.padded_numel)
        shard = optimizer.lines[flat.name].master
        units.comm.all_gather(full, shard) if flat.owners > 1 else full.copy_(shard)
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


def train_plain(setting: Setting) -> Trace:
    """Train in plain PyTorch: a 16-bit model, fp32 masters, and the loss scale by hand."""
    model = narrow(families.build("llama"), setting.dtype)
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, fused=True, **HYPER)
    scale, clean, trace = setting.loss_scale.value, 0, Trace()
    for step in range(STEPS):
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


def distances(ours: Trace, plain: Trace) -> tuple[float, float, float]:
    """Return how far losses, norms and masters are: the masters as a share of the way they went."""
    torch.manual_seed(0)
    start = dict(families.build("llama").named_parameters())
    losses = max(abs(a - b) / b for a, b in zip(ours.losses, plain.losses))
    norms = max(abs(a - b) / b for a, b in zip(ours.norms, plain.norms) if b < float("inf"))
    way = sum((plain.masters[name] - start[name]).square().sum() for name in start).sqrt()
    apart = sum((plain.masters[name] - ours.masters[name]).square().sum() for name in start).sqrt()
    return losses, norms, float(apart / way)


BF16, FP16 = torch.bfloat16, torch.float16
SETTINGS = [
    Setting(BF16, 1),
    Setting(BF16, 2),
    Setting(BF16, 3, activations="keep", accumulation=4),
    Setting(BF16, 2, accumulation=4, gradient_dtype=torch.float32),
    Setting(BF16, 2, stage=0),
    Setting(BF16, 3, stage=2, accumulation=4, gradient_dtype=torch.float32),
    Setting(FP16, 1, activations="keep"),
    Setting(FP16, 2, activations="keep", debug=False),
    Setting(FP16, 3),
    Setting(FP16, 2, accumulation=4, gradient_dtype=torch.float32),
    Setting(FP16, 3, stage=1),
    Setting(FP16, 2, stage=2, accumulation=4),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_16_bits_train_as_in_plain_pytorch(worlds, setting):
    ours, plain = worlds[setting.world].run(train, setting)[0], train_plain(setting)
    assert ours.scales == plain.scales
    print(distances(ours, plain))
