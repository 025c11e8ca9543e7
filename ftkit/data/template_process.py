"""A process that executes a chat template, within limits of time and memory.

A template is a program of its author. jinja2's sandbox keeps it from files and code, not from loops without end and strings
without limit, and constant expressions are computed when it is compiled. So it is compiled and executed in a fork of this
process that may take `MEMORY_BYTES` more than it has and `SECONDS` a text. Whatever goes wrong in there becomes a sentence.

An error of the template is the row's (`TemplateError`), a limit that is passed is the template's and stops (`UserError`).
Cost: a fork, and some 50 microseconds a text.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import warnings
import weakref
from multiprocessing.connection import Connection
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import _alias_reasoning_fields, _compile_jinja_template, render_jinja_template

from ftkit.data.columns import watched
from ftkit.errors import UserError

SECONDS = 10
MEMORY_BYTES = 2 << 30
TEXT_CHARACTERS = 64 << 20
"""The longest text of one conversation."""
LOOK_SECONDS = 1
"""After so long without work the process looks whether its parent is still there."""
PLAIN = (jinja2.TemplateError, TypeError, UnicodeError)
"""Errors whose message says enough without their name."""


class TemplateProcess:
    """Executes the chat template of a tokenizer in another process, which is started at first use, in each process anew.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        name: name of the tokenizer, for messages.
    """

    def __init__(self, tokenizer: Any, name: str):
        self.tokenizer, self.name = tokenizer, name
        self._pipe: Connection | None = None
        self._pid, self._owner = 0, 0

    def __getstate__(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer, "name": self.name, "_pipe": None, "_pid": 0, "_owner": 0}

    def text(self, turns: list[dict], tools: Any, *, ask: bool) -> str:
        """Return the text of some turns, with the header of an answer if asked.

        Raises:
            jinja2.TemplateError: the template fails on it. UserError: it passes a limit.
        """
        return self._asked("text", turns, tools, ask)

    def marked(self, turns: list[dict], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the spans of characters that `{% generation %}` marks; raises as `text`."""
        return self._asked("marked", turns, tools, False)

    def read(self, turns: list[dict], tools: Any, ask: bool, column: str) -> tuple[list[set[str]], set[str]]:
        """Return the names of keys that the template reads of each turn, and of the tools; raises as `text`.

        Args:
            turns: dictionaries with role and content
            tools: what the template is given as `tools`, or None
            ask: whether the template is asked for the header of an answer
            column: name of the column with the turns; the returned names begin with it
        """
        return self._asked("read", turns, tools, ask, column)

    def _asked(self, *request: Any) -> Any:
        if self._owner != os.getpid():
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send(request)
            if not self._pipe.poll(SECONDS):
                self._end()
                raise self._limit(f"does not end within {SECONDS} s")
            kind, found = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._end()
            raise self._limit("ended the process that executes it") from error
        if kind == "limit":
            self._end()
            raise self._limit(found)
        if kind == "error":
            raise jinja2.TemplateError(found)
        return found

    def _limit(self, does: str) -> UserError:
        return UserError(
            f"the chat template of {self.name} {does}; it is executed within {SECONDS} s and {MEMORY_BYTES >> 30} GiB a "
            "conversation. Give the tokenizer another template"
        )

    def _start(self) -> None:
        own, other = multiprocessing.Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: the child needs none of them
            parent, pid = os.getpid(), os.fork()
        if not pid:
            own.close()
            _serve(self.tokenizer, other, parent)
        other.close()
        self._pipe, self._pid, self._owner = own, pid, parent
        self._finalizer = weakref.finalize(self, _end, own, pid, parent)

    def _end(self) -> None:
        self._finalizer()
        self._owner = 0


def _end(pipe: Connection, pid: int, owner: int) -> None:
    """End the process and reap it; in a fork of its parent only the pipe is closed."""
    pipe.close()
    if os.getpid() == owner:
        try:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def _serve(tokenizer: Any, pipe: Connection, parent: int) -> None:
    """Answer requests until the parent is gone; never returns, and runs nothing that the parent wants done at its exit."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, resource.RLIM_INFINITY))
    except (OSError, ValueError):  # a system that has no such limit, or a smaller one
        pass
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
    try:
        while os.getppid() == parent:
            if pipe.poll(LOOK_SECONDS):
                request = pipe.recv()
                signal.setitimer(signal.ITIMER_PROF, 2 * SECONDS)  # the parent may be gone by then
                answer = _answer(tokenizer, *request)
                signal.setitimer(signal.ITIMER_PROF, 0)
                pipe.send(answer)
    except BaseException:
        os._exit(1)
    os._exit(0)


def _answer(tokenizer: Any, what: str, turns: list[dict], tools: Any, ask: bool, column: str = "") -> tuple[str, Any]:
    found: Any
    try:
        if what == "read":
            found, length = _read(tokenizer, turns, tools, ask, column), 0
        elif what == "text":
            found = tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=ask)
            length = len(found)
        else:
            rendered: Any = render_jinja_template(
                conversations=[turns],
                tools=tools,
                chat_template=tokenizer.get_chat_template(tools=tools),
                return_assistant_tokens_mask=True,
                **tokenizer.special_tokens_map,
            )
            (text, *_), (marked, *_) = rendered
            found, length = (text, marked), len(text)
    except MemoryError:
        return "limit", f"takes more than {MEMORY_BYTES >> 30} GiB"
    except PLAIN as error:
        return "error", str(error)
    except Exception as error:  # whatever the program of a stranger raises
        return "error", f"{type(error).__name__}: {error}"
    if length > TEXT_CHARACTERS:
        return "limit", f"makes a text of {length} characters, {TEXT_CHARACTERS} are the most"
    return "text", found


def _read(tokenizer: Any, turns: list[dict], tools: Any, ask: bool, column: str) -> tuple[list[set[str]], set[str]]:
    """Execute the template on turns that note what is read of them; not through the tokenizer, which hands over copies."""
    read: list[set[str]] = [set() for _ in turns]
    read_tools: set[str] = set()
    _compile_jinja_template(tokenizer.get_chat_template(tools=tools)).render(
        messages=[watched(turn, column, into) for turn, into in zip(_alias_reasoning_fields(turns), read)],
        tools=watched(tools, "tools", read_tools),
        documents=None,
        add_generation_prompt=ask,
        **tokenizer.special_tokens_map,
    )
    return read, read_tools
