"""Writes docs/rooms.md: one line for every file of the package, which is the first sentence of the file's own essay.

`make docs` runs it; a test compares the page with the tree. Nothing is imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "rooms.md"
FOLDERS = ("ftkit", "triton_kernels")

HEAD = """\
# Every room

<!-- written by `make docs` from the files themselves; a test compares -->

One line for every file: the first sentence of the essay with which it opens. [Architecture in ten minutes](architecture.md)
says how they work together. `triton_kernels/` is installed as `ftkit.kernels`.
"""


def sentence(path: Path) -> str:
    """Return the first sentence of a file's docstring, on one line.

    Raises:
        ValueError: for a file without one.
    """
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not text:
        raise ValueError(f"{path}: say in its docstring what it is for")
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s(?=[A-Z`])", paragraph)[0].replace("|", "\\|").replace("<", "&lt;")


def lines() -> Iterator[str]:
    """Yield the page's lines after its head: a table for each package."""
    for folder in FOLDERS:
        for package in sorted({path.parent for path in (ROOT / folder).rglob("*.py")}):
            name = package.relative_to(ROOT)
            yield f"\n## {name}/\n"
            yield f"{sentence(package / '__init__.py')}\n"
            files = sorted(path for path in package.glob("*.py") if path.name != "__init__.py")
            if files:
                yield "| file | purpose |\n|---|---|"
            yield from (f"| `{path.name}` | {sentence(path)} |" for path in files)


def page() -> str:
    """Return the page."""
    return HEAD + "\n".join(lines()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
