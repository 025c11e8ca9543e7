"""Values beside what turns say that a chat template reads and does not write.

A template may test a value (`{% if m.name %}`), take the first of a list, or cut a text. Then its key counts as read, and a
part of the row is lost all the same. So each value is looked for in the text that the template made.

Not looked for: true and false, which templates write as words of their own; values that stand in the template itself,
with which it compares (`m.type == 'function'`). The cost: a search of the text for each value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from transformers.utils.chat_template_utils import _REASONING_FIELDS

from ftkit.data.formats import Conversation
from ftkit.data.roles import ARGUMENTS

SIGNS = re.compile(r"\W+")
SAID = ("role", "content", *_REASONING_FIELDS)
"""Keys of a turn that are looked for by themselves."""
TEXTS_OF_TOOLS = ("name", "description")


class Text:
    """What a chat template made of a conversation, to look for values in it.

    Args:
        text: the text
        template: the template's source
    """

    def __init__(self, text: str, template: str):
        self.text, self.template = text, template
        self._bare = ""

    def lacks(self, value: str | float) -> bool:
        """Return whether a value is not written: as it is, as JSON, or but for signs and blanks."""
        said = value.strip() if isinstance(value, str) else str(value)
        if said in self.text or json.dumps(value, ensure_ascii=False).strip('"') in self.text:
            return False
        if f"'{said}'" in self.template or f'"{said}"' in self.template:
            return False
        self._bare = self._bare or SIGNS.sub("", self.text)
        return SIGNS.sub("", said).lower() not in self._bare.lower()


def unwritten(conversation: Conversation, text: Text) -> bool:
    """Return whether a value of turns or tools is missing from the text of a conversation."""
    values = (
        value for turn in conversation.turns for key, inner in turn.items() if key not in SAID for value in _in(inner, key)
    )
    return any(text.lacks(value) for value in values) or any(text.lacks(value) for value in _of_tools(conversation.tools))


def _in(value: Any, key: str) -> Iterator[str | float]:
    """Yield the texts and numbers in a value of a turn."""
    if key == ARGUMENTS and isinstance(value, str):
        value = _parsed(value)
    if isinstance(value, dict):
        if key == ARGUMENTS:  # their names say something, too
            yield from value
        for name, inner in value.items():
            yield from _in(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _in(inner, key if key != ARGUMENTS else "")
    elif value is not None and not isinstance(value, bool):
        yield value


def _of_tools(value: Any, key: str = "") -> Iterator[str]:
    """Yield the names and descriptions of tools and of their parameters."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _of_tools(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _of_tools(inner, key)
    elif isinstance(value, str) and key in TEXTS_OF_TOOLS:
        yield value


def _parsed(value: str) -> Any:
    """Return the object that a text is in JSON, or the text."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, dict) else value
