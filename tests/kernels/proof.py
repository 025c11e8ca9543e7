"""How a kernel is proved: beside fp64, with at most twice the error that PyTorch makes in the same dtype.

Both sides get the same leaves. Values and gradients of each are compared with the reference in fp64; the kernel's largest
error may be twice the reference's own in the tensors' dtype, and a rounding of the largest value where that makes none. In
bf16 it may be two: Triton's interpreter cuts off where a GPU rounds. Of a few numbers the largest error is chance: small
shapes are drawn to find what is wrong, with a few roundings more; sizes that average chance out are proved with one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]
DRAWN = 4
"""Roundings that the small shapes of a drawn case are allowed."""


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
    """Assert that a kernel is as exact as PyTorch in the same dtype, beside the reference in fp64."""
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
