"""Match the tensors of a folder with the parameters of a model: transformers' renaming, PEFT's wrapping, ties."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ftkit.engine.checkpoint.safetensors import TensorFile
from ftkit.engine.model import ShardedModel
from ftkit.errors import UserError
from ftkit.hf.adapters import base_of

Places = dict[str, tuple[TensorFile, str]]
"""Name of a parameter or buffer in the model to the file and the name in it."""


def find_places(units: ShardedModel, opened: Sequence[TensorFile], wanted: Set[str]) -> tuple[Places, set[str]]:
    """Find tensors in files that were written of a sharded model's base, or of a module outside transformers.

    Args:
        units: The sharded model.
        opened: The opened safetensors files.
        wanted: Names of the parameters and buffers to find.

    Returns:
        The place of each wanted tensor that the files contain, and the wanted names that files of this family may lack.

    Raises:
        UserError: transformers would have to split or merge a tensor.
    """
    model = base_of(units.model)
    if not isinstance(model, PreTrainedModel):
        return {key: (file, key) for file in opened for key in file.entries if key in wanted}, set()
    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    prefix = next(name for name, module in units.model.named_modules() if module is model)
    own: dict[str, list[str]] = {}
    for name, target in [*((name, name) for name in sorted(wanted)), *units.aliases.items()]:
        if target in wanted:
            plain = name.removeprefix(f"{prefix}.") if prefix else name
            own.setdefault(plain.replace(".base_layer.", ".").replace(".original_module.", "."), []).append(target)
    known = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers()), **own}
    places: Places = {}
    for file in opened:
        for key in file.entries:
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
            if pattern is not None and name in own:  # a plain renaming has no pattern
                raise UserError(
                    f"{file.path}: {key} must be split or merged on load, which a sharded model cannot do: load the folder "
                    "with ftkit.load_model() and shard that model"
                )
            for target in own.get(name, ()):
                places.setdefault(target, (file, key))
    patterns = model._keys_to_ignore_on_load_missing or ()
    return places, {name for name in wanted if any(re.search(pattern, name) for pattern in patterns)}
