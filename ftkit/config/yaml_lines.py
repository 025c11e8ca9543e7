"""YAML that remembers the line of every key, and `key.sub=value` set over it.

The values are those of `yaml.safe_load`, with two differences. `2e-5`, text in YAML 1.1, is a number. A key given twice is
refused: YAML would silently keep the last one. The `places` of a document have the `file:line` of each key, or the `--set`
that set it, so that errors can name it. This module does not know the keys of a recipe.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

KeyPath = tuple[str | int, ...]

UNREADABLE = (yaml.YAMLError, ValueError, RecursionError)
"""Errors of PyYAML: of syntax, on dates that do not exist, and on a section that contains itself."""


@dataclass(frozen=True)
class Problem:
    """One error in a recipe.

    Args:
        place: `file:line`, or the `--set key=value` that caused it.
        key: Dotted key path, or the empty string for the whole file.
        message: What was found, what was needed, what to change.
    """

    place: str
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place, self.key, self.message) if part)


@dataclass
class Document:
    """A mapping read from YAML, with the places of its keys.

    Args:
        source: Name of the file, as the user wrote it.
        values: The mapping. Lists and mappings below it are plain Python.
        places: Key path to `file:line` or `--set ...`.
        problems: Syntax errors, keys given twice, and overrides that do not fit.
        readable: Whether `values` can be checked.
    """

    source: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    readable: bool = True

    def place(self, path: KeyPath) -> str:
        """Return the place of a key, or of the nearest section around it that the user wrote."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return f"{self.source}:1"


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `2e-5` as a number."""


_NUMBER = re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))


def dotted(path: KeyPath) -> str:
    """Write a key path as `data.sources.0.path`."""
    return ".".join(str(part) for part in path)


def brief(value: Any) -> str:
    """Write a value in at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def read(text: str, source: str) -> Document:
    """Read one YAML mapping with the line of each key.

    Args:
        text: The YAML text.
        source: Name of the file, used in places.

    Returns:
        The document. Errors are in its `problems`; nothing is raised.
    """
    document = Document(source)
    try:
        values = _load(text, document) or {}
        if not isinstance(values, dict):
            raise ValueError(f"found {brief(values)}, needs sections such as `model:`")
        document.values = values
    except UNREADABLE as error:
        line = error.problem_mark.line + 1 if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark else 1
        message = f"not readable as YAML sections: {_reason(error)}"
        document.problems.append(Problem(f"{source}:{line}", "", message))
        document.readable = False
    return document


def override(document: Document, assignment: str) -> None:
    """Set one key of a document.

    Args:
        document: Changed in place. An assignment that does not fit is added to its `problems`.
        assignment: `key.sub=value`, with a value in YAML. A number in the path is an index into an existing list.
    """
    place = f"--set {assignment}"
    key, equals, text = assignment.partition("=")
    try:
        if not equals:
            raise ValueError("needs the form key.sub=value, for example optimizer.lr=1e-5")
        section, path = _find(document.values, key.strip())
        document.places = {known: said for known, said in document.places.items() if known[: len(path)] != path}
        document.places[path] = place
        section[path[-1]] = _load(text, document, path, place)
    except UNREADABLE as error:
        document.problems.append(Problem(place, "", _reason(error)))


def _reason(error: Exception) -> str:
    return getattr(error, "problem", None) or str(error)  # PyYAML's text has several lines and the position


def _find(values: Any, key: str) -> tuple[Any, KeyPath]:
    """Return the section or list with a dotted key, and the key's path. Sections that are missing are created."""
    path: KeyPath = ()
    section = values
    for part in key.split("."):
        if path:
            if isinstance(section, dict) and section.get(path[-1]) is None:
                section[path[-1]] = {}
            section = section[path[-1]]
        step = int(part) if isinstance(section, list) and part.isdecimal() else part
        if isinstance(section, list) and step not in range(len(section)):
            raise ValueError(f"{dotted(path)}: found index {part}, needs one below {len(section)}")
        if not isinstance(section, (dict, list)):
            raise ValueError(f"{dotted(path)}: found {brief(section)}, needs a section to set a key in")
        path = (*path, step)
    return section, path


def _load(text: str, document: Document, path: KeyPath = (), place: str = "") -> Any:
    """Return the value of a text that is at `path`, and note the places of its keys: `place`, or their lines."""
    if sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, _Loader)) > 20:
        raise ValueError("found more than 20 aliases (*name); write their values out")  # aliases of aliases multiply
    loader = _Loader(text)
    root = loader.get_single_node()
    if root is None:
        return None
    _note(root, path, document, place)
    return loader.construct_document(root)


def _note(node: yaml.Node, path: KeyPath, document: Document, place: str) -> None:
    """Note the place of every key below a node, and keys given twice."""
    pairs: list[tuple[str | int, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        pairs = [(str(key.value), key, value) for key, value in node.value if key.tag != "tag:yaml.org,2002:merge"]
    elif isinstance(node, yaml.SequenceNode):
        pairs = [(index, item, item) for index, item in enumerate(node.value)]
    lines: dict[str | int, int] = {}
    for name, start, value in pairs:
        below, line = (*path, name), start.start_mark.line + 1
        document.places[below] = place or f"{document.source}:{line}"
        if name in lines:
            message = f"given twice, first on line {lines[name]}; keep one of the two"
            document.problems.append(Problem(document.places[below], dotted(below), message))
        lines.setdefault(name, line)
        _note(value, below, document, place)
