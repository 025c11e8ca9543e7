"""What a user may say about the engine: `TrainingArguments(ftkit=...)`, `ftkit.Accelerator(ftkit=...)`, `engine:`.

Everything defaults to "auto"; what is said is forced. `"auto"` alone means all defaults, a string that ends in .yaml
is a file with these keys, and None switches ftkit off.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from ftkit.config.yaml_lines import read
from ftkit.errors import UserError
from ftkit.spec.tiers import KINDS, NVME, TIERS, TierOrAuto

REDUCTIONS = ("counted", "sum", "mean-rows", "mean-tokens", "mean-ranks")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}




@dataclass(frozen=True)
class EngineSettings:
    """The engine's settings.

    Args:
        stage: ZeRO stage 0 to 3, in the field's sense, or "auto".
        activations: "recompute", "keep" or "auto"; an integer n keeps the graphs of the last n blocks.
        weights: "free", "hold" or "auto" (see `ftkit.engine.core.flat_parameter.Policy`).
        dtype: compute dtype "fp32", "bf16", "fp16"; "auto" takes the Trainer's fp16/bf16 flags, else the model's own.
        gradient_dtype: "fp32", "compute", or "auto": fp32 where a step has several micro-batches.
        prefetch: gather the neighbour's weights while a block computes (see `Policy`).
        debug: fill freed buffers with NaN, and compare among ranks what each collective is for (see `Policy`).
        parameters: tier of the parameters: "device", "host", "nvme" or "auto" (see `ftkit.engine.memory.tiers`).
        gradients: tier of the gradients, named as for `parameters`.
        state: tier of the optimizer state, master weights and moments, named as for `parameters`.
        kept: tier of the inputs of recomputed blocks, named as for `parameters`.
        update: "now" makes the update in `step()`; "deferred" makes it under the next forward; "auto" defers it where the
            state lies on another tier than blocks compute on.
        accumulate_in: "step" sends micro-batches through the model one after another; "unit" sends all of them through a
            block before the next block is gathered, and the Trainer then gets the whole batch of a step; "auto" is "step",
            but under `ftkit finetune` what the plan chooses.
        device_gib: memory granted on each rank's device, GiB; None: what is free at the start, less a reserve.
        host_gib: host memory granted to all ranks of a box, GiB; None: what is free.
        nvme_dir: folder of the NVMe tier.
        nvme_gib: NVMe space granted to all ranks of a box in that folder, GiB; None: what is free.
        state_host_gib: host memory that keeps a part of each rank's state where the state lies on NVMe, GiB; None: all that
            is left there if the plan chose NVMe, and of that as much as the state of the two widest units takes if the user
            did.
        kernels: "auto" gives fused kernels to the submodules that they can compute, each proved first, and makes the
            Trainer's loss by chunks of the head; "off" leaves the model as it is.
        loss_reduction: how the loss scales with its batch: "counted" (divided by `num_items_in_batch`), "sum", "mean-rows",
            "mean-tokens" (over labels that are not -100), "mean-ranks" (the mean of the ranks' losses, as DDP); "auto":
            found out at the first step (see `ftkit.hf.trainer.loss_scaling`).
        affinity: bind each rank of a box to cores of its own (see `ftkit.engine.memory.affinity`).
    """

    stage: Literal["auto", 0, 1, 2, 3] = "auto"
    activations: Literal["auto", "recompute", "keep"] | int = "auto"
    weights: Literal["auto", "free", "hold"] = "auto"
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    gradient_dtype: Literal["auto", "fp32", "compute"] = "auto"
    prefetch: bool = True
    debug: bool = False
    parameters: TierOrAuto = "auto"
    gradients: TierOrAuto = "auto"
    state: TierOrAuto = "auto"
    kept: TierOrAuto = "auto"
    update: Literal["auto", "now", "deferred"] = "auto"
    accumulate_in: Literal["auto", "step", "unit"] = "auto"
    device_gib: float | None = None
    host_gib: float | None = None
    nvme_dir: str | None = None
    nvme_gib: float | None = None
    state_host_gib: float | None = None
    kernels: Literal["auto", "off"] = "auto"
    loss_reduction: Literal["auto", "counted", "sum", "mean-rows", "mean-tokens", "mean-ranks"] = "auto"
    affinity: bool = True

    @classmethod
    def of(cls, value: EngineSettings | Mapping[str, Any] | str) -> EngineSettings:
        """Read settings from what a user gave.

        Raises:
            UserError: for an unknown key (with the nearest known one), a value out of its range, an unreadable file.
        """
        if isinstance(value, EngineSettings):
            value._check()
            return value
        if isinstance(value, str):
            value = {} if value == "auto" else _file(value)
        if not isinstance(value, Mapping):
            raise UserError(f"ftkit settings: {value!r} is no 'auto', mapping or .yaml file")
        known = {field.name for field in fields(cls)}
        for key in map(str, value):
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise UserError(f"ftkit settings: unknown key {key!r}{hint} Known: {', '.join(sorted(known))}")
        settings = cls(**value)
        settings._check()
        return settings

    def _check(self) -> None:
        allowed: dict[str, tuple[Any, ...]] = {
            "stage": ("auto", 0, 1, 2, 3),
            "activations": ("auto", "recompute", "keep"),
            "weights": ("auto", "free", "hold"),
            "dtype": ("auto", *DTYPES),
            "gradient_dtype": ("auto", "fp32", "compute"),
            "prefetch": (True, False),
            "debug": (True, False),
            "kernels": ("auto", "off"),
            "loss_reduction": ("auto", *REDUCTIONS),
            "affinity": (True, False),
            **dict.fromkeys(("parameters", "gradients", "state", "kept"), ("auto", *TIERS)),
            "update": ("auto", "now", "deferred"),
            "accumulate_in": ("auto", "step", "unit"),
        }
        if type(self.activations) is int and self.activations > 0:
            del allowed["activations"]
        for key, values in allowed.items():
            value = getattr(self, key)
            if value not in values or isinstance(value, bool) != isinstance(values[0], bool):
                listed = ", ".join(map(str, values))
                raise UserError(f"ftkit settings: {key} is {getattr(self, key)!r}, one of {listed} is needed")
        for key in ("device_gib", "host_gib", "nvme_gib"):
            value = getattr(self, key)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and value > 0):
                raise UserError(f"ftkit settings: {key} is {value!r}, a positive number is needed")
        share = self.state_host_gib
        if share is not None and (isinstance(share, bool) or not isinstance(share, (int, float)) or share < 0):
            raise UserError(f"ftkit settings: state_host_gib is {share!r}, a number is needed, 0 or more")
        if share and self.state not in (NVME, "auto"):
            raise UserError(f"ftkit settings: state_host_gib is of a state on NVMe, and state is {self.state!r}")
        on_disk = [key for key in KINDS if getattr(self, key) == NVME]
        if on_disk and self.nvme_dir is None:
            raise UserError(f"ftkit settings: {on_disk[0]} is 'nvme' and no folder is named: set nvme_dir")


def _file(path: str) -> Mapping[str, Any]:
    if not path.endswith((".yaml", ".yml", ".json")):
        raise UserError(f"ftkit settings: {path!r} is neither 'auto' nor a .yaml file")
    try:
        document = read(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"ftkit settings: {path}: {error}") from error
    if document.problems:
        raise UserError(f"ftkit settings: {document.problems[0]}")
    return document.values


def named_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype that a user gave as torch's, or by its name: `bf16`, `bfloat16`.

    Raises:
        UserError: it is no floating-point dtype.
    """
    found = dtype
    if isinstance(dtype, str):
        found = DTYPES.get(dtype) or getattr(torch, dtype.removeprefix("torch."), None)
    if found is None and dtype is None:
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UserError(f"dtype is {dtype!r}; one of {', '.join(DTYPES)} is needed, or torch's, such as torch.bfloat16")
    return found


def check_dtype(dtype: torch.dtype | None, device: torch.device) -> None:
    """Refuse a compute dtype that the hardware does not have.

    Raises:
        UserError: for bf16 on a CUDA device below compute capability 8.0 (torch says it can: it emulates).
    """
    if dtype == torch.bfloat16 and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise UserError(
                f"bf16 needs compute capability 8.0, {torch.cuda.get_device_name(device)} has {major}.{minor}: use fp16"
            )
