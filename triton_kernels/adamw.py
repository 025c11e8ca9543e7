"""AdamW over a shard: unscale, clip, update and cast to 16 bits in one pass.

    g = gradient * scale                                 (scale: clip factor / loss scale)
    p = p * (1 - lr * weight_decay)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g^2
    p = p - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)
    weight = p, rounded to 16 bits

Everything is fp32.

Cost: 28 bytes moved per element with a 16-bit gradient and weight (2 read and 2 written for them, 12 read and 12 written for
master weight and moments). Unscaling, a fused AdamW and a cast move 38.

Source: Loshchilov and Hutter, arXiv:1711.05101.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import KernelError, check_fits, launch, use_triton

BLOCK = 1024
WARPS = 4


@dataclass(frozen=True)
class AdamW:
    """Constants of an update."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.0  # multiplied by `lr`
    step: int = 1  # number of the update, from 1
    scale: float = 1.0  # factor on the gradient: clip factor over loss scale


def adamw_reference(gradient: Tensor, master: Tensor, m: Tensor, v: Tensor, weight: Tensor | None, how: AdamW) -> None:
    """Update in place in plain PyTorch. Arguments are those of `adamw_`; fp64 state is updated in fp64."""
    g = gradient.to(master.dtype) * how.scale
    master.mul_(1.0 - how.lr * how.weight_decay)
    m.mul_(how.beta1).add_(g, alpha=1.0 - how.beta1)
    v.mul_(how.beta2).addcmul_(g, g, value=1.0 - how.beta2)
    root = v.sqrt().div_((1.0 - how.beta2**how.step) ** 0.5).add_(how.eps)
    master.addcdiv_(m, root, value=-how.lr / (1.0 - how.beta1**how.step))
    if weight is not None:
        weight.copy_(master)


@triton.jit
def _update(
    gradient, master, m, v, weight, numel, scale, decay, beta1, beta2, rest1, rest2, eps, step_size, root_correction,
    WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    g = tl.load(gradient + at, inside, other=0.0).to(tl.float32) * scale
    first = tl.load(m + at, inside, other=0.0) * beta1 + g * rest1
    second = tl.load(v + at, inside, other=0.0) * beta2 + g * g * rest2
    new = tl.load(master + at, inside, other=0.0) * decay - step_size * first / (tl.sqrt(second) * root_correction + eps)
    tl.store(m + at, first, inside)
    tl.store(v + at, second, inside)
    tl.store(master + at, new, inside)
    if WEIGHT:
        tl.store(weight + at, new.to(weight.dtype.element_ty), inside)


def adamw_(gradient: Tensor, master: Tensor, m: Tensor, v: Tensor, weight: Tensor | None, how: AdamW) -> None:
    """Update master weights and moments in place, and write the weights for the forward pass.

    Args:
        gradient: (S,), fp32, fp16 or bf16.
        master: Master weights, (S,) fp32.
        m: First moment (`exp_avg`), (S,) fp32.
        v: Second moment (`exp_avg_sq`), (S,) fp32.
        weight: (S,), fp32, fp16 or bf16; overwritten. None if the forward pass uses the master weights.
        how: The constants.

    Raises:
        KernelError: Shapes, dtypes or devices do not fit together.

    Cost: on a GPU one launch and no memory. Elsewhere the reference, with two temporary fp32 (S,).
    """
    states = {"master": master, "m": m, "v": v}
    for name, tensor in {"gradient": gradient, "weight": weight, **states}.items():
        if tensor is None:
            continue
        check_fits("adamw_", name, tensor, (gradient.numel(),), gradient.device)
        if not tensor.is_contiguous() or (name in states and tensor.dtype != torch.float32):
            found = f"{name} is {tensor.dtype} with stride {tensor.stride(0)}"
            raise KernelError(f"adamw_: {found}; contiguous, and fp32 for master, m and v, is needed")
    if not use_triton(gradient):
        adamw_reference(gradient, master, m, v, weight, how)
        return
    numel = gradient.numel()
    launch(
        _update, (triton.cdiv(numel, BLOCK),),
        gradient, master, m, v, weight, numel, how.scale, 1.0 - how.lr * how.weight_decay, how.beta1, how.beta2,
        1.0 - how.beta1, 1.0 - how.beta2, how.eps, how.lr / (1.0 - how.beta1**how.step), (1.0 - how.beta2**how.step) ** -0.5,
        warps=WARPS, WEIGHT=weight is not None, BLOCK=BLOCK,
    )  # fmt: skip
