"""A trial of a model that leaves no trace: what it counts, draws or notes is put back.

A trial forward moves BatchNorm's statistics, draws random numbers, and counts in whatever attributes a model, a Trainer or
a loss function keeps (TRL's trainers note metrics in `compute_loss`). `untouched` restores random states, the training
mode, every buffer, and every attribute that is a number, a string or a small container of them.

Not restored: tensors in attributes, files, and anything outside the things that it is given.
Cost: a copy of the buffers, and a walk over the modules.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, MutableMapping, MutableSet
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ftkit.hf.trainer.seeding import random_state, set_random_state

MOST_VALUES = 4096
"""Values in a container that is still copied; a longer list is a data set."""
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}


@contextmanager
def untouched(model: nn.Module, device: torch.device, *things: Any) -> Iterator[None]:
    """Evaluate in the body without gradients and without dropout; then put everything back.

    Args:
        model: the model; the buffers and plain attributes of its modules are restored.
        device: the device whose random numbers are restored.
        things: further objects whose plain attributes are restored.
    """
    random = random_state(device)
    buffers = [(module, name, buffer, buffer.clone()) for module, name, buffer in _buffers(model)]
    attributes = [_Attributes(thing) for thing in (*things, *model.modules()) if hasattr(thing, "__dict__")]
    try:
        with _without_dropout(model), torch.no_grad():
            yield
    finally:
        for module, name, buffer, content in buffers:
            with torch.no_grad():
                buffer.copy_(content)
            module._buffers[name] = buffer
        for each in attributes:
            each.restore()
        set_random_state(random, device)


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Take the modules out of training in the body, without their `eval`, which may be the user's and merge weights."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                yield module, name, buffer


class _Attributes:
    """The plain attributes of an object, as they were."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing
        hidden = _OF_TORCH if isinstance(thing, nn.Module) else frozenset()
        items = [(name, value) for name, value in vars(thing).items() if name not in hidden and _is_plain(value)]
        self.values = [(name, value, copy.deepcopy(value)) for name, value in items]

    def restore(self) -> None:
        """Put them back, each container into the object that it was."""
        for name, value, before in self.values:
            if isinstance(value, (MutableMapping, MutableSet)):
                value.clear()
                value.update(before) if isinstance(value, MutableMapping) else value.__ior__(before)
            elif isinstance(value, (list, deque)):
                value.clear()
                value.extend(before)
            vars(self.thing)[name] = value


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a string, or a small container of them."""
    left = [MOST_VALUES]

    def plain(each: Any) -> bool:
        left[0] -= 1
        if left[0] < 0:
            return False
        if each is None or isinstance(each, (bool, int, float, complex, str, bytes)):
            return True
        if isinstance(each, (list, tuple, deque, set, frozenset)):
            return all(map(plain, each))
        return isinstance(each, dict) and all(map(plain, each.keys())) and all(map(plain, each.values()))

    return plain(value)
