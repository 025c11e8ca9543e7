"""Write docs/cli.md: every command of `ftkit` with its arguments, options and defaults, from the typer app itself.

`make docs` runs it, and a test compares the page with the app.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from ftkit.cli.app import app

PAGE = Path(__file__).parent / "cli.md"
HEAD = """\
# Command line

<!-- written by `make docs` from ftkit/cli/app.py; a test compares -->

`ftkit COMMAND --help` prints the same, `ftkit --version` the version, and `ftkit --install-completion` sets up the shell.
[Recipes](recipes.md) explains recipe files, and [Troubleshooting](troubleshooting.md#exit-codes) lists the exit codes.
"""
NOTE = re.compile(r"\s*\[([^\[\]]*)\]$")
"""What typer appends to a help text: `[default: 0; x>=0]` or `[required]`."""


def page() -> str:
    """Return the text of the page."""
    found = list(commands(typer.main.get_command(app), "ftkit"))
    rows = [f"| [`{name}`](#{name.replace(' ', '-')}) | {_paragraphs(command)[0]} |" for name, command in found]
    lines = ["| command | |", "|---|---|", *rows, ""]
    return "\n".join([HEAD, *lines, *(line for name, command in found for line in _section(name, command))])


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and the object of each command; a group gives those in it."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, each in command.commands.items():
        if not each.hidden:
            yield from commands(each, f"{name} {word}")


def _section(name: str, command: Any) -> Iterator[str]:
    """Yield the lines of one command: its usage, its help, and a table of its parameters."""
    context = command.context_class(command)
    usage = " ".join(command.collect_usage_pieces(context)).replace("{", "").replace("}", "")
    yield f"## {name}\n"
    yield f"```text\n{name} {re.sub(r'[.]{3}(]?)[.]{3}', r'...', usage).replace('[[', '[')}\n```\n"
    yield from (f"{paragraph}\n" for paragraph in _paragraphs(command))
    records = [each.get_help_record(context) for each in command.params]
    if any(records):
        yield "| argument or option | default | meaning |\n|---|---|---|"
        yield from (_row(*record) for record in records if record is not None)
        yield ""


def _paragraphs(command: Any) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in (command.help or "").split("\n\n")]


def _row(spelling: str, text: str) -> str:
    """Return the row of a parameter from its two texts in `--help`."""
    notes, found = [], NOTE.search(text)
    if found:
        text, notes = text[: found.start()], found[1].split("; ")
    default = next((note.removeprefix("default: ") for note in notes if note.startswith("default: ")), "")
    default = "required" if "required" in notes else default and f"`{default}`"
    limits = [note.replace("x>=", "at least ").replace("x>", "more than ") for note in notes if "x>" in note or "x<" in note]
    spelling = re.sub(r" <([a-z]+) range>", r" <\1>", spelling)
    cells = f"`{spelling}`", default, " ".join([*text.split(), *(f"({each})" for each in limits)])
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
