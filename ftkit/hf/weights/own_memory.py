"""Every parameter has values and memory of its own before a model is sharded.

`lm_head.weight.data = embed_tokens.weight.data` looks like a tie and is none: the two stay two parameters, which are two
shards with two gradients, where plain PyTorch would let both updates write to the same memory. So parameters that share
elements and train are refused by name. Frozen ones never change, so each gets its own copy of the values; so does a
frozen parameter whose elements are one and the same (`expand`), which would pass for a parameter without values.

A buffer or a plain attribute that shares memory with a trained parameter (`weight.detach()`, a view, `.data`) would keep the
values from before sharding, so it is refused by name, too.

Columns of one tensor that do not touch each other are no ties. Parameters of lazy modules, which have no shape yet, are
refused. What it costs: one look at the addresses; a mask of the memory where extents overlap.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ftkit.engine.core.resharded import Guard
from ftkit.errors import UserError


def separate(model: nn.Module) -> None:
    """Give frozen parameters that share memory copies of their own.

    Raises:
        UserError: for parameters that share memory and train, also with a buffer or a plain attribute, and for those of
            lazy modules.
    """
    here: list[tuple[int, str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UserError(
                f"{name} has no shape yet, because it belongs to a lazy module: call the model once before it is sharded, "
                "or use the module that is not lazy (nn.Linear for nn.LazyLinear)"
            )
        if isinstance(parameter, Guard) or parameter.is_meta or not parameter.numel():
            continue
        if parameter.layout != torch.strided:
            raise UserError(
                f"{name} has the layout {parameter.layout}: only dense parameters are sharded. Make it dense "
                "(.to_dense()), or register it as a buffer (register_buffer), before the model is sharded"
            )
        if _overlaps_itself(parameter):
            if parameter.requires_grad:
                raise UserError(
                    f"{name}: several of its elements are the same memory (expand), and cannot be trained apart: give it "
                    f"memory of its own ({name}.data = {name}.data.clone()) before it is sharded"
                )
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        here.append((parameter.data_ptr(), name, parameter))
    here.sort(key=lambda each: each[0])
    reached, last = 0, None  # the furthest byte so far, and whose it is
    for start, name, parameter in here:
        if last is not None and start < reached and _share(last[1], parameter):
            if parameter.requires_grad or last[1].requires_grad:
                raise UserError(
                    f"{last[0]} and {name} share memory and are two parameters: each would get a gradient and an update of "
                    "its own. To tie them let both modules have one parameter (module.weight = other.weight); to keep them "
                    f"apart give one its own memory ({name}.data = {name}.data.clone()), before the model is sharded"
                )
            parameter.data = parameter.data.clone()
            continue
        if (stop := _stop(parameter)) > reached:
            reached, last = stop, (name, parameter)
    _refuse_seen_elsewhere(model, [each for each in here if each[2].requires_grad])


def _refuse_seen_elsewhere(model: nn.Module, trained: list[tuple[int, str, nn.Parameter]]) -> None:
    """Raise for a buffer or a plain attribute that shares elements with a trained parameter; those by their addresses."""
    starts = [start for start, _, _ in trained]
    reached = list(accumulate((_stop(parameter) for _, _, parameter in trained), max))
    own = {id(parameter) for parameter in model.parameters()}
    for name, tensor in _others(model):
        if id(tensor) in own or is_lazy(tensor) or isinstance(tensor, Guard) or tensor.is_meta:
            continue
        if tensor.layout != torch.strided or not tensor.numel():
            continue
        number = bisect_left(starts, _stop(tensor)) - 1
        while number >= 0 and reached[number] > tensor.data_ptr():
            _, of, parameter = trained[number]
            if _stop(parameter) > tensor.data_ptr() and _share(*sorted((parameter, tensor), key=Tensor.data_ptr)):
                raise UserError(
                    f"{name} shares memory with the parameter {of}, which trains: it would keep the values from before "
                    "sharding. Use the parameter itself where it is needed (a property, or module.weight = other.weight "
                    f"for a tie), or give {name} memory of its own (.clone()), before the model is sharded"
                )
            number -= 1


def _others(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of modules that are no parameters: buffers, and attributes, also in a list or a dictionary.

    What torch's own pruning and norms compute anew for each call, from a parameter of that name with `_orig`, is left out.
    """
    for prefix, module in model.named_modules():
        path = f"{prefix}." if prefix else ""
        for key, buffer in module.named_buffers(recurse=False):
            yield path + key, buffer
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules") or f"{key}_orig" in module._parameters:
                continue
            for tensor in _inside(value):
                yield path + key, tensor


DEEPEST = 4
"""Containers in containers of an attribute that are looked into: one may hold itself."""


def _inside(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple, set)) and depth < DEEPEST:
        for each in value.values() if isinstance(value, dict) else value:
            yield from _inside(each, depth + 1)


def _stop(parameter: Tensor) -> int:
    """Return the address behind a tensor's last element."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride()))
    return parameter.data_ptr() + span * parameter.element_size()


def _overlaps_itself(parameter: Tensor) -> bool:
    """Return whether two elements have one address, or a single one looks as if (stride 0)."""
    if parameter.dim() and not any(parameter.stride()):
        return True
    dims = sorted((stride, size) for size, stride in zip(parameter.shape, parameter.stride()) if size > 1)
    if dims and dims[0][0] == 0:
        return True
    return any(stride * size > above for (stride, size), (above, _) in pairwise(dims)) and not _distinct(parameter)


def _distinct(parameter: Tensor) -> bool:
    marks = _marks(parameter, parameter.data_ptr(), _stop(parameter))
    return int(marks.sum()) == parameter.numel()


def _marks(parameter: Tensor, first: int, stop: int) -> Tensor:
    """Return for each element between two addresses whether it is the tensor's."""
    size = parameter.element_size()
    marks = torch.zeros((stop - first) // size, dtype=torch.bool)
    marks.as_strided(parameter.shape, parameter.stride(), (parameter.data_ptr() - first) // size).fill_(True)
    return marks


def _share(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors whose extents overlap have an element in common."""
    size = one.element_size()
    if one.device != other.device:
        return False
    if size != other.element_size() or (other.data_ptr() - one.data_ptr()) % size:
        return True
    if one.is_contiguous() and other.is_contiguous():
        return True
    first, stop = one.data_ptr(), max(_stop(one), _stop(other))
    return bool((_marks(one, first, stop) & _marks(other, first, stop)).any())
