"""Names in rows: which columns and keys there are, which are left out by the recipe, which is not read.

A name is a column (`module`), or a key below one, with dots between them (`messages.name`); elements of lists have no
number in it. A format reads some columns, the chat template reads some keys of a turn; `Watched` notes the latter while
the template renders. What remains and has a value is not read, and training would go on without it, so the run stops
unless `data.ignore_columns` names it. The named values are removed before a row is read.

Not looked at: values that say nothing (null, empty text, empty lists and objects). The cost: one more rendering of each
row whose turns have keys beside role and content.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute

from ftkit.data.report import Found, Report
from ftkit.errors import UserError

PLACES_KEPT = 3
KNOWN = (
    *("messages", "conversations", "tools", "system", "instruction", "input", "context", "output", "response", "history"),
    *("prompt", "completion", "question", "answer", "text"),
)
"""Columns that some format reads."""


def says_nothing(value: Any) -> bool:
    """Return whether a value may be passed over: null, empty text, an empty list or object."""
    return value is None or value in ("", [], {})


def below(path: str, key: str) -> str:
    """Return the name of a key below a column or a key."""
    return f"{path}.{key}" if path else key


def above(name: str, names: Iterable[str]) -> str | None:
    """Return the one of some names that a name lies below, or None."""
    return next((each for each in names if name.startswith(f"{each}.")), None)


def names_of(value: Any, path: str = "") -> Iterator[str]:
    """Yield the names of all keys in a value, at any depth, with repetitions."""
    if isinstance(value, dict):
        for key, inner in value.items():
            name = below(path, key)
            yield name
            yield from names_of(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from names_of(inner, path)


def without(value: Any, ignored: frozenset[str], matched: set[str], path: str = "") -> Any:
    """Return a value without the keys of some names.

    Args:
        value: a row, or a part of one
        ignored: the names
        matched: gets the names that were there
        path: dotted name of the part; "" for a row
    """
    if isinstance(value, dict):
        kept = {}
        for key, inner in value.items():
            name = below(path, key)
            if name in ignored:
                matched.add(name)
            else:
                kept[key] = without(inner, ignored, matched, name)
        return kept
    return [without(inner, ignored, matched, path) for inner in value] if isinstance(value, list) else value


class Watched(dict):
    """A dictionary that notes which of its keys are read, for one rendering of a chat template.

    Args:
        content: the keys and values; dictionaries below are watched as well
        path: dotted name of the dictionary, with which the names of its keys begin
        read: gets the names of the keys that are read
        element: name that `read` gets besides once any key is read, where the dictionary is an element of a list; else ""
    """

    def __init__(self, content: dict[str, Any], path: str, read: set[str], element: str = ""):
        super().__init__({key: watched(value, below(path, key), read) for key, value in content.items()})
        self._path, self._read, self._element = path, read, element

    def _note(self, keys: Iterable[Any]) -> None:
        self._read.update(below(self._path, str(key)) for key in keys)
        self._read.add(self._element)

    def __getitem__(self, key: Any) -> Any:
        self._note([key])
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self._note([key])
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a value and note its key."""
        self._note([key])
        return super().get(key, default)

    def __iter__(self) -> Iterator[Any]:
        self._note(super().keys())
        return super().__iter__()

    def keys(self) -> Any:
        """Return the keys and note them all."""
        self._note(super().keys())
        return super().keys()

    def values(self) -> Any:
        """Return the values and note all keys."""
        self._note(super().keys())
        return super().values()

    def items(self) -> Any:
        """Return keys and values and note all keys."""
        self._note(super().keys())
        return super().items()


def watched(value: Any, path: str, read: set[str]) -> Any:
    """Return a value with its dictionaries watched, at any depth."""
    if isinstance(value, dict):
        return Watched(value, path, read)
    if not isinstance(value, list):
        return value
    return [
        Watched(inner, path, read, _element(path, number)) if isinstance(inner, dict) else watched(inner, path, read)
        for number, inner in enumerate(value)
    ]


def _element(path: str, number: int) -> str:
    """Return what stands for one element of a list among the names that are read; no name has such characters."""
    return f"{path}\0{number}"


def passed_over(values: Any, path: str, read: Collection[str]) -> list[int]:
    """Return the numbers, from 0, of the objects in a list of which nothing is read, where something of others is."""
    if not isinstance(values, list):
        return []
    objects = [number for number, value in enumerate(values) if isinstance(value, dict)]
    missed = [number for number in objects if _element(path, number) not in read]
    return missed if len(missed) < len(objects) else []


def not_read(value: Any, path: str, read: Collection[str]) -> Iterator[str]:
    """Yield the names of keys that were not read; of a value that was not, its own name alone.

    Args:
        value: a dictionary, or a list of them
        path: dotted name of the value
        read: names of the keys that were read
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            name = below(path, key)
            if says_nothing(inner):
                continue
            if name not in read:
                yield name
            else:
                yield from not_read(inner, name, read)
    elif isinstance(value, list):
        for inner in value:
            yield from not_read(inner, path, read)


def noted(unread: Iterable[str], matched: Iterable[str]) -> str:
    """Return what was found in one row as text, the same for equal rows; empty where nothing was."""
    found = [sorted(set(unread)), sorted(set(matched))]
    return json.dumps(found) if any(found) else ""


def found_in(notes: pyarrow.ChunkedArray, places: Any) -> tuple[dict[str, Found], dict[str, Found]]:
    """Return the names that are not read, and the ignored ones that were there, with their rows.

    Args:
        notes: what `noted` made of each row
        places: where each row stands, as text
    """
    encoded = pyarrow.compute.dictionary_encode(notes).combine_chunks()
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    gathered: tuple[dict[str, list], dict[str, list]] = ({}, {})
    for code, note in enumerate(encoded.dictionary.to_pylist()):
        if note:
            rows = np.flatnonzero(codes == code)
            for names, into in zip(json.loads(note), gathered):
                for name in names:
                    into.setdefault(name, []).append(rows)
    unread, ignored = ({name: _found(parts, places) for name, parts in sorted(each.items())} for each in gathered)
    return unread, ignored


def _found(parts: Sequence[np.ndarray], places: Any) -> Found:
    rows = np.sort(np.concatenate(parts))
    return Found(len(rows), tuple(places[int(row)] for row in rows[:PLACES_KEPT]))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the name of some that is spelled most like another, capitals and outer blanks aside, or ""."""
    by_text = {each.strip().lower(): each for each in known}
    wanted = name.strip().lower()
    close = difflib.get_close_matches(wanted, list(by_text), 1)
    last = wanted.rpartition(".")[2]
    alike = [each for text, each in by_text.items() if text.rpartition(".")[2] == last]
    return by_text[close[0]] if close else alike[0] if alike else ""


def hint(name: str) -> str:
    """Return a hint at the column of a format that a name resembles, or ""."""
    found = nearest(name, KNOWN)
    beginning = next((each for each in KNOWN if len(each) > 3 and name.lower().startswith(each)), "")
    close = found or beginning
    return f" (did you mean `{close}`?)" if close and close != name else ""


def refuse_marks(loss_on: str, reports: Iterable[Report]) -> None:
    """Stop where the template's marks are asked for and no row is rendered by it.

    Args:
        loss_on: answers | marks | all
        reports: reports of all data that the run reads

    Raises:
        UserError: all rows are plain text
    """
    if loss_on == "marks" and {source.format for report in reports for source in report.sources} == {"text"}:
        raise UserError(
            "data.loss_on is marks, and all rows are plain text, in which the template marks nothing; all of it "
            "would be learned. Set data.loss_on: all"
        )
