"""Whatever else holds the memory of a trained weight before a model is sharded.

In plain PyTorch `old = head.weight.detach()` follows the training, because both are one memory. A sharded weight gets
memory of its own, and such an alias would keep the values from before sharding. So an alias that the model can reach is
refused by name, wherever it lies: a buffer, an attribute, a list, the closure of a hook, a `functools.partial`, a
configuration, a module that is not registered, a numpy array. The model may still compute with one that only the
user's script holds (a global variable, a local one), or not: it is named in a warning.

What it costs: one look at each storage's use count. Only where a storage has more owners than the parameters
account for are objects walked (about half a second).
"""

from __future__ import annotations

import gc
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from ftkit.engine.core.placeholder import Placeholder
from ftkit.engine.shard import is_sharded
from ftkit.errors import UserError

logger = logging.getLogger(__name__)

CLOSED = (ModuleType, type, CodeType, FrameType, BuiltinFunctionType, str, bytes, int, float, complex, torch.dtype)
"""Objects behind which no part of a model lies: a walk that entered modules or classes would meet the whole process."""

Extent = tuple[int, int]
"""The first address of a tensor's elements, and the one behind its last."""


def refuse_aliases(model: nn.Module, trained: Mapping[str, nn.Parameter], shares: Callable[[Tensor, Tensor], bool]) -> None:
    """Refuse what the model holds beside its parameters of a trained parameter's memory; warn of what others hold.

    Args:
        model: the whole model, before it is sharded.
        trained: the parameters that train and have values, by name. No two of them share memory.
        shares: whether two tensors whose extents overlap have an element in common; the one that begins first comes
            first.

    Raises:
        UserError: for an alias that can be reached from the model, by name.
    """
    if not any(_has_more_owners(parameter) for parameter in trained.values()):
        return
    if any(map(is_sharded, model.modules())):
        return  # its parameters are views; the engine refuses to shard it again
    memory = _Memory(trained, shares)
    own = {id(parameter) for parameter in model.parameters()}
    seen: set[int] = set()
    for holder, value in _reachable(model):
        seen.add(id(value))
        if id(value) not in own and (name := memory.owner(value)) is not None:
            raise UserError(
                f"{holder} shares memory with the parameter {name}, which trains: it would keep the values from before "
                "sharding. Use the parameter itself where it is needed (a property, or module.weight = other.weight "
                "for a tie), or give it memory of its own (.clone()), before the model is sharded"
            )
    gc.collect()  # what nobody holds any more is no alias
    objects = gc.get_objects()
    kinds = {id(kind): kind for kind in map(type, objects)}  # a thousand of them, and a million objects; not all have a hash
    tensors = {key for key, kind in kinds.items() if issubclass(kind, Tensor)}
    for value in objects:
        if id(type(value)) not in tensors or id(value) in own or id(value) in seen:
            continue
        if (name := memory.owner(value)) is not None:
            logger.warning(
                "%s outside of the model shares memory with the parameter %s, which trains: it keeps the values from before "
                "sharding, where plain PyTorch would show those of the training. Read the parameter itself instead",
                _named(value),
                name,
            )


def _has_more_owners(parameter: Tensor) -> bool:
    """Return whether a storage is held by more than its parameter and the object that this asks for."""
    storage = parameter.untyped_storage()
    # A storage that does not own its memory (numpy's, a mapped file's) may have owners that it does not count.
    return not storage.resizable() or torch._C._storage_Use_Count(storage._cdata) > 2


class _Memory:
    """The extents of trained parameters, to be looked up by address."""

    def __init__(self, trained: Mapping[str, nn.Parameter], shares: Callable[[Tensor, Tensor], bool]) -> None:
        self.shares = shares
        parts = ((*extent(parameter), name, parameter) for name, parameter in trained.items())
        self.parts = sorted(parts, key=lambda part: part[:2])
        self.starts = [start for start, *_ in self.parts]
        self.reached = list(accumulate((stop for _, stop, *_ in self.parts), max))

    def owner(self, value: Any) -> str | None:
        """Return the name of the trained parameter that a tensor or an array shares elements with."""
        if isinstance(value, numpy.ndarray):
            if value.dtype.hasobject or not value.size:
                return None
            reach = [(size - 1) * stride for size, stride in zip(value.shape, value.strides)]
            first = int(value.__array_interface__["data"][0])
            start, stop = first + sum(min(0, each) for each in reach), first + sum(max(0, each) for each in reach)
            return next((name for name, _ in self._overlapping(start, stop + value.itemsize)), None)
        if isinstance(value, Placeholder) or not _has_memory(value):
            return None
        for name, parameter in self._overlapping(*extent(value)):
            if value.is_quantized or self.shares(*sorted((parameter, value), key=Tensor.data_ptr)):
                return name
        return None

    def _overlapping(self, start: int, stop: int) -> Iterator[tuple[str, nn.Parameter]]:
        number = bisect_left(self.starts, stop) - 1
        while number >= 0 and self.reached[number] > start:
            _, end, name, parameter = self.parts[number]
            if end > start:
                yield name, parameter
            number -= 1


def extent(tensor: Tensor) -> Extent:
    """Return the addresses of a strided tensor's first element and behind its last."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has elements at addresses; subclasses that wrap others have none of their own."""
    if nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return False
    try:
        return bool(tensor.data_ptr())
    except RuntimeError:  # fake and functional tensors
        return False


def _reachable(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and arrays that can be reached from a model, each with a description of its holder."""
    names = {id(module): name for name, module in model.named_modules()}
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", model)]
    kept = []  # objects that were made for this walk must not give their ids to others
    while waiting:
        holder, value = waiting.pop()
        kind = type(value)  # isinstance would ask proxies what they stand for
        if id(value) in seen or issubclass(kind, CLOSED):
            continue
        seen.add(id(value))
        kept.append(value)
        if issubclass(kind, (Tensor, numpy.ndarray)):
            yield holder, value
        if issubclass(kind, nn.Module):
            waiting += _of_module(names.get(id(value), holder), value)
        elif issubclass(kind, FunctionType):
            waiting += ((holder, each) for each in _of_function(value))
        elif not issubclass(kind, Placeholder):
            waiting += ((holder, each) for each in gc.get_referents(value))


def _of_module(path: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what a module holds, named by attribute, its modules last: they are reached under names of their own.

    What torch's own pruning and norms compute anew for each call, from a parameter of that name with `_orig`, is left out.
    """
    prefix = f"{path}." if path else ""
    yield from ((prefix + name, each) for name, each in module._modules.items())
    yield from ((f"an attribute of {prefix}{name}", each) for name, each in module._parameters.items())
    yield from ((prefix + name, each) for name, each in module._buffers.items())
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules") or f"{name}_orig" in module._parameters:
            continue
        kind = f"a hook of {path or 'the model'}" if name.endswith("_hooks") else prefix + name
        yield kind, value


def _of_function(function: FunctionType) -> Iterable[Any]:
    """Return what a function holds: its closure, defaults and attributes, and the global variables that its code names."""
    held: list[Any] = [function.__closure__, function.__defaults__, function.__kwdefaults__, vars(function)]
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        held += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    return held


def _named(value: Tensor) -> str:
    """Return how to name a tensor that the model does not hold: by its variable, where a module or an object has one."""
    for holder in gc.get_referrers(value):
        if isinstance(holder, dict):
            name = next((key for key, each in holder.items() if each is value and isinstance(key, str)), None)
            if name is not None:
                return f"{name} (a tensor of shape {tuple(value.shape)})"
    return f"A tensor of shape {tuple(value.shape)}"
