"""Read the configuration of a model, and report errors of transformers with the file that they concern.

A `config.json` may contain anything, and transformers raises many kinds of errors over it. `reading` converts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from ftkit.errors import UserError

NEEDED = "needed: a folder with config.json, a hub id that can be reached, or model.config"
REASON_CHARACTERS = 500


@contextmanager
def reading(where: str, failure: str, advice: str = "") -> Iterator[None]:
    """Convert any error that other libraries raise over a user's file to a `UserError` with their reason.

    Args:
        where: File or folder, the beginning of the message.
        failure: What was not possible.
        advice: What to change.

    Raises:
        UserError: The body raised an error.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        text = text if len(text) <= REASON_CHARACTERS else f"{text[:REASON_CHARACTERS]}…"
        if not text or not isinstance(error, (OSError, ValueError, StrictDataclassError)):
            text = f"{type(error).__name__}: {text}".removesuffix(": ")
        raise UserError("; ".join(part for part in (f"{where}: {failure} ({text})", advice) if part)) from error


def read_config(
    source: str | None,
    config: PretrainedConfig | Mapping[str, Any] | str | None,
    revision: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> PretrainedConfig:
    """Return the configuration of a model.

    Args:
        source: Folder or hub name with the weights, or None.
        config: Replaces the folder's configuration: an object, its fields with `model_type`, or a path.
        revision: Revision of the hub name.
        trust_remote_code: Run Python code from the folder.

    Raises:
        UserError: There is no configuration, transformers cannot read it, the folder contains an adapter, or the model is
            quantised.
    """
    loaded = config if isinstance(config, PretrainedConfig) else _read(source, config, revision, trust_remote_code)
    if getattr(loaded, "quantization_config", None):
        raise UserError(f"{config_file(source, config)}: a quantised model; ftkit trains full-precision bases only")
    return loaded


def _read(
    source: str | None, config: Mapping[str, Any] | str | None, revision: str | None, trust_remote_code: bool
) -> PretrainedConfig:
    failure = "no model configuration that transformers can read"
    if isinstance(config, Mapping):
        if "model_type" not in config:
            raise UserError("model.config: model_type is missing (llama, gpt2, t5, ...)")
        with reading("model.config", failure):
            fields = dict(config)
            made: PretrainedConfig = AutoConfig.for_model(fields.pop("model_type"), **fields)
            return made
    if source is None and config is None:
        raise UserError("a model needs a folder, a hub name or a config")
    if source is not None and config is None and (Path(source) / "adapter_config.json").is_file():
        raise UserError(
            f"{source}: contains an adapter, and a whole model is needed. Load its base and add the adapter with "
            "peft.PeftModel.from_pretrained(model, FOLDER, is_trainable=True), or merge the adapter first "
            "(ftkit export ADAPTER -o OUT --merge-adapter) and load the merged folder"
        )
    where = config_file(source, config)
    with reading(where, failure, NEEDED):
        loaded: PretrainedConfig = AutoConfig.from_pretrained(
            str(config or source), revision=revision, trust_remote_code=trust_remote_code
        )
    return loaded


def config_file(source: str | None, config: PretrainedConfig | Mapping[str, Any] | str | None) -> str:
    """Return how errors name the origin of a configuration; arguments as of `read_config`."""
    where = config if isinstance(config, str) else source if config is None else None
    if where is None:
        return "model.config"
    file = Path(where) / "config.json"
    return str(file) if file.is_file() else where
