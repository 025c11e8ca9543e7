"""The buffers of a block that its forward changes: running means, counters, vectors of a power iteration.

A recomputed block runs twice for one backward, and would count its batch twice. So buffers that a forward changed have in
the second run the values that they had before the first one, and afterwards those that they have now. Which ones change
is seen, not known: before the first forward in train or eval all are copied, later only small ones and those that have
changed before. A large one that is written to for the first time in a later forward cannot be brought back: its
recomputation raises. A block without buffers costs nothing, one whose large buffers stay as they are a look at their
versions.

A state that is no buffer (a number or a tensor in a plain attribute) is the affair of block_state.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ftkit.errors import UserError

SMALL_BYTES = 64 << 10
"""Up to which a buffer is copied before every forward: counters, scales, vectors may change at any time."""

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
        """Note the buffers before a forward. Cost: a copy of those that change or are small; of all before the first."""
        noted, first = [], self.module.training not in self.looked
        for module in self.module.modules():
            for key, buffer in module._buffers.items():
                copied = first or (id(module), key) in self.changing or (buffer is not None and buffer.nbytes <= SMALL_BYTES)
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
    """Let buffers have in the body the values of before their forward, and afterwards those of now.

    Raises:
        UserError: if a large buffer without a copy was written to.
    """
    now = [(module, key, module._buffers.get(key)) for module, key in (each.slot for each in changed)]
    for each in changed:
        if each.buffer is not None and each.before is None and each.buffer._version != each.version:
            module, key = each.slot
            raise UserError(
                f"the buffer {key} of a {type(module).__name__} was written to for the first time in a later forward, so "
                "that its block cannot be computed again as it was: let every forward write to it, give it a new tensor, "
                "or set ftkit={'activations': 'keep'}"
            )
    for each in changed:
        module, key = each.slot
        module._buffers[key] = each.buffer if each.before is None else each.before.clone()
    try:
        yield
    finally:
        for module, key, buffer in now:
            module._buffers[key] = buffer
