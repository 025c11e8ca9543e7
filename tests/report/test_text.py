"""Untrusted text on a console: it is printed as it is, without effect on the console or the terminal."""

from __future__ import annotations

import io

from rich.console import Console

from ftkit.report.text import literal
from ftkit.train.summary import show_answers


def test_markup_and_signs_of_a_terminal_are_shown() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=200)
    console.print(literal("[bold]loud[/] \x1b[31mred\x07\u202e end"))
    assert out.getvalue() == "[bold]loud[/] ␛[31mred␇\\u202e end\n"


def test_scripts_and_slices_stay() -> None:
    out = io.StringIO()
    text = "xs[a:x:b] 日本\u3000語 \u00e9\u00a0! \u200d\u200c"
    Console(file=out, force_terminal=True, color_system=None, width=200, emoji=False).print(literal(text))
    assert out.getvalue() == text + "\n"


def test_answers_are_not_obeyed() -> None:
    out = io.StringIO()
    shown = {"question": "[red]a\x1b]0;title\x07", "before": "\x1b[2J", "after": "[/]", "expected": ""}
    show_answers(Console(file=out, force_terminal=True, color_system=None, width=200), [shown])
    assert "\x1b]" not in out.getvalue()
    assert "\x1b[2J" not in out.getvalue()
    assert "[red]a␛]0;title␇" in out.getvalue()
    assert "after: [/]" in " ".join(out.getvalue().split())
