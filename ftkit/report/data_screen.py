"""Data before training, on a terminal. Trained tokens are in ⟦brackets⟧, bold and underlined if the terminal has colours.

Rows are untrusted text: control characters are escaped.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ftkit.config.wording import counted
from ftkit.data.preview import Findings, Piece, Sample, Shown
from ftkit.data.report import Bar
from ftkit.report.text import visible

LONGEST_BAR = 44
"""Characters of the longest bar."""
READ, LEARNED, SPECIAL = "dim", "bold underline green", "cyan"


def show(found: Findings, console: Console, *, rows: bool) -> None:
    """Print the findings, and the rows as tokens if asked."""
    console.print(Text(visible(found.title), "bold"))
    if found.report is not None:
        console.print(Text(visible(str(found.report))))
        _histogram(console, found.report.lengths, found.sequence_tokens)
    if found.held_out is not None:
        console.print(Text(visible(f"held-out rows: {found.held_out}")))
    for warned in found.warnings:
        console.print(Text.assemble(("warning: ", "bold yellow"), visible(str(warned))))
    if found.report is not None and not found.warnings:
        console.print(Text(f"all of {counted(found.report.rows, 'row')} were checked: no warnings", "green"))
    if rows and found.shown:
        legend = Text.assemble("\n", ("⟦trained on⟧", LEARNED), "  ", ("read only", READ), "  ", ("<special>", SPECIAL))
        console.print(legend)
        for shown in found.shown:
            _shown(console, shown)
    if found.refused:
        console.print(Text.assemble(("a run would refuse these data: ", "bold red"), visible(found.refused)))


def _histogram(console: Console, bars: list[Bar], sequence_tokens: int) -> None:
    most = max(count for _, _, count in bars)
    width = max(len(f"{high - 1:,}") for _, high, _ in bars)
    console.print(Text("tokens per sample, before cutting, and samples", "bold"))
    for low, high, count in bars:
        bar = "█" * max(round(LONGEST_BAR * count / most), int(count > 0))
        over = "  beyond sequence_tokens" if count and low >= sequence_tokens else ""
        console.print(Text(f"  {low:>{width},} – {high - 1:>{width},} {bar} {count:,}{over}"))


def _shown(console: Console, shown: Shown) -> None:
    console.print(Text(f"\n{visible(shown.title)}", "bold"))
    for number, sample in enumerate(shown.samples, 1):
        which = f"{number} of {len(shown.samples)} packed, " if shown.sequence_tokens else ""
        facts = f"── {which}{sample.place}: {counted(sample.tokens, 'token')}, {sample.trained_tokens} trained on"
        console.print(Text(visible(facts), "bold blue"))
        console.print(_text(sample))
    used = sum(sample.tokens for sample in shown.samples)
    if shown.sequence_tokens > used:
        console.print(Text(f"── {counted(shown.sequence_tokens - used, 'token')} not filled", "bold blue"))


def _text(sample: Sample) -> Text:
    """Return the tokens of a sample, with brackets around the trained ones."""
    text, inside = Text(), False
    for piece in sample.pieces:
        if piece.trained != inside:
            text.append("⟦" if piece.trained else "⟧", LEARNED)
            inside = piece.trained
        text.append(f" {piece.text} " if piece.gap else visible(piece.text), _style(piece))
    if inside:
        text.append("⟧", LEARNED)
    return text


def _style(piece: Piece) -> str:
    if piece.gap:
        return "italic"
    if piece.special:
        return f"{SPECIAL} bold underline" if piece.trained else SPECIAL
    return LEARNED if piece.trained else READ
