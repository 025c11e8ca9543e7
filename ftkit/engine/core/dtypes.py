"""The dtype names of a strategy, as torch dtypes."""

from __future__ import annotations

import torch

from ftkit.spec.strategy import Strategy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(strategy: Strategy) -> torch.dtype | None:
    """Return the dtype of weights in use and of gradients on the wire; None keeps each parameter's own."""
    return DTYPES.get(strategy.dtype)
