"""Writes docs/recipe-keys.md: every key of a recipe with its type, default and meaning, from the classes that check it.

`make docs` runs it; a test compares, so that the page cannot say other than `ftkit/config/recipe.py` does. It refuses a
key without a meaning, and a constraint that it has no words for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from ftkit.config.errors import keys_of, section_of
from ftkit.config.recipe import Recipe

PAGE = Path(__file__).parent / "recipe-keys.md"
HEAD = """\
# Every key of a recipe

<!-- written by `make docs` from ftkit/config/recipe.py; a test compares -->

A key that is not here is refused, with the nearest one that is. Only `model`, `data` and `output.dir` are required.
[Recipes](recipes.md) describes the format. `ftkit finetune recipe.yaml --dry-run` prints every value of a run.
"""
EXTENDS = "| `extends` | text | none | file or packaged recipe whose keys this file changes; not in --set |"
"""The key that is resolved before the classes check a recipe."""
WORDS = {"string": "text", "boolean": "true or false", "object": "mapping", "integer": "whole number", "number": "number"}
CONSTRAINTS = {"exclusiveMinimum", "minimum", "exclusiveMaximum", "maximum"}
SHORT = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum"}
"""As pydantic writes a limit that stands beside a validator of its own."""
UNSAID = {"title", "description", "default", "additionalProperties"}


def page() -> str:
    """Return the text of the page."""
    return "\n".join([HEAD, *_sections(Recipe, "")])


def keys(section: type = Recipe, prefix: str = "") -> Iterator[str]:
    """Yield every key of a recipe with its sections before it: `train.epochs`."""
    for name, field in keys_of(section).items():
        inner = section_of(field)
        if inner is None:
            yield prefix + name
        else:
            yield from keys(inner, f"{prefix}{name}.")


def _sections(section: type, prefix: str) -> Iterator[str]:
    """Yield a section's table, then those of the sections in it."""
    properties = TypeAdapter(section).json_schema()["properties"]
    within = {name: inner for name, field in keys_of(section).items() if (inner := section_of(field))}
    yield f"## `{prefix.rstrip('.')}`\n" if prefix else "## At the top\n"
    yield f"{(section.__doc__ or '').strip().splitlines()[0]}\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    if not prefix:
        yield EXTENDS
    for name, field in keys_of(section).items():
        if name in within:
            doc = (within[name].__doc__ or "").strip().splitlines()[0]
            needed = "needed" if field.is_required() else "none" if field.default in (None, ()) else "its own"
            shown = f"{prefix}{name}".replace(".", "")
            listed = "list of sections" if _is_list(field) else "section"
            yield f"| [`{name}`](#{shown}) | {listed} | {needed} | {field.description or doc} |"
            continue
        if not field.description:
            raise ValueError(f"{prefix}{name} has no description in ftkit/config/recipe.py")
        yield f"| `{name}` | {_type(properties[name])} | {_default(field)} | {field.description} |"
    yield ""
    for name, inner in within.items():
        yield from _sections(inner, f"{prefix}{name}.")


def _is_list(field: FieldInfo) -> bool:
    return getattr(field.annotation, "__origin__", None) is tuple


def _default(field: FieldInfo) -> str:
    """Return a default as YAML has it."""
    if field.is_required():
        return "needed"
    value = field.default
    return "none" if value is None or value == () else f"`{json.dumps(value).strip(chr(34))}`"


def _type(schema: dict[str, Any]) -> str:
    """Return what a value may be, in words."""
    if "anyOf" in schema:
        found = [_type(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(found))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "prefixItems" in schema:
        return f"list of {len(schema['prefixItems'])}: {_type(schema['prefixItems'][0])}"
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    schema = {SHORT.get(name, name): value for name, value in schema.items()}
    told = WORDS[schema["type"]]
    unknown = set(schema) - {"type"} - UNSAID - CONSTRAINTS
    if unknown:
        raise ValueError(f"no words for {sorted(unknown)} of {schema}")
    limits = []
    if "exclusiveMinimum" in schema:
        least = schema["exclusiveMinimum"]
        limits.append(f"from {least + 1}" if schema["type"] == "integer" else f"above {least:g}")
    if "minimum" in schema:
        limits.append(f"from {_number(schema['minimum'])}")
    if "exclusiveMaximum" in schema:
        limits.append(f"below {_number(schema['exclusiveMaximum'])}")
    if "maximum" in schema:
        limits.append(f"to {_number(schema['maximum'])}")
    return " ".join([told, ", ".join(limits)]).strip()


def _number(value: float) -> str:
    """Return a limit with all its digits."""
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
