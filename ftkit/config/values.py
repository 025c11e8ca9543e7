"""The values that keys of a recipe may have: names, paths and numbers, each checked as it is read.

Paths are relative to the current directory; `~` is the home directory and `bundled/` the data packaged with ftkit.
"""

from __future__ import annotations

import difflib
import os
import re
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationInfo


def _bundled_folder() -> Path:
    return Path(str(resources.files("ftkit.bundled")))


def _expand(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty; write a name")
    if "\0" in text:
        raise ValueError("holds a NUL character, which no name of a file or folder can")
    if text.startswith("bundled/"):
        return str(_bundled_folder() / text.removeprefix("bundled/"))
    return os.path.expanduser(text)


def _shorten(text: str) -> str:
    """Write a packaged path as `bundled/...` again, so that a resolved recipe means the same on another box."""
    folder = f"{_bundled_folder()}{os.sep}"
    return f"bundled/{text.removeprefix(folder)}" if text.startswith(folder) else text


def _existing(text: str, info: ValidationInfo) -> str:
    if (info.context or {}).get("check_files", True) and not os.path.exists(text):
        hint = "" if os.path.isabs(text) else f" (relative paths start at {os.getcwd()})"
        raise ValueError(f"no such file or folder: {_shorten(text)}{hint}{_alike(text)}")
    return text


def _alike(text: str) -> str:
    """Return a hint at what lies beside a missing file under nearly its name."""
    folder, name = os.path.split(text)
    if os.path.islink(text):
        return f"; it is a symbolic link to {os.readlink(text)}, which is not there"
    with suppress(OSError):
        close = difflib.get_close_matches(name, os.listdir(folder or "."), n=1)
        return f"; did you mean {_shorten(os.path.join(folder, close[0]))}?" if close else ""
    return ""


def _existing_or_hub_id(text: str, info: ValidationInfo) -> str:
    return _existing(text, info) if looks_like_a_path(text) else text


def looks_like_a_path(text: str) -> bool:
    """Return whether a name can only be meant as a folder: the hub need not be asked for it."""
    if text.startswith(("/", "./", "../", "~", "runs/", "data/")) or text.count("/") > 1:
        return True
    return "/" in text and os.path.exists(text.partition("/")[0])


def _existing_rows(text: str, info: ValidationInfo) -> str:
    try:
        return _existing(text, info)
    except ValueError as error:
        if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", text):
            raise ValueError(f"{error}; a hub data set goes in data.name") from None
        raise


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"found {str(value).lower()}, needs a number")
    return value


def as_list(value: Any) -> Any:
    """Return a list for a single text."""
    return [value] if isinstance(value, str) else value


_short = PlainSerializer(lambda text: text if text is None else _shorten(text), when_used="always")
PathText = Annotated[str, AfterValidator(_expand), _short]
ExistingPath = Annotated[str, AfterValidator(_expand), AfterValidator(_existing), _short]
RowsPath = Annotated[str, AfterValidator(_expand), AfterValidator(_existing_rows), _short]
ModelName = Annotated[str, AfterValidator(_expand), AfterValidator(_existing_or_hub_id), _short]
Count = Annotated[int, BeforeValidator(_number), Field(gt=0)]
Bounded = Annotated[int, Field(gt=0, le=10**15), BeforeValidator(_number)]  # more is a slip of the pen
Length = Annotated[int, Field(ge=2, lt=2**31), BeforeValidator(_number)]  # positions are 32-bit; one token predicts nothing
Seed = Annotated[int, Field(ge=0, lt=2**32), BeforeValidator(_number)]  # what numpy takes
Epochs = Annotated[float, Field(gt=0, le=10**6), BeforeValidator(_number)]
CountOrZero = Annotated[int, BeforeValidator(_number), Field(ge=0)]
Real = Annotated[float, BeforeValidator(_number)]
Fraction = Annotated[Real, Field(ge=0, lt=1)]
Positive = Annotated[Real, Field(gt=0)]
Noise = Annotated[float, Field(ge=0, le=10**6), BeforeValidator(_number)]
NotNegative = Annotated[Real, Field(ge=0)]
Texts = Annotated[tuple[str, ...], BeforeValidator(as_list)]
Format = Literal["auto", "messages", "sharegpt", "alpaca", "prompt", "text"]


class Section(BaseModel):
    """A part of a recipe: no unknown keys, no changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
