"""Gradients that a test gives by hand, as a block's backward would."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ftkit.engine.core.gradient import Gradient, ReducedGradient, reduce


def give(gradient: Gradient, tensors: Mapping[int, Tensor]) -> None:
    """Let `tensors`, by their places on the flat parameter, be this rank's gradients of one use; then reduce them."""
    if not isinstance(gradient, ReducedGradient):
        for index, tensor in tensors.items():
            gradient.add(index, tensor)
        return
    place = torch.empty(gradient.flat.layout.padded_numel, dtype=gradient.slot_dtype)
    gradient.begin(place)
    for index, tensor in tensors.items():
        gradient.add(index, tensor)
    gradient.end()
    reduce("given", [gradient], [place], gradient.streams)
