"""YAML that remembers the line of every key, one document over another, and `key.sub=value` set over it.

The values are those of `yaml.safe_load`, with two differences. `2e-5`, text in YAML 1.1, is a number. A key given twice is
refused: YAML would silently keep the last one. The `places` of a document have the `file:line` of each key, or the `--set`
that set it, so that errors can name it. This module does not know the keys of a recipe.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from ftkit.config.wording import brief

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    """One error in a recipe: its place (`file:line` or `--set key=value`), its dotted key or "", and a message."""

    place: str
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place, self.key, self.message) if part)


@dataclass
class Document:
    """A mapping read from YAML, with the `file:line` or `--set ...` of each key in `places`."""

    source: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    readable: bool = True  # if not, `values` is empty or lacks the base
    emptied: list[str] = field(default_factory=list)  # keys at the top without a value, which are not in `values`
    bases: list[str] = field(default_factory=list)  # sources of the documents below this one, the nearest first

    def place(self, path: KeyPath) -> str:
        """Return the place of a key, or of the nearest section around it that the user wrote."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return f"{self.source}:1"


MOST_ALIASES = 20


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `2e-5` as a number."""


_NUMBER = re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))


def dotted(path: KeyPath) -> str:
    """Write a key path as `data.sources.0.path`."""
    return ".".join(str(part) for part in path)


def read(text: str, source: str) -> Document:
    """Read one YAML mapping from a file named `source`. Errors are in the document's `problems`; nothing is raised."""
    document = Document(source)
    try:
        if sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, _Loader)) > MOST_ALIASES:
            raise ValueError(f"found more than {MOST_ALIASES} aliases (*name), which multiply; write their values out")
        values = yaml.load(text, _Loader) or {}
        if not isinstance(values, dict):
            raise ValueError(f"found {brief(values)}, needs sections such as `model:`")
        document.values = {key: value for key, value in values.items() if value is not None}  # `eval:` without keys
        document.emptied = [key for key, value in values.items() if value is None]
        _note(yaml.compose(text, _Loader), (), document)
    except (yaml.YAMLError, ValueError) as error:  # PyYAML raises ValueError for a date such as 2024-13-01
        line = error.problem_mark.line + 1 if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark else 1
        message = f"not readable as YAML sections: {_reason(error)}"
        document.problems.append(Problem(f"{source}:{line}", "", message))
        document.readable = False
    return document


def lay_over(document: Document, base: Document) -> Document:
    """Return the keys of a document over those of its base.

    Mappings are merged key by key. Every other value replaces that of the base, and null takes the key of the base away.
    """
    places = dict(base.places)
    values = _merged(base.values, {**dict.fromkeys(document.emptied), **document.values}, (), places)
    return Document(
        document.source,
        values,
        places | document.places,
        [*document.problems, *base.problems],
        document.readable and base.readable,
        bases=[base.source, *base.bases],
    )


def _merged(base: dict[str, Any], over: dict[str, Any], path: KeyPath, places: dict[KeyPath, str]) -> dict[str, Any]:
    """Merge two mappings at a path, and forget the places of the base's values that are replaced."""
    merged = dict(base)
    for key, value in over.items():
        below, former = (*path, key), base.get(key)
        if isinstance(value, dict) and isinstance(former, dict):
            merged[key] = _merged(former, value, below, places)
            continue
        _forget(places, below)
        merged[key] = value
        if value is None:
            del merged[key]
    return merged


def override(document: Document, assignment: str) -> None:
    """Set one key of a document.

    Args:
        document: Changed in place. An assignment that does not fit is added to its `problems`.
        assignment: `key.sub=value`, with a value in YAML. A number in the path is an index into an existing list. null takes
            the key away, as in a file that extends another.
    """
    place = f"--set {assignment}"
    key, equals, text = assignment.partition("=")
    path = tuple(int(part) if part.isdecimal() else part for part in key.strip().split("."))
    try:
        if not equals:
            raise ValueError("needs the form key.sub=value, for example optimizer.lr=1e-5")
        section, value = _section_of(path, document.values), yaml.load(text, _Loader)
        section[path[-1]] = value
        if value is None and isinstance(section, dict):
            del section[path[-1]]
    except (yaml.YAMLError, ValueError) as error:
        document.problems.append(Problem(place, "", _reason(error)))
    except (LookupError, TypeError):
        document.problems.append(Problem(place, "", "found no section with that key, and no list with that index"))
    _forget(document.places, path)
    document.places[path] = place


def _forget(places: dict[KeyPath, str], path: KeyPath) -> None:
    """Remove the places of a key and of all keys below it."""
    for known in [known for known in places if known[: len(path)] == path]:
        del places[known]


def _section_of(path: KeyPath, values: Any) -> Any:
    """Return the section or list of a key. Sections that are missing are created."""
    for part in path[:-1]:
        if isinstance(values, dict) and values.get(part) is None:
            values[part] = {}
        values = values[part]
    return values


def _reason(error: Exception) -> str:
    return getattr(error, "problem", None) or str(error)  # PyYAML's text has several lines and the position


def _note(node: yaml.Node | None, path: KeyPath, document: Document) -> None:
    """Note the place of every key below a node, and keys given twice."""
    pairs: list[tuple[str | int, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        pairs = [(str(key.value), key, value) for key, value in node.value if key.tag != "tag:yaml.org,2002:merge"]
    elif isinstance(node, yaml.SequenceNode):
        pairs = [(index, item, item) for index, item in enumerate(node.value)]
    for name, start, value in pairs:
        below = (*path, name)
        place = f"{document.source}:{start.start_mark.line + 1}"
        if below in document.places:
            first = document.places[below].rpartition(":")[2]
            message = f"given twice, first on line {first}; keep one of the two"
            document.problems.append(Problem(place, dotted(below), message))
        document.places[below] = place
        _note(value, below, document)
