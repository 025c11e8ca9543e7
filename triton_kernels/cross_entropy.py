"""Softmax cross-entropy over a large vocabulary. The gradient overwrites the logits.

    z    = cap * tanh(x / cap)           (with a soft cap, else z = x)
    n    = log(sum(exp(z)))
    loss = n - z[label]

    dz_j = exp(z_j - n) - [j = label]
    dx_j = dz_j * (1 - (z_j / cap)^2) = dz_j * 4 * sigmoid(2 x_j / cap) * sigmoid(-2 x_j / cap), without cancellation

Everything is fp32. Forward reads a row in blocks and finds maximum and sum of exponentials in one pass. Backward reads it
once more and writes in place. A row whose label is `ignore_index` has loss 0 and gradient 0.

Cost, for a row of V logits of b bytes: Vb moved forward and 2Vb backward. PyTorch with its fp32 copy moves five times as
much and needs 8V bytes more.

Source: Milakov and Gimelshein, arXiv:1805.02867.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from .launch import FLOATS, KernelError, as_on_gpu, launch

BLOCK = 8192
"""Logits in registers at once: 16 fp32 registers for each of 512 threads."""
WARPS = 16


def cross_entropy_reference(logits: Tensor, labels: Tensor, *, ignore_index: int = -100, cap: float = 0.0) -> Tensor:
    """Return the loss of each row in plain PyTorch. Arguments are those of `cross_entropy`; fp64 is computed in fp64."""
    return _losses_reference(logits, labels, ignore_index, cap)[0]


def _capped_reference(logits: Tensor, cap: float) -> Tensor:
    z = logits if logits.dtype == torch.float64 else logits.float()
    return cap * torch.tanh(z / cap) if cap else z


def _losses_reference(logits: Tensor, labels: Tensor, ignore_index: int, cap: float) -> tuple[Tensor, Tensor]:
    z = _capped_reference(logits, cap)
    valid = labels != ignore_index
    total = torch.logsumexp(z, -1)
    own = z.gather(-1, labels.where(valid, 0).unsqueeze(-1)).squeeze(-1)
    return (total - own).where(valid, 0.0), total


def _gradients_reference(
    logits: Tensor, labels: Tensor, total: Tensor, dloss: Tensor, ignore_index: int, cap: float, first: int
) -> None:
    z = _capped_reference(logits, cap)
    gradient = torch.exp(z - total.unsqueeze(-1))
    place = labels - first
    present = (place >= 0) & (place < z.shape[-1])
    own = torch.where(present, -1.0, 0.0).to(gradient.dtype).unsqueeze(-1)
    gradient.scatter_add_(-1, place.where(present, 0).unsqueeze(-1), own)
    if cap:
        y = 2.0 / cap * (logits if logits.dtype == torch.float64 else logits.float())
        gradient *= 4.0 * torch.sigmoid(y) * torch.sigmoid(-y)
    gradient *= dloss.unsqueeze(-1)
    logits.copy_(gradient.masked_fill_((labels == ignore_index).unsqueeze(-1), 0.0))


@triton.jit
def _capped(x, cap, CAP: tl.constexpr):
    """Return cap * tanh(x / cap), or x. Near 0, where 2 sigmoid(2y) - 1 cancels, use the series of tanh(y) up to y^9."""
    if CAP:
        y = x / cap
        s = y * y
        near = y * (1.0 - s * (1.0 / 3.0 - s * (2.0 / 15.0 - s * (17.0 / 315.0 - s * (62.0 / 2835.0)))))
        return cap * tl.where(s < 0.09, near, 2.0 * tl.sigmoid(2.0 * y) - 1.0)
    return x


@triton.jit
def _forward(logits, labels, loss, total, stride, columns, ignore_index, cap, CAP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    valid = label != ignore_index
    highest = -float("inf")
    mass = 0.0  # sum of exp(z - highest)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        z = _capped(tl.load(logits + row * stride + at, inside, other=0.0).to(tl.float32), cap, CAP)
        z = tl.where(inside, z, -float("inf"))
        now = tl.maximum(highest, tl.max(z, 0))
        base = tl.where(now == -float("inf"), 0.0, now)  # while all logits are -inf, -inf minus -inf would be NaN
        mass = mass * tl.exp(highest - base) + tl.sum(tl.exp(z - base), 0)
        highest = now
    normaliser = highest + tl.log(mass)
    known = (label >= 0) & (label < columns)
    own = _capped(tl.load(logits + row * stride + tl.where(known, label, 0)).to(tl.float32), cap, CAP)
    own = tl.where(known, own, float("nan"))  # a label outside the classes must not go unnoticed
    tl.store(loss + row, tl.where(valid, normaliser - own, 0.0))
    tl.store(total + row, normaliser)


@triton.jit
def _backward(
    dloss, logits, labels, total, stride, columns, first, ignore_index, cap, CAP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    label = tl.load(labels + row)
    scale = tl.where(label != ignore_index, tl.load(dloss + row).to(tl.float32), 0.0)
    x = tl.load(logits + row * stride + at, inside, other=0.0).to(tl.float32)
    gradient = tl.exp(_capped(x, cap, CAP) - tl.load(total + row))
    gradient = tl.where(at + first == label, gradient - 1.0, gradient)
    if CAP:
        y = 2.0 * x / cap
        gradient *= 4.0 * tl.sigmoid(y) * tl.sigmoid(-y)
    tl.store(logits + row * stride + at, tl.where(scale == 0.0, 0.0, gradient * scale).to(logits.dtype.element_ty), inside)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int, cap: float) -> Tensor:
        loss, total = losses_of(logits, labels, ignore_index, cap)
        ctx.save_for_backward(logits, labels, total)
        ctx.how = ignore_index, cap
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, total = ctx.saved_tensors  # raises if the logits were changed
        gradients_into(logits, labels, total, dloss.contiguous(), *ctx.how)
        increment_version(logits)  # autograd does not see a kernel's writes: a second backward must raise
        return logits, None, None, None


def losses_of(logits: Tensor, labels: Tensor, ignore_index: int, cap: float) -> tuple[Tensor, Tensor]:
    """Return the loss and log(sum(exp(z))) of each row of logits (R, V), both fp32 (R,)."""
    if not as_on_gpu(logits):
        return _losses_reference(logits, labels, ignore_index, cap)
    rows, columns = logits.shape
    loss, total = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    if not logits.is_meta:
        launch(
            _forward, (rows,), logits, labels, loss, total, logits.stride(0), columns, ignore_index, cap,
            warps=WARPS, CAP=cap != 0, BLOCK=min(BLOCK, triton.next_power_of_2(columns)),
        )  # fmt: skip
    return loss, total


def gradients_into(
    logits: Tensor, labels: Tensor, total: Tensor, dloss: Tensor, ignore_index: int, cap: float, *, first: int = 0
) -> None:
    """Replace logits by the gradient of the sum of dloss times the losses.

    Args:
        logits: (R, v), the logits of all classes or of consecutive ones; overwritten.
        labels: (R,) int64.
        total: log(sum(exp(z))) of each row over all classes, (R,) fp32, from `losses_of`.
        dloss: Gradient of each row's loss, (R,).
        ignore_index: Label of rows that do not count.
        cap: Soft cap of the logits; 0 for none.
        first: Class of the first column.
    """
    rows, columns = logits.shape
    if not as_on_gpu(logits):
        _gradients_reference(logits, labels, total, dloss, ignore_index, cap, first)
    elif not logits.is_meta:
        block = min(BLOCK, triton.next_power_of_2(columns))
        launch(
            _backward, (rows, triton.cdiv(columns, block)), dloss, logits, labels, total, logits.stride(0), columns, first,
            ignore_index, cap, warps=WARPS, CAP=cap != 0, BLOCK=block,
        )  # fmt: skip


def cross_entropy(logits: Tensor, labels: Tensor, *, ignore_index: int = -100, cap: float = 0.0) -> Tensor:
    """Return the loss of each row, fp32 (R,). Backward overwrites the logits with their gradient.

    Args:
        logits: (R, V), fp32, fp16 or bf16. Use them nowhere else. A tensor whose rows are not contiguous is copied.
        labels: (R,) int64. On a GPU the loss is NaN where a label is neither a class nor `ignore_index`.
        ignore_index: Label of rows that do not count.
        cap: Soft cap of the logits; 0 for none.

    Raises:
        KernelError: Shapes, dtypes or devices do not fit together.
        RuntimeError: On a CPU, a label is neither a class nor `ignore_index`. In backward, the logits were changed, as by
            an earlier backward of the same graph.

    Cost: on a GPU one launch each forward and backward, and 8 bytes per row. Elsewhere PyTorch with fp32 copies.
    """
    if logits.dim() != 2 or logits.dtype not in FLOATS or not logits.shape[1]:
        found = f"{tuple(logits.shape)} of {logits.dtype}"
        raise KernelError(f"cross_entropy: logits are {found}; (R, V) of fp32, fp16 or bf16 is needed")
    if labels.shape != logits.shape[:1] or labels.dtype != torch.int64 or labels.device != logits.device:
        found = f"{tuple(labels.shape)} of {labels.dtype} on {labels.device}"
        needed = f"{tuple(logits.shape[:1])} of int64 on {logits.device}"
        raise KernelError(f"cross_entropy: labels are {found}; {needed} is needed")
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    loss: Tensor = _CrossEntropy.apply(rows, labels.contiguous(), ignore_index, cap)
    return loss
