"""Count the house: `make census`. Sizes, import chains, quoted tier names, attribute lookups by name, long functions.

Everything is read from the source, nothing is imported. Lines of code leave out docstrings, comments and blank lines.
`--list WORD` prints every place behind a row whose name contains WORD.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
FOLDERS = {"ftkit": "ftkit", "triton_kernels": "ftkit.kernels"}
"""Folders of the package, and the name under which each is imported."""
TIERS = {"device", "host", "nvme"}
TIERS_FILE = "ftkit/spec/tiers.py"
OTHER_DEVICES = {
    "ftkit/cli/recipe_list.py",
    "ftkit/engine/memory/affinity.py",
    "ftkit/hf/memory/fake.py",
    "ftkit/report/compare.py",
    "ftkit/report/page.py",
    "ftkit/report/timeline.py",
    "ftkit/train/run.py",
    "ftkit/train/summary.py",
}
"""Files in which "device" and "host" are keys of something else: a name in torch, or in a JSON file."""
BY_NAME = {"hasattr", "getattr", "setattr", "delattr"}
FUNCTION_LINES, CLASS_LINES = 60, 300
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass
class Module:
    """One file of the package.

    Args:
        path: relative to the repository.
        name: dotted, as it is imported.
        text: its source.
    """

    path: Path
    name: str
    text: str
    package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def docstrings(self) -> list[ast.Expr]:
        """Every bare string: docstrings of modules, classes, functions and constants."""
        return [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ]

    @cached_property
    def code_lines(self) -> set[int]:
        """Numbers of the lines that hold code."""
        skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in skipped:
                lines |= set(range(token.start[0], token.end[0] + 1))
        for node in self.docstrings:
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return lines

    @cached_property
    def comments(self) -> int:
        """Number of comments."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return sum(token.type == tokenize.COMMENT for token in tokens)

    def where(self, node: ast.AST) -> str:
        """Return `path:line` of a node."""
        return f"{self.path}:{getattr(node, 'lineno', 0)}"


@dataclass
class Census:
    """All modules of the package, and what is counted of them.

    Args:
        modules: by dotted name.
    """

    modules: dict[str, Module]
    places: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, root: Path = ROOT) -> Census:
        """Read every file below `FOLDERS`."""
        modules = {}
        for folder, prefix in FOLDERS.items():
            for path in sorted((root / folder).rglob("*.py")):
                parts = [prefix, *path.relative_to(root / folder).with_suffix("").parts]
                package = parts[-1] == "__init__"
                name = ".".join(parts[:-1] if package else parts)
                modules[name] = Module(path.relative_to(root), name, path.read_text(), package)
        return cls(modules)

    # --- imports

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Modules of the package that each module imports, in functions and under TYPE_CHECKING too."""
        return {name: set(self._imported(module)) - {name} for name, module in self.modules.items()}

    def _imported(self, module: Module) -> Iterator[str]:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.modules)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    if inner in self.modules:
                        yield inner
                    elif node.module in self.modules:
                        yield node.module

    def in_functions(self) -> list[str]:
        """Imports of the package's own modules inside functions."""
        found = []
        for module in self.modules.values():
            for outer in ast.walk(module.tree):
                if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    found += [
                        module.where(node)
                        for node in ast.walk(outer)
                        if isinstance(node, (ast.Import, ast.ImportFrom)) and "ftkit" in ast.unparse(node)
                    ]
        return sorted(set(found))

    def cycles(self) -> list[list[str]]:
        """Groups of modules that import each other; a package's `__init__` counts as a module."""
        return [group for group in _components(self.imports) if len(group) > 1]

    def longest_chain(self) -> list[str]:
        """The longest chain of imports without a repetition, from the top down (cycles count as one module)."""
        groups = _components(self.imports)
        of = {name: number for number, group in enumerate(groups) for name in group}
        best: dict[int, list[str]] = {}
        for number, group in enumerate(groups):  # each after all that it imports
            below = [best[of[name]] for member in group for name in self.imports[member] if of[name] != number]
            best[number] = [group[0], *max(below, key=len, default=[])]
        return max(best.values(), key=len)

    # --- the rows

    def rows(self) -> list[tuple[str, str]]:
        """Count everything; return (what, how much) in the order of the table."""
        modules = self.modules.values()
        code = {name: len(module.code_lines) for name, module in self.modules.items()}
        total = sum(code.values())
        for module in modules:
            self._look_at(module)
        looked = {"attributes by name": len(self.places["attributes by name"])}
        chain = self.longest_chain()
        self.places["longest import chain"] = chain
        self.places["cycles"] = [" <-> ".join(group) for group in self.cycles()]
        self.places["imports inside functions"] = self.in_functions()
        loose = [m for m in modules if len(m.path.parts) == 2 and m.path.parts[0] == "ftkit" and not m.package]
        self.places["modules loose on the top level"] = [module.path.name for module in loose]
        tiers = Counter(place.partition(":")[0] for place in self.places["quoted tier names"])
        comments = sum(module.comments for module in modules)
        return [
            ("files", str(len(self.modules))),
            ("lines", str(sum(module.text.count("\n") for module in modules))),
            ("lines of code", str(total)),
            ("modules loose on the top level", str(len(loose))),
            ("longest import chain", str(len(chain))),
            ("cycles", str(len(self.cycles()))),
            ("imports inside functions", str(len(self.places["imports inside functions"]))),
            ("quoted tier names", f"{sum(tiers.values())} in {len(tiers)} files"),
            (
                "attributes by name",
                f"{looked['attributes by name']}, {1000 * looked['attributes by name'] / total:.1f} per 1,000 lines of code",
            ),
            ("fields of type Any", str(len(self.places["fields of type Any"]))),
            ("functions over 60 lines", str(len(self.places["functions over 60 lines"]))),
            ("classes over 300 lines", str(len(self.places["classes over 300 lines"]))),
            ("lines of Args with several parameters", str(len(self.places["lines of Args with several parameters"]))),
            ("comments", f"{comments}, {1000 * comments / total:.0f} per 1,000 lines of code"),
        ]

    def _look_at(self, module: Module) -> None:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and node.value in TIERS and _may_be_tier(module, node.value):
                self.places["quoted tier names"].append(module.where(node))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
                self.places["attributes by name"].append(module.where(node))
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._long(module, node, "functions over 60 lines", FUNCTION_LINES)
            elif isinstance(node, ast.ClassDef):
                self._long(module, node, "classes over 300 lines", CLASS_LINES)
                self._any_fields(module, node)
        for docstring in module.docstrings:
            self._several_parameters(module, docstring)

    def _long(self, module: Module, node: Definition, row: str, most: int) -> None:
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > most:
            self.places[row].append(f"{module.where(node)} {node.name}: {lines}")

    def _any_fields(self, module: Module, node: ast.ClassDef) -> None:
        if not module.name.startswith("ftkit.engine"):
            return
        annotated = [each for each in ast.walk(node) if isinstance(each, ast.AnnAssign)]
        for each in annotated:
            named = {part.id for part in ast.walk(each.annotation) if isinstance(part, ast.Name)}
            mine = isinstance(each.target, ast.Name) or ast.unparse(each.target).startswith("self.")
            if "Any" in named and mine and each in [*node.body, *_in_init(node)]:
                self.places["fields of type Any"].append(f"{module.where(each)} {ast.unparse(each.target)}")

    def _several_parameters(self, module: Module, docstring: ast.Expr) -> None:
        text = ast.literal_eval(docstring.value)
        inside = False
        for offset, line in enumerate(text.splitlines()):
            if line.strip() in ("Args:", "Attributes:"):
                inside, indent = True, len(line) - len(line.lstrip())
            elif inside and line.strip() and len(line) - len(line.lstrip()) <= indent:
                inside = False
            elif inside and len(line) - len(line.lstrip()) == indent + 4:
                head, _, rest = line.partition(":")
                if "," in head or _names_another(rest):
                    self.places["lines of Args with several parameters"].append(
                        f"{module.path}:{docstring.lineno + offset} {line.strip()[:80]}"
                    )


def _may_be_tier(module: Module, value: object) -> bool:
    return str(module.path) != TIERS_FILE and (value == "nvme" or str(module.path) not in OTHER_DEVICES)


def _names_another(text: str) -> bool:
    """Whether a line of `Args:` goes on with a further `name: ...` after a full stop."""
    parts = text.split(". ")[1:]
    return any(part.partition(":")[1] and part.partition(":")[0].replace("_", "").isalnum() for part in parts)


def _in_init(node: ast.ClassDef) -> list[ast.stmt]:
    """Return the statements of a class's `__init__`."""
    return [
        each
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        for each in ast.walk(method)
        if isinstance(each, ast.stmt)
    ]


def _components(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components, each after all that it points to (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for name in sorted(edges):
        if name not in index:
            visit(name)
    return found


def main() -> None:
    """Print the table, and the places behind the rows that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", metavar="WORD", help="print the places behind every row whose name contains WORD")
    arguments = parser.parse_args()
    census, console = Census.of(), Console(highlight=False)
    table = Table("what", "how much", title="ftkit/ and triton_kernels/", title_justify="left")
    for row in census.rows():
        table.add_row(*row)
    console.print(table)
    for row, places in census.places.items():
        if arguments.list and arguments.list in row:
            console.print(f"\n[bold]{row}[/bold]")
            for place in places:
                console.print(f"  {place}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
