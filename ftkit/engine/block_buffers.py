"""The buffers of a block that its forward changes: running means, counters, vectors of a power iteration.

A recomputed block runs twice for one backward, and would count its batch twice. So buffers that a forward changed have in
the second run the values that they had before the first one, and afterwards those that they have now. Which ones change
is seen, not known: before the first forward in train or eval all are copied, later only those that have changed before. A
block without buffers costs nothing, one whose buffers stay as they are a look at their versions.

It does not see a state that is no buffer (a number or a tensor in a plain attribute): such a state counts each run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Slot = tuple[nn.Module, str]


@dataclass
class Noted:
    """One buffer as it was before a forward, with a copy where one was taken."""

    slot: Slot
    buffer: Tensor | None
    version: int
    before: Tensor | None


class BlockBuffers:
    """What is known of a block's buffers.

    Args:
        module: the block.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.changing: set[tuple[int, str]] = set()
        self.looked: set[bool] = set()  # in train and in eval

    def note(self) -> list[Noted]:
        """Note the buffers before a forward. Cost: a copy of those that change, and of all before the first forward."""
        noted, first = [], self.module.training not in self.looked
        for module in self.module.modules():
            for key, buffer in module._buffers.items():
                copied = first or (id(module), key) in self.changing
                before = buffer.detach().clone() if copied and buffer is not None else None
                noted.append(Noted((module, key), buffer, -1 if buffer is None else buffer._version, before))
        return noted

    def changed(self, noted: list[Noted]) -> list[Noted]:
        """Return which buffers a forward has changed, after it."""
        found, first = [], self.module.training not in self.looked
        for each in noted:
            module, key = each.slot
            now = module._buffers.get(key)
            same = now is each.buffer and (now is None or now._version == each.version)
            if same and first and now is not None and each.before is not None:
                same = torch.equal(now, each.before)  # `.data` has a version of its own
            if not same or (id(module), key) in self.changing:
                found.append(each)
                self.changing.add((id(module), key))
        self.looked.add(self.module.training)
        return found


@contextmanager
def as_before(changed: list[Noted]) -> Iterator[None]:
    """Let buffers have in the body the values of before their forward, and afterwards those of now."""
    now = [(module, key, module._buffers.get(key)) for module, key in (each.slot for each in changed)]
    for each, (module, key, buffer) in zip(changed, now):
        if each.buffer is None:
            module._buffers[key] = None
        elif each.before is not None:
            module._buffers[key] = each.before.clone()
        else:  # nobody knew that it would change
            module._buffers[key] = buffer if buffer is None else buffer.detach().clone()
    try:
        yield
    finally:
        for module, key, buffer in now:
            module._buffers[key] = buffer
