"""Our Triton kernels over flat shards, in the form in which the engine takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from ftkit.engine.kernels.host_loops import FlatKernels
from ftkit.kernels.adamw import AdamW, adamw_
from ftkit.kernels.adamw_8bit import adamw_8bit_, lion_8bit_
from ftkit.kernels.squared_norm import squared_norm


def _adamw(
    master: Tensor, gradient: Tensor, m: Tensor, v: Tensor, weight: Tensor | None, *, factor: float, **how: float
) -> None:
    step = int(how.pop("step"))
    constants = {key: float(value) for key, value in how.items()}
    adamw_(gradient, master, m, v, weight, AdamW(**constants, step=step, scale=factor))


def _square(gradient: Tensor) -> Tensor:
    squares, finite = squared_norm(gradient)
    return torch.where(finite, squares, torch.inf).float()


FLAT_KERNELS = FlatKernels(_adamw, _square, adamw_8bit_, lion_8bit_)
