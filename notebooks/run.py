"""Execute the notebooks from top to bottom, each in an empty folder and a kernel of its own: `make notebooks`.

    python -m notebooks.run                    # all of them; ends with 1 where a cell raises
    python -m notebooks.run NAME.ipynb ...     # these
    python -m notebooks.run --write            # and put what they gave into them, without what is of this machine

Nothing is compared: a notebook is broken if a cell raises, if it takes too long, or if it leaves a process behind. What it
writes is removed with its folder. It works offline, on the bundled model. What is written back must be the same on any
machine but for numbers: paths of this one are cut, and a time of day or a path that is left is an error.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from traitlets.config import Config

HERE = Path(__file__).resolve().parent
CELL_SECONDS = 300
TOKEN = "FTKIT_NOTEBOOK"
"""In the environment of a notebook's kernel and of all that it starts."""
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",  # a bar in a committed output is noise
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore:IProgress not found,ignore::FutureWarning",
    "COLUMNS": "110",
}
LEFT_SECONDS = 10
"""That processes have to end after their kernel."""
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
OF_A_MACHINE = (
    re.compile(r"(?<![\w.<:/])/(?:tmp|home|root|usr|opt|work|var|mnt)/\S+"),
    re.compile(r"\b[012]\d:[0-5]\d:[0-5]\d\b"),
    re.compile(r"\bat 0x[0-9a-f]{6,}"),
)


@dataclass(frozen=True)
class Outcome:
    """What became of a notebook.

    Args:
        notebook: as it was executed. seconds: how long that took. problem: why it is broken, or "".
    """

    notebook: Any
    seconds: float
    problem: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute notebooks; returns the exit code."""
    parser = argparse.ArgumentParser(description="Execute notebooks from top to bottom.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all that lie beside this file")
    parser.add_argument("--write", action="store_true", help="put what they gave into them")
    asked = parser.parse_args(arguments)
    paths = asked.notebooks or sorted(HERE.glob("*.ipynb"))
    began, broken = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="notebooks-") as scratch:
        for number, path in enumerate(paths, 1):
            print(f"[{number}/{len(paths)}] {path.name} ...", end=" ", flush=True)
            outcome = execute(path, Path(scratch))
            if not outcome.problem and asked.write:
                outcome = written(path, outcome, Path(scratch))
            print(f"{outcome.seconds:.0f} s{': BROKEN' * bool(outcome.problem)}", flush=True)
            if outcome.problem:
                print(outcome.problem, flush=True)
            broken += [path.name] if outcome.problem else []
    names = f": {', '.join(broken)}" if broken else ""
    print(f"{len(paths)} notebooks in {time.monotonic() - began:.0f} s, {len(broken)} broken{names}")
    return int(bool(broken))


def execute(path: Path, scratch: Path) -> Outcome:
    """Execute a notebook in a folder of its own under `scratch`, where prepared data are shared between them."""
    notebook = nbformat.read(path, as_version=4)
    folder = scratch / path.stem
    folder.mkdir()
    token = uuid.uuid4().hex
    own = {"HF_DATASETS_CACHE": str(scratch / "cache"), "IPYTHONDIR": str(scratch / "ipython"), TOKEN: token}
    own["MPLCONFIGDIR"] = str(scratch / "matplotlib")
    own["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        store_widget_state=False,
        config=Config({"KernelManager": {"transport_encryption": "auto"}}),
    )
    began = time.monotonic()
    problem, left = "", []
    try:
        client.execute(env={**os.environ, **QUIET, **own})
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        problem = COLOURS.sub("", str(error)).strip()
    finally:  # also where the user interrupts it
        left = ended(token)
    if left and not problem:
        problem = f"left {len(left)} processes behind: {'; '.join(left)}"
    return Outcome(notebook, time.monotonic() - began, problem)


def ended(token: str) -> list[str]:
    """Wait for the processes of a notebook; kill those that do not end, and return what they are."""
    until = time.monotonic() + LEFT_SECONDS
    while (left := list(processes(token))) and time.monotonic() < until:
        time.sleep(0.2)
    names = [" ".join(process.info["cmdline"] or ["?"])[:120] for process in left]
    for process in left:
        process.kill()
    return names


def processes(token: str) -> Iterator[psutil.Process]:
    """Yield the processes that a notebook started and that are alive."""
    for process in psutil.process_iter(["environ", "status", "cmdline"]):
        environ = process.info["environ"] or {}
        if environ.get(TOKEN) == token and process.info["status"] != psutil.STATUS_ZOMBIE:
            yield process


def written(path: Path, outcome: Outcome, scratch: Path) -> Outcome:
    """Write a notebook with its outputs, unless they tell of this machine."""
    notebook = outcome.notebook
    roots = [str(scratch / path.stem), str(scratch), str(HERE.parent), str(Path.home())]
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
            for output in cell.outputs:
                clean(output, roots)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    told = list(of_a_machine(notebook))
    if told:
        return Outcome(notebook, outcome.seconds, f"not written, what it gave is of this machine: {'; '.join(told[:5])}")
    nbformat.validate(notebook)
    nbformat.write(notebook, path)
    return outcome


def joined(outputs: list[Any]) -> list[Any]:
    """Return outputs with the texts of a stream joined, as a reader sees them: of a line that was overwritten, its end."""
    found: list[Any] = []
    for output in outputs:
        if found and output.output_type == "stream" and found[-1].output_type == "stream" and found[-1].name == output.name:
            found[-1].text += output.text
        else:
            found.append(output)
    for output in found:
        if output.output_type == "stream":
            lines = COLOURS.sub("", output.text).replace("\r\n", "\n").split("\n")
            output.text = "\n".join(line.rstrip("\r").rpartition("\r")[2].rstrip() for line in lines)
    return found


def clean(output: Any, roots: Sequence[str]) -> None:
    """Cut the folders of this machine out of an output."""
    bundle = output if output.output_type == "stream" else output.get("data", {})
    for key in ["text"] if output.output_type == "stream" else [name for name in bundle if not name.startswith("image/png")]:
        text = bundle[key]
        if isinstance(text, str):
            for root in roots:
                text = text.replace(f"{root}/", "").replace(root, ".")
            bundle[key] = text


def of_a_machine(notebook: Any) -> Iterator[str]:
    """Yield what in the outputs of a notebook is of one machine or one moment: absolute paths, times of day."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            texts = [output.get("text", ""), *output.get("data", {}).values()]
            for text in (text for text in texts if isinstance(text, str) and len(text) < 1 << 20):
                for pattern in OF_A_MACHINE:
                    yield from (found[0] for found in pattern.finditer(text))


if __name__ == "__main__":
    sys.exit(main())
