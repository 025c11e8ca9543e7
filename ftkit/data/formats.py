"""The content of a row: five formats, one conversation.

    messages   {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    sharegpt   {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}
    alpaca     {"instruction": "…", "input" or "context": "…"?, "output" or "response": "…"}
    prompt     {"prompt": "…", "completion" or "response": "…"}   or   {"question": "…", "answer": "…"}
    text       {"text": "…"}

All but text may have `system` and `tools`; alpaca and prompt may have `history`, a list of pairs of a question and an
answer. An assistant turn with `weight: 0` or `train: false` is read and not learned. Tools, and the arguments of tool calls,
may be objects or JSON text: both become objects, as chat templates expect them.

The format follows from the columns, never from values. A row that does not fit raises `BadRowError`; nothing is repaired.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ftkit.errors import UserError

COLUMNS = {
    "messages": (("messages",),),
    "sharegpt": (("conversations",), ("conversation",)),
    "alpaca": (("instruction", "output"), ("instruction", "response")),
    "prompt": (("prompt", "completion"), ("prompt", "response"), ("question", "answer")),
    "text": (("text",),),
}
"""Columns that a row of each format needs, in any of these combinations."""
OPTIONAL = {
    "messages": ("system", "tools"),
    "sharegpt": ("system", "tools"),
    "alpaca": ("input", "context", "system", "tools", "history"),
    "prompt": ("system", "tools", "history"),
    "text": (),
}
"""Further columns that are read if a row has them."""
OWN_KEYS = ("role", "from", "content", "value", "weight", "train")
"""Keys of a turn that are not passed on to the chat template under their names."""
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
"""Roles in the words of OpenAI and of ShareGPT, and the role that the chat template gets."""


class BadRowError(ValueError):
    """A row that cannot be trained on; the text says why. The caller adds the place."""


@dataclass(frozen=True)
class Conversation:
    """Turns with at least one answer among them.

    Args:
        turns: Dictionaries with `role` (system, user, assistant, tool) and `content`, and other keys of the row for the chat
            template (`tool_calls`, `name`, `reasoning_content`, …).
        tools: The template's `tools`, or None.
        separator: Text between a question and its answer if the tokenizer has no chat template.
        muted: Numbers of the assistant turns, from 0, that are read and not learned.
    """

    turns: tuple[dict, ...]
    tools: list | None = None
    separator: str = "\n"
    muted: frozenset[int] = frozenset()


def parse_record(record: str) -> dict:
    """Parse the JSON text of a row."""
    try:
        row = json.loads(record)
    except json.JSONDecodeError as error:
        raise BadRowError(f"broken JSON: {error.msg} (column {error.colno})") from error
    if not isinstance(row, dict):
        raise BadRowError(f"expected an object with columns; found {type(row).__name__}")
    return row


def detect(rows: list[dict], label: str, wanted: str = "auto") -> str:
    """Return the format that fits most of the first rows of a source.

    Args:
        rows: Parsed rows.
        label: The source, for the message.
        wanted: A name of `COLUMNS`, or auto.

    Raises:
        UserError: No row has the columns of the format asked for, or of any format.
    """
    candidates = list(COLUMNS) if wanted == "auto" else [wanted]
    counts = {name: sum(_columns(row, name) is not None for row in rows) for name in candidates}
    best = max(candidates, key=counts.__getitem__)
    if counts[best]:
        return best
    columns = sorted({column for row in rows for column in row})
    needed = "; ".join(f"{name}: {_needed(name)}" for name in candidates)
    raise UserError(
        f"{label}: found columns {', '.join(columns) or 'none'}; needed columns ({needed}). Rename the columns or set the "
        "format."
    )


def read_row(row: dict, format_name: str, *, tool_calls: bool = True) -> Conversation | str:
    """Turn a row into a conversation, or into plain text for the format `text`.

    Args:
        row: The parsed row.
        format_name: A name of `COLUMNS`.
        tool_calls: Whether the chat template reads `tool_calls`. If not, a `function_call` turn keeps its text.

    Raises:
        BadRowError: The row lacks a column of the format, or has it empty or of another type.
    """
    columns = _columns(row, format_name)
    if columns is None:
        raise BadRowError(f"needs columns {_needed(format_name)}; found {', '.join(sorted(row)) or 'none'}")
    if format_name == "text":
        return _text(row["text"], "`text`")
    if format_name in ("messages", "sharegpt"):
        return _chat(row, columns[0], tool_calls=tool_calls)
    question, answer = columns
    asked = _text(row[question], f"`{question}`")
    if format_name == "alpaca":
        extra = _text(row.get("input") or row.get("context") or "", "`input` or `context`", may_be_empty=True)
        asked += f"\n\n{extra}" if extra.strip() else ""
    turns = [
        *_history(row),
        {"role": "user", "content": asked},
        {"role": "assistant", "content": _text(row[answer], f"`{answer}`")},
    ]
    separator = "" if answer == "completion" else "\n"
    return Conversation(tuple(_with_system(row, turns)), _tools(row), separator)


def unused_columns(row: dict, format_name: str) -> list[str]:
    """Return the columns of a row that have content and that its format does not read."""
    used = {*(_columns(row, format_name) or ()), *OPTIONAL[format_name]}
    return [column for column, value in row.items() if column not in used and value not in (None, "", [], {})]


def turn_of(turn: object, where: str, *, tool_calls: bool = True) -> dict:
    """Read one turn; keys besides role and content are kept for the chat template, empty ones dropped."""
    if not isinstance(turn, dict):
        raise BadRowError(f"{where} must be an object with role and content; found {turn!r:.60}")
    said = turn.get("role", turn.get("from"))
    role = ROLES.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        raise BadRowError(f"{where} has the unknown role {said!r}; needed: {', '.join(ROLES)}")
    content = turn["content"] if turn.get("content") is not None else turn.get("value")
    rest = {key: value for key, value in turn.items() if key not in OWN_KEYS and value not in (None, "", [], {})}
    if said == "function_call" and tool_calls and (calls := _calls_in(content)):
        content, rest["tool_calls"] = None, calls
    if "tool_calls" in rest:
        rest["tool_calls"] = with_arguments(rest["tool_calls"], _object)
    if isinstance(content, list):
        parts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise BadRowError(f"{where} has a part that is not text; only text can be trained on")
        content = "".join(parts)
    if content is None and "tool_calls" in rest:
        content = ""
    may_be_empty = role in ("system", "tool") or "tool_calls" in rest
    return {"role": role, "content": _text(content, f"the {role} content of {where}", may_be_empty=may_be_empty), **rest}


def with_arguments(calls: Any, change: Callable[[Any], Any]) -> Any:
    """Return tool calls with the `arguments` of each changed by a function."""
    if isinstance(calls, list):
        return [with_arguments(call, change) for call in calls]
    if not isinstance(calls, dict):
        return calls
    return {key: change(value) if key == "arguments" else with_arguments(value, change) for key, value in calls.items()}


def _columns(row: dict, format_name: str) -> tuple[str, ...] | None:
    """Return the columns that a format needs and that a row has; None if the row does not fit."""
    return next((columns for columns in COLUMNS[format_name] if all(name in row for name in columns)), None)


def _needed(format_name: str) -> str:
    return ", or ".join(" and ".join(columns) for columns in COLUMNS[format_name])


def _chat(row: dict, column: str, *, tool_calls: bool) -> Conversation:
    """Read a list of turns, in the words of OpenAI (role, content) or of ShareGPT (from, value)."""
    turns = row[column]
    if not isinstance(turns, list):
        raise BadRowError(f"`{column}` must be a list of turns; found {turns!r:.60}")
    read = [turn_of(turn, f"`{column}`, turn {number}", tool_calls=tool_calls) for number, turn in enumerate(turns, 1)]
    answers = [number for number, turn in enumerate(read) if turn["role"] == "assistant"]
    if not answers:
        found = ", ".join(turn["role"] for turn in read)
        raise BadRowError(f"`{column}` has no assistant turn; found {found or 'no turn'}")
    whole = _with_system(row, read)
    added = len(whole) - len(read)
    muted = frozenset(number + added for number in answers if _mutes(turns[number], number))
    return Conversation(tuple(whole), _tools(row), muted=muted)


def _mutes(turn: dict, number: int) -> bool:
    """Return whether a turn has `weight: 0` or `train: false`."""
    for key in ("weight", "train"):
        if turn.get(key) not in (None, 0, 1):
            raise BadRowError(f"turn {number + 1} has the {key} {turn[key]!r}; needed: 0 or 1")
    return turn.get("weight") == 0 or turn.get("train") == 0


def _with_system(row: dict, turns: list[dict]) -> list[dict]:
    """Return turns after the system prompt of the row's own column, if it has one."""
    text = _text(row.get("system") or "", "`system`", may_be_empty=True)
    if not text.strip():
        return turns
    if turns[0]["role"] != "system":
        return [{"role": "system", "content": text}, *turns]
    if text.strip() != turns[0]["content"].strip():
        raise BadRowError("has a `system` column and another system turn; keep one of them")
    return turns


def _history(row: dict) -> list[dict]:
    """Read the earlier questions and answers of a row: a list of pairs."""
    turns = []
    for pair in row.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRowError("`history` must be a list of pairs of a question and an answer")
        turns.append({"role": "user", "content": _text(pair[0], "a question of `history`")})
        turns.append({"role": "assistant", "content": _text(pair[1], "an answer of `history`")})
    return turns


def _tools(row: dict) -> list | None:
    """Read the tools of a row: a list, or JSON text of one; each an object, or JSON text of one."""
    tools = _object(row.get("tools"))
    if tools and not isinstance(tools, list):
        raise BadRowError(f"`tools` must be a list, or JSON text of one; found {tools!r:.60}")
    return [_object(tool) for tool in tools] if tools else None


def _calls_in(text: object) -> list[dict]:
    """Return the tool calls in the text of a ShareGPT `function_call` turn; none if it is not JSON of calls."""
    content = _object(text)
    calls = content if isinstance(content, list) else [content]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        return []
    return [{"type": "function", "function": call} for call in calls]


def _object(value: Any) -> Any:
    """Return the object or list that a text is in JSON; any other value as it is."""
    if isinstance(value, str) and value.strip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _text(value: object, name: str, *, may_be_empty: bool = False) -> str:
    """Return a value that must be text, and valid Unicode (not half a surrogate pair)."""
    if not isinstance(value, str):
        raise BadRowError(f"{name} must be text; found {value!r:.60}")
    if not value.strip() and not may_be_empty:
        raise BadRowError(f"{name} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRowError(f"{name} is not valid Unicode at character {error.start + 1}") from error
    return value
