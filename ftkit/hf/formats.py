"""What a row says: five formats, one conversation.

    messages   {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}], "tools": […]?}
    sharegpt   {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}
    alpaca     {"instruction": "…", "input" or "context": "…"?, "output" or "response": "…", "system": "…"?}
    prompt     {"prompt": "…", "completion" or "response": "…"}   or   {"question": "…", "answer": "…"}
    text       {"text": "…"}

The format is seen from the columns and reported; it is never guessed from values. A row that does not fit raises
`BadRowError` with the reason, and the caller knows the place. Nothing is repaired: an empty answer, a number where text
was expected or a role nobody knows is a fault of the data, and training on a repair hides it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from ftkit.errors import UserError

FORMATS = {
    "messages": "messages",
    "sharegpt": "conversations",
    "alpaca": "instruction and output",
    "prompt": "prompt and completion, prompt and response, or question and answer",
    "text": "text",
}
PAIRS = (("prompt", "completion"), ("prompt", "response"), ("question", "answer"))
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


class BadRowError(ValueError):
    """A row that cannot be trained on; the text says why, its place is added by the one who knows it."""


@dataclass(frozen=True)
class Conversation:
    """Turns with at least one answer in them.

    Args:
        turns: dictionaries with `role` (system, user, assistant, tool) and `content`, and what else the row had for the
            template (`tool_calls`, `name`, `reasoning_content`, …)
        tools: what the template is given as `tools`, or None
        glue: what the plain template puts between a question and its answer where the tokenizer has no chat template
    """

    turns: tuple[dict, ...]
    tools: list | None = None
    glue: str = "\n"


def parse_record(record: str) -> dict:
    """Read a row from its JSON text.

    Raises:
        BadRowError: broken JSON, or JSON that is not an object
    """
    try:
        row = json.loads(record)
    except json.JSONDecodeError as error:
        raise BadRowError(f"broken JSON: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"broken JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadRowError(f"expected an object with columns; found {type(row).__name__}")
    return row


def fits(row: dict, format_name: str) -> bool:
    """Say whether a row has the columns of a format."""
    if format_name == "alpaca":
        return "instruction" in row and ("output" in row or "response" in row)
    if format_name == "prompt":
        return any(question in row and answer in row for question, answer in PAIRS)
    if format_name == "sharegpt":
        return "conversations" in row or "conversation" in row
    return format_name in row


def detect(rows: list[dict], label: str, wanted: str = "auto") -> str:
    """Return the format of a source from the columns of some of its rows.

    Args:
        rows: the first rows that can be read at all
        label: the source, for the message
        wanted: the format the user named, or auto

    Returns:
        A name of `FORMATS`: the one that fits most of the rows.

    Raises:
        UserError: no row has the columns of the format asked for (or of any)
    """
    if wanted != "auto" and wanted not in FORMATS:
        raise UserError(f"{label}: unknown format {wanted!r}; needed: auto, {', '.join(FORMATS)}")
    candidates = list(FORMATS) if wanted == "auto" else [wanted]
    counts = {name: sum(fits(row, name) for row in rows) for name in candidates}
    best = max(candidates, key=counts.__getitem__)
    if counts[best]:
        return best
    found = ", ".join(sorted({column for row in rows for column in row})) or "none"
    needed = "; ".join(f"{name}: {FORMATS[name]}" for name in candidates)
    raise UserError(f"{label}: found columns {found}; needed columns ({needed}). Rename the columns or set the format.")


def read_row(row: dict, format_name: str) -> Conversation | str:
    """Turn a row into a conversation, or into plain text for the format `text`.

    Args:
        row: the parsed row
        format_name: a name of `FORMATS`

    Returns:
        The conversation, or the text.

    Raises:
        BadRowError: the row lacks what the format needs, or holds it empty or in another type
    """
    if not fits(row, format_name):
        raise BadRowError(f"needs columns {FORMATS[format_name]}; found {', '.join(sorted(row)) or 'none'}")
    if format_name == "text":
        return text_of(row["text"], "`text`")
    if format_name == "alpaca":
        return alpaca(row)
    if format_name == "prompt":
        question, answer = next(pair for pair in PAIRS if pair[0] in row and pair[1] in row)
        turns = (
            {"role": "user", "content": text_of(row[question], f"`{question}`")},
            {"role": "assistant", "content": text_of(row[answer], f"`{answer}`")},
        )
        return Conversation(turns, glue="" if answer == "completion" else "\n")
    column = next(name for name in ("messages", "conversations", "conversation") if name in row)
    return chat(row[column], column, row.get("tools"))


def alpaca(row: dict) -> Conversation:
    """Read instruction, optional input and optional system prompt, and output."""
    answer = "output" if "output" in row else "response"
    extra = next((name for name in ("input", "context") if row.get(name) not in (None, "")), None)
    question = text_of(row["instruction"], "`instruction`")
    if extra and text_of(row[extra], f"`{extra}`", may_be_empty=True).strip():
        question += "\n\n" + row[extra]
    turns = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": text_of(row[answer], f"`{answer}`")},
    ]
    if row.get("system"):
        turns.insert(0, {"role": "system", "content": text_of(row["system"], "`system`")})
    return Conversation(tuple(turns))


def chat(turns: object, column: str, tools: object) -> Conversation:
    """Read a list of turns, in the words of OpenAI (role, content) or of ShareGPT (from, value)."""
    if not isinstance(turns, list) or not turns:
        raise BadRowError(f"`{column}` must be a list of turns; found {turns if turns == [] else type(turns).__name__}")
    read = tuple(turn_of(turn, f"`{column}`, turn {number}") for number, turn in enumerate(turns, 1))
    if not any(turn["role"] == "assistant" for turn in read):
        raise BadRowError(f"`{column}` has no assistant turn; found {', '.join(turn['role'] for turn in read)}")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise BadRowError(f"`tools` is not JSON: {error}") from error
    if tools is not None and not isinstance(tools, list):
        raise BadRowError(f"`tools` must be a list; found {type(tools).__name__}")
    return Conversation(read, tools or None)


def turn_of(turn: object, where: str) -> dict:
    """Read one turn; keys beside role and content are kept for the template, empty ones dropped."""
    if not isinstance(turn, dict):
        raise BadRowError(f"{where} must be an object with role and content; found {type(turn).__name__}")
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise BadRowError(f"{where} has the unknown role {role!r}; needed: {', '.join(ROLES)}")
    rest = {
        key: value
        for key, value in turn.items()
        if key not in ("role", "from", "content", "value") and value not in (None, [], {})
    }
    role = ROLES[role.lower()]
    content = turn.get("content", turn.get("value"))
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
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise BadRowError(f"{where} holds a part of type {kind!r}; only text can be trained on")
    return part["text"]


def text_of(value: object, what: str, *, may_be_empty: bool = False) -> str:
    """Return a value that must be text.

    Raises:
        BadRowError: another type, nothing but blanks, or text that no UTF-8 can hold (half a surrogate pair)
    """
    if not isinstance(value, str):
        raise BadRowError(f"{what} must be text; found {'nothing' if value is None else type(value).__name__}")
    if not value.strip() and not may_be_empty:
        raise BadRowError(f"{what} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRowError(f"{what} is not valid Unicode at character {error.start + 1}") from error
    return value
