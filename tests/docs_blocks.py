"""The code blocks of the documentation: what each is, how it is checked, and how it is run.

A block is fenced, or indented where a page names commands in passing. What it is stands after the fence:

    python    executed; the blocks of a page share their names, as the lines of one script do
    bash      commands, executed line by line; an indented block is the same. Those of ftkit run in this process
    yaml      a recipe, read as `ftkit finetune` reads one
    json      rows of a data set, a line each, read as training reads them
    text      what a program prints, or a drawing: no code

An HTML comment just before a block says how it differs from that, in parts with commas between:

    <!-- run: no, needs eight GPUs -->            not executed, and why; it is still parsed, options and keys must exist
    <!-- run: slow -->                            executed with the slow tests
    <!-- run: slow, with --set train.max_steps=2 -->   these words are put behind each `ftkit finetune`
    <!-- run: slow, ranks 2 -->                   on two ranks of one process group, as under torchrun
    <!-- run: given batches -->                   with a name that the reader's own script has; see `GIVEN`
    <!-- run: part of a recipe -->                the bundled recipe with these sections in place of its own
    <!-- run: profile -->                         a node for `ftkit plan --hardware FILE.yaml`
    <!-- run: a listing -->                       an indented block that is text

Whatever fits none of this is an error with page and line. All blocks of a page run in one folder, in their order; `furnish`
says what lies there.
"""

from __future__ import annotations

import builtins
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist
import typer
import yaml
from accelerate.state import AcceleratorState, GradientState
from markdown_it import MarkdownIt
from torch.distributed.run import get_args_parser
from transformers import AutoTokenizer

from ftkit.cli import app as cli
from ftkit.config import recipe
from ftkit.config.recipe_files import packaged
from ftkit.data.formats import detect, read_row
from ftkit.plan.catalog import find_hardware
from tests.worlds import PATIENCE

HERE = Path(__file__).resolve().parents[1]
LANGUAGES = ("python", "bash", "yaml", "json", "text")
KINDS = ("part of a recipe", "profile", "a listing")
SHELL = {".", "cd", "cp", "mkdir", "ls", "cat", "docker", "git", "hf"}
"""Other programs that pages name; nothing is known of their arguments."""
BETWEEN = re.compile(r"[;&|]+|[<>]+")
DIRECTIVE = re.compile(r"<!--\s*run:\s*(.*?)\s*-->", re.DOTALL)
LEAST_REASON = 8
"""Characters of a reason not to run a block."""
COMMAND_SECONDS = 120


class BadBlock(AssertionError):
    """A block that is not what it says, or does not do what it should; the text names page and line."""


@dataclass(frozen=True)
class Run:
    """How a block is run; see the top of this file."""

    slow: bool = False
    ranks: int = 1
    given: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    kind: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Block:
    """A block.

    Args:
        page: its path from the top. line: of its first line. language: one of `LANGUAGES`.
    """

    page: str
    line: int
    language: str
    text: str
    run: Run = field(default_factory=Run)

    @property
    def executed(self) -> bool:
        """Whether there is something to run beyond reading it."""
        return self.language in ("python", "bash") and not self.run.reason

    def bad(self, why: object) -> BadBlock:
        """Return the error for this block."""
        return BadBlock(f"{self.page}:{self.line}: {why}")


# --- finding


def pages() -> list[str]:
    """Return the pages with code, as paths from the top."""
    found = [*HERE.glob("docs/*.md"), HERE / "README.md", HERE / "CONTRIBUTING.md"]
    return sorted(str(path.relative_to(HERE)) for path in found)


def blocks(page: str, text: str | None = None) -> list[Block]:
    """Return the blocks of a page, in their order.

    Raises:
        BadBlock: for a block that does not say what it is, or a comment that is not understood.
    """
    text = (HERE / page).read_text(encoding="utf-8") if text is None else text
    found, comment = [], ""
    for token in MarkdownIt().enable("table").parse(text):
        if token.type == "html_block":
            comment = "".join(f"<!-- run: {each} -->" for each in DIRECTIVE.findall(token.content))
            continue
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            fenced = token.type == "fence"
            line = token.map[0] + 1 + fenced
            language = token.info.strip().split(" ")[0] if fenced else "bash"
            block = Block(page, line, language, token.content)
            if language not in LANGUAGES:
                raise block.bad(f"the fence says {language or 'nothing'!r}, one of {', '.join(LANGUAGES)} is needed")
            run = _run(block, DIRECTIVE.findall(comment))
            found.append(Block(page, line, "text" if run.kind == "a listing" else language, token.content, run))
        elif comment:
            raise BadBlock(f"{page}: a comment {comment} stands before no block")
        comment = ""
    return found


def _run(block: Block, comments: list[str]) -> Run:
    """Read the comment of a block."""
    if not comments:
        return Run()
    if len(comments) > 1:
        raise block.bad("two comments on how it is run")
    told = " ".join(comments[0].split())
    if told.partition(",")[0] == "no":
        reason = told.partition(",")[2].strip()
        if len(reason) < LEAST_REASON:
            raise block.bad("it is not run and no reason is given: <!-- run: no, REASON -->")
        return Run(reason=reason)
    parts: dict[str, Any] = {}
    for part in (each.strip() for each in told.split(",")):
        first, *rest = part.split()
        if part == "slow":
            parts["slow"] = True
        elif first == "ranks" and rest and rest[0].isdecimal():
            parts["ranks"] = int(rest[0])
        elif first == "given" and rest and set(rest) <= set(GIVEN):
            parts["given"] = tuple(rest)
        elif first == "with" and rest:
            parts["extra"] = tuple(rest)
        elif part in KINDS:
            parts["kind"] = part
        else:
            raise block.bad(f"its comment says {part!r}, which nothing here knows")
    return Run(**parts)


# --- reading


def check(block: Block) -> None:
    """Read a block without running it.

    Raises:
        BadBlock: if it cannot be what it says.
    """
    try:
        if block.language == "python":
            compile(block.text, block.page, "exec")
        elif block.language == "bash":
            for line in lines(block.text):
                for command in commands(line):
                    check_command(command)
        elif block.language == "yaml":
            _check_yaml(block)
        elif block.language == "json":
            _check_rows(block)
    except BadBlock:
        raise
    except (Exception, SystemExit) as error:  # typer's and argparse's own among them
        told = error.format_message() if hasattr(error, "format_message") else error
        raise block.bad(f"{type(error).__name__}: {told}") from error


def lines(text: str) -> list[str]:
    """Return the lines of a block of commands, continued ones joined, comments and empty ones left out."""
    joined = text.replace("\\\n", " ").splitlines()
    return [line for line in joined if shlex.split(line, comments=True)]


def commands(line: str) -> Iterator[list[str]]:
    """Yield the words of each command of a line."""
    found = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    found.whitespace_split = True
    words: list[str] = []
    file_follows = False
    for word in found:
        if file_follows:
            file_follows = False
        elif BETWEEN.fullmatch(word):
            file_follows = word[0] in "<>"
            if words and not file_follows:
                yield words
                words = []
        else:
            words.append(word)
    if words:
        yield words


def check_command(words: list[str]) -> None:
    """Read a command: its program, options and files must exist.

    Raises:
        Exception: of many kinds, if they do not.
    """
    program, *rest = words
    if program == "ftkit":
        check_ftkit(rest)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (HERE / "Makefile").read_text(), re.MULTILINE)
        assert set(rest) <= set(targets), f"the Makefile has no {' '.join(sorted(set(rest) - set(targets)))}"
    elif program == "torchrun":
        told = get_args_parser().parse_args(rest)
        inner = [told.training_script, *told.training_script_args]
        check_command(inner if told.no_python else ["python", *inner])
    elif program == "srun":
        check_command(rest[rest.index("ftkit") :] if "ftkit" in rest else [])
    elif program in ("python", "python3"):
        _check_python(rest)
    elif program == "pip":
        for option, value in pairwise(rest):
            assert option not in ("-c", "-r") or (HERE / value).is_file(), f"there is no {value}"
    elif program not in SHELL:
        raise ValueError(f"{program!r} is no program that pages may name")


def _check_python(rest: list[str]) -> None:
    if rest[0] == "-m":
        assert importlib.util.find_spec(rest[1]), f"there is no module {rest[1]}"
    elif "/" in rest[0]:
        assert (HERE / rest[0]).is_file(), f"there is no {rest[0]}"


def check_ftkit(rest: list[str]) -> None:
    """Read the arguments of ftkit as it would: command, options, keys of `--set`, the name of a node.

    Raises:
        Exception: of many kinds, if it would refuse them.
    """
    command: Any = typer.main.get_command(cli.app)
    name = "ftkit"
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            raise ValueError(f"`{name}` has no command {rest[0]!r}; known: {', '.join(command.commands)}")
        name, command, rest = f"{name} {rest[0]}", command.commands[rest[0]], rest[1:]
    if hasattr(command, "commands") and rest in (["--help"], ["--version"]):
        return
    told = command.make_context(name, list(rest)).params
    if told.get("overrides"):
        recipe.parse(_bundled_recipe(), "the bundled recipe", list(told["overrides"]), check_files=False)
    if told.get("hardware") and not told["hardware"].endswith((".yaml", ".yml")):
        find_hardware(told["hardware"])


def _check_yaml(block: Block) -> None:
    if block.run.kind == "profile":
        told = yaml.safe_load(block.text)
        from ftkit.plan.catalog import CHECKED

        CHECKED.validate_python({"name": "profile", **told})
        return
    text = block.text
    if block.run.kind:
        parts = yaml.safe_load(text)
        text = yaml.safe_dump({**yaml.safe_load(_bundled_recipe()), **parts})
    recipe.parse(text, block.page, check_files=False)


def _check_rows(block: Block) -> None:
    rows = [json.loads(line) for line in block.text.splitlines() if line.strip()]
    if not block.run.reason:
        for row in rows:
            read_row(row, detect([row], block.page))


def _bundled_recipe() -> str:
    return packaged()["tiny-cpu"].read_text(encoding="utf-8")


# --- running


def furnish(folder: Path) -> Path:
    """Put what pages take for granted into a folder: a small recipe, rows of one's own, a model, the example scripts."""
    text = """\
model:     {name: bundled/tiny-base}
data:      {path: my-chats.jsonl, sequence_tokens: 64, packing: true, cache_dir: cache}
train:     {batch_tokens: 256, max_steps: 2}
output:    {dir: runs/mine, save_every_steps: 1}
"""
    (folder / "recipe.yaml").write_text(text)
    rows = (HERE / "data" / "python-docs.jsonl").read_text().splitlines(keepends=True)[:48]
    (folder / "my-chats.jsonl").write_text("".join(rows))
    (folder / "held-out.jsonl").write_text("".join(rows[:4]))
    (folder / "folder").symlink_to(HERE / "data" / "tiny-base")
    (folder / "docs").symlink_to(HERE / "docs")
    return folder


def _batches(folder: Path) -> list[dict[str, Any]]:
    tokenizer = AutoTokenizer.from_pretrained(folder / "folder")
    found = []
    for text in ("def add(a, b): return a + b", "import os", "class Queue: pass", "for line in file: print(line)"):
        tokens = tokenizer(text, return_tensors="pt")
        found.append({"input_ids": tokens["input_ids"], "labels": tokens["input_ids"]})
    return found


def _nvme(folder: Path) -> str:
    (folder / "scratch").mkdir(exist_ok=True)
    return str(folder / "scratch")


GIVEN = {"batches": _batches, "nvme": _nvme}
"""Names that a page leaves to the reader's own script, and what stands for them here."""


def execute(block: Block, folder: Path, names: dict[str, Any]) -> None:
    """Run a block in a folder, the current one.

    Args:
        names: of the page's Python blocks so far; more are added.

    Raises:
        BadBlock: if it fails.
    """
    try:
        if block.language == "python":
            names.update({name: GIVEN[name](folder) for name in block.run.given})
            run_python(block, names)
        else:
            for line in lines(block.text):
                run_line(line, block.run.extra, folder)
    except BadBlock:
        raise
    except Exception as error:
        raise block.bad(f"{type(error).__name__}: {error}") from error


def run_python(block: Block, names: dict[str, Any]) -> None:
    """Execute a block of Python; tracebacks name the page's own lines."""
    names.setdefault("__name__", "__main__")
    names.setdefault("__builtins__", builtins)
    exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), names)


def run_line(line: str, extra: tuple[str, ...], folder: Path) -> None:
    """Run one line of commands: ftkit alone in this process, the rest by the shell.

    Raises:
        RuntimeError: if it does not end with 0.
    """
    alone = [*commands(line)]
    words = shlex.split(line, comments=True)
    if words[0] == "ftkit" and alone == [words] and "$" not in line:
        more = extra if words[1] == "finetune" else ()
        try:
            cli.main([*words[1:], *more])
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(f"`{line.strip()}` ended with {ended.code}") from None
        return
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        ["bash", "-ec", line], cwd=folder, env=environ, capture_output=True, text=True, timeout=COMMAND_SECONDS * PATIENCE
    )
    if done.returncode:
        raise RuntimeError(f"`{line.strip()}` ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def on_a_rank(block: Block, folder: str) -> None:
    """Execute a block of Python as one rank of several; the case of a world (`tests/worlds.py`)."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    if "init_process_group" in block.text:
        dist.destroy_process_group()  # the block makes one, as a script under torchrun does
    before = os.getcwd()
    os.chdir(folder)
    try:
        execute(block, Path(folder), {})
    finally:
        os.chdir(before)
        if "init_process_group" in block.text and dist.is_initialized():
            dist.destroy_process_group()  # the world makes its own again
