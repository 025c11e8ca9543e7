"""The style sheet: in a page as a whole, in an element of a foreign page for this element only."""

from __future__ import annotations

from collections.abc import Iterator

from ftkit.report.style import embedded, html, stylesheet


def outermost(sheet: str) -> Iterator[str]:
    """Yield the selectors of the rules that are in no other rule."""
    depth, start = 0, 0
    for place, sign in enumerate(sheet):
        if sign == "{":
            if depth == 0:
                yield sheet[start:place].strip()
            depth += 1
        elif sign == "}":
            depth -= 1
            start = place + 1
    assert depth == 0


def test_an_embedded_style_reaches_nothing_else_on_the_page() -> None:
    sheet = embedded(".mine", ".box { color: red; }")
    selectors = list(outermost(sheet))
    assert len(selectors) == 4
    assert all(each.strip().endswith(".mine") for selector in selectors for each in selector.split(","))
    assert sheet.index("--page") < sheet.index(".card") < sheet.index(".box { color: red; }")
    assert ":root" not in sheet


def test_a_page_has_the_style_as_it_is() -> None:
    page = html("data.html", title="<i>", found=type("Found", (), {"refused": "", "report": None, "shown": ()}))
    assert f"<style>{stylesheet()}</style>" in page
    assert "<h1>&lt;i&gt;</h1>" in page
    assert not set("&<") & set(stylesheet()), "an SVG file and a notebook's output contain it, too"
