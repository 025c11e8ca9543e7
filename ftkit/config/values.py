"""Types of the values in a recipe: names, paths and numbers, each checked as it is read.

Relative paths start at the current directory. `~` is the home directory, `bundled/` the folder of data packaged with ftkit.
"""

from __future__ import annotations

import os
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationInfo


def _bundled_folder() -> str:
    return f"{resources.files('ftkit.bundled')}{os.sep}"


def expand(text: str) -> str:
    """Return a path with `~` and `bundled/` replaced by their folders."""
    if text.startswith("bundled/"):
        return _bundled_folder() + text.removeprefix("bundled/")
    return os.path.expanduser(text)


def _shorten(text: str) -> str:
    """Write a packaged path as `bundled/...` again, so that a dumped recipe is valid on another machine."""
    return text.replace(_bundled_folder(), "bundled/")


def _existing(text: str, info: ValidationInfo) -> str:
    if (info.context or {}).get("check_files", True) and not os.path.exists(text):
        hint = "" if os.path.isabs(text) else f" (relative paths start at {os.getcwd()})"
        raise ValueError(f"no such file or folder: {_shorten(text)}{hint}")
    return text


def _existing_or_hub_id(text: str, info: ValidationInfo) -> str:
    return _existing(text, info) if looks_like_a_path(text) else text


def looks_like_a_path(text: str) -> bool:
    """Return whether a name must be a folder and cannot be a hub id."""
    if text.startswith(("/", "./", "../", "~", "runs/", "data/")) or text.count("/") > 1:
        return True
    return "/" in text and os.path.exists(text.partition("/")[0])


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"found {str(value).lower()}, needs a number")
    return value


def as_list(value: Any) -> Any:
    """Return a list for a single text."""
    return [value] if isinstance(value, str) else value


_short = PlainSerializer(_shorten, when_used="always")
PathText = Annotated[str, AfterValidator(expand), _short]
ExistingPath = Annotated[str, AfterValidator(expand), AfterValidator(_existing), _short]
ModelName = Annotated[str, AfterValidator(expand), AfterValidator(_existing_or_hub_id), _short]
Count = Annotated[int, BeforeValidator(_number), Field(gt=0)]
CountOrZero = Annotated[int, BeforeValidator(_number), Field(ge=0)]
Length = Annotated[int, BeforeValidator(_number), Field(ge=3)]  # a split text then has no piece of a single token
Seed = Annotated[int, BeforeValidator(_number), Field(ge=0, lt=2**32)]  # the range of numpy's seeds
Real = Annotated[float, BeforeValidator(_number)]
Positive = Annotated[Real, Field(gt=0)]
NotNegative = Annotated[Real, Field(ge=0)]
Fraction = Annotated[Real, Field(ge=0, lt=1)]
Texts = Annotated[tuple[str, ...], BeforeValidator(as_list)]
Format = Literal["auto", "messages", "sharegpt", "alpaca", "prompt", "text"]


class Section(BaseModel):
    """A part of a recipe: no unknown keys, no changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
