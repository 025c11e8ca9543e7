"""Data before training, as a page or as an element of a notebook.

Trained tokens are underlined, on a background of their own and in `<mark>`; special tokens have a frame and their names; a
packed sample begins with its place. So nothing depends on a colour alone. Rows are untrusted text: it is escaped, and
control characters are shown as signs. The page loads no other file and has no scripts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import chain

from ftkit.config.wording import counted
from ftkit.data.preview import Findings, Piece, Shown
from ftkit.data.report import Bar, Report, Warned
from ftkit.report.charts import histogram
from ftkit.report.page import page
from ftkit.report.style import embedded
from ftkit.report.text import escaped, visible

SCOPE = "ftkit-data"

FRAME = """
.frame{background:var(--page);color:var(--ink);border:1px solid var(--line);border-radius:10px;padding:2px 18px 16px;
font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif}
h2{font-size:15px;font-weight:650;margin:22px 0 10px}
h3{margin:0 0 4px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-top:16px}
.card,figure{background:var(--card);border:1px solid var(--line);border-radius:10px}
.card{padding:10px 14px}
.card .name,.card .note,.remark{color:var(--soft);font-size:12.5px}
.card .value{font-size:20px;font-weight:600;line-height:1.3;font-variant-numeric:tabular-nums}
.said{background:var(--card);padding:10px 16px;margin:14px 0 0;border:1px solid var(--line);border-left:4px solid var(--bad);
border-radius:10px;overflow-wrap:anywhere;white-space:pre-wrap}
.soft{color:var(--soft)}
"""
"""For a notebook, which has no style sheet of ours."""

STYLE = """
.legend-of-tokens{display:flex;flex-wrap:wrap;gap:6px 22px;margin:0 0 12px;color:var(--soft);font-size:13px}
.warnings{margin:0;padding:0;list-style:none;display:grid;gap:10px}
.warnings li{background:var(--card);border:1px solid var(--line);border-left:4px solid var(--c1);border-radius:10px;
padding:10px 16px;overflow-wrap:anywhere}
.warnings .places{color:var(--soft);font-size:13px}
.shown{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 18px;margin:0 0 14px}
.shown h3{font-size:14px;font-weight:600;margin:0 0 4px;overflow-wrap:anywhere}
.edge{display:flex;flex-wrap:wrap;gap:2px 12px;margin:10px 0 4px;padding-top:8px;border-top:2px dashed var(--line);
color:var(--soft);font-size:12.5px;overflow-wrap:anywhere}
.edge:first-of-type{border-top:0;padding-top:0;margin-top:0}
.tokens{font:13.5px/1.9 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre-wrap;
overflow-wrap:anywhere;color:var(--soft)}
.tokens span,.tokens mark{box-shadow:inset -1px 0 var(--line)}
.tokens mark{color:var(--ink);background:var(--learned);border-bottom:2px solid var(--c2);padding:1px 0}
.tokens i{font-style:normal;font-size:11.5px;border:1px solid currentColor;border-radius:4px;padding:0 3px;margin:0 1px}
.tokens .gap{border:1px dashed var(--soft);border-radius:4px;padding:0 6px}
.tokens u{text-decoration:none;opacity:.7}
"""


def render(found: Findings) -> str:
    """Return the findings as a page."""
    body = [
        f"<header><h1>{escaped(found.title)}</h1></header>",
        *_body(found),
        f"<footer>Written by ftkit on {escaped(datetime.now().astimezone().strftime('%Y-%m-%d %H:%M:%S %z'))}. "
        "This file loads no other.</footer>",
    ]
    return page(f"{found.title} – ftkit data", body, style=STYLE)


def fragment(found: Findings) -> str:
    """Return the findings as an element of another page."""
    style = embedded(f".{SCOPE}", FRAME + STYLE)
    return f'<div class="{SCOPE}"><style>{style}</style><div class="frame">{"".join(_body(found))}</div></div>'


def _body(found: Findings) -> Iterator[str]:
    if found.refused:
        yield f'<p class="said">A run would refuse these data.\n{escaped(visible(found.refused))}</p>'
    if found.report is not None:
        yield from _cards(found.report)
        yield from _warnings(found.report, found.warnings)
        yield "<h2>How long the rows are</h2>"
        yield f'<div class="grid-of-charts">{"".join(_lengths(found.report, found.sequence_tokens))}</div>'
    if found.shown:
        yield "<h2>Rows as the model gets them</h2>"
        yield (
            '<p class="legend-of-tokens tokens"><span><mark>trained on</mark></span><span>read only</span>'
            "<span><i>&lt;special&gt;</i> a special token</span><span><u>⏎</u> a line break in the text</span></p>"
        )
        yield from chain.from_iterable(map(_shown, found.shown))


def _cards(report: Report) -> Iterator[str]:
    trained = 100 * report.trained_tokens / report.tokens
    cards = [
        ("rows", f"{report.rows:,}", ", ".join(dict.fromkeys(source.format for source in report.sources))),
        ("samples", f"{report.samples:,}", f"mean {report.tokens // report.samples:,} tokens, longest {report.longest:,}"),
        ("tokens", f"{report.tokens:,}", f"{trained:.0f} % trained on: {report.trained_tokens:,}"),
        ("cut", f"{report.truncated_rows:,}", f"samples; {report.cut_tokens:,} tokens lost"),
    ]
    if report.packing_efficiency is not None:
        cards.append(("packed", f"{report.sequences:,}", f"sequences, {100 * report.packing_efficiency:.1f} % full"))
    yield '<div class="cards">'
    for name, value, note in cards:
        yield f'<div class="card"><div class="name">{name}</div><div class="value">{value}</div>'
        yield f'<div class="note">{escaped(note)}</div></div>'
    yield "</div>"
    for remark in report.remarks():
        yield f'<p class="remark">{escaped(visible(remark))}</p>'


def _warnings(report: Report, warnings: Sequence[Warned]) -> Iterator[str]:
    yield "<h2>Warnings</h2>"
    if warnings:
        yield '<ul class="warnings">'
        for warned in warnings:
            places = "".join(f"<div>{escaped(visible(place))}</div>" for place in warned.places)
            yield f'<li>⚠ {escaped(visible(warned.text))}<div class="places">{places}</div></li>'
        yield "</ul>"
    else:
        yield f'<p class="soft">None: all of {counted(report.rows, "row")} were checked.</p>'


def _lengths(report: Report, sequence_tokens: int) -> Iterator[str]:
    limit = (float(sequence_tokens), "sequence_tokens") if 2 * report.longest >= sequence_tokens else None
    yield _histogram("Tokens of a sample, before it is cut", report.lengths, limit)
    yield _histogram("Tokens trained on, of a sample", report.trained_lengths, None)


def _histogram(title: str, bars: list[Bar], limit: tuple[float, str] | None) -> str:
    return histogram(title, ("length", "tokens"), ("how many", "samples"), bars, limit)


def _shown(shown: Shown) -> Iterator[str]:
    used = sum(sample.tokens for sample in shown.samples)
    yield f'<section class="shown"><h3>{escaped(visible(shown.title))}</h3>'
    for number, sample in enumerate(shown.samples, 1):
        which = f"{number} of {len(shown.samples)} packed · " if shown.sequence_tokens else ""
        yield (
            f'<div class="edge"><span>{which}{escaped(visible(sample.place))}</span>'
            f"<span>{counted(sample.tokens, 'token')}, {sample.trained_tokens} trained on</span></div>"
        )
        yield f'<div class="tokens">{"".join(map(_piece, sample.pieces))}</div>'
    if shown.sequence_tokens > used:
        yield f'<div class="edge">{counted(shown.sequence_tokens - used, "token")} not filled</div>'
    yield "</section>"


def _piece(piece: Piece) -> str:
    text = escaped(visible(piece.text)).replace("\n", "<u>⏎</u>\n")
    if piece.gap:
        return f'<span class="gap">{text}</span>'
    inside = f"<i>{text}</i>" if piece.special else text
    name = "mark" if piece.trained else "span"
    return f"<{name}>{inside}</{name}>"
