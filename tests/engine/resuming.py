"""One run that writes a checkpoint in its middle and goes on, and another, held in another way, that goes on from it.

`write` and `read` are cases for a world of ranks. Both train a small Llama, or LoRA on it, on batches that depend on the
step alone; the reader begins with other weights, and with state of its own if it was `used`. Each notes the losses and
gradient norms after the save, and all that it holds at the end: masters, moments, frozen weights, whole. The learning rate
is what it was, times a factor, at every step: a group that was not restored parts from the run before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

from ftkit.engine.checkpoint.loading import load_checkpoint
from ftkit.engine.checkpoint.saving import Saving, save_checkpoint
from ftkit.engine.model import ShardedModel
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.hf.adapters import adapter_parameters
from ftkit.hf.trainer.optimizers import SHARDED
from ftkit.spec.strategy import Strategy
from ftkit.spec.tiers import Tier
from tests.engine import families
from tests.engine.trajectory import MAX_NORM, shard_model, split

BEFORE, AFTER = 2, 3
"""Steps before the save and after it."""


@dataclass(frozen=True)
class Side:
    """How a run holds what it trains.

    Args:
        world: ranks. tier: of all that may leave the device at this stage. stage: of ZeRO. deferred: the update.
        dtype: fp32, or bf16 with masters in fp32.
    """

    world: int = 1
    tier: Tier = "device"
    stage: int = 3
    deferred: bool = False
    dtype: str = "fp32"

    def __str__(self) -> str:
        return f"W{self.world}-{self.tier}-stage{self.stage}-{self.dtype}{'-deferred' * self.deferred}"

    @property
    def strategy(self) -> Strategy:
        """The engine's settings; freed buffers are poisoned."""
        return Strategy.of(
            stage=self.stage,
            dtype=self.dtype,
            parameters=self.tier if self.stage == 3 else "device",
            gradients=self.tier if self.stage >= 2 else "device",
            state=self.tier,
            activation_offload=self.tier,
            update="deferred" if self.deferred else "now",
            debug=True,
        )


@dataclass(frozen=True)
class Writing:
    """A run that writes: `kind` is full or lora; meanwhile: training goes on while it is written; `rule`: of the update."""

    side: Side
    kind: str = "full"
    meanwhile: bool = False
    rule: str = "adamw"

    def __str__(self) -> str:
        return f"{self.kind}-{self.side}{'-meanwhile' * self.meanwhile}{f'-{self.rule}' * (self.rule != 'adamw')}"


@dataclass
class Log:
    """What a run did after the save; `loaded` and `held`, by "tensor/kind", are of rank 0 only."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    loaded: dict[str, Tensor] = field(default_factory=dict)
    held: dict[str, Tensor] = field(default_factory=dict)


def build(kind: str) -> nn.Module:
    """Return the small Llama, or LoRA on it with second factors that are not zero, so that all of it has gradients."""
    model = families.build("llama")
    if kind == "full":
        return model
    torch.manual_seed(13)
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model


@contextmanager
def engine(side: Side, model: nn.Module, rule: str) -> Iterator[tuple[ShardedModel, ShardedOptimizer]]:
    """Shard a model over this world, with an optimizer of two groups."""
    adapters = adapter_parameters(model)
    units = shard_model(model, side.strategy, replicated=lambda name, _: name in adapters)
    assert units.comm.world_size == side.world
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained[::2], "weight_decay": 0.1}, {"params": trained[1::2], "lr": 2e-3}]
    try:
        yield units, SHARDED[rule](units, groups, lr=1e-3, betas=(0.9, 0.95))
    finally:
        units.tiers.close()


def train(units: ShardedModel, optimizer: ShardedOptimizer, step: int, log: Log) -> None:
    """Make one step."""
    rows, comm = families.batch("llama", step), units.comm
    loss = families.token_loss(units.model, split(rows, comm.world_size, comm.rank), families.label_tokens(rows))
    optimizer.scale(loss * comm.world_size).backward()
    log.norms.append(optimizer.clip_grad_norm_(MAX_NORM).item())
    optimizer.step()
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] *= 0.8
    log.losses.append(comm.sum(loss.detach().clone()).item())


def whole_tensors(units: ShardedModel, optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """Return every whole tensor by "name/kind": masters and moments, and the weights of frozen flat parameters.

    A collective. The model's weights are compared with the masters.
    """
    optimizer.settle()
    found: dict[str, Tensor] = {}
    for flat in units.flats:
        state = optimizer.state_of(flat) if flat.trainable else None
        for kind, store in {"master": state.master, **state.moments}.items() if state else [("weights", flat.weights)]:
            whole = flat.collect(store)
            for segment in flat.layout.segments:
                found[f"{segment.name}/{kind}"] = whole[segment.start : segment.stop].view(segment.shape).clone()
    for name, tensor in units.full_tensors():
        master = found.get(f"{name}/master", found.get(f"{name}/weights"))
        assert torch.equal(tensor, master.to(tensor.dtype)), f"{name} is not what its master says"
    return found if units.comm.rank == 0 else {}


def write(writing: Writing, folder: str) -> Log:
    """Train, save, and go on."""
    log, earlier = Log(), Log()
    with engine(writing.side, build(writing.kind), writing.rule) as (units, optimizer):
        for step in range(BEFORE):
            train(units, optimizer, step, earlier)
        save = Saving if writing.meanwhile else save_checkpoint
        saving = save(folder, units, optimizer, extra={"cursor": BEFORE})
        for step in range(BEFORE, BEFORE + AFTER):
            train(units, optimizer, step, log)
            if units.saving is not None:
                saving.poll()
        if units.saving is not None:
            saving.wait()
        log.held = whole_tensors(units, optimizer)
    return log


def read(side: Side, writing: Writing, used: bool, frozen: bool, folder: str) -> Log:
    """Begin with other weights, perhaps with a step of training, load, and go on."""
    model, log = build(writing.kind), Log()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad or frozen:
                parameter.mul_(1.5)
    with engine(side, model, writing.rule) as (units, optimizer):
        if used:
            train(units, optimizer, 90, Log())
        assert load_checkpoint(folder, units, optimizer, frozen=frozen) == {"cursor": BEFORE}
        log.loaded = whole_tensors(units, optimizer)
        for step in range(BEFORE, BEFORE + AFTER):
            train(units, optimizer, step, log)
        log.held = whole_tensors(units, optimizer)
    return log


def on_disk(folder: str | Path) -> dict[str, Tensor]:
    """Return the tensors in a checkpoint's files, by "tensor/kind" as in `whole_tensors`. Only safetensors reads them."""
    found: dict[str, Tensor] = {}
    for path in Path(folder).glob("*.safetensors"):
        kind = path.name.rsplit(".", 2)[1]
        found |= {f"{name}/{kind}": tensor for name, tensor in load_file(path).items()}
    return found
