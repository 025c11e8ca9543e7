"""The tiers on which tensors may lie, and the kinds of tensors that have one: the only place where their names are quoted.

A recipe, `TrainingArguments(ftkit=...)`, the plan, the engine and a checkpoint's manifest use the same strings.
"""

from __future__ import annotations

from typing import Final, Literal

Tier = Literal["device", "host", "nvme"]
TierOrAuto = Literal["auto", "device", "host", "nvme"]
DEVICE: Final = "device"
HOST: Final = "host"
NVME: Final = "nvme"
TIERS: tuple[Tier, ...] = (DEVICE, HOST, NVME)
"""From fast to large."""

KINDS: Final = ("parameters", "gradients", "state", "activation_offload")
"""Weight shards, gradient shards, optimizer state, and the inputs of checkpointed blocks."""
