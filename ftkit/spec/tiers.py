"""Tiers of memory, and the kinds of tensors that are placed on them.

A recipe, `TrainingArguments(ftkit=...)`, the plan, the engine and a checkpoint's manifest use these strings.
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

LEAST_STEP = 16384
"""Bytes. Files on NVMe and pinned memory are whole pages."""


def activation_bytes(size_bytes: int) -> int:
    """Return the bytes of memory for an offloaded activation: up to an eighth more, so that rows of any length share it."""
    step = max(1 << max(size_bytes.bit_length() - 4, 0), LEAST_STEP)
    return -(-size_bytes // step) * step
