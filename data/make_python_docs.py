"""Make the bundled questions and answers from the docstrings of Python's standard library.

    python data/make_python_docs.py --output data

A question names a function and shows its signature; the answer names it again and gives its docstring's summary line:

    user:       What does `mailbox.Mailbox.add` do?

                def add(self, message)
    assistant:  `Mailbox.add`: Add message and return assigned key.

The file also owns two facts that the pretraining script shares with it: which files of the library are read
(`library_modules`) and which of them are held out (`is_held_out`). A held-out module is in neither the pretraining text
nor the fine-tuning file; only the evaluation reads it. The same Python gives the same bytes.
"""

import argparse
import ast
import hashlib
import json
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

HELD_OUT_PERCENT = 12
SIGNATURE_CHARACTERS = 300
SUMMARY = re.compile(r"[A-Z].{14,159}")  # a sentence begins with a capital; others are mostly repeated signatures
# Tests, installers and copies of other projects; character tables are numbers, not text.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "ensurepip"}
SKIPPED_FOLDERS |= {"lib-dynload", "turtledemo"}
CHARACTER_TABLE = re.compile(r"encodings/(cp|iso|mac|koi|kz|ptcp|tis|hp_)")


def library_modules() -> Iterator[tuple[str, str]]:
    """Yield (dotted module name, source text) of the running Python's standard library, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if any(part in SKIPPED_FOLDERS or part.startswith(("config-", "_sysconfigdata")) for part in relative.parts):
            continue
        if CHARACTER_TABLE.match(relative.as_posix()):
            continue
        parts = list(relative.with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        yield ".".join(parts), path.read_text(encoding="utf-8", errors="replace")


def is_held_out(module: str) -> bool:
    """Say whether a module is held out, by a hash of its family's name.

    The family is the top-level package without `_` or `_py`, so that `_pydecimal` goes where `decimal` goes.
    """
    family = re.sub(r"^_(py)?", "", module.split(".")[0])
    digest = hashlib.sha256(f"python-docs{family}".encode()).hexdigest()
    return int(digest, 16) % 100 < HELD_OUT_PERCENT


def documented_functions(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield (qualified name, signature on one line, docstring) of a module's functions and methods."""
    lines = source.split("\n")

    def walk(parent: ast.AST, path: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
        for node in ast.iter_child_nodes(parent):
            named = isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            inner = (*path, node.name) if named else path
            if named and not isinstance(node, ast.ClassDef) and (docstring := ast.get_docstring(node)):
                head = " ".join(line.strip() for line in lines[node.lineno - 1 : node.body[0].lineno - 1])
                if head.endswith(":"):  # else the docstring stands on the signature's line, or a comment between them
                    yield ".".join(inner), head.removesuffix(":"), docstring
            yield from walk(node, inner)

    yield from walk(ast.parse(source), ())


def rows() -> Iterator[tuple[str, dict]]:
    """Yield the library's modules and questions with their answers, a chat row each, without repetitions."""
    seen = set()
    for module, source in library_modules():
        for name, signature, docstring in documented_functions(source):
            summary = " ".join(re.split(r"\n\s*\n", docstring)[0].split())
            if not SUMMARY.fullmatch(summary) or len(signature) > SIGNATURE_CHARACTERS or (signature, summary) in seen:
                continue
            seen.add((signature, summary))
            question = f"What does `{module}.{name}` do?\n\n{signature}"
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": f"`{name}`: {summary}"},
            ]
            yield module, {"messages": messages}


def words(text: str) -> str:
    """Return the letters and digits of a text as words with one space around each, for finding copies."""
    return " " + " ".join(re.findall(r"[a-z0-9]+", text.lower())) + " "


def write(path: Path, chosen: list[dict]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder for the two files")
    options = parser.parse_args()

    # Modules copy from each other: a held-out row whose summary stands anywhere in the training text is dropped.
    training_text = words("\n".join(text for module, text in library_modules() if not is_held_out(module)))
    train, held_out, copied = [], [], 0
    for module, row in rows():
        summary = row["messages"][-1]["content"].split(": ", 1)[1]
        if not is_held_out(module):
            train.append(row)
        elif words(summary) in training_text:
            copied += 1
        else:
            held_out.append(row)
    write(options.output / "python-docs.jsonl", train)
    write(options.output / "python-docs-heldout.jsonl", held_out)
    print(f"{len(train)} rows to train on, {len(held_out)} held out, {copied} dropped from these as copies")


if __name__ == "__main__":
    main()
