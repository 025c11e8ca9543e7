"""The strategy: every choice of how a model is stored and trained, a value or "auto".

A recipe's `engine:` block and `TrainingArguments(ftkit=...)` are read into a `Strategy`, the plan replaces each "auto"
(`Plan.strategy`), and the engine executes the result. Rules that plan and engine share follow here from the strategy: when
a flat parameter is resident, and when its gradient is reduced. Pydantic checks the range of each value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from ftkit.spec.tiers import DEVICE, KINDS, NVME, TIERS, Tier, TierOrAuto

AUTO: Final = "auto"
Auto = Literal["auto"]
T = TypeVar("T")

FP32: Final = "fp32"
SPLIT: Final = "split"
"""Forms of the master weights of 16-bit weights (`Strategy.master`)."""
STEP: Final = "step"
UNIT: Final = "unit"
"""The micro-batches of a step run through the model one after another, or all through each block before the next."""


def decided(choice: T | Auto) -> T:
    """Return a choice after the plan, or raise ValueError if it is still "auto"."""
    if isinstance(choice, str) and choice == AUTO:
        raise ValueError('the strategy has an "auto" that no plan has replaced')
    return choice


def _off(value: Any) -> Any:
    """Return "off" for false: YAML 1.1 reads a bare off as false."""
    return "off" if value is False else value


Count = Annotated[int, Field(ge=1, strict=True)]
Bytes = Annotated[int, BeforeValidator(TypeAdapter(ByteSize).validate_python), Field(ge=0)]
"""A number of bytes, or a string with a unit."""
Switch = Annotated[bool, Field(strict=True)]
FlatKind = Literal["block", "root", "replicated"]
"""Kinds of flat parameters: of a block; root parameters; replicated parameters (small ones, and LoRA adapters)."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Strategy:
    """Choices that the plan otherwise derives from memory."""

    stage: Literal["auto", 0, 1, 2, 3] = Field(default=AUTO, description="ZeRO stage; 0 = replicated, as DDP")
    activations: Literal["auto", "recompute", "keep"] | Count = Field(
        default=AUTO, description="of blocks; a number: that many last blocks keep theirs, the others recompute"
    )
    reshard_after_forward: Auto | Switch = Field(
        default=AUTO, description="free gathered weights after forward, gather them again for backward; stage 3"
    )
    micro_batch: Auto | Count = Field(default=AUTO, description="sequences of a rank in one forward")
    accumulation: Auto | Count = Field(default=AUTO, description="micro-batches of one optimizer step")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default=AUTO, description="of arithmetic and of sent gradients; auto = the model's; in a recipe: train.dtype"
    )
    gradient_dtype: Literal["auto", "fp32", "compute"] = Field(default=AUTO, description="of accumulated gradient shards")
    parameters: TierOrAuto = Field(default=AUTO, description="tier of weight shards")
    gradients: TierOrAuto = Field(default=AUTO, description="tier of gradient shards")
    state: TierOrAuto = Field(default=AUTO, description="tier of master weights and moments")
    master: Literal["fp32", "split"] = Field(
        default=FP32,
        description="of 16-bit weights; split: a 16-bit residual beside the weight, 2 bytes instead of 4; "
        "in a recipe: optimizer.master",
    )
    convert_state: Switch = Field(
        default=False,
        description="take the moments of a checkpoint in the other form, fp32 or 8 bits; "
        "in a recipe: optimizer.convert_state",
    )
    activation_offload: TierOrAuto = Field(
        default=AUTO, description="tier of the inputs of recomputed blocks until backward"
    )
    update: Literal["auto", "now", "deferred"] = Field(default=AUTO, description="in the step, or under the next forward")
    accumulate_in: Literal["auto", "step", "unit"] = Field(
        default=AUTO, description="micro-batches run through the model one by one, or through each block together"
    )
    state_host_bytes: Auto | Bytes = Field(
        default=AUTO,
        description="part of a rank's NVMe state that stays in host memory, in bytes or as 4GiB; auto = the free memory, or "
        "that of two units",
    )
    prefetch: Switch = Field(default=True, description="gather the neighbour while a unit computes")
    kernels: Annotated[Literal["auto", "off"], BeforeValidator(_off)] = Field(
        default=AUTO, description="fused kernels if they agree with the model's modules"
    )
    loss_reduction: Literal["auto", "counted", "sum", "mean-rows", "mean-tokens", "mean-ranks"] = Field(
        default=AUTO, description="how the loss scales with its batch; auto = detected at the first step"
    )
    affinity: Switch = Field(default=True, description="bind each rank to cores of its own, on the NUMA node of its GPU")
    debug: Switch = Field(default=False, description="fill freed buffers with NaN")

    @classmethod
    def of(cls, **choices: Any) -> Strategy:
        """Return `ZERO3` with some choices replaced."""
        return replace(ZERO3, **choices)

    def reopened(self) -> Strategy:
        """Return the strategy with all choices of the plan reset to "auto", except micro-batch and gradient dtype."""
        derived = ("stage", "activations", "reshard_after_forward", "accumulation", "update", "accumulate_in")
        opened: dict[str, Any] = dict.fromkeys((*derived, *KINDS, "state_host_bytes"), AUTO)
        return replace(self, **opened)

    def tier(self, kind: str) -> Tier:
        """Return the tier of a kind of tensor, one of `KINDS`."""
        tier: Tier = decided(getattr(self, kind))
        return tier

    @property
    def uses_nvme(self) -> bool:
        """Whether any kind of tensor is on NVMe."""
        return any(getattr(self, kind) == NVME for kind in KINDS)

    @property
    def deferred(self) -> bool:
        """Whether the update runs under the next forward, unit by unit."""
        return decided(self.update) == "deferred"

    @property
    def parts(self) -> int:
        """Micro-batches that run through each block together."""
        return decided(self.accumulation) if decided(self.accumulate_in) == UNIT else 1

    @property
    def rounds(self) -> int:
        """Forward and backward passes over all blocks per step."""
        return decided(self.accumulation) // self.parts

    @property
    def sequences(self) -> int:
        """Sequences of a rank that run through each block together."""
        return decided(self.micro_batch) * self.parts

    @property
    def sums_in_fp32(self) -> bool:
        """Whether gradients of micro-batches are summed in fp32 for any compute dtype."""
        return decided(self.gradient_dtype) == FP32

    def gradient_itemsize(self, itemsize: int) -> int:
        """Return the bytes per element of a gradient shard, for weights of `itemsize` bytes."""
        return 4 if self.sums_in_fp32 else itemsize

    def slot_itemsize(self, itemsize: int) -> int:
        """Return the bytes per element of a gradient before its reduction. Several parts are summed in the sum's dtype."""
        return self.gradient_itemsize(itemsize) if self.parts > 1 else itemsize

    def problem(self, *, cpu: bool) -> str | None:
        """Return why the engine cannot execute the strategy, or None.

        Args:
            cpu: The rank computes on the host.
        """
        stage = decided(self.stage)
        if self.parameters != DEVICE and stage < 3:
            return f"parameters on the {self.parameters} tier need stage 3, not {stage}"
        if self.gradients != DEVICE and stage < 2:
            return f"gradients on the {self.gradients} tier need stage 2 or 3, not {stage}"
        if not cpu and self.state == DEVICE and (self.parameters, self.gradients) != (DEVICE, DEVICE):
            return (
                "optimizer state on the device needs parameters and gradients there: place the state where the lowest of "
                f"parameters ({self.parameters}) and gradients ({self.gradients}) is"
            )
        if not cpu and self.master == SPLIT and self.state != DEVICE and (self.parameters == DEVICE or stage < 3):
            return (
                f"optimizer.master: split needs the weights where the state is: the state is on {self.state}, the weights "
                f"on {self.parameters} at stage {stage}. Set engine.parameters to host and engine.stage to 3, set "
                "engine.state to device, or set optimizer.master to fp32"
            )
        return None

    def graphs(self, blocks: int) -> int:
        """Return how many of `blocks` blocks keep their graphs from forward to backward.

        These are the last blocks: their backward runs first, so their graphs live shortest.
        """
        if isinstance(self.activations, int):
            return min(self.activations, blocks)
        return blocks if decided(self.activations) == "keep" else 0

    def owners(self, ranks: int) -> int:
        """Return how many of `ranks` ranks share a flat parameter. Stage 0 replicates."""
        return 1 if decided(self.stage) == 0 else ranks

    def resident(self, kind: FlatKind, ranks: int) -> bool:
        """Return whether every rank always stores a flat parameter's full weights."""
        alone = self.owners(ranks) == 1 and self.parameters == DEVICE
        return decided(self.stage) < 3 or kind == "replicated" or alone

    def reduced_late(self, kind: FlatKind, ranks: int) -> bool:
        """Return whether a flat parameter's gradient is reduced at the end of the step, and full on every rank before.

        One rank has nothing to reduce, and adds gradients to the shard directly.
        """
        alone = self.owners(ranks) == 1 and self.gradients == DEVICE
        return decided(self.stage) < 2 or kind == "replicated" or alone

    def __str__(self) -> str:
        return ", ".join(self._words())

    def _words(self) -> Iterator[str]:
        yield f"stage {self.stage}"
        words = {"keep": "activations kept", "recompute": "blocks recomputed", AUTO: "activations auto"}
        last = f"activations of the last {self.activations} blocks kept, the others recomputed"
        yield words.get(str(self.activations), last)
        if self.stage == 3:
            weights = {True: "resharded after forward", False: "gathered until backward", AUTO: "auto"}
            yield f"weights {weights[self.reshard_after_forward]}"
        for tier in TIERS[1:]:
            kinds = [kind for kind in KINDS if getattr(self, kind) == tier]
            if kinds:
                yield f"{' and '.join(kinds).replace('activation_offload', 'activations')} on {tier}"
        if self.state_host_bytes not in (AUTO, 0):
            yield f"{decided(self.state_host_bytes) / 2**30:.1f} GiB of each rank's state cached in host memory"
        if self.master == SPLIT:
            yield "split master weights"
        if self.accumulate_in == UNIT and self.parts > 1:
            yield f"{self.parts} micro-batches through each block together"
        if self.update == "deferred":
            yield "update under the next forward"
        if self.micro_batch != AUTO:
            yield f"micro-batch of {self.micro_batch} sequence{'s' * (self.micro_batch > 1)}"


OPEN: Final = Strategy()
"""Every choice is left to the plan."""
ZERO3: Final = Strategy(
    stage=3,
    activations="recompute",
    reshard_after_forward=True,
    micro_batch=1,
    accumulation=1,
    gradient_dtype="compute",
    parameters=DEVICE,
    gradients=DEVICE,
    state=DEVICE,
    activation_offload=DEVICE,
    update="now",
    accumulate_in="step",
    state_host_bytes=0,
)
"""ZeRO-3 with everything on the device. `kernels` and `loss_reduction` stay "auto": the model decides them."""
