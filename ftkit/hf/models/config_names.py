"""Names that a user gives to transformers: fields of a configuration, fields and special tokens of a tokenizer.

transformers takes any field and adds any token, so that a misspelled one changes nothing, or trains a token that no
vocabulary has. Here each must match. Configurations of model folders are read as they are, and those of their fields
are named that are spelled nearly as one that is read. Of a file that replaces a model's
configuration such fields are refused that are spelled nearly as one that it lacks, and the others named: such a file may
be older than transformers. Of a tokenizer's folder those fields are refused that are spelled nearly as one that is read, and
what its files say twice and differently; of a tokenizer without `tokenizer.json` the vocabulary is not known.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PretrainedConfig
from transformers.modeling_rope_utils import RopeParameters
from transformers.utils import cached_file

from ftkit.errors import UserError

logger = logging.getLogger(__name__)

TOKENS = ("bos", "eos", "pad", "decoder_start", "forced_bos", "forced_eos")
GENERATION = tuple(f"{name}_token_id" for name in TOKENS)
"""Fields of every saved configuration; a class may read them from the generation configuration only."""
READ_BY_MODELS = {"decoder_start_token_id", "pad_token_id"}
"""Of these an encoder-decoder's own forward reads from its configuration."""
FORCED = ("forced_bos_token_id", "forced_eos_token_id")
"""Of these transformers drops where a class has no such field."""

LEGACY = ("torch_dtype", "attn_implementation", "_attn_implementation", "auto_map")
"""Fields that transformers still reads and that no configuration has."""

ROTATION = ("rope_theta", "rope_scaling")
"""Two more, which it reads where a class has `rope_parameters`."""

OF_FILES = ("architectures", "transformers_version", "_name_or_path", "_commit_hash", "quantization_config")
"""What stands in files and says nothing of the model itself."""

ROPE = (*RopeParameters.__annotations__, "type", "mrope_section", "mrope_interleaved")
"""What may stand in `rope_parameters`."""

TOKENIZER_FIELDS = (
    *("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"),
    *("add_bos_token", "add_eos_token", "chat_template", "model_max_length", "padding_side", "truncation_side"),
    *("add_prefix_space", "additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"),
)
"""Fields of `tokenizer_config.json` that change what is trained on."""
CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
LIKE_A_FIELD = 0.85
"""How alike the name of a field must be to one of these to be taken for it."""


def check_fields(fields: Mapping[str, Any], *, generation: bool = True) -> None:
    """Compare the fields of an inline configuration with those of its class, parts of it (`text_config`) included.

    Args:
        fields: the configuration's fields, `model_type` among them
        generation: whether the model's generation configuration is made of it

    Raises:
        UserError: a field that the class does not know, with the nearest
    """
    _check(fields, AutoConfig.for_model(str(fields["model_type"])), "model.config", generation=generation)


def check_file(fields: Mapping[str, Any], model_type: str, file: str, *, replaces: bool) -> None:
    """Compare the fields of a file with those of its class.

    Args:
        fields: the file's fields.
        model_type: model type of a class of transformers.
        file: name of the file, for messages.
        replaces: whether the file takes the place of a model's own configuration. The model's own is read as it is, and
            a field that looks misspelt is named in a warning.

    Raises:
        UserError: a field that the class does not know, and that is spelled nearly as one which the file lacks.
    """
    unread, config = list[str](), AutoConfig.for_model(model_type)
    known = [*config.to_dict()]
    try:
        _check(fields, config, file, unread)
    except UserError as error:
        if replaces:
            raise
        logger.warning("%s", error)
    alike = [name for name in unread if replaces or difflib.get_close_matches(name, known, 1, cutoff=LIKE_A_FIELD)]
    if alike:
        logger.warning("%s: read by nobody: %s", file, ", ".join(alike))


def check_generation(config: GenerationConfig | str | os.PathLike[str], revision: str | None = None) -> None:
    """Compare the fields of a generation configuration with those that transformers reads.

    Args:
        config: the folder or hub name that it comes from, or its file: of some, transformers drops what it does not know,
            so the file is read itself. Or an object.
        revision: revision of the hub name.

    Raises:
        UserError: a field that the class does not know, and that is spelled nearly as one which the file lacks.
    """
    names, unread = vars(GenerationConfig()), list[str]()
    if isinstance(config, GenerationConfig):
        place, fields = "generation_config", config.to_diff_dict()
    else:
        file = Path(config)
        folder, name = (file.parent, file.name) if file.is_file() else (config, "generation_config.json")
        found = cached_file(
            folder,
            name,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        place, fields = f"{folder}: {name}", _content(Path(found)) if found is not None else {}
    given = [name for name, value in fields.items() if value is not None]
    for name in (each for each in fields if each[0] != "_"):
        if name not in names and not _is_passed(name, names, dict.fromkeys(given), unread):
            (close,) = difflib.get_close_matches(name, names, 1)
            raise UserError(
                f"{place} has a field {name!r}, which is not read; did you mean {close!r}? Correct the name or remove it."
            )
    if unread:
        logger.warning("%s has fields that are not read: %s", place, ", ".join(unread))


def check_changes(changes: Mapping[str, Any], config: PretrainedConfig, *, generation: bool = True) -> None:
    """Compare fields that are set beside a configuration (`load_model(folder, field=...)`) with those that it has.

    Args:
        changes: the fields.
        config: the configuration.
        generation: whether the model's generation configuration is made of it.

    Raises:
        UserError: a field that the configuration does not have, with the nearest, or a part of a rotation
    """
    _check(changes, config, "load_model", makes=False, generation=generation)
    _check_rotation(changes, config, "load_model")


def _check_rotation(changes: Mapping[str, Any], config: PretrainedConfig, path: str) -> None:
    """Stop where a part of a rotation is set, which would take the place of the whole or be read by nobody."""
    for name, value in changes.items():
        part = getattr(config, name, None) if name in config.sub_configs else None
        if isinstance(part, PretrainedConfig) and isinstance(value, Mapping):
            _check_rotation(value, part, f"{path}.{name}")
    rope = getattr(config, "rope_parameters", None)
    said = changes.get("rope_parameters", changes.get("rope_scaling"))
    without_base = isinstance(said, Mapping) and "rope_theta" not in said and not any(map(_is_mapping, said.values()))
    base_alone = "rope_theta" in changes and "rope_theta" not in vars(config)
    if not isinstance(rope, Mapping) or not (without_base or base_alone):
        return
    whole = dict(rope)  # of each type of layer, or of all
    if "rope_theta" in rope:
        whole |= said if isinstance(said, Mapping) else {}
        whole["rope_theta"] = changes.get("rope_theta", rope["rope_theta"])
    if "rope_theta" in rope or any(map(_is_mapping, rope.values())):
        raise UserError(
            f"{path}: a configuration of {config.model_type} has its rotation in rope_parameters, rope_theta with the "
            f"rest, and reads it nowhere else: give rope_parameters={whole!r}"
        )


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _check(
    fields: Mapping[str, Any],
    known: PretrainedConfig,
    path: str,
    unread: list[str] | None = None,
    *,
    makes: bool = True,
    generation: bool = True,
) -> None:
    """Stop for fields that are not known.

    Args:
        fields: fields to check.
        known: configuration of the class, whose fields are known.
        path: where the fields stand, for messages.
        unread: gets the unknown fields that resemble no missing one; None: these are refused, too.
        makes: whether a configuration is made of the fields; else they are set on one that is there.
        generation: whether the model's generation configuration is made of it.
    """
    names = {*known.to_dict(), *vars(known), *known.attribute_map, *LEGACY, "model_type"}
    kind = type(known)
    own = {name for name in dir(kind) if getattr(getattr(kind, name), "fset", None) is not None}  # num_labels
    names |= own.difference(ROTATION)  # which every class has
    parts = [getattr(known, name, None) for name in known.sub_configs] if makes else []  # a flat file fills them, too
    if any("rope_parameters" in vars(each) for each in (known, *parts) if isinstance(each, PretrainedConfig)):
        names |= {*ROTATION, "rope_parameters"}
    encodes = getattr(known, "is_encoder_decoder", False)
    names |= {*GENERATION}.difference(FORCED) if generation else READ_BY_MODELS if encodes else set()
    for name, value in fields.items():
        if name in GENERATION and name not in names:
            if value is not None and unread is None:
                raise UserError(
                    f"{path}.{name}: a configuration of {known.model_type} has no such field; how a model generates is said "
                    "by generation_config.json in its folder. Write it there, and remove it here."
                )
            if value is not None and unread is not None:
                unread.append(name)
        elif name not in names and not _is_passed(name, names, fields, unread):
            close = difflib.get_close_matches(name, names, 1)
            meant = f"did you mean {close[0]!r}? " if close else ""
            raise UserError(
                f"{path}.{name}: a configuration of {known.model_type} has no such field; {meant}transformers would take "
                "it and not read it. Correct the name or remove it."
            )
        if name in ("rope_parameters", "rope_scaling") and isinstance(value, Mapping):
            _check_rope(value, f"{path}.{name}", unread)
        part = getattr(known, name, None) if name in known.sub_configs else None
        if isinstance(part, PretrainedConfig) and isinstance(value, Mapping):
            _check(value, part, f"{path}.{name}", unread, generation=generation)


def _is_passed(name: str, names: Iterable[str], fields: Mapping[str, Any], unread: list[str] | None) -> bool:
    """Return whether an unknown name may stay, in `unread`: it resembles none that is not there besides."""
    if unread is None:
        return False
    close = difflib.get_close_matches(name, names, 1, cutoff=LIKE_A_FIELD)
    if close and close[0] not in fields:
        return False
    if name not in OF_FILES:
        unread.append(name)
    return True


def _check_rope(fields: Mapping[str, Any], path: str, unread: list[str] | None) -> None:
    """Compare the keys of rope parameters, those of each type of layer included, with what transformers reads."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            _check_rope(value, f"{path}.{name}", unread)
        elif name not in ROPE and not _is_passed(name, ROPE, fields, unread):
            close = difflib.get_close_matches(name, ROPE, 1)
            meant = f"did you mean {close[0]!r}? " if close else ""
            raise UserError(f"{path}.{name}: rope parameters have no such key; {meant}Correct the name or remove it.")


def check_tokenizer_fields(folder: str) -> None:
    """Look at what the files of a tokenizer say: each key once, no field that is nearly one that is read, one template.

    Args:
        folder: the tokenizer's folder; a hub name is passed over

    Raises:
        UserError: with the field that was meant, or both places of what is said twice
    """
    place = Path(folder)
    stated, mapped = _content(place / CONFIG), _content(place / MAP)
    if "added_tokens_decoder" in stated:
        mapped = {}  # then transformers does not read it
    given = {**stated, **mapped}
    for file, fields in ((CONFIG, stated), (MAP, mapped)):
        for name in fields:
            close = difflib.get_close_matches(name, TOKENIZER_FIELDS, 1, cutoff=LIKE_A_FIELD)
            if close and name not in TOKENIZER_FIELDS and (close[0] not in given or _misspelt(name, close[0])):
                raise UserError(
                    f"{folder}/{file}: {name!r} is not read; did you mean {close[0]!r}? Correct the name or remove it."
                )
    for name in TOKENIZER_FIELDS:
        one, other = _token(stated.get(name)), _token(mapped.get(name))
        if one and other and one != other:
            raise UserError(
                f"{folder}: {CONFIG} has the {name} {one!r}, and {MAP} {other!r}, which transformers would take. Correct "
                "one of them."
            )
    written = _templates(stated.get("chat_template"))
    files = {"default": place / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((place / "additional_chat_templates").glob("*.jinja"))}
    places = {name: file.relative_to(place) for name, file in files.items()}
    read = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    for name, text in written.items() if read else ():
        if name not in read:
            raise UserError(
                f"{folder}: the chat template {name!r} in {CONFIG} is not read beside {places[next(iter(read))]}. "
                f"Move it to additional_chat_templates/{name}.jinja or remove it."
            )
        if text.strip() != read[name].strip():
            raise UserError(
                f"{folder}: has two chat templates that differ: {places[name]}, which transformers reads, and the one in "
                f"{CONFIG}, which it does not. Remove one of them."
            )


def _content(file: Path) -> dict[str, Any]:
    """Return the object of a JSON file; an empty one where there is none.

    Raises:
        UserError: a key of it is given twice, with different values
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        for key, value in pairs:
            if found[key] != value:
                raise UserError(f"{file}: has the key {key!r} twice; keep one of them")
        return found

    try:
        content = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=once)
    except UserError:
        raise
    except (OSError, ValueError, RecursionError):
        return {}  # transformers has read it, or said what is wrong
    return content if isinstance(content, dict) else {}


def _misspelt(name: str, meant: str) -> bool:
    """Return whether a field can only be a slip of the pen: transformers takes any `…_token` for one of the model's own."""
    return abs(len(name) - len(meant)) <= 1 and not name.endswith("_token")


def _token(stated: Any) -> str:
    """Return a special token of a file as text; "" for what is none."""
    text = stated.get("content") if isinstance(stated, dict) else stated
    return text if isinstance(text, str) else ""


def _templates(stated: Any) -> dict[str, str]:
    """Return the chat templates of `tokenizer_config.json` by their names."""
    if isinstance(stated, str):
        return {"default": stated}
    listed = [each for each in stated if isinstance(each, dict)] if isinstance(stated, list) else []
    return {str(each.get("name")): str(each.get("template")) for each in listed}


def check_template_files(folder: str) -> None:
    """Stop where a tokenizer has no chat template and its folder a file that is one by its name, which is not read.

    Args:
        folder: folder of a tokenizer without a chat template; a hub name is passed over

    Raises:
        UserError: with the file
    """
    place = Path(folder)
    found = [*sorted(place.glob("*.jinja")), *sorted(place.glob("chat_template.json"))]
    if found:
        raise UserError(
            f"{folder}: the tokenizer has no chat template, and {found[0].name} is not read. Write the template to "
            f"chat_template.jinja, or move {found[0].name} away to train on plain text."
        )


def check_special_tokens(tokenizer: Any, folder: str) -> None:
    """Compare the special tokens that a tokenizer's folder names with its vocabulary.

    Args:
        tokenizer: the tokenizer as transformers loaded it
        folder: the folder it comes from; a hub name is passed over

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
    for name, token in (*tokenizer.special_tokens_map.items(), *_extra_tokens(Path(folder))):
        for text in map(str, token if isinstance(token, (list, tuple)) else [token]):
            if text not in known:
                close = difflib.get_close_matches(text, (word for word in known if word[:1] == text[:1]), 1)
                meant = f"did you mean {close[0]!r}? " if close else ""
                raise UserError(
                    f"{folder}: the tokenizer's {name} {text!r} is in no vocabulary; {meant}transformers would add it as a "
                    "token that the model was never trained on. Correct tokenizer_config.json or special_tokens_map.json."
                )


def _extra_tokens(folder: Path) -> list[tuple[str, list[str]]]:
    """Return the lists of further special tokens in the files of a tokenizer; those that its class adds are not in them."""
    stated = _content(folder / CONFIG)
    files = [stated] if "added_tokens_decoder" in stated else [stated, _content(folder / MAP)]
    names = ("extra_special_tokens", "additional_special_tokens")
    lists = [(name, fields[name]) for fields in files for name in names if isinstance(fields.get(name), list)]
    return [(name, [text for text in map(_token, tokens) if text]) for name, tokens in lists]
