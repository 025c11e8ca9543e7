"""Pydantic's errors as problems of a recipe: one per key, with its place and the nearest known key or word.

The branches of a union (`auto` or a number) become one problem. Other kinds of error keep pydantic's text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo

from ftkit.config.foreign_keys import PEERS, REFUSED
from ftkit.config.wording import brief, counted, did_you_mean
from ftkit.config.yaml_lines import Document, KeyPath, Problem, dotted
from ftkit.errors import UserError


class RecipeError(UserError):
    """All problems of a recipe, in the order of the files."""

    def __init__(self, problems: list[Problem]):
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        count = counted(len(self.problems), "problem")
        return "\n".join([f"the recipe has {count}:", *(f"  {problem}" for problem in self.problems)])


def problems(error: ValidationError, document: Document, root: type[BaseModel]) -> list[Problem]:
    """Return pydantic's errors in a document of class `root` as problems, in the order of the files."""
    grouped: dict[KeyPath, list[Any]] = {}
    for found in error.errors(include_url=False):
        path = _written_path(found["loc"] or _first_named(found), document.values)
        grouped.setdefault(path, []).append(found)
    listed = [Problem(document.place(path), dotted(path), _messages(founds, path, root)) for path, founds in grouped.items()]
    return sorted(listed, key=_order)


def keys_of(section: type) -> dict[str, FieldInfo]:
    """Return the keys of a section, or of the strategy, which is a dataclass."""
    fields: dict[str, FieldInfo] = section.__pydantic_fields__  # type: ignore[attr-defined]  # models and dataclasses have it
    return fields


def section_of(field: FieldInfo) -> type | None:
    """Return the class of the section, or of the sections in a list, that a key takes."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and (issubclass(kind, BaseModel) or is_pydantic_dataclass(kind)):
            return kind
    return None


def _order(problem: Problem) -> tuple[bool, str, int]:
    file, _, line = problem.place.rpartition(":")
    return (True, "", 0) if problem.place.startswith("--set") else (False, file, int(line))


def _first_named(found: Any) -> tuple[str, ...]:
    """Return the key that the message begins with. Pydantic gives no location to checks of the whole recipe."""
    named = re.match(r"([a-z_]+)\.([a-z_]+) ", str(found.get("ctx", {}).get("error", "")))
    return named.groups() if named else ()


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
    kind, value = found["type"], brief(found["input"])
    if kind == "missing":
        return "is missing"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return _unknown(path, root)
    if kind == "value_error":
        return str(found["ctx"]["error"]).removeprefix(f"{dotted(path)} ")
    text = found["msg"].replace("Input should be", "needs", 1).replace("valid tuple", "list").partition(", unable to")[0]
    if kind == "literal_error":
        text += did_you_mean(str(found["input"]), re.findall(r"'([^']+)'", found["ctx"]["expected"]))
    return f"found {value}, {text}"


def _unknown(path: KeyPath, root: type[BaseModel]) -> str:
    """Return what to write instead of an unknown key."""
    key = str(path[-1])
    if key in REFUSED:
        return REFUSED[key]
    sections = {name: keys_of(inner) for name, field in root.model_fields.items() if (inner := section_of(field))}
    if key in PEERS:
        name, _, inner_key = PEERS[key].partition(".")
        meaning = f" ({sections[name][inner_key].description})" if inner_key else ""
        return f"unknown key; here it is '{PEERS[key]}'{meaning}"
    here: Mapping[str, FieldInfo] = root.model_fields
    for part in path[:-1]:
        if isinstance(part, str):  # not the index of a section in a list
            here = keys_of(section_of(here[part]) or root)
    elsewhere = {inner_key: f"{name}.{inner_key}" for name, keys in sections.items() for inner_key in keys}
    elsewhere["extends"] = "extends"
    hint = did_you_mean(key, {**elsewhere, **{name: name for name in here}})
    return f"unknown key{hint or '; known here: ' + ', '.join(here)}"
