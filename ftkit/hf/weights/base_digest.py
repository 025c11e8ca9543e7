"""What a run was trained on: its base's configuration, adapter and weights, noted so that a resume can compare them.

The note holds the configuration, PEFT's configuration of each adapter, a digest of each tensor in the base's folder, and,
where the base is not in the checkpoint, a sum of each frozen tensor as it is in memory. A digest covers the dtype, the shape
and sampled bytes of a tensor, small tensors whole. Tensors are compared by name, so a folder may be moved, copied or
cut into other files.

A module with several models, or adapters, in it has a note of each. It refuses a base that has changed, naming the field or
the tensor. What a note lacks, such as that of an earlier version, is not compared, nor, with another version of transformers
or PEFT, a field that only one of them knows. What it costs: a few reads a tensor, and one read of the frozen weights in
memory.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import transformers
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from ftkit.engine.checkpoint.weight_sums import frozen_sums
from ftkit.engine.core.shard import Units
from ftkit.engine.files.sealed_files import BrokenCheckpoint, checksum
from ftkit.engine.files.storage import TensorFile
from ftkit.errors import UserError
from ftkit.hf.weights.loading import find_weights

BASE = "base"
"""Under which a checkpoint notes its base."""
BASE_FILE = "ftkit_base.json"
"""The same beside an adapter."""
FILE_LIMIT_BYTES = 64 << 20
WHOLE_BYTES = 64 << 10
"""Tensors up to this size are read whole: norms and biases."""
SAMPLES, SAMPLE_BYTES = 16, 4 << 10
"""Of larger ones so many ranges are read, from the first byte to the last."""
NO_MATTER = frozenset(
    (
        *("_name_or_path", "transformers_version", "architectures", "auto_map", "dtype", "torch_dtype", "use_cache"),
        *("return_dict", "output_hidden_states", "output_attentions", "attn_implementation", "_attn_implementation"),
        *("id2label", "label2id", "task_specific_params", "finetuning_task"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),  # a Trainer makes them the tokenizer's
    )
)
"""Fields of a configuration that do not change what the model computes in training."""
NO_MATTER_OF_ADAPTERS = frozenset(
    ("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version", "init_lora_weights")
)
"""The same of PEFT's; first values lie in the checkpoint."""
FIELDS = {
    "config": ("config.json's ", "transformers"),
    "configs": ("the configuration of ", "transformers"),
    "adapter": ("the adapter's ", "peft"),
    "adapters": ("the adapter of ", "peft"),
    "scales": ("the adapter's scale in ", "peft"),
}
"""Parts of a note that are fields: how a message names one, and whose they are; of further models under their names."""
VERSIONS = "versions"
Note = dict[str, Any]


def note_of(units: Units, *, weights: bool = True) -> Note:
    """Return what a model is built on, as plain data. A collective.

    Args:
        units: the sharded model.
        weights: whether the weights are noted, too; not needed where the checkpoint holds all of them.

    Cost: see above.
    """
    model = units.model
    note, inner = _described(model)
    if weights:
        note["files"] = units.comm.same(_files_note(model, inner) if units.comm.rank == 0 else {})
    if weights and isinstance(model, PeftModel):
        note["frozen"] = frozen_sums(units)
    return note


def note_before_sharding(model: nn.Module) -> Note:
    """Return of `note_of` what is known of a model that is not sharded: its configuration, its files and its adapter."""
    note, inner = _described(model)
    note["files"] = _files_note(model, inner)
    return note


def _described(model: nn.Module) -> tuple[Note, nn.Module]:
    """Return what the configurations of a model and its adapters say, and the first model of transformers inside it."""
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, PeftModel)}  # in a user's, too
    inner: dict[str, nn.Module] = {n: each for n, each in model.named_modules() if isinstance(each, PreTrainedModel)}
    inner = inner or {"": model}
    seen = {id(getattr(module, "config", None)): name for name, module in reversed(inner.items())}
    first, *others = (name for name in inner if name in seen.values())  # parts of a model share its configuration
    note: Note = {VERSIONS: {"transformers": transformers.__version__, "peft": peft.__version__}}
    note["config"] = config_note(inner[first])
    note["configs"] = {name: config_note(inner[name]) for name in others}
    adapters = [(name, _adapters_note(module)) for name, module in adapted.items()]
    if adapters:
        note["adapter"] = adapters[0][1]
        note["adapters"] = {f"{name}.{key}": fields for name, told in adapters[1:] for key, fields in told.items()}
        note["scales"] = _scales_note(model)
    return note, inner[first]


def _adapters_note(model: PeftModel) -> Note:
    return {name: _plain(each.to_dict(), NO_MATTER_OF_ADAPTERS) for name, each in model.peft_config.items()}


def _scales_note(model: nn.Module) -> Note:
    """Return the scale of each adapter in each layer: `set_scale` changes it, and PEFT's configuration does not say so."""
    found: Note = {}
    for name, layer in model.named_modules():
        scales = getattr(layer, "scaling", None) if isinstance(layer, BaseTunerLayer) else None
        if isinstance(scales, dict):  # of LoRA and its kin
            found |= {f"{name}.{key}": float(each) for key, each in scales.items() if isinstance(each, int | float)}
    return found


def config_note(model: nn.Module) -> Note:
    """Return the fields of a model's configuration that matter in training; none for other modules."""
    config: Any = getattr(model, "config", None)
    return dict(_plain(config.to_dict(), NO_MATTER)) if hasattr(config, "to_dict") else {}


def digests_of(files: Sequence[Path]) -> dict[str, str]:
    """Return a digest of each tensor in some safetensors files.

    Raises:
        UserError: if a file is not valid.
    """
    found = {}
    for path in files:
        with TensorFile(path) as file, open(path, "rb") as data:
            size = os.path.getsize(path)
            offsets = sorted({*(entry.offset for entry in file.entries.values()), size})
            stops = dict(itertools.pairwise(offsets))
            for name, entry in file.entries.items():
                stop = stops.get(entry.offset, entry.offset) if entry.numel else entry.offset
                head = f"{entry.dtype} {list(entry.shape)} ".encode()
                found[name] = checksum(head + b"".join(_sampled(data, entry.offset, stop)))
    return found


def _sampled(data: Any, start: int, stop: int) -> Iterator[bytes]:
    """Yield the bytes of [start, stop) of a file: all of a short range, some of a long one."""
    if stop - start <= WHOLE_BYTES:
        data.seek(start)
        yield data.read(stop - start)
        return
    for number in range(SAMPLES):
        data.seek(start + number * (stop - start - SAMPLE_BYTES) // (SAMPLES - 1))
        yield data.read(SAMPLE_BYTES)


def _files_note(model: nn.Module, inner: nn.Module) -> dict[str, str]:
    """Return the digests of the local folder that a model came from; none where there is no such folder."""
    sources = [source for each in (model, inner) if (source := getattr(each, "_ftkit_source", None)) is not None]
    name = getattr(getattr(inner, "config", None), "_name_or_path", "")
    try:
        if sources:
            return digests_of(sources[0].files)
        return digests_of(find_weights(name)) if name and os.path.isdir(name) else {}
    except (UserError, OSError):  # pickles, or a folder that is gone: the model was made of it by other means
        return {}


def _plain(fields: Mapping[str, Any], but: frozenset[str]) -> Any:
    """Return the fields of a configuration as JSON gives them back, sets in order."""
    kept = {key: value for key, value in fields.items() if key not in but}
    return json.loads(
        json.dumps(kept, default=lambda value: sorted(map(str, value)) if isinstance(value, set) else str(value))
    )


def check_base(noted: Any, now: Note, where: str) -> bool:
    """Compare the base of a checkpoint with that of this run.

    Args:
        noted: the checkpoint's note of its base; None where it has none.
        now: the note of this run.
        where: the checkpoint, for messages.

    Returns:
        Whether there was a note to compare with.

    Raises:
        UserError: if the base is another, naming the field or the tensor. BrokenCheckpoint: if the note is none.
    """
    if noted is None:
        return False
    if not isinstance(noted, dict) or not all(isinstance(each, dict) for each in noted.values()):
        raise BrokenCheckpoint(f"{where}: its note of the base is not valid")
    told = [
        f"{named}{key}: {_short(old)} then, {_short(new)} now"
        for part, (named, package) in FIELDS.items()
        for key, old, new in _changes(noted, now, part, package)
    ]
    if not told:
        told = [f"the weights of {name}" for name in changed_tensors(noted.get("files", {}), now.get("files", {}))]
    if not told:
        told = [f"the frozen weights of {name}" for name in _changed_frozen(noted.get("frozen", {}), now.get("frozen", {}))]
    if told:
        more = f"\n  and {len(told) - 5} more" if len(told) > 5 else ""
        listed = "".join(f"\n  {text}" for text in told[:5])
        raise UserError(
            f"{where}: was trained on another base than this one. These have changed:{listed}{more}\nPut the base back as "
            "it was to continue, or start a new run on this one"
        )
    return True


def changed_tensors(noted: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the tensors whose digests differ, and those that only one of two folders has; none if one is not known."""
    if not noted or not now:
        return []
    return [name for name in sorted({*noted, *now}) if noted.get(name) != now.get(name)]


def _changed_frozen(noted: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the frozen tensors that differ. Those in another dtype of computation are not compared."""
    pairs = ((name, str(noted[name]), str(now[name])) for name in sorted(noted.keys() & now.keys()))
    return [name for name, old, new in pairs if old != new and old.partition(" ")[0] == new.partition(" ")[0]]


def uncompared(noted: Any, now: Note) -> list[str]:
    """Return the frozen tensors that `check_base` cannot compare: those of another dtype, and those in one note only."""
    old, new = (each.get("frozen", {}) if isinstance(each, dict) else {} for each in (noted, now))
    if not old or not new:
        return []
    dtypes = [{name: str(told).partition(" ")[0] for name, told in each.items()} for each in (old, new)]
    return [name for name in sorted({*old, *new}) if dtypes[0].get(name) != dtypes[1].get(name)]


def _changes(noted: Note, now: Note, part: str, package: str) -> list[tuple[str, Any, Any]]:
    version = noted.get(VERSIONS, {}).get(package)
    same = version is not None and version == now.get(VERSIONS, {}).get(package)
    if part not in noted or part not in now:  # an earlier version noted the first model only
        return []
    return list(_differences(noted[part], now[part], every=same))


def _differences(old: Any, new: Any, name: str = "", *, every: bool) -> Iterator[tuple[str, Any, Any]]:
    """Yield (field, before, now) of what differs.

    A field that only one version of transformers knows is passed over, unless `every` field counts; an entry of a field's
    dictionary (`rope_parameters`) is not.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        fields = "model_type" in old or "peft_type" in old
        known = old.keys() & new.keys()
        for key in sorted({*old, *new}):
            counts = every and not key.startswith("_") and key not in NO_MATTER if fields else bool(name)
            if key in known or counts:
                yield from _differences(old.get(key), new.get(key), f"{name}.{key}" if name else key, every=every)
    elif old != new and not (name.endswith("problem_type") and None in (old, new)):  # a model's first batch may set it
        yield name, old, new


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def write_base(folder: Path, note: Note) -> None:
    """Write the note of a base beside an adapter."""
    kept = {key: value for key, value in note.items() if key != "frozen"}  # of memory; a merge reads files
    (folder / BASE_FILE).write_text(json.dumps(kept))


def read_base(folder: Path) -> Any:
    """Return the note of a base beside an adapter, or None where there is none.

    Raises:
        BrokenCheckpoint: if the file is not one.
    """
    path = folder / BASE_FILE
    if not path.is_file() or path.is_symlink():
        return None
    try:
        if path.stat().st_size > FILE_LIMIT_BYTES:
            raise ValueError("too large")
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenCheckpoint(f"{path}: not a note of a base ({error})") from error
