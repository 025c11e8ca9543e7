"""YAML that remembers the line of every key, and `key.sub=value` laid over it.

The values are those of `yaml.safe_load` except that `2e-5`, a string in YAML 1.1, is the number it looks like. Beside
them lie the places: for each key path the `file:line` it came from, or the `--set` that put it there, so that whoever
checks the values can say where a wrong one stands. A key given twice is refused: YAML would keep the last one
silently, and so is a text whose aliases stand for more values than anybody wrote. It knows nothing of recipes. What it
costs: two more walks over a tree of a few dozen nodes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

KeyPath = tuple[str | int, ...]

MOST_VALUES = 100_000
UNREADABLE = (ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What PyYAML raises, beside its own errors, on values that only look like a date, on wrong tags, and on deep nesting."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, with the place where it stands.

    Args:
        place: `file:line`, or the `--set key=value` that put it there.
        key: Dotted key path, or the empty string for the file as a whole.
        message: What was found, what was needed, what to change.
    """

    place: str
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place, self.key, self.message) if part)


@dataclass
class Document:
    """A mapping read from YAML, the place of each of its keys, and what was wrong already.

    Args:
        source: Name of the file, as the user wrote it.
        values: The mapping; lists and mappings below it are plain Python.
        places: Key path to `file:line` or `--set ...`.
        problems: Syntax errors, keys given twice, overrides that fit nowhere.
        readable: Whether there are values to check at all.
    """

    source: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    readable: bool = True

    def place(self, path: KeyPath) -> str:
        """Return the place of the nearest enclosing key of `path` that was written somewhere."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return f"{self.source}:1"


NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
ODD_NUMBER = re.compile(r"[-+]?0[0-9_]+$|.*:")
"""What PyYAML takes for a number and most people for another number, or for text."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `2e-5` as a number."""


_inherited = yaml.SafeLoader.yaml_implicit_resolvers
_Loader.yaml_implicit_resolvers = {first: list(pairs) for first, pairs in _inherited.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def dotted(path: KeyPath) -> str:
    """Write a key path as `data.sources.0.path`."""
    return ".".join(str(part) for part in path)


def read(text: str, source: str) -> Document:
    """Read one YAML mapping with the line of each key.

    Args:
        text: The YAML text.
        source: Name of the file, used in places.

    Returns:
        The document; what could not be read is in its `problems`, never raised.
    """
    document = Document(source)
    loader = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is not None:
            _count(root, {})
            _walk(root, (), document)
            values = loader.construct_document(root)
            if isinstance(values, dict):
                document.values = values
            elif values is not None:
                message = f"found a {type(values).__name__}, needs sections such as `model:`"
                document.problems.append(Problem(f"{source}:1", "", message))
                document.readable = False
    except yaml.YAMLError as error:
        document.problems.append(_syntax_problem(error, source))
        document.readable = False
    except UNREADABLE as error:
        document.readable = False
        document.problems.append(Problem(f"{source}:1", "", f"not readable as YAML: {error}"))
    finally:
        if loader is not None:
            loader.dispose()
    return document


def override(document: Document, assignment: str) -> None:
    """Lay `key.sub=value` over a document; the value is read as YAML.

    Args:
        document: Changed in place; what does not fit is added to its `problems`.
        assignment: The text given to `--set`. A number in the path is an index into an existing list.
    """
    place = f"--set {assignment}"
    key, equals, text = assignment.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        document.problems.append(Problem(place, "", "needs the form key.sub=value, for example optimizer.lr=1e-5"))
        return
    value = read_value(text, place, document, tuple(parts))
    target: Any = document.values
    path: KeyPath = ()
    for part in parts[:-1]:
        step = _step(target, part)
        path = (*path, step)
        below = target.get(step) if isinstance(target, dict) else target[step] if _fits(target, step) else None
        if below is None and isinstance(target, dict):
            below = target[step] = {}
            document.places[path] = place
        if not isinstance(below, (dict, list)):
            document.problems.append(Problem(place, dotted(path), f"found {below!r}, needs a section to set a key in"))
            return
        target = below
    step = _step(target, parts[-1])
    if isinstance(target, list) and not _fits(target, step):
        document.problems.append(Problem(place, dotted((*path, step)), f"needs an index below {len(target)}"))
        return
    whole = (*path, step)
    if any(known[: len(whole)] == whole and said.startswith("--set ") for known, said in document.places.items()):
        document.problems.append(Problem(place, dotted(whole), "set twice; keep one of the two"))
    target[step] = value
    path = (*path, step)
    for known in [known for known in document.places if known[: len(path)] == path]:
        del document.places[known]
    document.places[path] = place


def read_value(text: str, place: str, document: Document, path: KeyPath = ()) -> Any:
    """Read one YAML value of a key, adding what is wrong with it to the document's problems."""
    loader = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _count(root, {})
        inside = Document(place)
        _walk(root, path, inside)
        for problem in inside.problems:
            text = "given twice; keep one of the two" if problem.message.startswith("given twice") else problem.message
            document.problems.append(Problem(place, problem.key, text))
        return loader.construct_document(root)
    except (yaml.YAMLError, *UNREADABLE) as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        document.problems.append(Problem(place, "", f"the value is not readable as YAML ({first_line}); quote it"))
        return None
    finally:
        if loader is not None:
            loader.dispose()


def _step(target: Any, part: str) -> str | int:
    return int(part) if isinstance(target, list) and part.isdecimal() else part


def _fits(target: list[Any], step: str | int) -> bool:
    return isinstance(step, int) and step < len(target)


def _syntax_problem(error: yaml.YAMLError, source: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    line = mark.line + 1 if mark is not None else 1
    text = getattr(error, "problem", None) or str(error).splitlines()[0]
    return Problem(f"{source}:{line}", "", f"not readable as YAML: {text}; check indentation, colons and quotes here")


def _count(node: yaml.Node, counted: dict[int, int | None]) -> int:
    """Return how many values a node stands for, each alias counted with all that it refers to.

    Raises:
        ValueError: more than `MOST_VALUES`, or an alias to a section that contains it.
    """
    if id(node) not in counted:
        counted[id(node)] = None  # begun
        below = [each for pair in node.value for each in pair] if isinstance(node, yaml.MappingNode) else node.value
        total = 1 + sum(_count(each, counted) for each in below) if isinstance(node, yaml.CollectionNode) else 1
        if total > MOST_VALUES:
            raise ValueError(f"its aliases stand for more than {MOST_VALUES} values")
        counted[id(node)] = total
    known = counted[id(node)]
    if known is None:
        raise ValueError("an alias refers to a section that contains it")
    return known


def _walk(node: yaml.Node, path: KeyPath, document: Document) -> None:
    """Note the line of every key below a node, and keys given twice."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if name in seen:
                message = f"given twice, first on line {seen[name]}; keep one of the two"
                document.problems.append(Problem(f"{document.source}:{line}", dotted((*path, name)), message))
            seen.setdefault(name, line)
            document.places[(*path, name)] = f"{document.source}:{line}"
            _walk(value, (*path, name), document)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            document.places[(*path, index)] = f"{document.source}:{value.start_mark.line + 1}"
            _walk(value, (*path, index), document)
    elif node.tag in NUMBERS and not node.style and ODD_NUMBER.match(node.value):
        meant = "YAML 1.1 reads a leading zero as base 8, and colons as base 60; write a decimal number, or quote the text"
        place = document.places.get(path, f"{document.source}:{node.start_mark.line + 1}")
        document.problems.append(Problem(place, dotted(path), f"found {node.value}; {meant}"))
