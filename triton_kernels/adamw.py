"""AdamW over a flat shard: unscale, clip, update and cast to 16 bits in one pass.

    g = gradient * scale                                 (scale: clip factor / loss scale)
    p = p * (1 - lr * weight_decay)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g^2
    p = p - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)
    weight = p, rounded to 16 bits

All in fp32. Loshchilov and Hutter, arXiv:1711.05101. Bytes moved an element: 28 with a 16-bit gradient and weight (2 in and
2 out of them, 12 in and 12 out of master and moments), where unscaling, a fused AdamW and a cast move 38.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import FLOATS, KernelError, options, use_triton

BLOCK = 1024
WARPS = 4


@dataclass(frozen=True)
class AdamW:
    """The constants of an update.

    Args:
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay, which `lr` multiplies.
        step: number of the update, t, from 1.
        scale: what the gradient is multiplied by: clip factor over loss scale.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    step: int = 1
    scale: float = 1.0


def adamw_reference(gradient: Tensor, master: Tensor, m: Tensor, v: Tensor, weight: Tensor | None, how: AdamW) -> None:
    """Update in place in plain PyTorch; arguments as `adamw_`. Fp64 states are updated in fp64."""
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
    """Update master weights and moments in place, and write the weights that are computed with.

    Args:
        gradient: (S,), fp32, fp16 or bf16.
        master: master weights, (S,) fp32.
        m: first moment, (S,) fp32.
        v: second moment, (S,) fp32.
        weight: (S,), fp32, fp16 or bf16, whatever it held; None where the master weights are computed with.
        how: the constants.

    Raises:
        KernelError: if shapes, dtypes or devices do not fit together.

    Cost: on a GPU one launch and no memory; elsewhere the reference, with two fp32 (S,) beside it.
    """
    for name, tensor in {"gradient": gradient, "master": master, "m": m, "v": v, "weight": weight}.items():
        if tensor is None:
            continue
        state = name in ("master", "m", "v")
        if tensor.dtype not in ((torch.float32,) if state else FLOATS):
            raise KernelError(f"adamw_: {name} is {tensor.dtype}; {'fp32' if state else 'fp32, fp16 or bf16'} is needed")
        if tensor.dim() != 1 or tensor.shape != gradient.shape or tensor.device != gradient.device:
            raise KernelError(
                f"adamw_: {name} is {tuple(tensor.shape)} on {tensor.device}, gradient {tuple(gradient.shape)} on "
                f"{gradient.device}; (S,) alike is needed"
            )
        if not tensor.is_contiguous():
            raise KernelError(f"adamw_: {name} is not contiguous")
    if not use_triton(gradient):
        adamw_reference(gradient, master, m, v, weight, how)
        return
    numel = gradient.numel()
    if numel:
        _update[(triton.cdiv(numel, BLOCK),)](
            gradient, master, m, v, weight, numel, how.scale, 1.0 - how.lr * how.weight_decay, how.beta1, how.beta2,
            1.0 - how.beta1, 1.0 - how.beta2, how.eps, how.lr / (1.0 - how.beta1**how.step),
            (1.0 - how.beta2**how.step) ** -0.5, WEIGHT=weight is not None, BLOCK=BLOCK, **options(WARPS),
        )  # fmt: skip
