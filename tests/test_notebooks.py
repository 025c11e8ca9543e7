"""The notebooks as they are committed; and the runner: one that works, and broken ones, which must fail."""

import json
import re
from pathlib import Path

import nbformat
import pytest

from notebooks.run import clean, execute, joined, main, of_a_machine

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_LINES = 15


def made(path, *cells):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    nbformat.write(notebook, path)
    return path


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_is_whole(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    first, *rest = notebook.cells
    assert first.cell_type == "markdown"
    title, told = first.source.split("\n", 1)
    assert title.startswith("# ")
    assert len(re.findall(r"[.!?](?=\s|$)", told)) >= 2
    code = [cell for cell in rest if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))  # from top to bottom, once
    for cell in code:
        assert len(cell.source.splitlines()) <= MOST_LINES
        assert not [output for output in cell.outputs if output.output_type == "error"]
    assert list(of_a_machine(notebook)) == []
    shown = [set(output.get("data", {})) for cell in code for output in cell.outputs]
    assert any(each & {"image/png", "text/html"} for each in shown)  # figures included


def test_the_readme_names_each():
    text = (FOLDER.parent / "README.md").read_text()
    assert len(NOTEBOOKS) == 8
    assert all(f"(notebooks/{path.name})" in text for path in NOTEBOOKS)


def test_what_is_of_one_machine_is_cut_or_found():
    def stream(text):
        return nbformat.v4.new_output("stream", name="stdout", text=text)

    outputs = joined([stream("at /tmp/x/runs/a\n 10%\r 90%\r"), stream("done\n"), stream("\x1b[31mred\x1b[0m")])
    assert len(outputs) == 1
    clean(outputs[0], ["/tmp/x"])
    assert outputs[0].text == "at runs/a\ndone\nred"
    for text in ("see /home/me/model", "at 12:34:56", "(/tmp/a b)", "<X at 0x7f25b0382f10>"):
        cell = nbformat.v4.new_code_cell("1", outputs=[stream(text)])
        assert list(of_a_machine(nbformat.v4.new_notebook(cells=[cell])))
    fine = nbformat.v4.new_code_cell("1", outputs=[stream("https://x.org/home/y, a/tmp/b, 3:12 of 4")])
    assert list(of_a_machine(nbformat.v4.new_notebook(cells=[fine]))) == []


@pytest.mark.slow
def test_a_notebook_is_executed_and_cleaned_up_after(tmp_path, capsys):
    path = FOLDER / "02-your-own-data.ipynb"
    before = path.read_bytes()
    there = set(Path.cwd().iterdir())
    assert main([str(path)]) == 0
    assert re.search(r"\[1/1\] 02-your-own-data.ipynb ... \d+ s\n1 notebooks in \d+ s, 0 broken\n", capsys.readouterr().out)
    assert path.read_bytes() == before
    assert set(Path.cwd().iterdir()) == there


@pytest.mark.slow
def test_broken_notebooks_fail(tmp_path, capsys):
    good = made(tmp_path / "good.ipynb", "import os\nprint(os.getcwd() + '/runs')", "1 + 1")
    raises = made(tmp_path / "raises.ipynb", "1 / 0", "print('not reached')")
    starts = "import subprocess\nleft = subprocess.Popen(['sleep', '600'], start_new_session=True)"
    leaves = made(tmp_path / "leaves.ipynb", starts)
    tells = made(tmp_path / "tells.ipynb", "print('/home/somebody/model')")
    assert main([str(path) for path in (raises, good, leaves)]) == 1
    told = capsys.readouterr().out
    assert "ZeroDivisionError" in told
    assert "left 1 processes behind: sleep 600" in told
    assert "3 notebooks" in told
    assert "2 broken: raises.ipynb, leaves.ipynb" in told
    assert main(["--write", str(good)]) == 0
    first, _ = json.loads(good.read_text())["cells"]
    assert first["outputs"][0]["text"] == ["runs\n"]
    before = tells.read_bytes()
    assert main(["--write", str(tells)]) == 1
    assert tells.read_bytes() == before


@pytest.mark.slow
def test_a_cell_that_does_not_end_is_broken(tmp_path, monkeypatch):
    monkeypatch.setattr("notebooks.run.CELL_SECONDS", 3)
    outcome = execute(made(tmp_path / "hangs.ipynb", "import time\ntime.sleep(600)"), tmp_path)
    assert "timed out" in outcome.problem.lower()
