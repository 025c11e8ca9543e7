"""A cell of the user's code on one rank: run it, say what its last expression gave, and what went wrong, shortly.

A cell is plain Python: `%` and `!` are IPython's, and the ranks have none. Values go to the kernel as text: plain data as a
literal that is read again with `ast.literal_eval`, anything else as its repr and what it shows richly.

Cost: values of more than `MOST_LITERAL` characters arrive as a shortened repr.
"""

from __future__ import annotations

import ast
import linecache
import math
import os
import reprlib
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import ftkit
from ftkit.errors import UserError
from ftkit.notebook.hang import Frame

MOST_LITERAL = 1 << 20
"""Characters of plain data that is returned as such."""
MOST_REPR = 20_000
MOST_LINES = 12
"""Of the message of an exception."""

PLAIN = (type(None), bool, int, float, str, bytes)
RICH = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_svg_": "image/svg+xml",
    "_repr_latex_": "text/latex",
}
"""What Jupyter asks an object for, and what it gets."""

_LIBRARIES = tuple(
    {f"{os.path.realpath(sysconfig.get_path(name))}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_ENGINE = f"{Path(ftkit.__file__).resolve().parent / 'engine'}{os.sep}"
_OWN = f"{Path(ftkit.__file__).resolve().parent}{os.sep}"


def run_cell(source: str, name: str, namespace: dict[str, Any]) -> Any:
    """Run a cell in a namespace; returns the value of its last expression, None without one or after a semicolon.

    Args:
        source: The cell's code.
        name: What tracebacks call it: "cell 3".
        namespace: The namespace in which the code runs.
    """
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    body = ast.parse(source, file).body
    last = body[-1] if body and isinstance(body[-1], ast.Expr) else None
    body = body if last is None else body[:-1]
    exec(compile(ast.Module(body, []), file, "exec", dont_inherit=True), namespace)  # this file's own __future__
    if last is None:
        return None
    value = eval(compile(ast.Expression(last.value), file, "eval", dont_inherit=True), namespace)
    return None if source.rstrip().endswith(";") else value


def is_plain(value: Any) -> bool:
    """Return whether `ast.literal_eval` gives a value back from its repr: numbers, text, and containers of them."""
    if type(value) in (list, tuple, set):
        return bool(value or type(value) is not set) and all(map(is_plain, value))
    if type(value) is dict:
        return all(is_plain(key) and is_plain(each) for key, each in value.items())
    return type(value) in PLAIN and not (isinstance(value, float) and not math.isfinite(value))


def shown(value: Any) -> dict[str, Any]:
    """Return a value as it goes to the kernel: `literal`, or `data`, a bundle of MIME types that Jupyter shows."""
    if is_plain(value):
        literal = repr(value)
        if len(literal) <= MOST_LITERAL:
            return {"literal": literal}
    return {"data": bundle(value)}


def bundle(value: Any) -> dict[str, str]:
    """Return what Jupyter shows of a value: its repr, and the richer texts that it offers."""
    text = repr(value)
    if len(text) > MOST_REPR:
        text = f"{text[:MOST_REPR]} ... ({len(text) - MOST_REPR:,} more characters)"
    data = {"text/plain": text}
    for method, mime in RICH.items():
        ask = getattr(type(value), method, None)
        try:
            told = ask(value) if callable(ask) else None
        except Exception:  # whatever its author did: the repr is there
            continue
        if isinstance(told, str):
            data[mime] = told
    return data


# --- where something is


def is_own(file: str) -> bool:
    """Return whether a file is the user's: a cell, or a module that is no library's and not ftkit's."""
    if file.startswith("<cell"):
        return True
    path = os.path.realpath(file)
    return not file.startswith("<") and "site-packages" not in path and not path.startswith((*_LIBRARIES, _OWN))


def frames_of(stack: Iterable[tuple[FrameType, int | None]]) -> list[Frame]:
    """Return the calls of a stack, in its order; a call that is between two lines has number 0."""
    found = []
    for frame, line in stack:
        file = frame.f_code.co_filename
        text = linecache.getline(file, line or 0).strip()
        found.append(Frame(file, line or 0, frame.f_code.co_name, text, is_own(file)))
    return found


def failure_of(error: BaseException) -> dict[str, Any]:
    """Return an error as it goes to the kernel: `kind`, `message`, and `lines`, the user's own calls that led to it.

    `engine` is there where it came within the engine's work on a sharded model.
    """
    told: dict[str, Any] = {"kind": type(error).__name__, "message": _message(error), "lines": _lines(error)}
    frames = traceback.walk_tb(error.__traceback__)
    if any(os.path.realpath(frame.f_code.co_filename).startswith(_ENGINE) for frame, _ in frames):
        told["engine"] = True
    if isinstance(error, UserError):
        told |= {"refused": str(error), "exit_code": error.exit_code}
    return told


def _message(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        lines = [line.rstrip() for line in traceback.format_exception_only(error)]
        place = f"{(error.filename or '').strip('<>')}, line {error.lineno}"
        return "\n".join([f"{error.msg} ({place})", *lines[1:-1]])
    lines = str(error).splitlines()
    cut = [f"... ({len(lines) - MOST_LINES} more lines)"] if len(lines) > MOST_LINES else []
    cause = error.__cause__
    because = [f"(from {type(cause).__name__}: {reprlib.repr(str(cause))})"] if cause is not None else []
    return "\n".join([*lines[:MOST_LINES], *cut, *because])


def _lines(error: BaseException) -> list[str]:
    """Return the user's calls, and beneath them the library's that raised, a line each."""
    frames = frames_of(traceback.walk_tb(error.__traceback__))
    first = next((place for place, frame in enumerate(frames) if frame.file.startswith("<cell")), None)
    if first is None and isinstance(error, SyntaxError):
        return []  # of the cell itself, whose message says it all
    frames = frames[first or 0 :]  # what lies before a cell ran it
    own = [frame for frame in frames if frame.own]
    lines = [f"  {frame.place}, in {frame.function}: {frame.text}" for frame in own]
    if frames and not frames[-1].own and not frames[-1].file.endswith("notebook/cell.py"):
        lines.append(f"  {frames[-1].place}, in {frames[-1].function}: {frames[-1].text}")
    return lines[-MOST_LINES:]
