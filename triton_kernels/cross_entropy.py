"""Softmax cross-entropy over a large vocabulary; its gradient takes the memory of the logits.

    z    = cap * tanh(x / cap)                            (where there is a soft cap, else z = x)
    n    = log(sum(exp(z)))
    loss = n - (1 - smoothing) * z[label] - smoothing * mean(z) + z_weight * n^2

    dz_j = exp(z_j - n) * (1 + 2 * z_weight * n) - (1 - smoothing) * [j = label] - smoothing / V
    dx_j = dz_j * (1 - (z_j / cap)^2) = dz_j * 4 * sigmoid(2 x_j / cap) * sigmoid(-2 x_j / cap), without the cancellation

All in fp32. A row is walked in blocks: once for the maximum and the sum of exponentials together (Milakov and Gimelshein,
arXiv:1805.02867), once more in backward, which writes where it reads. A row whose label is `ignore_index` has loss 0 and
gradient 0. Bytes moved, of a row of V logits of b bytes: Vb forward, 2Vb backward; PyTorch, with its copy in fp32, moves
five times that and holds 8V bytes more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import FLOATS, KernelError, as_on_gpu, options

BLOCK = 8192
"""Logits in registers at once: 16 of fp32 in each of 512 threads."""
WARPS = 16


@dataclass(frozen=True)
class LossTerms:
    """What a loss is made of besides the labels.

    Args:
        ignore_index: label of rows that do not count.
        smoothing: share of the mass that is spread evenly over all classes.
        cap: soft cap of the logits; 0 is none.
        z_weight: weight of the squared normaliser.
    """

    ignore_index: int = -100
    smoothing: float = 0.0
    cap: float = 0.0
    z_weight: float = 0.0


PLAIN = LossTerms()


def cross_entropy_reference(logits: Tensor, labels: Tensor, terms: LossTerms = PLAIN) -> Tensor:
    """Return the loss of each row in plain PyTorch; arguments as `cross_entropy`. Fp64 logits are computed in fp64."""
    return _losses_reference(logits, labels, terms)[0]


def _capped_reference(logits: Tensor, cap: float) -> Tensor:
    z = logits if logits.dtype == torch.float64 else logits.float()
    return cap * torch.tanh(z / cap) if cap else z


def _losses_reference(logits: Tensor, labels: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor]:
    """Return the loss and log(sum(exp(z))) of each row."""
    z = _capped_reference(logits, terms.cap)
    valid = labels != terms.ignore_index
    total = torch.logsumexp(z, -1)
    own = z.gather(-1, labels.where(valid, 0).unsqueeze(-1)).squeeze(-1)
    loss = total - (1.0 - terms.smoothing) * own + terms.z_weight * total * total
    if terms.smoothing:
        loss = loss - terms.smoothing * z.mean(-1)
    return loss.where(valid, 0.0), total


def _gradients_reference(
    logits: Tensor, labels: Tensor, total: Tensor, dloss: Tensor, terms: LossTerms, first: int, classes: int
) -> None:
    """Replace logits by the gradient, by the formula above."""
    z = _capped_reference(logits, terms.cap)
    gradient = torch.exp(z - total.unsqueeze(-1))
    gradient *= (1.0 + 2.0 * terms.z_weight * total).unsqueeze(-1)
    gradient -= terms.smoothing / classes
    place = labels - first
    present = (place >= 0) & (place < z.shape[-1])
    own = torch.where(present, terms.smoothing - 1.0, 0.0).to(gradient.dtype).unsqueeze(-1)
    gradient.scatter_add_(-1, place.where(present, 0).unsqueeze(-1), own)
    if terms.cap:
        y = 2.0 / terms.cap * (logits if logits.dtype == torch.float64 else logits.float())
        gradient *= 4.0 * torch.sigmoid(y) * torch.sigmoid(-y)
    gradient *= dloss.unsqueeze(-1)
    logits.copy_(gradient.masked_fill_((labels == terms.ignore_index).unsqueeze(-1), 0.0))


@triton.jit
def _capped(x, cap, CAP: tl.constexpr):
    """Return cap * tanh(x / cap), or x. Near 0, where 2 sigmoid(2y) - 1 cancels, by the series of tanh(y) up to y^9."""
    if CAP:
        y = x / cap
        s = y * y
        near = y * (1.0 - s * (1.0 / 3.0 - s * (2.0 / 15.0 - s * (17.0 / 315.0 - s * (62.0 / 2835.0)))))
        return cap * tl.where(s < 0.09, near, 2.0 * tl.sigmoid(2.0 * y) - 1.0)
    return x


@triton.jit
def _forward(
    logits, labels, loss, total, stride, columns, ignore_index, smoothing, cap, z_weight,
    CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    valid = label != ignore_index
    highest = -float("inf")
    mass = 0.0  # sum of exp(z - highest)
    plain = 0.0  # sum of z
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        z = _capped(tl.load(logits + row * stride + at, inside, other=0.0).to(tl.float32), cap, CAP)
        plain += tl.sum(tl.where(inside, z, 0.0), 0)
        z = tl.where(inside, z, -float("inf"))
        now = tl.maximum(highest, tl.max(z, 0))
        mass = mass * tl.exp(highest - now) + tl.sum(tl.exp(z - now), 0)
        highest = now
    normaliser = highest + tl.log(mass)
    known = (label >= 0) & (label < columns)
    own = _capped(tl.load(logits + row * stride + tl.where(known, label, 0)).to(tl.float32), cap, CAP)
    own = tl.where(known, own, float("nan"))  # a label that is no class is loud
    value = normaliser - (1.0 - smoothing) * own - smoothing * (plain / columns) + z_weight * normaliser * normaliser
    tl.store(loss + row, tl.where(valid, value, 0.0))
    tl.store(total + row, normaliser)


@triton.jit
def _backward(
    dloss, logits, labels, total, stride, columns, first, even, ignore_index, smoothing, cap, z_weight,
    CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    label = tl.load(labels + row)
    normaliser = tl.load(total + row)
    scale = tl.where(label != ignore_index, tl.load(dloss + row).to(tl.float32), 0.0)
    x = tl.load(logits + row * stride + at, inside, other=0.0).to(tl.float32)
    z = _capped(x, cap, CAP)
    gradient = tl.exp(z - normaliser) * (1.0 + 2.0 * z_weight * normaliser) - even
    gradient = tl.where(at + first == label, gradient - (1.0 - smoothing), gradient)
    if CAP:
        y = 2.0 * x / cap
        gradient *= 4.0 * tl.sigmoid(y) * tl.sigmoid(-y)
    tl.store(logits + row * stride + at, tl.where(scale == 0.0, 0.0, gradient * scale).to(logits.dtype.element_ty), inside)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, terms: LossTerms) -> Tensor:
        loss, total = losses_of(logits, labels, terms)
        ctx.save_for_backward(logits, labels, total)
        ctx.terms = terms
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, total = ctx.saved_tensors  # raises if somebody changed the logits meanwhile
        gradients_into(logits, labels, total, dloss.contiguous(), ctx.terms)
        return logits, None, None


def losses_of(logits: Tensor, labels: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor]:
    """Return the loss and log(sum(exp(z))) of each row of logits (R, V), both fp32 (R,)."""
    if not as_on_gpu(logits):
        return _losses_reference(logits, labels, terms)
    rows, columns = logits.shape
    loss, total = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    if rows and not logits.is_meta:
        _forward[(rows,)](
            logits, labels, loss, total, logits.stride(0), columns,
            terms.ignore_index, terms.smoothing, terms.cap, terms.z_weight,
            CAP=terms.cap != 0, BLOCK=min(BLOCK, triton.next_power_of_2(columns)), **options(WARPS),
        )  # fmt: skip
    return loss, total


def gradients_into(
    logits: Tensor,
    labels: Tensor,
    total: Tensor,
    dloss: Tensor,
    terms: LossTerms,
    *,
    first: int = 0,
    classes: int | None = None,
) -> None:
    """Replace logits (R, v) by the gradient of the sum of dloss (R,) times the losses.

    Args:
        logits: (R, v), the logits of all classes or of some neighbouring ones; overwritten.
        labels: (R,) int64.
        total: log(sum(exp(z))) of each row over all classes, (R,) fp32, from `losses_of`.
        dloss: gradient of each row's loss, (R,).
        terms: terms of the loss.
        first: class of the first column.
        classes: number of all classes; None means v.
    """
    rows, columns = logits.shape
    classes = classes or columns
    if not as_on_gpu(logits):
        _gradients_reference(logits, labels, total, dloss, terms, first, classes)
    elif rows and not logits.is_meta:
        block = min(BLOCK, triton.next_power_of_2(columns))
        _backward[(rows, triton.cdiv(columns, block))](
            dloss, logits, labels, total, logits.stride(0), columns, first, terms.smoothing / classes,
            terms.ignore_index, terms.smoothing, terms.cap, terms.z_weight,
            CAP=terms.cap != 0, BLOCK=block, **options(WARPS),
        )  # fmt: skip


def cross_entropy(logits: Tensor, labels: Tensor, terms: LossTerms = PLAIN) -> Tensor:
    """Return the loss of each row, fp32 (R,). Backward overwrites the logits with their gradient: use them nowhere else.

    Args:
        logits: (R, V), fp32, fp16 or bf16, the elements of a row side by side; others are copied.
        labels: (R,) int64.
        terms: terms of the loss.

    Raises:
        KernelError: if shapes, dtypes or devices do not fit together.
        RuntimeError: for a label outside of [0, V) that is not `ignore_index`; on a GPU the row's loss is nan instead.

    Cost: on a GPU one launch each way and 8 bytes a row; elsewhere the same by PyTorch, with fp32 copies of the logits.
    """
    if logits.dim() != 2 or logits.dtype not in FLOATS or not logits.shape[1]:
        raise KernelError(
            f"cross_entropy: logits (R, V) of fp32, fp16 or bf16 are needed, not {tuple(logits.shape)} of {logits.dtype}"
        )
    if labels.shape != logits.shape[:1] or labels.dtype != torch.int64 or labels.device != logits.device:
        raise KernelError(
            f"cross_entropy: labels {tuple(logits.shape[:1])} of int64 on {logits.device} are needed, not "
            f"{tuple(labels.shape)} of {labels.dtype} on {labels.device}"
        )
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    return _CrossEntropy.apply(rows, labels.contiguous(), terms)
