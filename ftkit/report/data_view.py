"""Data before training: on a terminal, as a page, and as the output of a notebook cell.

Trained tokens are in ⟦brackets⟧ on a terminal, underlined and in `<mark>` on a page, so nothing depends on a colour alone.
Rows are untrusted text: control characters are shown as signs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from markupsafe import Markup
from rich.console import Console
from rich.text import Text

from ftkit.config.wording import counted
from ftkit.data.preview import Findings, Piece, Sample, Shown
from ftkit.data.report import Bar, Report
from ftkit.report.charts import histogram
from ftkit.report.page import Card
from ftkit.report.style import embedded, html
from ftkit.report.text import escaped, visible

SCOPE = "ftkit-data"
LONGEST_BAR = 44
"""Characters of the longest bar on a terminal."""
READ, LEARNED, SPECIAL = "dim", "bold underline green", "cyan"


def show(found: Findings, console: Console, *, rows: bool) -> None:
    """Print the findings, and the rows as tokens if asked."""
    console.print(Text(visible(found.title), "bold"))
    if found.report is not None:
        console.print(Text(visible(str(found.report))))
        _print_lengths(console, found.report.lengths, found.sequence_tokens)
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
            _print_row(console, shown)
    if found.refused:
        console.print(Text.assemble(("a run would refuse these data: ", "bold red"), visible(found.refused)))


def _print_lengths(console: Console, bars: list[Bar], sequence_tokens: int) -> None:
    most = max(count for _, _, count in bars)
    width = max(len(f"{high - 1:,}") for _, high, _ in bars)
    console.print(Text("samples by their tokens, before cutting", "bold"))
    for low, high, count in bars:
        bar = "█" * max(round(LONGEST_BAR * count / most), int(count > 0))
        over = "  beyond sequence_tokens" if count and low >= sequence_tokens else ""
        console.print(Text(f"  {low:>{width},} – {high - 1:>{width},} {bar} {count:,}{over}"))


def _print_row(console: Console, shown: Shown) -> None:
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
        style = "italic" if piece.gap else LEARNED if piece.trained else READ
        if piece.special:
            style = f"{SPECIAL} bold underline" if piece.trained else SPECIAL
        text.append(f" {piece.text} " if piece.gap else visible(piece.text), style)
    if inside:
        text.append("⟧", LEARNED)
    return text


def render(found: Findings) -> str:
    """Return the findings as a page."""
    return _filled("data.html", found)


def fragment(found: Findings) -> str:
    """Return the findings as an element of another page."""
    return f'<div class="{SCOPE}"><style>{_style()}</style><div class="frame">{_filled("rows.html", found)}</div></div>'


@cache
def _style() -> str:
    return embedded(f".{SCOPE}")


def _filled(template: str, found: Findings) -> str:
    cards, lengths = [], Markup()
    if (report := found.report) is not None:
        axes = ("length", "tokens"), ("how many", "samples")
        lengths = histogram(f"Tokens of a sample, before it is cut at {found.sequence_tokens:,}", *axes, report.lengths)
        lengths += histogram("Trained tokens of a sample", *axes, report.trained_lengths)
        cards = list(_cards(report))
    return html(template, title=found.title, found=found, cards=cards, lengths=lengths, element=_element)


def _cards(report: Report) -> Iterator[Card]:
    trained = 100 * report.trained_tokens / report.tokens
    mean = report.tokens // report.samples
    yield "rows", "", f"{report.rows:,}", "", ", ".join(dict.fromkeys(source.format for source in report.sources))
    yield "samples", "", f"{report.samples:,}", "", f"mean {mean:,} tokens, longest {report.longest:,}"
    yield "tokens", "", f"{report.tokens:,}", "", f"{trained:.0f} % trained on: {report.trained_tokens:,}"
    yield "cut", "", f"{report.truncated_rows:,}", "", f"samples; {report.cut_tokens:,} tokens lost"
    if report.packing_efficiency is not None:
        yield "packed", "", f"{report.sequences:,}", "", f"sequences, {100 * report.packing_efficiency:.1f} % full"


def _element(piece: Piece) -> Markup:
    text = escaped(piece.text).replace("\n", Markup("<u>⏎</u>\n"))
    if piece.gap:
        return Markup(f'<span class="gap">{text}</span>')
    inside = f"<i>{text}</i>" if piece.special else text
    return Markup(f"<mark>{inside}</mark>" if piece.trained else f"<span>{inside}</span>")
