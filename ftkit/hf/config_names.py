"""Names that a user gives to transformers: fields of a configuration, fields and special tokens of a tokenizer.

transformers takes any field and adds any token, so that a misspelled one changes nothing, or trains a token that no
vocabulary has. Here each must match. Configurations of the hub are read as they are. Of a tokenizer's folder those fields
are refused that are spelled nearly as one that is read; of a tokenizer without `tokenizer.json` the vocabulary is not known.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from ftkit.errors import UserError

TOKENS = ("bos", "eos", "pad", "decoder_start", "forced_bos", "forced_eos")
GENERATION = tuple(f"{name}_token_id" for name in TOKENS)
"""Fields of every saved configuration; a class may read them from the generation configuration only."""

LEGACY = ("rope_theta", "rope_scaling", "torch_dtype", "attn_implementation", "_attn_implementation", "auto_map")
"""Fields that transformers still reads and that no configuration has."""

ROPE = (*RopeParameters.__annotations__, "type", "mrope_section", "mrope_interleaved")
"""What may stand in `rope_parameters`."""

TOKENIZER_FIELDS = (
    *("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"),
    *("add_bos_token", "add_eos_token", "chat_template", "model_max_length", "padding_side", "truncation_side"),
    *("add_prefix_space", "additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"),
)
"""Fields of `tokenizer_config.json` that change what is trained on."""
LIKE_A_FIELD = 0.85
"""How alike the name of a field must be to one of these to be taken for it."""


def check_fields(fields: Mapping[str, Any]) -> None:
    """Compare the fields of an inline configuration with those of its class, parts of it (`text_config`) included.

    Args:
        fields: with `model_type`

    Raises:
        UserError: a field that the class does not know, with the nearest
    """
    _check(fields, AutoConfig.for_model(str(fields["model_type"])), "model.config")


def check_changes(changes: Mapping[str, Any], config: PretrainedConfig) -> None:
    """Compare fields that are set beside a configuration (`load_model(folder, field=...)`) with those that it has.

    Raises:
        UserError: a field that the configuration does not have, with the nearest
    """
    _check(changes, config, "load_model")


def _check(fields: Mapping[str, Any], known: PretrainedConfig, path: str) -> None:
    names = {*known.to_dict(), *vars(known), *known.attribute_map, *GENERATION, *LEGACY, "model_type"}
    kind = type(known)
    names |= {name for name in dir(kind) if getattr(getattr(kind, name), "fset", None) is not None}  # num_labels
    for name, value in fields.items():
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            meant = f"did you mean {close[0]!r}? " if close else ""
            raise UserError(
                f"{path}.{name}: a configuration of {known.model_type} has no such field; {meant}transformers would take "
                "it and not read it. Correct the name or remove it."
            )
        if name in ("rope_parameters", "rope_scaling") and isinstance(value, Mapping):
            _check_rope(value, f"{path}.{name}")
        part = getattr(known, name, None) if name in known.sub_configs else None
        if isinstance(part, PretrainedConfig) and isinstance(value, Mapping):
            _check(value, part, f"{path}.{name}")


def _check_rope(fields: Mapping[str, Any], path: str) -> None:
    """Compare the keys of rope parameters, those of each type of layer included, with what transformers reads."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            _check_rope(value, f"{path}.{name}")
        elif name not in ROPE:
            close = difflib.get_close_matches(name, ROPE, 1)
            meant = f"did you mean {close[0]!r}? " if close else ""
            raise UserError(f"{path}.{name}: rope parameters have no such key; {meant}Correct the name or remove it.")


def check_tokenizer_fields(folder: str) -> None:
    """Look for fields in `tokenizer_config.json` that are nearly spelled as one that is read, and for two chat templates.

    Args:
        folder: names of the hub are passed over

    Raises:
        UserError: with the field that was meant, or both places of the template
    """
    try:
        stated = json.loads((Path(folder) / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = Path(folder) / "chat_template.jinja"
        other = template.read_text(encoding="utf-8") if template.is_file() else None
    except (OSError, ValueError):
        return  # transformers has read it, or said what is wrong
    if not isinstance(stated, dict):
        return
    for name in stated:
        close = difflib.get_close_matches(name, TOKENIZER_FIELDS, 1, cutoff=LIKE_A_FIELD)
        if close and name not in TOKENIZER_FIELDS and close[0] not in stated:
            raise UserError(
                f"{folder}/tokenizer_config.json: {name!r} is read by nobody; did you mean {close[0]!r}? Correct the name "
                "or remove it."
            )
    written = stated.get("chat_template")
    if other is not None and isinstance(written, str) and written.strip() != other.strip():
        raise UserError(
            f"{folder}: has two chat templates that differ: chat_template.jinja, which transformers reads, and the one in "
            "tokenizer_config.json, which it does not. Remove one of them."
        )


def check_special_tokens(tokenizer: Any, folder: str) -> None:
    """Compare the special tokens that a tokenizer's folder names with its vocabulary.

    Args:
        tokenizer: as transformers loaded it
        folder: where from; names of the hub are passed over

    Raises:
        UserError: a token that no vocabulary has, with the nearest
    """
    try:
        content = json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))
        words = content["model"]["vocab"]
        known = set(words) if isinstance(words, dict) else {str(word[0]) for word in words}
        known |= {str(token["content"]) for token in content.get("added_tokens") or []}
        for name in ("added_tokens.json", "tokenizer_config.json"):
            if (Path(folder) / name).is_file():
                stated = json.loads((Path(folder) / name).read_text(encoding="utf-8"))
                added = stated.get("added_tokens_decoder") or {}
                known |= set(stated) if name == "added_tokens.json" else {str(token["content"]) for token in added.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return  # another kind of tokenizer: transformers has read it
    for name, token in tokenizer.special_tokens_map.items():
        for text in map(str, token if isinstance(token, (list, tuple)) else [token]):
            if text not in known:
                close = difflib.get_close_matches(text, (word for word in known if word[:1] == text[:1]), 1)
                meant = f"did you mean {close[0]!r}? " if close else ""
                raise UserError(
                    f"{folder}: the tokenizer's {name} {text!r} is in no vocabulary; {meant}transformers would add it as a "
                    "token that the model was never trained on. Correct tokenizer_config.json or special_tokens_map.json."
                )
