"""What pydantic found wrong with a recipe, said in the words of this project and with the place where it stands.

Each finding becomes one line: place, key, what was found, what is needed, and for an unknown key or word the nearest
known one. The branches of a union (`auto` or a number) become one line instead of one each. It knows the shape of the
recipe only through the class it is handed. What it costs: pydantic's kinds of error are spelled out here, and a kind
that is not listed keeps pydantic's own words.
"""

from __future__ import annotations

import difflib
import re
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo

from ftkit.config.foreign_keys import NOTES, PEERS
from ftkit.config.yaml_lines import Document, KeyPath, Problem, dotted

_QUANTISED = (
    "quantised bases are not supported: ftkit saves memory by sharding plain weights over the ranks; "
    "remove the key, or train an adapter (adapter: {rank: 16}) on the plain model"
)
_LAUNCHER = (
    "other launchers are not supported: ftkit starts its own ranks on one box, and joins those of torchrun or Slurm; "
    "remove the key and say how many with `ranks:` or --nproc"
)
_HELD_OUT = (
    "rows to evaluate come from a file (eval.path) or are a share of data's own (eval.share); write a split or a set of the "
    "hub to a file first"
)
REFUSED_KEYS = {
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization", "quantization_config", "quantize"), _QUANTISED),
    **dict.fromkeys(("bnb_4bit_quant_type", "gptq", "awq", "qlora", "bits"), _QUANTISED),
    **dict.fromkeys(("launcher", "mpi", "hostfile", "deepspeed", "fsdp"), _LAUNCHER),
    **dict.fromkeys(("eval.split", "eval.name"), _HELD_OUT),
}


_NEEDS = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
    **dict.fromkeys(("model_type", "dict_type", "model_attributes_type", "dataclass_type"), "a section with keys"),
    "string_type": "text (quote it)",
}


def problems(error: ValidationError, document: Document, root: type[BaseModel]) -> list[Problem]:
    """Turn what pydantic found into problems with places, in the order of the file.

    Args:
        error: The error that `root.model_validate` raised.
        document: What was validated.
        root: The class of the whole recipe.
    """
    grouped: dict[KeyPath, list[Any]] = {}
    for found in error.errors(include_url=False):
        path = found["loc"] or _first_named(found)
        grouped.setdefault(_written_path(path, document.values), []).append(found)
    listed = []
    for path, founds in grouped.items():
        message = _messages(founds, path, root)
        listed.append(Problem(document.place(path), dotted(path), message))
    return sorted(listed, key=_order)


def _order(problem: Problem) -> tuple[bool, int]:
    line = problem.place.rsplit(":", 1)[-1]
    return (problem.place.startswith("--set"), int(line) if line.isdecimal() else 0)


def _first_named(found: Any) -> tuple[str, ...]:
    """Return the key with which a problem of several keys begins: such a one has no place of its own."""
    named = re.match(r"([a-z_]+\.[a-z_.]+) ", str((found.get("ctx") or {}).get("error", "")))
    return tuple(named[1].split(".")) if named else ()


def _written_path(location: tuple[str | int, ...], values: Any) -> KeyPath:
    """Cut the names of union branches, which pydantic appends, off a location."""
    path: list[str | int] = []
    for part in location:
        if not isinstance(values, dict) and not (isinstance(values, list) and isinstance(part, int)):
            break
        path.append(part)
        keyed: dict[str | int, Any] = values if isinstance(values, dict) else dict(enumerate(values))
        values = keyed.get(part)
    return tuple(path)


def _messages(founds: list[Any], path: KeyPath, root: type[BaseModel]) -> str:
    """Say what was found at one path; the branches of a union share the word `found`."""
    texts = list(dict.fromkeys(_message(found, path, root) for found in founds))
    lead = f"found {_brief(founds[0]['input'])}, needs "
    return " or ".join([texts[0], *(text.removeprefix(lead) for text in texts[1:])])


def _message(found: Any, path: KeyPath, root: type[BaseModel]) -> str:
    kind, context, value = found["type"], found.get("ctx") or {}, _brief(found["input"])
    if kind == "missing":
        return "is missing"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return _unknown(path, root)
    if kind == "value_error":
        return str(context["error"]).removeprefix(f"{dotted(path)} ")
    if kind in _NEEDS:
        return f"found {value}, needs {_NEEDS[kind]}"
    text = found["msg"].replace("Input should be", "needs", 1)
    if kind == "literal_error":
        allowed = [word.strip(" '") for word in context["expected"].replace(" or ", ", ").split(",")]
        text += _did_you_mean(str(found["input"]), allowed)
    return f"found {value}, {text}"


def _unknown(path: KeyPath, root: type[BaseModel]) -> str:
    """Say what to write instead of an unknown key: a key of another section, one spelled nearly so, or all of them."""
    key, section = str(path[-1]), _section(path[:-1], root)
    if refused := REFUSED_KEYS.get(dotted(path)) or REFUSED_KEYS.get(key):
        return refused
    elsewhere = [name for name, inner in _sections(root).items() if key in keys_of(inner)]
    if elsewhere and len(path) > 1 and key not in root.model_fields:
        return f"unknown key (did you mean '{elsewhere[0]}.{key}'?)"
    if key in PEERS:
        return f"unknown key; here it is '{PEERS[key]}'{NOTES.get(PEERS[key], '')}"
    known = list(keys_of(section)) if section is not None else []
    hint = _did_you_mean(key, known) or _did_you_mean_elsewhere(key, root)
    if not hint and elsewhere:
        hint = f" (did you mean '{elsewhere[0]}.{key}'?)"
    return f"unknown key{hint}" if hint else f"unknown key; known here: {', '.join(known)}"


def _did_you_mean(word: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(word, known, 1)
    return f" (did you mean '{nearest[0]}'?)" if nearest else ""


def _did_you_mean_elsewhere(word: str, root: type[BaseModel]) -> str:
    """Return a hint at a key of any section that is spelled nearly so."""
    keys = {inner: f"{name}.{inner}" for name, section in _sections(root).items() for inner in keys_of(section)}
    nearest = difflib.get_close_matches(word, keys, 1, cutoff=0.8)
    return f" (did you mean '{keys[nearest[0]]}'?)" if nearest else ""


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _sections(root: type[BaseModel]) -> dict[str, type]:
    found = {name: _section((name,), root) for name in root.model_fields}
    return {name: section for name, section in found.items() if section is not None}


def _section(path: KeyPath, root: type[BaseModel]) -> type | None:
    """Return the class of the section at a path."""
    section: type | None = root
    for part in path:
        if section is not None and isinstance(part, str):
            annotation = keys_of(section)[part].annotation
            section = next((kind for kind in _classes(annotation) if is_section(kind)), None)
    return section


def keys_of(section: type) -> dict[str, FieldInfo]:
    """Return the keys of a section, or of a class of choices."""
    if issubclass(section, BaseModel):
        return section.model_fields
    found: dict[str, FieldInfo] = section.__pydantic_fields__  # type: ignore[attr-defined]  # of a pydantic dataclass
    return found


def is_section(kind: type) -> bool:
    """Return whether a class is read as a mapping with keys."""
    return issubclass(kind, BaseModel) or is_pydantic_dataclass(kind)


def first_message(error: ValidationError) -> str:
    """Return the first thing that pydantic found wrong with the keys of one mapping."""
    founds = error.errors(include_url=False)
    key = founds[0]["loc"][:1]
    return f"{dotted(key)}: {_messages([each for each in founds if each['loc'][:1] == key], key, BaseModel)}"


def _classes(annotation: Any) -> list[type]:
    """Return the classes named in an annotation, at any depth."""
    parts = get_args(annotation)
    if parts:
        return [kind for part in parts for kind in _classes(part)]
    return [annotation] if isinstance(annotation, type) else []
