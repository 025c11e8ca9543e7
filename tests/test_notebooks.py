"""The notebooks as they are committed: whole, of no machine, and with names that exist. One of them is executed."""

import ast
import importlib
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from ftkit.config import recipe
from notebooks.run import of_a_machine
from tests.docs_blocks import check_command, commands, run_line

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_LINES = 15


def code(path):
    """Return the sources of a notebook's code cells."""
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_is_whole(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    first, *rest = notebook.cells
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    code = [cell for cell in rest if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))  # from top to bottom, once
    for cell in code:
        assert len(cell.source.splitlines()) <= MOST_LINES
        assert not [output for output in cell.outputs if output.output_type == "error"]
    assert list(of_a_machine(notebook)) == []


class Instance:
    """A value of which only its class is known."""

    def __init__(self, of):
        self.of = of


def attribute(value, name):
    """Return an attribute of a value as far as it is known without running anything: else None.

    Raises:
        AttributeError: There is none.
    """
    if not isinstance(value, Instance):
        return getattr(value, name)
    fields = getattr(value.of, "__dataclass_fields__", {})
    if name in fields:
        return typed(fields[name].type, value.of)
    if re.search(rf"self\.{name}\b", inspect.getsource(value.of)) and not hasattr(value.of, name):
        return None  # set by one of its methods
    found = getattr(value.of, name)
    return typed(found.fget.__annotations__.get("return"), found.fget) if isinstance(found, property) else found


def typed(hint, where):
    """Return an instance of the class that a hint in a module of ours names; None for any other hint."""
    of = vars(inspect.getmodule(where)).get(str(hint).removesuffix(" | None"))
    return Instance(of) if inspect.isclass(of) and of.__module__.startswith("ftkit") else None


class Names(ast.NodeVisitor):
    """Walks through the code of a notebook and resolves what comes from ftkit: imports, attributes, methods, arguments.

    What comes from elsewhere, or from a value that only running would give, is None and is passed over.
    """

    def __init__(self):
        self.known = {}

    def visit_Import(self, node):
        for each in node.names:
            if each.name.partition(".")[0] == "ftkit":
                self.known[each.asname or "ftkit"] = importlib.import_module(each.name)

    def visit_ImportFrom(self, node):
        for each in node.names:
            if node.module.partition(".")[0] == "ftkit":
                self.known[each.asname or each.name] = getattr(importlib.import_module(node.module), each.name)

    def visit_Assign(self, node):
        value = self.value(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.known[target.id] = value
            self.visit(target)

    def visit_With(self, node):
        for each in node.items:
            value = self.value(each.context_expr)
            if isinstance(each.optional_vars, ast.Name):
                self.known[each.optional_vars.id] = value
        for each in node.body:
            self.visit(each)

    def visit_Attribute(self, node):
        self.value(node)

    def visit_Call(self, node):
        self.value(node)

    def value(self, node):
        """Return what an expression is, as far as it is known."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Attribute):
            value = self.value(node.value)
            return None if value is None else attribute(value, node.attr)
        if isinstance(node, ast.Call):
            return self.called(node)
        self.generic_visit(node)
        return None

    def called(self, node):
        made = self.value(node.func)
        for each in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.value(each)
        if made is None or isinstance(made, Instance):
            return None
        if not any(isinstance(each, ast.Starred) for each in node.args) and all(each.arg for each in node.keywords):
            method = inspect.isfunction(made) and isinstance(node.func, ast.Attribute) and "." in made.__qualname__
            arguments = [None] * (len(node.args) + method)
            inspect.signature(made).bind(*arguments, **{each.arg: None for each in node.keywords})
        return Instance(made) if inspect.isclass(made) else typed(getattr(made, "__annotations__", {}).get("return"), made)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_names_that_a_notebook_uses_exist(path):
    """Commands, keys of recipes, and all of ftkit that can be resolved without running a cell."""
    names = Names()
    for source in code(path):
        first, _, rest = source.partition("\n")
        if first == "%%writefile recipe.yaml":
            recipe.parse(rest, path.name, check_files=False)
            continue
        for line in re.findall(r"^!(ftkit .*)$", source, re.MULTILINE):
            for words in commands(line):
                check_command(words)
        plain = rest if first.startswith("%%") else source
        names.visit(ast.parse(TransformerManager().transform_cell(plain)))


@pytest.mark.parametrize(
    "broken",
    [
        "from ftkit.plan.whatif import what_is",
        "import ftkit\nftkit.preveiw('recipe.yaml')",
        "from ftkit.notebook import Ranks\nranks = Ranks(2).start()\nranks.fine_tune('recipe.yaml')",
        "from ftkit.notebook import Ranks\nwith Ranks(2) as ranks:\n    ranks.finetune('recipe.yaml', setting=[])",
        "from ftkit.train.planning import ask\nplan = ask(1, 2, 3).plan()\nprint(f'{plan.speed.tokens_a_second}')",
    ],
)
def test_names_that_do_not_exist_are_found(broken):
    with pytest.raises((ImportError, AttributeError, TypeError)):
        Names().visit(ast.parse(broken))


def test_a_plan_is_executed(monkeypatch, tmp_path, capsys):
    """The notebook that needs no ranks, in this process; `make notebooks` executes all, in kernels of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    shell = SimpleNamespace(system=lambda line: run_line(line, (), tmp_path))
    names = {"get_ipython": lambda: shell}
    for number, source in enumerate(code(FOLDER / "06-plan-a-13b-run.ipynb"), 1):
        exec(compile(TransformerManager().transform_cell(source), f"cell {number}", "exec"), names)
    names["plt"].close("all")
    said = capsys.readouterr().out
    assert "tokens/s, simulated" in said
    assert "Options" in said


def test_the_readme_names_each():
    text = (FOLDER.parent / "README.md").read_text()
    assert all(f"(notebooks/{path.name})" in text for path in NOTEBOOKS)
