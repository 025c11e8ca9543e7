"""What the kernels share: where Triton runs, how rows are laid over programs, and what they refuse.

A row kernel holds one row of up to `LARGEST_ROW` elements in the registers of one program. Longer rows are walked in blocks
by the kernels that can (losses), and refused by those that cannot.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
from torch import Tensor

LARGEST_ROW = 16384
"""Elements: 32 fp32 registers of each of 512 threads. No model's hidden size is wider."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's own switch, which it reads when a kernel is defined: it then runs on the CPU, slowly, for tests."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class KernelError(ValueError):
    """A kernel was given what it cannot take; the text names it and what would do."""


def use_triton(x: Tensor) -> bool:
    """Return whether kernels run where `x` lies: on a GPU, or interpreted. Elsewhere their PyTorch references do."""
    return x.is_cuda or INTERPRETED


def as_on_gpu(x: Tensor) -> bool:
    """Return whether memory is taken as on a GPU: there, interpreted, and on meta, where a launch has nothing to compute."""
    return use_triton(x) or x.is_meta


def options(warps: int) -> dict[str, Any]:
    """Return what a launch says of its compilation: products are fused with sums, which Triton 3.10 does not by itself."""
    return {"num_warps": warps, "enable_fp_fusion": True}


def as_rows(x: Tensor) -> Tensor:
    """Return x (..., N) as (rows, N), elements side by side: a view where its rows are evenly spaced, else a copy."""
    if not x.numel():
        return x.reshape(0, x.shape[-1])
    return (x if x.stride(-1) == 1 else x.contiguous()).reshape(-1, x.shape[-1])


def row_block(columns: int) -> tuple[int, int]:
    """Return (elements of a block, warps) for rows of so many columns: 512 elements a warp, at most 16 warps.

    Raises:
        KernelError: if a row does not fit.
    """
    if columns > LARGEST_ROW:
        raise KernelError(f"rows of {columns} elements: at most {LARGEST_ROW} fit in the registers of one program")
    block = triton.next_power_of_2(max(columns, 1))
    return block, min(max(block // 512, 1), 16)


def programs_of(rows: int, device: torch.device) -> int:
    """Return how many programs share the rows where each sums over its own: four a multiprocessor."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return max(1, min(rows, 4 * processors))


def check_rows(name: str, x: Tensor, **others: Tensor | None) -> None:
    """Raise unless `x` (..., N) and what goes with it fit together: vectors are (N,), all else has x's shape.

    Raises:
        KernelError: naming what does not: no dimension, no fp32, fp16 or bf16, another device or shape.
    """
    if x.dim() < 1:
        raise KernelError(f"{name}: x is a scalar, (..., N) is needed")
    for what, tensor in {"x": x, **others}.items():
        if tensor is None:
            continue
        if tensor.dtype not in FLOATS:
            raise KernelError(f"{name}: {what} is {tensor.dtype}; fp32, fp16 or bf16 is needed")
        if tensor.device != x.device:
            raise KernelError(f"{name}: {what} lies on {tensor.device}, x on {x.device}")
        wanted = (x.shape[-1],) if what in ("weight", "bias") else tuple(x.shape)
        if tuple(tensor.shape) != wanted:
            raise KernelError(f"{name}: {what} has shape {tuple(tensor.shape)}; {wanted} goes with x {tuple(x.shape)}")
        if what == "residual" and tensor.dtype != x.dtype:
            raise KernelError(f"{name}: residual is {tensor.dtype}, x is {x.dtype}")
