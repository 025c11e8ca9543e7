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
"""Name of a parameter or buffer in the model to the file and the name in it."""


def find_places(
    model: PreTrainedModel, opened: Sequence[TensorFile], prefix: str, wanted: set[str], aliases: Mapping[str, str]
) -> Places:
    """Return the place of each wanted tensor that the files contain.

    Args:
        model: The model that the files describe.
        opened: The opened safetensors files.
        prefix: Name of `model` inside the model that has `wanted`; "" for the model itself.
        wanted: Names of the parameters and buffers to find.
        aliases: Other name of a parameter to its name in `wanted`.

    Raises:
        UserError: transformers would have to split or merge a tensor.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    meta = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers()])
    own = _base_names(wanted, aliases, prefix)
    places: Places = {}
    for file in opened:
        for key in file.entries:
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, {**meta, **own})
            if pattern is not None and name in own:  # a plain renaming has no pattern
                raise UserError(
                    f"{file.path}: {key} must be split or merged on load, which a sharded model cannot do: load the folder "
                    "with ftkit.load_model() and shard that model"
                )
            for target in own.get(name, ()):
                places.setdefault(target, (file, key))
    return places


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
