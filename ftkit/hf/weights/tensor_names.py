"""Which tensor of a folder belongs to which name of a model: transformers' own renaming, PEFT's wrapping, ties."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ftkit.engine.checkpoint.safetensors import TensorFile
from ftkit.errors import UserError

Places = dict[str, tuple[TensorFile, str]]
"""Name in the model to the file and the name in it. Buffers stand under `buffer:` and their name."""


def find_places(
    model: PreTrainedModel, opened: Sequence[TensorFile], prefix: str, wanted: set[str], aliases: Mapping[str, str]
) -> tuple[Places, list[str]]:
    """Return the place of each wanted tensor that the files have, and the names left over.

    Args:
        model: the model that the files describe.
        opened: the opened safetensors files.
        prefix: name of `model` inside the model that has `wanted`; "" where it is that model itself.
        wanted: names of the parameters to find.
        aliases: other name of a parameter to its name in `wanted`.

    Raises:
        UserError: for a tensor that transformers would have to cut or merge.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    meta = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers()])
    own = _own_names(wanted, aliases, prefix)
    buffers = {name for name, _ in model.named_buffers()}
    ignored = model._keys_to_ignore_on_load_unexpected  # what old folders of this family have too much
    places: Places = {}
    unused: list[str] = []
    for file in opened:
        for key in file.entries:
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, {**meta, **own})
            if pattern is not None and name in own:  # (a renaming has no pattern)
                raise UserError(
                    f"{file.path}: {key} must be cut or merged on load, which ftkit.load_model does not do: load the model "
                    "with from_pretrained() and give it to the Trainer"
                )
            if name in own:
                for target in own[name]:
                    places.setdefault(target, (file, key))
            elif name in buffers:
                places[f"buffer:{name}"] = (file, key)
            elif name not in meta and not matches(name, ignored):
                unused.append(key)
    return places, unused


def matches(name: str, patterns: Iterable[str] | None) -> bool:
    """Return whether one of the patterns is found in a name."""
    return any(re.search(pattern, name) for pattern in patterns or ())


def _own_names(wanted: set[str], aliases: Mapping[str, str], prefix: str) -> dict[str, list[str]]:
    """Return names as the folder's model has them -> names in the sharded model, through PEFT's wrapping and ties.

    A module that PEFT trains whole (modules_to_save) is there twice: as it was, and as the copy that trains.
    """

    def plain(name: str) -> str:
        name = name.removeprefix(prefix + ".") if prefix else name
        name = re.sub(r"\.modules_to_save\.[^.]+\.", ".", name)
        return name.replace(".base_layer.", ".").replace(".original_module.", ".")

    own: dict[str, list[str]] = {}
    for name, target in [*((name, name) for name in sorted(wanted)), *aliases.items()]:
        own.setdefault(plain(name), []).append(target)
    return own
