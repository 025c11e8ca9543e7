"""The configuration of a model as a user gives it: read, and looked at before anything is made of it.

A `config.json` may hold anything. transformers, and the classes that it makes of one, raise whatever comes of that: a
division by zero, a KeyError, an error of torch. `reading` is the one guard around them: it turns every error into one for
the user, with the file and, where that can be found, the key. Only calls that hand the user's values to others stand within.

Refused besides: numbers of layers, labels, heads and experts that would take all memory before anything could be counted, a
model without layers, buffers of many GiB, and folders with a FIFO or a device in them, which would never be read to the end.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from ftkit.errors import UserError
from ftkit.hf.models.config_names import check_fields, check_file

NEEDED = "needed: a folder with config.json, a hub id that can be reached, or model.config"
MOST_LAYERS = 10_000
MOST_COUNTED = 100_000
COUNTED = re.compile(r"(num|n)_(\w*_)?(layers?|blocks?|labels|heads?|experts)")
"""Fields for each of which something is made, one by one."""
MOST_BUFFER_BYTES = 4 << 30
REASON_CHARACTERS = 500


@contextmanager
def reading(where: str, does: str, fields: Mapping[str, Any] | None = None, advice: str = "") -> Iterator[None]:
    """Let whatever others' code raises over a user's file be a `UserError`.

    Args:
        where: file or folder with which the error begins.
        does: what was not possible.
        fields: fields of the configuration that is read; the error may name one of them.
        advice: what to change.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        keys = "; ".join(suspects(fields, error)) if fields else ""
        told = f"{where}: {does} ({reason(error)})"
        raise UserError("; ".join(part for part in (told, keys, advice) if part)) from error


def reason(error: Exception) -> str:
    """Return the text of an error in one line, with its kind where the text alone says nothing."""
    text = " ".join(str(error).split())
    text = text if len(text) <= REASON_CHARACTERS else f"{text[:REASON_CHARACTERS]}…"
    speaks = text and isinstance(error, (OSError, ValueError, StrictDataclassError))
    return text if speaks else f"{type(error).__name__}: {text}".removesuffix(": ")


def read_config(
    source: str | None,
    config: PretrainedConfig | Mapping[str, Any] | str | None,
    revision: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> PretrainedConfig:
    """Return the configuration of a model.

    Args:
        source: folder or hub name with the weights, or None.
        config: replaces the folder's configuration: an object, its fields with `model_type`, or a path.
        revision: revision of the hub name.
        trust_remote_code: whether Python from the folder is run.

    Raises:
        UserError: there is none, transformers cannot read it, or `config` has a field that nobody reads.
    """
    if isinstance(config, PretrainedConfig):
        return config
    if isinstance(config, Mapping):
        fields = dict(config)
        if "model_type" not in fields:
            raise UserError("model.config: model_type is missing (llama, gpt2, t5, ...)")
        _check_numbers(fields, "model.config")
        with reading("model.config", "no model configuration that transformers can read", fields):
            check_fields(fields, generation=source is None)
            return AutoConfig.for_model(fields.pop("model_type"), **fields)
    where = config or source
    if where is None:
        raise UserError("a model needs a folder, a hub name or a config")
    file, fields = check_folder(where)
    if not fields and (adapted := base_of_adapter(where)) is not None:
        raise UserError(
            f"{where}: is an adapter of {adapted}, and a whole model is needed. Name that model, or merge the adapter "
            "first (ftkit export ADAPTER OUT --merge-adapter) and name the merged folder"
        )
    with reading(file, "no model configuration that transformers can read", fields, NEEDED if not fields else ""):
        loaded = AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=trust_remote_code)
        if fields and type(loaded).__module__.startswith("transformers."):
            check_file(fields, loaded.model_type, file, replaces=config is not None)
    if getattr(loaded, "quantization_config", None):
        raise UserError(f"{where}: a quantised model; ftkit trains full-precision bases only")
    return loaded


def config_file(source: str | None, config: PretrainedConfig | Mapping[str, Any] | str | None) -> str:
    """Return how errors name where a configuration is from; arguments as of `read_config`."""
    if isinstance(config, Mapping):
        return "model.config"
    where = config if isinstance(config, str) else getattr(config, "_name_or_path", None) or source
    if not where:
        return "the config"
    file = Path(where) / "config.json"
    return str(file) if file.is_file() else where


def check_folder(where: str) -> tuple[str, dict[str, Any]]:
    """Look at a model's folder, or at the file of a configuration, before transformers does.

    Returns:
        The name of the file with the configuration, as errors name it, and its fields; `where` and none for a hub name, and
        for a file that cannot be read, of which transformers says more.

    Raises:
        UserError: for numbers that nothing could be made of, and for files that are none.
    """
    path = Path(where)
    inside: list[Path] = []
    with suppress(OSError, ValueError):
        inside = list(path.iterdir()) if path.is_dir() else []
        path = path / "config.json" if path.is_dir() else path
    for each in (path, *inside):
        _refuse_special(each)
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return where, {}
    if not isinstance(fields, dict):
        raise UserError(f"{path}: no model configuration: it holds {str(fields)[:40]}, an object with model_type is needed")
    _check_numbers(fields, str(path))
    return str(path), fields


def base_of_adapter(folder: str) -> str | None:
    """Return what an adapter's configuration in a local folder calls its base, or None where there is none."""
    try:
        return str(json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def check_layers(config: PretrainedConfig, where: str) -> None:
    """Refuse a model without layers, or with more than anything could be made of.

    Raises:
        UserError: naming the key.
    """
    layers = getattr(config.get_text_config(), "num_hidden_layers", 1)
    if isinstance(layers, int) and not 1 <= layers <= MOST_LAYERS:
        raise UserError(f"{where}: num_hidden_layers is {layers}; 1 to {MOST_LAYERS:,} are needed")


def check_buffers(model: nn.Module, where: str) -> None:
    """Refuse buffers on meta that would take many GiB on the host.

    Raises:
        UserError: naming the first.
    """
    for name, buffer in model.named_buffers():
        if buffer.numel() * buffer.element_size() > MOST_BUFFER_BYTES:
            size = buffer.numel() * buffer.element_size() / 2**30
            raise UserError(
                f"{where}: {name} would be a buffer of {size:,.0f} GiB ({list(buffer.shape)}): a number in this "
                "configuration is too large"
            )


def suspects(fields: Mapping[str, Any], error: Exception) -> list[str]:
    """Return the fields that an error may be about, with values: those that it names, that look odd, or that it quotes."""
    text = str(error)
    named = [key for key in fields if key != "model_type" and re.search(rf"(?<!\w){re.escape(key)}(?!\w)", text)]
    named = named or _odd(fields) or [key for key, value in fields.items() if any(each in text for each in _telling(value))]
    return [f"{key} is {fields[key]!r:.60}" for key in named[:3]]


def _telling(value: Any) -> list[str]:
    """Return how an error may quote a value, or what is in it: texts, and numbers that are like no other."""
    if isinstance(value, Mapping):
        return [each for inner in value.values() for each in _telling(inner)]
    if isinstance(value, str):
        return [f"'{value}'"] if value else []
    return [str(value)] if isinstance(value, int) and abs(value) >= 1000 else []


def _odd(fields: Mapping[str, Any]) -> list[str]:
    """Return the fields whose values are of another kind than their class's defaults, or not above 0 where those are."""
    known: dict[str, Any] = {}
    with suppress(Exception):  # of others' classes, which may want anything to be made
        known = AutoConfig.for_model(fields["model_type"]).to_dict()
    found = []
    for key, value in fields.items():
        usual: Any = known.get(key)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        wants_number = isinstance(usual, (int, float)) and not isinstance(usual, bool)
        small = is_number and wants_number and usual > 0 and value <= 0 and not key.endswith("_id")
        if small or (usual is not None and value is not None and is_number != wants_number):
            found.append(key)
    return found


def _check_numbers(fields: Mapping[str, Any], where: str, path: str = "") -> None:
    """Refuse numbers of which so many things would be made that no memory holds them, at any depth."""
    for key, value in fields.items():
        if isinstance(value, int) and value > MOST_COUNTED and COUNTED.fullmatch(str(key)):
            raise UserError(f"{where}: {path}{key} is {str(value)[:30]}; at most {MOST_COUNTED:,} can be made")
        if isinstance(value, Mapping):
            _check_numbers(value, where, f"{path}{key}.")


def _refuse_special(path: Path) -> None:
    """Refuse what is neither a file nor a folder: reading it would never end."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return  # it is not there
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UserError(f"{path}: is neither a file nor a folder, and a model's folder holds nothing else; remove it")
