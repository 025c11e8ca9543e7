"""The flag `_is_hf_initialized`: transformers does not initialise a tensor or module that has it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def mark_initialised(thing: Tensor | nn.Module, *, done: bool = True) -> None:
    """Set the flag of a tensor or a module.

    Args:
        thing: the tensor or module.
        done: whether it is initialised.
    """
    marked: Any = thing
    marked._is_hf_initialized = done


def unmark(tensor: Tensor) -> None:
    """Remove the flag of a tensor that has it."""
    marked: Any = tensor
    del marked._is_hf_initialized
