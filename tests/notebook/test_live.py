"""What a cell shows of a run, and `%%ranks` in IPython; without ranks."""

import json
import xml.etree.ElementTree as tree
from types import SimpleNamespace

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ftkit
from ftkit.notebook import Interrupted, RankFailed, Ranks, Refused, load_ipython_extension
from ftkit.notebook.live import LiveRun, Output
from ftkit.output.run_folder import RunFolder

HOSTILE = "<img src=x onerror=alert(1)>&\"'"


@pytest.fixture
def shell():
    made = InteractiveShell.instance(colors="nocolor")
    yield made
    InteractiveShell.clear_instance()


def run_folder(path, steps):
    lines = [{"step": n, "loss": 5 / n, "grad_norm": 1.0, "learning_rate": 0.1} for n in range(1, steps + 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunFolder(path)


def test_a_run_is_drawn_with_bar_and_curves(tmp_path):
    live = LiveRun(run_folder(tmp_path, 30), HOSTILE)
    live.take({"step": 30, "steps": 120, "numbers": HOSTILE})
    live.take({"step": 30, "held_out": {"loss": 2.5}})
    live.said.append(HOSTILE)
    drawn = live.html()
    page = tree.fromstring(drawn)  # it is well-formed: what is hostile has been escaped
    assert not page.findall(".//img")
    text = "".join(page.itertext())
    assert "step 30 of 120" in text
    assert "held-out loss 2.5000" in text
    assert text.count(HOSTILE) == 3
    assert "width:25.0%" in drawn
    charts = page.findall(".//svg")
    assert [chart.get("aria-label").partition(":")[0] for chart in charts] == ["Loss", "Gradient norm"]
    assert all(path.get("d").count("L") == 29 for path in page.findall(".//path[@class='line s0']"))
    assert "script" not in drawn


def test_without_jupyter_it_is_text_and_says_so_once(tmp_path, capsys):
    live = LiveRun(run_folder(tmp_path, 1), "run")
    for step in range(1, 41):
        live.take({"step": step, "steps": 40})
        live.take({"step": step, "numbers": f"loss {step}"})
    live.take({"step": 40, "held_out": {"loss": 2.5, "perplexity": 12.0}})
    live.end("good")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "no Jupyter here: the run is shown as lines of text"
    assert lines[1:3] == ["step 1/40  loss 1", "step 2/40  loss 2"]
    assert lines[-1] == "step 40/40  held-out loss 2.5000, perplexity 12.0000"
    assert len(lines) == 1 + 21 + 1


def test_the_room_is_there_without_an_import_of_its_own():
    assert repr(ftkit.__getattr__("notebook").Ranks(2)) == "<Ranks: not started>"


def test_notices_are_no_errors_and_a_cells_stderr_is(capsys):
    Output().take({"out": "plan: stage 3\n", "stream": "stderr"})
    Output(calm=False).take({"out": "Warning\n", "stream": "stderr"})
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("plan: stage 3\n", "Warning\n")


def test_the_magic_runs_a_cell_on_the_ranks_that_were_named_or_started_last(shell, capsys):
    asked = []

    def ranks(name):
        return SimpleNamespace(run=lambda source, *, name=name: asked.append((source, name)) or 42)

    load_ipython_extension(shell)
    load_ipython_extension(shell)
    shell.run_cell("%%ranks\n1")
    assert "no ranks were started; first, in a cell: from ftkit.notebook import Ranks" in capsys.readouterr().out
    shell.user_ns["others"] = ranks("others")
    assert shell.run_cell("%%ranks others\nx = 1\nx", store_history=True).result == 42
    assert asked == [("x = 1\nx\n", f"cell [{shell.execution_count - 1}]")]
    shell.magics_manager.registry["RanksMagics"].ranks = SimpleNamespace(runs=True)
    with pytest.raises(Refused, match="run in this notebook: go on with them"):
        Ranks(1).start()
    assert "holds no ranks" in str(shell.run_cell("%%ranks In\n1").error_in_exec)


@pytest.mark.parametrize("error", [RankFailed(1, "rank 1 raised KeyError: 3\n  cell 3"), Interrupted("interrupted")])
def test_an_error_shows_its_text_and_no_traceback(shell, capsys, error):
    shell.user_ns["error"] = error
    shell.run_cell("raise error")
    shown = capsys.readouterr()
    assert (shown.out + shown.err).strip() == str(error)
