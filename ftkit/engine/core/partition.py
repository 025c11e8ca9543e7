"""The partition of a model's parameters into flat parameters.

In this order:

    in one block                           -> the block's flat parameters, one for each (trained, dtype)
    small, or selected by `replicated`     -> one replicated flat parameter for each (trained, dtype)
    all others (embeddings, heads)         -> root parameters, one flat parameter each
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import nn

from ftkit.errors import UserError
from ftkit.spec.state_forms import can_be_coded
from ftkit.spec.strategy import FlatKind

REPLICATED = "whole"
"""Owner of the replicated flat parameters, and the name of their files in a checkpoint."""
REPLICATED_SHARE = 0.002
"""Parameters outside blocks of at most this share of the model are replicated: a gather would cost more."""


@dataclass(frozen=True)
class Binding:
    """One registration of a parameter: `module.attribute`, called `name` in the model."""

    name: str
    module: nn.Module
    attribute: str


@dataclass(frozen=True)
class Group:
    """The key of a flat parameter: its parameters agree in it. `owner` is a block, a root parameter, or `REPLICATED`."""

    kind: FlatKind
    owner: str
    trained: bool
    dtype: torch.dtype


def bindings_of(model: nn.Module) -> dict[int, list[Binding]]:
    """Return all registrations of each parameter, by id, in model order."""
    found: dict[int, list[Binding]] = {}
    for module_name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{module_name}.{attribute}" if module_name else attribute
            found.setdefault(id(parameter), []).append(Binding(name, module, attribute))
    return found


def partition(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    *,
    dtype: torch.dtype | None,
    replicated: Callable[[str, nn.Parameter], bool] = lambda name, parameter: False,
    wide: Callable[[str], bool] = lambda name: False,
) -> dict[Group, list[tuple[str, nn.Parameter]]]:
    """Return the (name, parameter) pairs of each flat parameter, in model order, tensors that can be coded first.

    Args:
        model: The model.
        blocks: (name, module) of its blocks.
        dtype: Compute dtype. None: each parameter's own.
        replicated: Selects parameters to replicate in any case.
        wide: Selects parameters, by name, that stay in fp32.

    Raises:
        UserError: A block shares a parameter with another block or with a module outside.
    """
    bindings = bindings_of(model)
    chosen = {id(parameter) for name, parameter in model.named_parameters() if replicated(name, parameter)}
    block_of = _blocks_of_modules(blocks, chosen)
    total = sum(parameter.numel() for parameter in model.parameters())
    groups: dict[Group, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        places = bindings[id(parameter)]
        homes = {block_of.get(id(place.module)) for place in places}
        home = next(iter(homes)) if len(homes) == 1 else None
        compute = dtype or parameter.dtype
        compute = torch.float32 if wide(name) and compute.itemsize < 4 else compute
        kind: FlatKind
        if id(parameter) not in chosen and home is not None:
            kind, owner = "block", home
        elif id(parameter) in chosen or parameter.dim() < 2 or parameter.numel() <= REPLICATED_SHARE * total:
            kind, owner = "replicated", REPLICATED
        elif homes != {None}:
            raise UserError(
                f"{name} and {next(place.name for place in places if place.name != name)} are one parameter, shared by a "
                "block and another module. Blocks are sharded one by one: untie the parameter before the model is sharded"
            )
        else:
            kind, owner = "root", name
        groups.setdefault(Group(kind, owner, parameter.requires_grad, compute), []).append((name, parameter))
    for group, members in groups.items():
        if group.kind == "block" and group.trained:
            members.sort(key=lambda member: not can_be_coded(tuple(member[1].shape)))
    return groups


def names_of(groups: Sequence[Group]) -> list[str]:
    """Return the unique name of each flat parameter, which also names its files."""
    names = []
    for group in groups:
        dtypes = {g.dtype for g in groups if (g.kind, g.owner, g.trained) == (group.kind, group.owner, group.trained)}
        owner = group.owner.replace("%", "%25").replace("/", "%2F")
        dtype = f".{str(group.dtype).removeprefix('torch.')}" if len(dtypes) > 1 else ""
        names.append(f"{owner}{'' if group.trained else '.frozen'}{dtype}")
    return names


def _blocks_of_modules(blocks: Sequence[tuple[str, nn.Module]], replicated: Set[int]) -> dict[int, str]:
    """Return the block of each module inside a block, by id. Blocks may share modules with replicated parameters only."""
    found: dict[int, str] = {}
    for name, block in blocks:
        for inner, module in block.named_modules():
            other = found.setdefault(id(module), name)
            if other != name and any(id(parameter) not in replicated for parameter in module.parameters()):
                raise UserError(
                    f"{inner} of block {name} is a part of {other}, too. Blocks are sharded one by one: give each a copy "
                    "(copy.deepcopy) before the model is sharded"
                )
    return found
