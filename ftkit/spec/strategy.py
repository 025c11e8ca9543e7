"""The strategy: how a model is held and trained, every choice of it a value or "auto".

One class says it everywhere. A recipe's `engine:` block and `TrainingArguments(ftkit=...)` are read into it, the plan
replaces each "auto" (`Plan.strategy`), and the engine does what is left. The rules for a flat parameter that follow from a
strategy stand here, too, so that plan and engine cannot disagree: when it is resident, when its reduction waits.

It refuses values out of their range as they are made (pydantic's `ValidationError`).
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
STEP: Final = "step"
UNIT: Final = "unit"
"""Micro-batches of a step pass the model one after another, or all of them each block before the next one."""


def decided(choice: T | Auto) -> T:
    """Return a choice that is no longer open.

    Raises:
        ValueError: if it is "auto".
    """
    if isinstance(choice, str) and choice == AUTO:
        raise ValueError("a choice is left to the plan, and nothing was planned")
    return choice


def _no_bool(value: Any) -> Any:
    """Refuse true and false, which pydantic takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"found {value}, needs a number or a word")
    return value


def _off(value: Any) -> Any:
    """Return what YAML 1.1 made of the word: it reads a bare off as false."""
    return "off" if value is False else value


def _bytes(value: Any) -> Any:
    """Return the bytes of a number, or of a text with a unit."""
    return int(_SIZE.validate_python(value)) if isinstance(value, str) and value != AUTO else _no_bool(value)


_SIZE = TypeAdapter(ByteSize)
Count = Annotated[int, Field(ge=1, strict=True)]
Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=0)]
Stage = Annotated[Literal["auto", 0, 1, 2, 3], BeforeValidator(_no_bool)]
Switch = Annotated[bool, Field(strict=True)]
LineKind = Literal["block", "root", "replicated"]
"""Where a flat parameter's parameters stand: in a block; large and outside; small and outside, or an adapter's."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Strategy:
    """Experiments: each choice that is otherwise derived from memory, forced."""

    stage: Stage = Field(default=AUTO, description="ZeRO stage; 0 = replicated, as DDP")
    activations: Literal["auto", "recompute", "keep"] | Count = Field(
        default=AUTO, description="of blocks; a number: the last so many are kept, the others recomputed"
    )
    reshard_after_forward: Auto | Switch = Field(
        default=AUTO, description="free gathered weights after forward, gather them again for backward; stage 3"
    )
    micro_batch: Auto | Count = Field(default=AUTO, description="sequences of a rank in one forward")
    accumulation: Auto | Count = Field(default=AUTO, description="micro-batches of one optimizer step")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default=AUTO, description="of arithmetic and of sent gradients; auto = the model's; a recipe says it as train.dtype"
    )
    gradient_dtype: Literal["auto", "fp32", "compute"] = Field(default=AUTO, description="of accumulated gradient shards")
    parameters: TierOrAuto = Field(default=AUTO, description="where weight shards lie")
    gradients: TierOrAuto = Field(default=AUTO, description="where gradient shards lie")
    state: TierOrAuto = Field(default=AUTO, description="where master weights and moments lie")
    activation_offload: TierOrAuto = Field(
        default=AUTO, description="where the inputs of recomputed blocks wait for backward"
    )
    update: Literal["auto", "now", "deferred"] = Field(default=AUTO, description="in the step, or under the next forward")
    accumulate_in: Literal["auto", "step", "unit"] = Field(
        default=AUTO, description="micro-batches pass the model, or each block"
    )
    state_host_bytes: Auto | Bytes = Field(
        default=AUTO,
        description="part of a rank's NVMe state that stays in host memory, in bytes or as 4GiB; auto = the free memory, or "
        "that of two units",
    )
    prefetch: Switch = Field(default=True, description="gather the neighbour while a unit computes")
    kernels: Annotated[Literal["auto", "off"], BeforeValidator(_off)] = Field(
        default=AUTO, description="fused kernels where they agree with the model's modules"
    )
    loss_reduction: Literal["auto", "counted", "sum", "mean-rows", "mean-tokens", "mean-ranks"] = Field(
        default=AUTO, description="how the loss scales with its batch; auto = found out at the first step"
    )
    affinity: Switch = Field(default=True, description="bind each rank to cores of its own, on the NUMA node of its GPU")
    debug: Switch = Field(default=False, description="poison freed buffers, compare unit ids between ranks")

    @classmethod
    def of(cls, **choices: Any) -> Strategy:
        """Return a strategy that leaves nothing open: what is not said is as in `ZERO3`."""
        return replace(ZERO3, **choices)

    def reopened(self) -> Strategy:
        """Return the strategy with all that a plan decides left to it, but the micro-batch and the gradients' dtype."""
        derived = (
            "stage",
            "activations",
            "reshard_after_forward",
            *KINDS,
            "accumulation",
            "update",
            "accumulate_in",
            "state_host_bytes",
        )
        opened: dict[str, Any] = dict.fromkeys(derived, AUTO)
        return replace(self, **opened)

    def tier(self, kind: str) -> Tier:
        """Return the tier of a kind of tensor, one of `KINDS`."""
        tier: Tier = decided(getattr(self, kind))
        return tier

    @property
    def uses_nvme(self) -> bool:
        """Whether anything lies on NVMe."""
        return NVME in (self.parameters, self.gradients, self.state, self.activation_offload)

    @property
    def deferred(self) -> bool:
        """Whether the update runs under the next forward, unit by unit."""
        return decided(self.update) == "deferred"

    @property
    def parts(self) -> int:
        """Micro-batches that pass each block together."""
        return decided(self.accumulation) if decided(self.accumulate_in) == UNIT else 1

    @property
    def rounds(self) -> int:
        """Times that all blocks are passed in a step, there and back."""
        return decided(self.accumulation) // self.parts

    @property
    def sequences(self) -> int:
        """Sequences of a rank that pass each block together."""
        return decided(self.micro_batch) * self.parts

    @property
    def sums_in_fp32(self) -> bool:
        """Whether a step's micro-batches are summed in fp32, whatever the compute dtype is."""
        return decided(self.gradient_dtype) == FP32

    def gradient_itemsize(self, itemsize: int) -> int:
        """Return the bytes of an element of a gradient shard, of weights whose elements have `itemsize` in use."""
        return 4 if self.sums_in_fp32 else itemsize

    def slot_itemsize(self, itemsize: int) -> int:
        """Return the bytes of an element of a gradient before its reduction: the sum's, where several parts are summed."""
        return self.gradient_itemsize(itemsize) if self.parts > 1 else itemsize

    def problem(self, *, cpu: bool) -> str | None:
        """Return why the engine cannot do this; None if it can.

        Args:
            cpu: the rank's device is the host.
        """
        stage = decided(self.stage)
        if self.parameters != DEVICE and stage < 3:
            return f"parameters on the {self.parameters} tier need stage 3, not {stage}"
        if self.gradients != DEVICE and stage < 2:
            return f"gradients on the {self.gradients} tier need stage 2 or 3, not {stage}"
        if not cpu and self.state == DEVICE and (self.parameters, self.gradients) != (DEVICE, DEVICE):
            return (
                "optimizer state on the device needs parameters and gradients there: place the state where the lowest of "
                f"parameters ({self.parameters}) and gradients ({self.gradients}) lies"
            )
        return None

    def graphs(self, blocks: int) -> int:
        """Return how many of so many blocks keep their graphs from forward to backward.

        The last ones do, if not all: their backward comes first, so their graphs live shortest.
        """
        if isinstance(self.activations, int):
            return min(self.activations, blocks)
        return blocks if decided(self.activations) == "keep" else 0

    def owners(self, ranks: int) -> int:
        """Return how many of so many ranks share a flat parameter: stage 0 replicates."""
        return 1 if decided(self.stage) == 0 else ranks

    def resident(self, kind: LineKind, ranks: int) -> bool:
        """Return whether every rank has a flat parameter's weights whole for good."""
        alone = self.owners(ranks) == 1 and self.parameters == DEVICE
        return decided(self.stage) < 3 or kind == "replicated" or alone

    def reduced_late(self, kind: LineKind, ranks: int) -> bool:
        """Return whether a flat parameter's gradient is reduced at the end of the step, and whole on every rank until then.

        On one rank, where there is nothing to reduce, autograd's gradients are added straight to it.
        """
        alone = self.owners(ranks) == 1 and self.gradients == DEVICE
        return decided(self.stage) < 2 or kind == "replicated" or alone

    def __str__(self) -> str:
        return ", ".join(self._words())

    def _words(self) -> Iterator[str]:
        yield f"stage {self.stage}"
        if isinstance(self.activations, str):
            words = {"keep": "activations kept", "recompute": "blocks recomputed", AUTO: "activations auto"}
            yield words[self.activations]
        else:
            yield f"activations of the last {self.activations} blocks kept, the others recomputed"
        if self.stage == 3:
            told = {True: "weights resharded after forward", False: "weights gathered until backward", AUTO: "weights auto"}
            yield told[self.reshard_after_forward]
        for tier in TIERS[1:]:
            kinds = [kind for kind in KINDS if getattr(self, kind) == tier]
            if kinds:
                yield f"{' and '.join(kinds).replace('activation_offload', 'activations')} on {tier}"
        if self.state_host_bytes not in (AUTO, 0):
            yield f"{decided(self.state_host_bytes) / 2**30:.1f} GiB of each rank's state cached in host memory"
        if self.accumulate_in == UNIT and self.parts > 1:
            yield f"{self.parts} micro-batches through each block together"
        if self.update == "deferred":
            yield "update under the next forward"
        if self.micro_batch != AUTO:
            yield f"{self.micro_batch} sequence{'s' * (self.micro_batch > 1)} a micro-batch"


OPEN: Final = Strategy()
"""Everything is left to the plan."""
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
"""ZeRO-3 with everything on the device. `kernels` and `loss_reduction` stay "auto": the model decides them, not the plan."""
