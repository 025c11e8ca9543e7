"""What a block's modules hold beside parameters and buffers: attributes, hooks, generators of random numbers.

A recomputed block runs twice for one backward, the second time when a counter has counted on, a caller has set its
next attribute, or a model has taken off the hooks that it put on for one forward (aLoRA and Poly of PEFT). So the
second run finds attributes and hooks as the first one found them, and afterwards they are those of now. Values are
compared by identity. Lists, dictionaries and sets are copied before the first forward in train or eval, later those
that had changed. A `torch.Generator` in an attribute draws the same numbers again.

It does not see a state outside of the modules (a global switch, a generator in a closure). What comes of one is seen:
after the 1st, 2nd, 4th, 8th ... forward of a block, a sample of its results is compared with those of the second run
(`differ`). Cost: a walk over the modules of a block for each forward, and one for each backward.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from ftkit.errors import UserError

TORCHS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""What is torch's own affair, or that of `block_buffers`."""
HOOKS = tuple(key for key in vars(nn.Module()) if key.startswith(("_forward_", "_backward_")))
CONTAINERS = (list, dict, set, deque)
MOST_VALUES = 4096
"""Values of a container that is copied; a longer one is a data set."""
SAMPLE = 1024
"""Elements of a result that are compared."""
MOST_OFF = 0.05
"""Share of them that may differ: a router that is torn between two experts may choose otherwise by one rounding."""

_NONE: OrderedDict[int, Any] = OrderedDict()
_ABSENT = object()


class Container(Protocol):
    """A list, dictionary, set or deque: one of `CONTAINERS`."""

    def copy(self) -> Container:
        """Return a container of the same objects."""

    def __len__(self) -> int:
        """Return how many there are."""


@dataclass
class Noted:
    """The modules of a block with their attributes, before a forward; hooks and changing containers are copies."""

    modules: list[tuple[nn.Module, dict[str, object]]]
    copies: dict[tuple[int, str], tuple[Container, Container]] = field(default_factory=dict)
    generators: list[tuple[torch.Generator, Tensor]] = field(default_factory=list)


class BlockState:
    """What is known of the attributes of a block's modules.

    Args:
        module: the block.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.looked: set[bool] = set()  # in train and in eval
        self.changing: set[tuple[int, str]] = set()
        self.on_graph: dict[tuple[int, str], bool] = {}  # of tensors that forwards leave there (left_tensors.py)

    def note(self) -> Noted:
        """Note the attributes before a forward."""
        noted = Noted([])
        generators: dict[int, torch.Generator] = {}
        for module in self.module.modules():
            own = vars(module)
            before = own.copy()
            generators.update((id(value), value) for value in own.values() if type(value) is torch.Generator)
            for key in HOOKS:
                before[key] = own[key].copy() if own.get(key) else _NONE
            noted.modules.append((module, before))
        if self.module.training not in self.looked:
            self._note_all(noted)
        else:
            for module, own in noted.modules if self.changing else ():
                for key in own:
                    if (id(module), key) in self.changing and _is_container(value := own[key]):
                        noted.copies[id(module), key] = value, value.copy()
        noted.generators = [(each, each.get_state()) for each in generators.values()]
        return noted

    def _note_all(self, noted: Noted) -> None:
        for module, own in noted.modules:
            for key, value in own.items():
                if key not in TORCHS and key not in HOOKS and _is_container(value):
                    noted.copies[id(module), key] = value, value.copy()

    def ran(self, noted: Noted) -> None:
        """Keep of the copies those of containers that the forward has changed; called after it."""
        self.looked.add(self.module.training)
        noted.copies = {place: pair for place, pair in noted.copies.items() if place in self.changing or not _same(*pair)}
        self.changing.update(noted.copies)


def _is_container(value: object) -> TypeGuard[Container]:
    return isinstance(value, CONTAINERS) and 0 <= len(value) <= MOST_VALUES


def _same(one: Any, other: Any) -> bool:
    """Return whether two containers hold the same objects."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(key in other and other[key] is value for key, value in one.items())
    if isinstance(one, set):
        return bool(one == other)
    return all(first is second for first, second in zip(one, other))


@contextmanager
def attributes_as_before(noted: Noted) -> Iterator[None]:
    """Let modules have in the body the attributes and hooks of before their forward, and afterwards those of now."""
    now = [(vars(module), vars(module).copy()) for module, _ in noted.modules]
    drawn = [(generator, generator.get_state()) for generator, _ in noted.generators]
    fresh: dict[int, Any] = {}  # several modules may share a container
    for module, before in noted.modules:
        _put_back(module, before, noted, fresh)
    for generator, state in noted.generators:
        generator.set_state(state)
    try:
        yield
    finally:
        for own, values in now:
            for key in own.keys() - values.keys():
                del own[key]
            own.update(values)
        for generator, state in drawn:
            generator.set_state(state)


def _put_back(module: nn.Module, before: dict[str, Any], noted: Noted, fresh: dict[int, Any]) -> None:
    own = vars(module)
    for key, value in before.items():
        if key in HOOKS:
            if (own.get(key) or _NONE) != value:
                own[key] = value.copy()
        elif key not in TORCHS:
            container, contents = noted.copies.get((id(module), key), (value, None))
            if id(container) in fresh:
                value = fresh[id(container)]
            else:
                value = _without_graphs(value if contents is None else contents.copy(), module, key)
                if value is not container:
                    fresh[id(container)] = value
            if value is not own.get(key, _ABSENT):
                own[key] = value
    for key in own.keys() - before.keys():
        del own[key]


def _without_graphs(value: Any, module: nn.Module, key: str) -> Any:
    """Return an attribute's value for a second run, which must not walk on into the graph of somebody else's forward."""
    if isinstance(value, Tensor):
        return value if value.grad_fn is None else _cut(value, module, key)
    if type(value) not in (list, tuple, dict, deque) or not 0 < len(value) <= MOST_VALUES:
        return value
    values = value.values() if type(value) is dict else value
    if not any(isinstance(each, Tensor) and each.grad_fn is not None for each in values):
        return value
    if type(value) is dict:
        return {at: _without_graphs(each, module, key) for at, each in value.items()}
    return type(value)(_without_graphs(each, module, key) for each in value)


def _cut(tensor: Tensor, module: nn.Module, key: str) -> Tensor:
    """Return a leaf of the same values; whoever would have to hand a gradient on through it is refused."""

    def refuse(gradient: Tensor) -> None:
        raise UserError(
            f"a block reads a tensor with a graph in {type(module).__name__}.{key}, which another forward has left there, "
            "and it is computed again in backward, where that tensor would get no gradient. Hand it over as an argument of "
            "the block, read it with detach(), or set ftkit={'stage': 1, 'activations': 'keep'}"
        )

    leaf = tensor.detach().requires_grad_()
    leaf.register_hook(refuse)
    return leaf


# --- what is not seen before, after


def sample(results: Sequence[Tensor]) -> list[Tensor]:
    """Return some elements of each floating-point result, in fp32; none of one that holds no values, as in a fake run."""
    plain = [result for result in results if type(result) is Tensor and not result.is_meta]
    floats = [result.detach().flatten() for result in plain if result.is_floating_point()]
    return [each[:: max(1, each.numel() // SAMPLE)].float().clone() for each in floats]


def differ(first: Sequence[Tensor], second: Sequence[Tensor], eps: float) -> bool:
    """Return whether samples of two runs are of different computations, and not only rounded otherwise.

    Args:
        first: samples of the results of one run, as `sample` returns them.
        second: samples of the results of the other run.
        eps: machine epsilon of the dtype of the results.
    """
    if len(first) != len(second):
        return True
    for one, other in zip(first, second):
        if one.shape != other.shape:
            return True
        known = one.isfinite() & other.isfinite()
        one, other = one[known], other[known]
        if one.numel() and float(((one - other).abs() > eps**0.5 * one.abs().max()).float().mean()) > MOST_OFF:
            return True
    return False
