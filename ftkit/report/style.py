"""The style sheet and the HTML templates of all pages.

A page is one file: the style sheet is inlined, and the Content-Security-Policy forbids scripts and requests. Templates
escape every value; `text.plain` replaces control characters first.
"""

from __future__ import annotations

from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ftkit.config.wording import counted
from ftkit.report.text import plain

HERE = Path(__file__).parent
ENVIRONMENT = Environment(
    loader=FileSystemLoader(HERE / "templates"),
    autoescape=True,
    finalize=plain,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters["counted"] = counted


@cache
def stylesheet() -> str:
    """Return report.css. Its first rule defines the colours on `:root`. It has no `&`, so that XML can contain it."""
    return (HERE / "report.css").read_text(encoding="utf-8")


def embedded(root: str, rules: str = "") -> str:
    """Return the style sheet for one element of a foreign page, such as a notebook.

    JupyterLab and VS Code mark their theme on `body`. Elsewhere the system's setting counts.

    Args:
        root: Selector of the element.
        rules: Further rules for elements inside it.
    """
    colours, brace, others = stylesheet().partition("}")
    dark = ", ".join(f"{theme} {root}" for theme in ('[data-jp-theme-light="false"]', ".vscode-dark"))
    light = ", ".join(f"{theme} {root}" for theme in ('[data-jp-theme-light="true"]', ".vscode-light"))
    themes = f"{dark} {{ color-scheme: dark; }}\n{light} {{ color-scheme: light; }}\n"
    return f"{colours.replace(':root', root)}{brace}\n{themes}{root} {{\n{others}\n{rules}\n}}\n"


def html(template: str, **values: Any) -> str:
    """Return a filled template of `templates/`."""
    now = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    return ENVIRONMENT.get_template(template).render(css=Markup(stylesheet()), now=now, **values)
