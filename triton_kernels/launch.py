"""Launches, layout of rows over programs, and argument checks that the kernels share.

A row kernel keeps a row of up to `LARGEST_ROW` elements in the registers of one program. The loss kernels read longer rows
in blocks.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

LARGEST_ROW = 16384
"""Elements: 32 fp32 registers for each of 512 threads. No model of the catalogue has a larger hidden size."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's own switch. Triton reads it when a kernel is defined, and then runs the kernel on the CPU, slowly, for tests."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class KernelError(ValueError):
    """Arguments that a kernel cannot take. The message says which are needed."""


def use_triton(x: Tensor) -> bool:
    """Return whether a kernel runs on the device of `x`: a GPU, or the interpreter. Elsewhere the reference runs."""
    return x.is_cuda or INTERPRETED


def as_on_gpu(x: Tensor) -> bool:
    """Return whether a loss needs the memory that it needs on a GPU. On meta it does, but launches nothing."""
    return use_triton(x) or x.is_meta


def device_guard(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which the GPU of `x` is the current one. Without a GPU it does nothing."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def options(warps: int, fused: bool = True) -> dict[str, Any]:
    """Return compile options. `fused`: products are fused with sums; Triton 3.10 does not fuse them by default."""
    return {"num_warps": warps, "enable_fp_fusion": fused}


def launch(
    kernel: Any, grid: tuple[int, ...], x: Tensor, *others: Any, warps: int, fused: bool = True, **constants: Any
) -> None:
    """Run a kernel on the GPU of its first argument, or do nothing if the grid is empty.

    Args:
        kernel: Function decorated with `triton.jit`.
        grid: Number of programs in each dimension.
        x: First argument of the kernel.
        others: Further arguments.
        warps: Warps per program.
        fused: Whether products are fused with sums. Without it, a kernel can give the bits of plain PyTorch.
        constants: Arguments that are `tl.constexpr`.
    """
    if all(grid):
        with device_guard(x):  # Triton launches on the current GPU, wherever the tensors are
            kernel[grid](x, *others, **constants, **options(warps, fused))


def as_rows(x: Tensor) -> Tensor:
    """Return x (..., N) as (rows, N) with elements side by side: a view if its rows are evenly spaced, else a copy."""
    return (x if x.stride(-1) == 1 else x.contiguous()).reshape(x.shape[:-1].numel(), x.shape[-1])


def row_block(columns: int) -> tuple[int, int]:
    """Return (elements per block, warps) for rows of `columns` elements: 512 elements per warp, at most 16 warps.

    Raises:
        KernelError: A row has more than `LARGEST_ROW` elements.
    """
    if columns > LARGEST_ROW:
        raise KernelError(f"rows of {columns} elements: at most {LARGEST_ROW} fit in the registers of one program")
    block = triton.next_power_of_2(max(columns, 1))
    return block, min(max(block // 512, 1), 16)


def check_fits(name: str, what: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise KernelError if argument `what` of function `name` is not fp32, fp16 or bf16, or has another shape or device."""
    if tensor.dtype not in FLOATS:
        raise KernelError(f"{name}: {what} is {tensor.dtype}; fp32, fp16 or bf16 is needed")
    if tuple(tensor.shape) != tuple(shape) or tensor.device != device:
        found = f"{what} has shape {tuple(tensor.shape)} on {tensor.device}"
        raise KernelError(f"{name}: {found}; {tuple(shape)} on {device} is needed")
