"""Text and numbers for a page or a terminal. Control characters of untrusted text are shown as signs."""

from __future__ import annotations

import math
import unicodedata
from typing import Any

from markupsafe import Markup, escape
from rich.markup import escape as rich_escape

GIB = 1 << 30
STAYING = "\n\t\u200c\u200d"


def plain(value: Any) -> Any:
    """Return a value as `visible` text; markup stays as it is."""
    return value if isinstance(value, Markup) else visible(str(value))


def escaped(text: str) -> Markup:
    """Return text as escaped HTML, also for attributes."""
    return escape(visible(text))


def visible(text: str) -> str:
    """Return text with control and invisible characters shown as signs.

    Line breaks, tabs, spaces of all widths and the joiners of scripts and emoji stay.
    """
    return "".join(c if c.isprintable() or c in STAYING or unicodedata.category(c) == "Zs" else _sign(c) for c in text)


def literal(text: str) -> str:
    """Return text that a rich console without emoji codes prints as it is: no markup, no control characters."""
    return rich_escape(visible(text))


def _sign(character: str) -> str:
    return chr(0x2400 + ord(character)) if character < " " else f"\\u{ord(character):04x}"


def short(value: float | None, digits: int = 4) -> str:
    """Return a number with a few significant digits, grouped thousands, and an exponent where it needs one."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-4:
        mantissa, _, exponent = f"{value:.{max(digits - 2, 0)}e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    text = f"{value:,.{decimals}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−")


def gib(value: float) -> str:
    """Return bytes as GiB, or as MiB below a tenth of a GiB."""
    return f"{value / GIB:,.2f} GiB" if value >= GIB / 10 else f"{value / 2**20:,.1f} MiB"


def lasted(seconds: float | None) -> str:
    """Return a duration in seconds, minutes or hours."""
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(min(seconds, 1e9)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
