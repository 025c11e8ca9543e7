"""One call of a block: its arguments, its micro-batches, and the context in which it was computed.

A block is computed again in backward, so a call notes whatever the computation depends on besides weights and arguments:
random numbers, autocast, buffers, attributes of modules and hooks (`ForwardContext`). What the block leaves in attributes
counts as a result (`Call.take_left`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ftkit.engine.core.block_buffers import BlockBuffers, Noted, as_before
from ftkit.engine.core.block_state import BlockState, attributes_as_before
from ftkit.engine.core.left_tensors import Place
from ftkit.engine.core.tensor_tree import put_tensors, take_tensors


class ForwardContext:
    """What a computation depends on besides its arguments, as it was in forward: random numbers (torch's, Python's and
    NumPy's), autocast, buffers, attributes of modules (train or eval is one) and hooks.

    Args:
        module: the block.
        device: the device on which the block computes.
        fingerprint: from the block to its switches that ftkit does not set (active adapters); they must be the same in
            backward.
        state: what is known of the attributes of the block's modules.
        buffers: buffers of the block; None where it will not be computed again.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        fingerprint: Callable[[nn.Module], Hashable],
        state: BlockState,
        buffers: BlockBuffers | None = None,
    ) -> None:
        self.module = module
        self.buffers = buffers
        self.noted: list[Noted] = [] if buffers is None else buffers.note()
        self.state = state
        self.attributes = state.note()
        if buffers is not None:
            self.others = random.getstate(), np.random.get_state()
        self.device = device
        self.fingerprint = fingerprint
        self.switches = fingerprint(module)
        self.cpu_state = torch.get_rng_state()
        self.cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        kind = autocast_kind(device)
        self.autocast = torch.is_autocast_enabled(kind)
        self.autocast_dtype = torch.get_autocast_dtype(kind)

    def without_caches(self) -> AbstractContextManager[None]:
        """Return forward's autocast as a context, without what would outlive the weights; see `uncached`."""
        return uncached(autocast_kind(self.device), self.autocast_dtype, enabled=self.autocast)

    def ran(self) -> None:
        """Keep of what was noted that which the forward has changed; called after it."""
        self.state.ran(self.attributes)
        if self.buffers is not None:
            self.noted = self.buffers.changed(self.noted)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run the body in the context of the forward, then return to the present one.

        Raises:
            RuntimeError: if adapters were switched since the forward.
        """
        if self.fingerprint(self.module) != self.switches:
            raise RuntimeError("adapters were switched between a block's forward and its backward; switch after backward")
        with ExitStack() as stack:
            devices = [self.device] if self.cuda_state is not None else []
            stack.enter_context(torch.random.fork_rng(devices=devices, device_type="cuda"))
            torch.set_rng_state(self.cpu_state)
            if self.cuda_state is not None:
                torch.cuda.set_rng_state(self.cuda_state, self.device)
            stack.callback(_set_others, random.getstate(), np.random.get_state())
            _set_others(*self.others)
            stack.enter_context(attributes_as_before(self.attributes))
            stack.enter_context(as_before(self.noted))
            stack.enter_context(self.without_caches())
            yield


def _set_others(python: Any, numpy: Any) -> None:
    """Set the states of Python's and NumPy's random numbers."""
    random.setstate(python)
    np.random.set_state(numpy)


def autocast_kind(device: torch.device) -> str:
    """Return the kind of device by which autocast is asked for; the CPU's where a device (meta) has none."""
    return device.type if torch.amp.is_autocast_available(device.type) else "cpu"


@contextmanager
def uncached(kind: str, dtype: torch.dtype, *, enabled: bool) -> Iterator[None]:
    """Compute in the body with autocast, but without its cache of weights and that of `parametrize.cached()`.

    What they keep would outlive the weights, and has no gradient where the first run of a block made it.
    """
    cached = parametrize._cache_enabled
    parametrize._cache_enabled = 0
    try:
        with torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False):
            yield
    finally:
        parametrize._cache_enabled = cached


Split = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], list[bool]]
"""From a block and a call's (args, kwargs) to a flag for each tensor in them, in order: whether its rows are the batch."""


class Call:
    """One call of a block: the function, its arguments as a tree with holes for tensors, and the contexts it ran in.

    Args:
        function: computes the block.
        arguments: its arguments as a tree with holes for tensors.
        note_context: returns the present context.
        divided: for each tensor, whether its rows are divided among `parts`.
        parts: number of micro-batches.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Any,
        note_context: Callable[[], ForwardContext],
        divided: Sequence[bool] = (),
        parts: int = 1,
    ) -> None:
        self.function = function
        self.arguments = arguments
        self.note_context = note_context
        self.divided = divided
        self.parts = parts
        self.contexts: list[ForwardContext] = []
        self.result: object = None
        self.left: list[tuple[Place, object]] = []  # with trees as of the result
        self.cut_off: list[Place] = []

    def enter_context(self) -> ForwardContext:
        """Note the context in which the next micro-batch is computed."""
        self.contexts.append(self.note_context())
        return self.contexts[-1]

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Compute the block; return the tensors of its result and remember their tree in `result`."""
        args, kwargs = put_tensors(self.arguments, tensors)
        found: list[Tensor] = []
        self.result = take_tensors(self.function(*args, **kwargs), found)
        return found

    # --- what it leaves in attributes

    def take_left(self, places: Sequence[Place], found: list[Tensor]) -> None:
        """Count the tensors in `places` as results, which are appended to `found`."""
        self.left = [(place, take_tensors(place.get(), found)) for place in places]

    def put_left(self, results: Sequence[Tensor]) -> None:
        """Put results where the block has left them."""
        for place, tree in self.left:
            place.put(put_tensors(tree, results))

    def left_again(self, found: list[Tensor]) -> None:
        """Append to `found` what another run has left in the same places."""
        for place, _ in self.left:
            take_tensors(place.get(), found)

    # --- micro-batches

    def part(self, tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        """Return the tensors as micro-batch `number` has them."""
        if self.parts == 1:
            return list(tensors)
        return [t.tensor_split(self.parts)[number] if cut else t for t, cut in zip(tensors, self.divided)]

    def share(self, gradient: Tensor | None, number: int) -> Tensor | None:
        """Return micro-batch `number`'s rows of a result's gradient."""
        return gradient if gradient is None or self.parts == 1 else gradient.tensor_split(self.parts)[number]

    def joined(self, tensors: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the results of all micro-batches, row after row.

        Raises:
            RuntimeError: if a result has other rows than the batch: it could not be divided again in backward.
        """
        if self.parts == 1:
            return list(parts[0])
        rows = next(len(t) for t, cut in zip(tensors, self.divided) if cut)
        whole = [torch.cat(results) for results in zip(*parts)]
        if any(len(result) != rows for result in whole):
            raise RuntimeError(
                f"a block returns a tensor whose rows are not the {rows} of its batch; such a model cannot divide its batch "
                "inside blocks: set engine.accumulate_in: step"
            )
        return whole

    def summed(self, found: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        """Return the gradient of each of the call's tensors from those of its micro-batches."""
        if self.parts == 1:
            return list(found[0])
        total: list[Tensor | None] = []
        for gradients, cut in zip(zip(*found), self.divided):
            there = [g for g in gradients if g is not None]
            if len(there) < (len(gradients) if cut else 1):
                total.append(None)
            else:
                total.append(torch.cat(there) if cut else torch.stack(there).sum(0))
        return total
