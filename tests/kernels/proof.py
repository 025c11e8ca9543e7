"""Comparison of a kernel with fp64: its error may be at most twice that of PyTorch in the same dtype.

Kernel and reference get the same leaves. Values and gradients of both are compared with the reference in fp64. The kernel's
largest error may be twice the reference's in the dtype of the tensors, plus one rounding of the largest value. In bf16 it is
two roundings, because Triton's interpreter truncates where a GPU rounds. The largest error of a few numbers is chance, so
drawn cases, which are small, get a few roundings more. Larger sizes, which average chance out, get one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ftkit.kernels.cross_entropy import cross_entropy_reference

Function = Callable[..., Any]
DRAWN = 4
"""Roundings allowed for the small shapes of a drawn case."""


def results(function: Function, leaves: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return the outputs of a function of leaves, and the gradients of a random sum of them."""
    own = {name: leaf.detach().clone().requires_grad_(leaf.is_floating_point()) for name, leaf in leaves.items()}
    outputs = function(**own)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    chance = torch.Generator().manual_seed(seed)
    total = sum((out.double() * torch.randn(out.shape, generator=chance, dtype=torch.float64)).sum() for out in outputs)
    if total.requires_grad:
        total.backward()
    found = {f"output {number}": out.detach() for number, out in enumerate(outputs)}
    return found | {f"gradient of {name}": leaf.grad for name, leaf in own.items() if leaf.grad is not None}


def prove(kernel: Function, reference: Function, leaves: Mapping[str, Tensor], *, roundings: int = 1, seed: int = 0) -> None:
    """Assert that a kernel is as exact as PyTorch in the same dtype, compared with the reference in fp64."""
    exact = results(reference, {k: v.double() if v.is_floating_point() else v for k, v in leaves.items()}, seed)
    plain, ours = results(reference, leaves, seed), results(kernel, leaves, seed)
    assert ours.keys() == plain.keys() == exact.keys()
    dtypes = {leaf.dtype for leaf in leaves.values() if leaf.is_floating_point()}
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes) * (2 if torch.bfloat16 in dtypes else 1) * roundings
    for name, truth in exact.items():
        assert ours[name].dtype == plain[name].dtype, name
        assert ours[name].shape == plain[name].shape, name
        if not truth.numel():
            continue
        error, allowed = ((found[name].double() - truth).abs().max().item() for found in (ours, plain))
        rounding = coarsest * truth.abs().max().item()
        assert error <= 2 * allowed + rounding, f"{name}: off by {error:.3g}, PyTorch in this dtype by {allowed:.3g}"


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    cap: float = 0.0,
    scale: float = 1.0,
) -> Tensor:
    """Return the sum of the losses in plain PyTorch, with all logits. Arguments are those of `linear_cross_entropy`."""
    logits = linear(hidden, weight, bias) * scale
    return cross_entropy_reference(logits, labels, ignore_index=ignore_index, cap=cap).sum()
