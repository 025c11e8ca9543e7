"""Kernels over 8-bit moments and split master weights, interpreted, against plain PyTorch, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ftkit.engine.optim import coding
from ftkit.kernels.adamw_8bit import GROUPS, adamw_8bit_, lion_8bit_
from ftkit.kernels.launch import KernelError
from ftkit.spec.state_forms import GROUP_NUMEL
from tests.engine.test_coding import ADAMW, KINDS, LION, NARROW, check, gradients, pairs, same, state

KERNELS = {"adamw_8bit": (adamw_8bit_, coding.adamw_8bit, ADAMW), "lion_8bit": (lion_8bit_, coding.lion_8bit, LION)}


def truncated(p: Tensor) -> Tensor:
    """Return fp32 numbers as Triton's interpreter stores them in bf16: not rounded, as a GPU does it."""
    return (p.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


@pytest.mark.quick(13)
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", KERNELS)
def test_kernels_give_the_bits_of_plain_pytorch(rule: str, kind: str, dtype: torch.dtype) -> None:
    kernel, reference, numbers = KERNELS[rule]
    n = (8 * GROUPS + 3) * GROUP_NUMEL
    mine, plain = state(rule, kind, n), state(rule, kind, n)
    for step in range(1, 4):
        gradient = gradients(n, dtype, step)
        if dtype == torch.bfloat16:
            gradient[gradient.abs() < torch.finfo(dtype).tiny] = 0  # the interpreter reads subnormal bf16 numbers wrongly
        more: dict[str, Any] = {"step": step} if rule == "adamw_8bit" else {}
        more |= {"factor": 2.0**-16} if dtype == torch.float16 else {}
        kernel(gradient=gradient, **mine, **{**numbers, **more})
        reference(gradient=gradient, **plain, **{**numbers, **more})
        if kind == "bfloat16":
            assert same(mine["weight"], truncated(mine["master"]))
            mine["weight"].copy_(mine["master"])
        check(mine, plain)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_what_does_not_change_keeps_its_bits(dtype: torch.dtype) -> None:
    """All codes with many scales, and a sample of normal 16-bit weights with residuals: lr 0, beta2 1 and no gradient."""
    weight, residual = (each[::211] for each in pairs(dtype))
    normal = weight.abs() >= torch.finfo(dtype).tiny  # see above
    n = normal.sum().item() // (2 * GROUP_NUMEL) * 2 * GROUP_NUMEL
    tensors = {"weight": weight[normal][:n].clone(), "residual": residual[normal][:n].clone()}
    codes = torch.arange(256).view(2, GROUP_NUMEL)
    codes[1, 0] = 255  # not 128, a zero with a sign
    codes[0, 0] = 127
    scales = 2.0 ** torch.linspace(-98, 127, n // GROUP_NUMEL)
    tensors |= {"m": codes.repeat(n // (2 * GROUP_NUMEL), 1).view(-1).to(torch.uint8), "m_scales": scales}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    numbers = {**LION, "lr": 0.0, "beta2": 1.0}
    lion_8bit_(master=None, gradient=torch.zeros(n), **tensors, **numbers)
    check(tensors, before)


def test_shapes_that_do_not_fit_are_refused() -> None:
    tensors = state("lion_8bit", "none", 16 * GROUP_NUMEL)
    with pytest.raises(KernelError, match=r"1024 elements with a tensor of shape \(2048,\)"):
        lion_8bit_(gradient=torch.empty(8 * GROUP_NUMEL), **tensors, **LION)
    with pytest.raises(KernelError, match="stride"):
        lion_8bit_(gradient=torch.empty(32 * GROUP_NUMEL)[::2], **tensors, **LION)
