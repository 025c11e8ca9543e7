"""Pydantic's errors as problems of a recipe: one per key, with its place and the nearest known key or word.

The branches of a union (`auto` or a number) become one problem. Other kinds of error keep pydantic's text.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo

from ftkit.config.foreign_keys import NOTES, PEERS, REFUSED
from ftkit.config.wording import counted
from ftkit.config.yaml_lines import Document, KeyPath, Problem, brief, dotted
from ftkit.errors import UserError

_NEEDS = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
    **dict.fromkeys(("model_type", "dict_type", "model_attributes_type", "dataclass_type"), "a section with keys"),
    "string_type": "text (quote it)",
}


class RecipeError(UserError):
    """All problems of a recipe, in the order of the file."""

    def __init__(self, problems: list[Problem]):
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        count = counted(len(self.problems), "problem")
        return "\n".join([f"the recipe has {count}:", *(f"  {problem}" for problem in self.problems)])


def problems(error: ValidationError, document: Document, root: type[BaseModel]) -> list[Problem]:
    """Return pydantic's errors as problems, in the order of the file.

    Args:
        error: The error of `root.model_validate`.
        document: What was validated.
        root: The class of the whole recipe.
    """
    grouped: dict[KeyPath, list[Any]] = {}
    for found in error.errors(include_url=False):
        path = _written_path(found["loc"] or _first_named(found), document.values)
        grouped.setdefault(path, []).append(found)
    listed = [Problem(document.place(path), dotted(path), _messages(founds, path, root)) for path, founds in grouped.items()]
    return sorted(listed, key=_order)


def first_message(error: ValidationError) -> str:
    """Return the first of pydantic's errors in a mapping without sections."""
    founds = error.errors(include_url=False)
    key = founds[0]["loc"][:1]
    return f"{dotted(key)}: {_messages([each for each in founds if each['loc'][:1] == key], key, BaseModel)}"


def keys_of(section: type) -> dict[str, FieldInfo]:
    """Return the keys of a section, or of the strategy, which is a dataclass."""
    if issubclass(section, BaseModel):
        return section.model_fields
    found: dict[str, FieldInfo] = section.__pydantic_fields__  # type: ignore[attr-defined]  # of a pydantic dataclass
    return found


def section_of(field: FieldInfo) -> type | None:
    """Return the class of the section, or of the sections in a list, that a key takes; None for a plain value."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and (issubclass(kind, BaseModel) or is_pydantic_dataclass(kind)):
            return kind
    return None


def _order(problem: Problem) -> tuple[bool, int]:
    line = problem.place.rsplit(":", 1)[-1]
    return (problem.place.startswith("--set"), int(line) if line.isdecimal() else 0)


def _first_named(found: Any) -> tuple[str, ...]:
    """Return the key that the message begins with. Pydantic gives no location to checks of the whole recipe."""
    named = re.match(r"([a-z_]+\.[a-z_]+) ", str((found.get("ctx") or {}).get("error", "")))
    return tuple(named[1].split(".")) if named else ()


def _written_path(location: tuple[str | int, ...], values: Any) -> KeyPath:
    """Cut the names of union branches, which pydantic appends, off a location."""
    path: list[str | int] = []
    for part in location:
        if not isinstance(values, list if isinstance(part, int) else dict):
            break
        path.append(part)
        values = (dict(enumerate(values)) if isinstance(values, list) else values).get(part)
    return tuple(path)


def _messages(founds: list[Any], path: KeyPath, root: type[BaseModel]) -> str:
    """Return one message for the errors at a path: the branches of a union share the word `found`."""
    texts = list(dict.fromkeys(_message(found, path, root) for found in founds))
    lead = f"found {brief(founds[0]['input'])}, needs "
    return " or ".join([texts[0], *(text.removeprefix(lead) for text in texts[1:])])


def _message(found: Any, path: KeyPath, root: type[BaseModel]) -> str:
    kind, context, value = found["type"], found.get("ctx") or {}, brief(found["input"])
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
        allowed = re.findall(r"'([^']+)'", context["expected"])
        text += _did_you_mean(str(found["input"]), {word: word for word in allowed})
    return f"found {value}, {text}"


def _unknown(path: KeyPath, root: type[BaseModel]) -> str:
    """Return what to write instead of an unknown key."""
    key = str(path[-1])
    if key in REFUSED:
        return REFUSED[key]
    if key in PEERS:
        return f"unknown key; here it is '{PEERS[key]}'{NOTES.get(PEERS[key], '')}"
    section: type = root
    for name in path[:-1]:
        if isinstance(name, str):  # not the index of a section in a list
            section = section_of(keys_of(section)[name]) or root
    known = {inner: f"{name}.{inner}" for name, field in root.model_fields.items() for inner in _keys_in(field)}
    known |= {name: name for name in keys_of(section)}
    return f"unknown key{_did_you_mean(key, known) or '; known here: ' + ', '.join(keys_of(section))}"


def _keys_in(field: FieldInfo) -> Iterable[str]:
    section = section_of(field)
    return keys_of(section) if section is not None else ()


def _did_you_mean(word: str, known: dict[str, str]) -> str:
    """Return a hint at the nearest of some words. `known` has the text to write for each."""
    nearest = difflib.get_close_matches(word, known, 1, cutoff=0.7)
    return f" (did you mean '{known[nearest[0]]}'?)" if nearest else ""
