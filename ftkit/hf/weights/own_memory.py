"""Every parameter has values and memory of its own before a model is sharded.

`lm_head.weight.data = embed_tokens.weight.data` looks like a tie and is none: the two stay two parameters, which are two
shards with two gradients, where plain PyTorch would let both updates write to the same memory. So parameters that share
elements and train are refused by name. Frozen ones never change, so each gets its own copy of the values; so does a
frozen parameter whose elements are one and the same (`expand`), which would pass for a parameter without values.

Whatever else holds the memory of a trained parameter (`weight.detach()`, a view, `.data`) is looked for in `aliases`.

Columns of one tensor that do not touch each other are no ties. Parameters of lazy modules, which have no shape yet, are
refused. What it costs: one look at the addresses; a mask of the memory where extents overlap.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ftkit.engine.core.placeholder import Placeholder
from ftkit.errors import UserError
from ftkit.hf.weights.aliases import extent, refuse_aliases


def separate(model: nn.Module) -> None:
    """Give frozen parameters that share memory copies of their own.

    Raises:
        UserError: for parameters that share memory and train, also with anything else that the model holds, and for
            those of lazy modules.
    """
    here: list[tuple[int, str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UserError(
                f"{name} has no shape yet, because it belongs to a lazy module: call the model once before it is sharded, "
                "or use the module that is not lazy (nn.Linear for nn.LazyLinear)"
            )
        if isinstance(parameter, Placeholder) or parameter.is_meta or not parameter.numel():
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
        if (stop := extent(parameter)[1]) > reached:
            reached, last = stop, (name, parameter)
    refuse_aliases(model, {name: parameter for _, name, parameter in here if parameter.requires_grad}, _share)


def _overlaps_itself(parameter: Tensor) -> bool:
    """Return whether two elements have one address, or a single one looks as if (stride 0)."""
    if parameter.dim() and not any(parameter.stride()):
        return True
    dims = sorted((stride, size) for size, stride in zip(parameter.shape, parameter.stride()) if size > 1)
    if dims and dims[0][0] == 0:
        return True
    return any(stride * size > above for (stride, size), (above, _) in pairwise(dims)) and not _distinct(parameter)


def _distinct(parameter: Tensor) -> bool:
    marks = _marks(parameter, *extent(parameter))
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
    first, stop = one.data_ptr(), max(extent(one)[1], extent(other)[1])
    return bool((_marks(one, first, stop) & _marks(other, first, stop)).any())
