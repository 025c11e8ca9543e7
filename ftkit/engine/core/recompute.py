"""One call of a block: its arguments, its micro-batches, and the state that recomputation restores.

Recomputation restores the random number generators of torch and the autocast settings, as `torch.utils.checkpoint`
does. It restores nothing else: `shard()` refuses to recompute blocks that depend on more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ftkit.engine.core.tensor_tree import put_tensors, take_tensors

Split = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], list[bool]]
"""Takes a block, args and kwargs; returns for each tensor in them whether its first dimension is the batch."""


def autocast_kind(device: torch.device) -> str:
    """Return the device type to query autocast with: the CPU's for a device without autocast (meta)."""
    return device.type if torch.amp.is_autocast_available(device.type) else "cpu"


class Autocast:
    """The autocast settings at the time of construction.

    Entering them disables autocast's weight cache. The cache identifies a weight by its tensor object, and a gathered
    parameter keeps its object while its values change.
    """

    def __init__(self, device: torch.device) -> None:
        self.kind = autocast_kind(device)
        self.enabled = torch.is_autocast_enabled(self.kind)
        self.dtype = torch.get_autocast_dtype(self.kind)

    def restored(self) -> AbstractContextManager[None]:
        """Return a context with these settings."""
        if not self.enabled and not torch.is_autocast_enabled(self.kind):
            return nullcontext()
        return torch.autocast(self.kind, self.dtype, enabled=self.enabled, cache_enabled=False)


class ForwardState:
    """The state of the random number generators and of autocast before a forward.

    Args:
        device: Device that computes the block.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.autocast = Autocast(device)
        self.cpu_rng = torch.get_rng_state()
        self.device_rng = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run the body in this state, then return to the present random numbers."""
        devices = [] if self.device_rng is None else [self.device]
        with torch.random.fork_rng(devices=devices, device_type="cuda"), self.autocast.restored():
            torch.set_rng_state(self.cpu_rng)
            if self.device_rng is not None:
                torch.cuda.set_rng_state(self.device_rng, self.device)
            yield


class Call:
    """One call of a block, divided into micro-batches.

    Args:
        function: The block's own forward.
        arguments: (args, kwargs) as a tree with holes for tensors.
        divided: For each tensor, whether its rows are divided among the parts. Empty for one part.
        parts: Number of micro-batches.
    """

    def __init__(self, function: Callable[..., Any], arguments: Any, divided: Sequence[bool], parts: int) -> None:
        self.function = function
        self.arguments = arguments
        self.divided = divided
        self.parts = parts
        self.states: list[ForwardState] = []  # one per part, for recomputation
        self.result: object = None

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Compute the block. Return the tensors of its result; `result` keeps their tree."""
        args, kwargs = put_tensors(self.arguments, tensors)
        found: list[Tensor] = []
        self.result = take_tensors(self.function(*args, **kwargs), found)
        return found

    def part(self, tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        """Return the call's tensors as micro-batch `number` uses them, detached from their graph."""
        if self.parts > 1:
            tensors = [t.tensor_split(self.parts)[number] if cut else t for t, cut in zip(tensors, self.divided)]
        return [t.detach().requires_grad_(t.requires_grad) for t in tensors]

    def part_of_gradients(self, gradients: Sequence[Tensor | None], number: int) -> list[Tensor | None]:
        """Return the rows of the results' gradients that belong to micro-batch `number`."""
        if self.parts == 1:
            return list(gradients)
        return [g if g is None else g.tensor_split(self.parts)[number] for g in gradients]

    def joined(self, tensors: Sequence[Tensor], results: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Concatenate the results of all micro-batches.

        Args:
            tensors: Tensors of the call.
            results: For each micro-batch, the tensors of its result.

        Raises:
            RuntimeError: A result has another number of rows than the batch, so backward could not divide it.
        """
        if self.parts == 1:
            return list(results[0])
        rows = next(len(t) for t, cut in zip(tensors, self.divided) if cut)
        whole = [torch.cat(parts) for parts in zip(*results)]
        if any(len(result) != rows for result in whole):
            raise RuntimeError(
                f"a block returned a tensor without the {rows} rows of its batch, so its batch cannot be divided: set "
                "engine.accumulate_in: step"
            )
        return whole

    def summed(self, gradients: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        """Combine the gradients of the micro-batches: concatenate those of divided tensors, add the others."""
        if self.parts == 1:
            return list(gradients[0])
        total: list[Tensor | None] = []
        for parts, cut in zip(zip(*gradients), self.divided):
            found = [g for g in parts if g is not None]
            if len(found) < (len(parts) if cut else 1):
                total.append(None)
            else:
                total.append(torch.cat(found) if cut else torch.stack(found).sum(0))
        return total
