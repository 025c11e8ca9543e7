"""Match the tensors of a folder with the parameters of a model: transformers' renaming, PEFT's wrapping, ties."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ftkit.engine.checkpoint.safetensors import TensorFile
from ftkit.errors import UserError

Places = dict[str, tuple[TensorFile, str]]
"""Name in the model to the file and the name in it. Buffers have the prefix `buffer:`."""


def find_places(
    model: PreTrainedModel, opened: Sequence[TensorFile], prefix: str, wanted: set[str], aliases: Mapping[str, str]
) -> tuple[Places, list[str]]:
    """Return the place of each wanted tensor that the files contain, and the unused names of the files.

    Args:
        model: The model that the files describe.
        opened: The opened safetensors files.
        prefix: Name of `model` inside the model that has `wanted`; "" for the model itself.
        wanted: Names of the parameters to find.
        aliases: Other name of a parameter to its name in `wanted`.

    Raises:
        UserError: transformers would have to split or merge a tensor, or no tensor belongs to the model.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    meta = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers()])
    own = _base_names(wanted, aliases, prefix)
    buffers = {name for name, _ in model.named_buffers()}
    ignored = model._keys_to_ignore_on_load_unexpected  # superfluous tensors in old folders of this family
    places: Places = {}
    unused: list[str] = []
    for file in opened:
        for key in file.entries:
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, {**meta, **own})
            if pattern is not None and name in own:  # a plain renaming has no pattern
                raise UserError(
                    f"{file.path}: {key} must be split or merged on load, which ftkit.load_model does not do: load the "
                    "model with from_pretrained() and pass it to the Trainer"
                )
            if name in own:
                for target in own[name]:
                    places.setdefault(target, (file, key))
            elif name in buffers:
                places[f"buffer:{name}"] = (file, key)
            elif name not in meta and not matches(name, ignored):
                unused.append(key)
    if opened and not places:
        raise UserError(f"{opened[0].path.parent}: none of its tensors belongs to a {type(model).__name__}")
    return places, unused


def check_shapes(shapes: Mapping[str, Sequence[int]], places: Places) -> None:
    """Compare tensors in files with what the model needs.

    Args:
        shapes: Name of a tensor to the shape that the model needs.
        places: Name of a tensor to its place.

    Raises:
        UserError: A shape differs, or torch does not have a tensor's dtype.
    """
    wrong = []
    for name in shapes.keys() & places.keys():
        file, key = places[name]
        entry = file.entries[key]
        if entry.dtype is None:
            raise UserError(f"{file.path}: {key} has a dtype that ftkit cannot read (quantised weights?)")
        if entry.shape != tuple(shapes[name]):
            wrong.append(f"{key} is {list(entry.shape)}, the model needs {list(shapes[name])}")
    if wrong:
        folder = next(iter(places.values()))[0].path.parent
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise UserError(f"{folder}: shapes differ from config.json: {'; '.join(sorted(wrong)[:3])}{more}")


def matches(name: str, patterns: Iterable[str] | None) -> bool:
    """Return whether one of the patterns is found in a name."""
    return any(re.search(pattern, name) for pattern in patterns or ())


def _base_names(wanted: set[str], aliases: Mapping[str, str], prefix: str) -> dict[str, list[str]]:
    """Return name in the folder's model -> names in the sharded model, through PEFT's wrapping and ties."""

    def plain(name: str) -> str:
        name = name.removeprefix(prefix + ".") if prefix else name
        return name.replace(".base_layer.", ".").replace(".original_module.", ".")

    own: dict[str, list[str]] = {}
    for name, target in [*((name, name) for name in sorted(wanted)), *aliases.items()]:
        if target in wanted:
            own.setdefault(plain(name), []).append(target)
    return own
