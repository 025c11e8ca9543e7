"""transformers' mark of what is initialised: its initialisers pass by a tensor, or a layer, that bears it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def mark_initialised(thing: Tensor | nn.Module, *, done: bool = True) -> None:
    """Mark a tensor or a module as initialised, or as not."""
    marked: Any = thing
    marked._is_hf_initialized = done


def unmark(tensor: Tensor) -> None:
    """Take the mark away."""
    marked: Any = tensor
    del marked._is_hf_initialized
