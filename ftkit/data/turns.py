"""One turn of a conversation: who speaks, what is said, whether it is learned, what the template gets beside it.

Turns are read in the words of OpenAI (role, content) or of ShareGPT (from, value). An assistant turn with `weight: 0` or
`train: false` is read and not learned. Nothing is repaired: what does not fit raises `BadRowError` with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ftkit.data.columns import nearest, says_nothing

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
HALF = re.compile("[\ud800-\udfff]")
"""Half a surrogate pair."""
FOREIGN = "not JSON:"
"""The key of what stands for a value that JSON lacks (bytes, dates, images); its value names the kind."""


class BadRowError(ValueError):
    """A row that cannot be trained on; the text says why, its place is added by the one who knows it."""


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of JSON pairs.

    Raises:
        BadRowError: a key is given twice (JSON's reader would keep the last one), or no UTF-8 can hold it
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadRowError(f"has the key {twice!r} twice in one object; keep one of them")
    if bad := next((key for key in found if not key.isascii() and HALF.search(key)), None):
        raise BadRowError(f"has the key {bad!r}, which is not valid Unicode")
    return found


def mutes(turn: dict, role: str, where: str) -> bool:
    """Return whether a turn is an answer that is not to be learned: `weight: 0` or `train: false`.

    Raises:
        BadRowError: another value, two that contradict each other, or a turn to be learned that is no answer
    """
    said = {}
    for key in ("weight", "train"):
        value = turn.get(key)
        if value is not None:
            if not isinstance(value, (bool, int, float)) or (key == "train" and not isinstance(value, bool)):
                raise BadRowError(
                    f"{where} has the {key} {value!r}; needed: {'true or false' if key == 'train' else '0 or 1'}"
                )
            if value not in (0, 1):
                raise BadRowError(f"{where} has the weight {value!r}; only 0 and 1 are supported")
            said[key] = bool(value)
    if len(set(said.values())) > 1:
        raise BadRowError(f"{where} has a weight and a train that contradict each other; keep one of them")
    learned = next(iter(said.values()), role == "assistant")
    if learned and role != "assistant":
        raise BadRowError(f"{where} is a {role} turn that is to be learned ({next(iter(said))}); only answers can be")
    return role == "assistant" and not learned


def unread_parts(turn: Mapping[str, Any], column: str) -> list[str]:
    """Return the names of keys in the parts of a content that nobody reads."""
    content = turn[content_key(turn)] if content_key(turn) else None
    parts = content if isinstance(content, list) else []
    keys = {key for part in parts for key, value in part.items() if key not in ("type", "text") and not says_nothing(value)}
    return [f"{column}.{content_key(turn)}.{key}" for key in sorted(keys)]


def role_key(turn: Mapping[str, Any]) -> str:
    """Return the key that names the speaker of a turn, or ""."""
    return next((key for key in ("role", "from") if turn.get(key) is not None), "")


def content_key(turn: Mapping[str, Any]) -> str:
    """Return the key with what a turn says, or ""."""
    return next((key for key in ("content", "value") if turn.get(key) is not None), "")


def turn_of(turn: object, where: str) -> dict:
    """Read one turn; keys beside role and content are kept for the template, empty ones dropped."""
    if not isinstance(turn, dict):
        raise BadRowError(f"{where} must be an object with role and content; found {kind_of(turn)}")
    role = turn.get(role_key(turn))
    if not isinstance(role, str) or role.lower() not in ROLES:
        close = nearest(role, ROLES) if isinstance(role, str) else ""
        meant = f" (did you mean {close}?)" if close else ""
        raise BadRowError(
            f"{where} has the unknown role {role!r}{meant}; needed: {', '.join(ROLES)}"
        )
    read = {role_key(turn), content_key(turn) or "content", "weight", "train"}
    rest = {key: value for key, value in turn.items() if key not in read and not says_nothing(value)}
    if foreign := next((key for key, value in rest.items() if FOREIGN in json.dumps(value)), None):
        raise BadRowError(f"{where} has a `{foreign}` that is neither text nor a number; name it in data.ignore_columns")
    role = ROLES[role.lower()]
    content = turn.get(content_key(turn))
    if isinstance(content, list):
        content = "".join(part_of(part, where) for part in content)
    if content is None and "tool_calls" in rest:
        content = ""
    what = f"the {role} content of {where}"
    may_be_empty = role == "system" or role == "tool" or "tool_calls" in rest
    return {"role": role, "content": text_of(content, what, may_be_empty=may_be_empty), **rest}


def part_of(part: object, where: str) -> str:
    """Read one part of a content that is a list; only text can be trained on here."""
    if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else kind_of(part)
        raise BadRowError(f"{where} holds a part of type {kind!r}; only text can be trained on")
    return part["text"]


def kind_of(value: object) -> str:
    """Return the kind of a value, for a message; of values that JSON lacks, their own."""
    if isinstance(value, dict) and FOREIGN in value:
        return str(value[FOREIGN])
    return "nothing" if value is None else type(value).__name__


def text_of(value: object, what: str, *, may_be_empty: bool = False) -> str:
    """Return a value that must be text.

    Raises:
        BadRowError: another type, nothing but blanks, or text that no UTF-8 can hold (half a surrogate pair)
    """
    if not isinstance(value, str):
        advice = ": write the column as text (UTF-8), not as binary" if kind_of(value) == "bytes" else ""
        raise BadRowError(f"{what} must be text; found {kind_of(value)}{advice}")
    if not value.strip() and not may_be_empty:
        raise BadRowError(f"{what} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRowError(f"{what} is not valid Unicode at character {error.start + 1}") from error
    return value
