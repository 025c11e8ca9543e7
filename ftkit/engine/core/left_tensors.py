"""Tensors that a block's forward leaves in attributes of its modules, for somebody to read: an auxiliary loss, a penalty.

In plain PyTorch such a tensor hangs on the graph. So it does here: a unit returns it beside the block's results and puts
what autograd gives for it back in its place, so that a loss on it trains the block. What a forward cuts off (`detach`, a
running mean) stays as it is. Seen are attributes and buffers that hold another tensor after the forward than before, and
lists, dictionaries and tuples in attributes that hold tensors they did not hold; not what lies deeper, in other objects
or in a closure. Cost: a look at each attribute of a block's modules for each forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import Tensor

from ftkit.engine.core.block_buffers import Noted as NotedBuffer
from ftkit.engine.core.block_state import HOOKS, TORCHS, Noted
from ftkit.engine.core.tensor_tree import take_tensors

_PASSED_OVER = frozenset((*TORCHS, *HOOKS))
_NOTHING = object()


class Indexed(Protocol):
    """A list, dictionary or deque."""

    def __getitem__(self, key: Hashable) -> object:
        """Return what lies at a key or index."""

    def __setitem__(self, key: Hashable, value: object) -> None:
        """Put something there."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies.

    Args:
        owner: the attributes, or the buffers, of a module.
        attribute: the key in `owner`.
        inner: the index or key within the container that lies there; None for the value itself.
    """

    owner: dict[str, object]
    attribute: str
    inner: Hashable = None

    @property
    def key(self) -> tuple[int, str]:
        """The attribute, for a dictionary."""
        return id(self.owner), self.attribute

    def get(self) -> Any:
        """Return what lies there now, None if nothing does."""
        value = self.owner.get(self.attribute)
        if self.inner is None or value is None:
            return value
        try:
            return cast(Indexed, value)[self.inner]
        except (LookupError, TypeError):
            return None

    def put(self, value: Any) -> None:
        """Put `value` there."""
        if self.inner is None:
            self.owner[self.attribute] = value
        else:
            cast(Indexed, self.owner[self.attribute])[self.inner] = value


def left(noted: Noted, buffers: list[NotedBuffer]) -> list[Place]:
    """Return where a forward has left floating-point tensors.

    Args:
        noted: the attributes before the forward, with copies of those containers that it has changed.
        buffers: buffers that the forward has changed.
    """
    places = [(Place(cast(dict[str, object], each.slot[0]._buffers), each.slot[1]), each.buffer) for each in buffers]
    found = [place for place, before in places if place.get() is not before and _floats(place.get())]
    containers: set[int] = set()  # several modules may share one
    for module, before in noted.modules:
        own = vars(module)
        for key, value in own.items():
            copied = noted.copies.get((id(module), key))
            if (value is before.get(key, _NOTHING) and copied is None) or key in _PASSED_OVER:
                continue
            if not isinstance(value, (list, dict, deque)):
                if _floats(value):
                    found.append(Place(own, key))
            elif id(value) not in containers:
                containers.add(id(value))
                old = copied[1] if copied is not None and copied[0] is value else ()
                known = {id(each) for _, each in _items(old)}
                found += [Place(own, key, at) for at, each in _items(value) if id(each) not in known and _floats(each)]
    return found


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    return iter(container.items()) if isinstance(container, dict) else enumerate(container)


def _floats(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point()
    if not isinstance(value, (tuple, list, dict)):
        return False
    tensors: list[Tensor] = []
    take_tensors(value, tensors)
    return any(each.is_floating_point() for each in tensors)
