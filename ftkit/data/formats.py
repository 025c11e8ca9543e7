"""What a row says: five formats, one conversation.

    messages   {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    sharegpt   {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}
    alpaca     {"instruction": "…", "input" or "context": "…"?, "output" or "response": "…"}
    prompt     {"prompt": "…", "completion" or "response": "…"}   or   {"question": "…", "answer": "…"}
    text       {"text": "…"}

All but text may have `system` and `tools` beside them; alpaca and prompt may have `history`, a list of pairs of a
question and an answer. An assistant turn with `weight: 0` or `train: false` is read and not learned. What else a row has
is noted (`unread_columns`), and the caller refuses it.

The format is seen from the columns and reported; it is never guessed from values. A row that does not fit raises
`BadRowError` with the reason, and the caller knows the place. Nothing is repaired: an empty answer, a number where text
was expected or a role nobody knows is a fault of the data, and training on a repair hides it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from ftkit.data.columns import hint, says_nothing
from ftkit.data.turns import BadRowError, kind_of, mutes, object_of, role_key, text_of, turn_of, unread_parts
from ftkit.errors import UserError

FORMATS = {
    "messages": "messages",
    "sharegpt": "conversations",
    "alpaca": "instruction and output",
    "prompt": "prompt and completion, prompt and response, or question and answer",
    "text": "text",
}
TURNS = ("messages", "conversations", "conversation")
PAIRS = (("prompt", "completion"), ("prompt", "response"), ("question", "answer"))


@dataclass(frozen=True)
class Conversation:
    """Turns with at least one answer in them.

    Args:
        turns: dictionaries with `role` (system, user, assistant, tool) and `content`, and what else the row had for the
            template (`tool_calls`, `name`, `reasoning_content`, …)
        tools: what the template is given as `tools`, or None
        glue: what the plain template puts between a question and its answer where the tokenizer has no chat template
        muted: numbers of the assistant turns, from 0, that are read and not learned
        column: the column with the turns, for the names of their keys
        unread: names of keys that were read by nobody while the row was parsed
        renamed: whether a turn has a role, in OpenAI's words, for which `turns` have another name
    """

    turns: tuple[dict, ...]
    tools: list | None = None
    glue: str = "\n"
    muted: frozenset[int] = frozenset()
    column: str = "messages"
    unread: tuple[str, ...] = ()
    renamed: bool = False


def parse_record(record: str) -> dict:
    """Read a row from its JSON text.

    Raises:
        BadRowError: broken JSON, or JSON that is not an object
    """
    try:
        row = json.loads(record, object_pairs_hook=object_of)
    except json.JSONDecodeError as error:
        raise BadRowError(f"broken JSON: {error.msg} (column {error.colno})") from error
    except BadRowError:
        raise
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
        return any(column in row for column in TURNS[1:])
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
    columns = sorted({column for row in rows for column in row})
    found = ", ".join(columns) or "none"
    needed = "; ".join(f"{name}: {FORMATS[name]}" for name in candidates)
    meant = "; ".join(f"{column}{hint(column)}" for column in columns if hint(column))
    raise UserError(
        f"{label}: found columns {found}; needed columns ({needed}). {f'{meant}. ' if meant else ''}"
        "Rename the columns or set the format."
    )


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
    if format_name in ("messages", "sharegpt"):
        return chat(row, columns_of(row, format_name)[0])
    question, answer, *extra = columns_of(row, format_name)
    asked = text_of(row[question], f"`{question}`")
    if extra and text_of(row[extra[0]], f"`{extra[0]}`", may_be_empty=True).strip():
        asked += "\n\n" + row[extra[0]]
    turns = [
        *history_of(row.get("history")),
        {"role": "user", "content": asked},
        {"role": "assistant", "content": text_of(row[answer], f"`{answer}`")},
    ]
    return Conversation(tuple(with_system(row, turns)), tools_of(row), glue="" if answer == "completion" else "\n")


def columns_of(row: dict, format_name: str) -> list[str]:
    """Return the columns that a format reads of a row that fits it, `system`, `tools` and `history` aside."""
    if format_name == "text":
        return ["text"]
    if format_name in ("messages", "sharegpt"):
        return [next(name for name in (TURNS[:1] if format_name == "messages" else TURNS[1:]) if name in row)]
    if format_name == "prompt":
        return list(next(pair for pair in PAIRS if pair[0] in row and pair[1] in row))
    answer = "output" if "output" in row else "response"
    extra = next((name for name in ("input", "context") if row.get(name) not in (None, "")), None)
    return ["instruction", answer, *([extra] if extra else [])]


def unread_columns(row: dict, format_name: str) -> list[str]:
    """Return the columns of a row that say something and that its format does not read.

    Args:
        row: a row that `read_row` has read
        format_name: the format it was read as, a name of `FORMATS`
    """
    read = set(columns_of(row, format_name))
    if format_name != "text":
        read |= {"system", "tools"}
    if format_name in ("alpaca", "prompt"):
        read.add("history")
    return [column for column, value in row.items() if column not in read and not says_nothing(value)]


def history_of(pairs: object) -> list[dict]:
    """Read earlier questions and answers: a list of pairs."""
    if says_nothing(pairs):
        return []
    if not isinstance(pairs, list):
        raise BadRowError(f"`history` must be a list of pairs; found {kind_of(pairs)}")
    turns = []
    for number, pair in enumerate(pairs, 1):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRowError(f"`history`, pair {number} must be a list of a question and an answer; found {kind_of(pair)}")
        for role, text in zip(("user", "assistant"), pair):
            turns.append({"role": role, "content": text_of(text, f"the {role} text of `history`, pair {number}")})
    return turns


def with_system(row: dict, turns: list[dict]) -> list[dict]:
    """Return turns after the system prompt of the row's own column, if it has one."""
    if says_nothing(row.get("system")):
        return turns
    text = text_of(row["system"], "`system`", may_be_empty=True)
    if turns[0]["role"] != "system":
        return [{"role": "system", "content": text}, *turns] if text.strip() else turns
    if text.strip() != turns[0]["content"].strip():
        raise BadRowError("has a `system` column and another system turn; keep one of them")
    return turns


def tools_of(row: dict) -> list | None:
    """Read the tools of a row: a list, or JSON text of one."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools, object_pairs_hook=object_of) if tools.strip() else None
        except BadRowError as error:
            raise BadRowError(f"`tools` {error}") from error
        except (ValueError, RecursionError) as error:
            raise BadRowError(f"`tools` is not JSON: {error}") from error
    if tools is not None and not isinstance(tools, list):
        raise BadRowError(f"`tools` must be a list; found {kind_of(tools)}")
    return tools or None


def chat(row: dict, column: str) -> Conversation:
    """Read a list of turns, in the words of OpenAI (role, content) or of ShareGPT (from, value)."""
    turns = row[column]
    if not isinstance(turns, list) or not turns:
        raise BadRowError(f"`{column}` must be a list of turns; found {turns if turns == [] else kind_of(turns)}")
    muted, unread = set(), []
    read, renamed = [], False
    for number, turn in enumerate(turns):
        where = f"`{column}`, turn {number + 1}"
        read.append(turn_of(turn, where))
        renamed |= role_key(turn) == "role" and turn["role"].lower() != read[-1]["role"]
        unread += unread_parts(turn, column)
        if mutes(turn, read[-1]["role"], where):
            muted.add(number)
    if not any(turn["role"] == "assistant" for turn in read):
        raise BadRowError(f"`{column}` has no assistant turn; found {', '.join(turn['role'] for turn in read)}")
    whole = with_system(row, read)
    if len(whole) > len(read):
        muted = {number + 1 for number in muted}
    return Conversation(
        tuple(whole), tools_of(row), muted=frozenset(muted), column=column, unread=tuple(unread), renamed=renamed
    )
