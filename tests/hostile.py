"""What tests of hostile files share: fuzzing by Hypothesis, damage to a file, and an eye on every file that is opened.

Readers may succeed or raise `UserError` with the file's or folder's name, and nothing else. Examples are derived from the
test alone, so a run in CI tries the same ones every time; nothing is kept between runs.
"""

from __future__ import annotations

import site
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftkit.errors import UserError

NUMBERS = st.sampled_from(
    [-1, 0, 1, 2, 7, 4096, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**400, 0.5, 1e308, float("nan"), float("inf"), True]
)
TEXTS = st.sampled_from(
    ["", ".", "..", "/", "/etc/passwd", "../x", "a/../..", "x\0y", "x\ny", "\ud800", "é" * 5000, "~", "NaN", "__class__"]
)
LEAVES = st.none() | NUMBERS | TEXTS | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(LEAVES, lambda below: st.lists(below, max_size=4) | st.dictionaries(TEXTS | st.text(max_size=4), below))
"""Whatever JSON (as Python writes it) can hold, and often what readers stumble over."""


def fuzz(examples: int, strategy: Any, check: Callable[[Any], None]) -> None:
    """Call `check` with so many examples."""

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def run(example: Any) -> None:
        check(example)

    run()


def examples(few: int, many: int) -> Any:
    """Return the parameter `count` of a fuzzing test: a few examples in CI, many among the slow tests."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.slow)])


def told(name: Path | str, read: Callable[[], Any]) -> str | None:
    """Return the text of the error that a reader refuses with, which must name the file or folder; None if it does not."""
    try:
        read()
    except UserError as error:
        text = str(error)
    else:
        return None
    assert str(name) in text, f"{name} is not named: {text}"
    return text


@st.composite
def mutated(draw: Any, good: bytes) -> bytes:
    """Draw good bytes with some of them changed, cut out, doubled or put in."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        how = draw(st.sampled_from(["flip", "cut", "put", "double", "end"]))
        stop = min(len(data), at + draw(st.integers(1, 40)))
        if how == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "cut":
            del data[at:stop]
        elif how == "put":
            data[at:at] = draw(st.binary(max_size=12))
        elif how == "double":
            data[at:at] = data[at:stop]
        elif how == "end":
            del data[at:]
    return bytes(data)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "first byte": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "header": lambda data: data[:9] + bytes([data[9] ^ 4]) + data[10:],
    "middle": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 128]) + data[len(data) // 2 + 1 :],
    "last byte": lambda data: data[:-1] + bytes([data[-1] ^ 16]),
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "cut by one": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "a page longer": lambda data: data + bytes(4096),
}
"""Ways in which a file's bytes change on a disk or on the way to it."""


# --- what is opened

_opened: list[str] | None = None
_PYTHONS = tuple(str(Path(path).resolve()) for path in {sys.prefix, sys.base_prefix, *site.getsitepackages()})


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event in ("open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.mkdir"):
        _opened.append(str(arguments[0]))


_hooked = False


@contextmanager
def opens_only(*folders: Path) -> Iterator[None]:
    """Fail if the body opens, lists, makes or removes anything outside `folders`, Python's own files and /proc apart."""
    global _opened, _hooked
    if not _hooked:
        sys.addaudithook(_note)  # for the life of the process: it looks only while a body runs
        _hooked = True
    _opened = []
    try:
        yield
        seen = list(_opened)
    finally:
        _opened = None
    allowed = (*(str(folder.resolve()) for folder in folders), *_PYTHONS, "/proc", "/sys", str(Path(__file__).parents[1]))
    paths = {str(Path(path).resolve()) for path in seen if not path.isdecimal()}
    outside = [path for path in paths if not any(path == each or path.startswith(f"{each}/") for each in allowed)]
    assert not outside, f"files outside the folder were touched: {outside}"
