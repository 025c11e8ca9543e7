"""Compute dtypes by name, and whether the hardware has them."""

from __future__ import annotations

import torch
from torch import nn

from ftkit.engine.core.dtypes import DTYPES
from ftkit.errors import UserError


def named_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype that a user gave as torch's, or by its name: `bf16`, `bfloat16`.

    Raises:
        UserError: it is no floating-point dtype.
    """
    if dtype is None:
        return None
    found = DTYPES.get(dtype) or getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
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


def own_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's first parameter; fp32 where it has none."""
    return next((parameter.dtype for parameter in model.parameters()), torch.float32)
