"""The output of a cell during a run, errors, and `%%ranks` in IPython; without ranks."""

import json
import xml.etree.ElementTree as tree
from types import SimpleNamespace

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ftkit
from ftkit.errors import RankError, UserError
from ftkit.notebook import Ranks, load_ipython_extension
from ftkit.notebook.live import LiveRun
from ftkit.notebook.ranks import Interrupted
from ftkit.output.run_folder import RunFolder

HOSTILE = "<img src=x onerror=alert(1)>&\"'"


@pytest.fixture
def shell():
    made = InteractiveShell.instance(colors="nocolor")
    yield made
    InteractiveShell.clear_instance()


def test_a_run_is_drawn_with_progress_and_curves(tmp_path):
    folder = RunFolder(tmp_path / HOSTILE.replace("/", ""))
    folder.path.mkdir()
    records = [{"step": n, "loss": 5 / n, "grad_norm": 1.0, "learning_rate": 0.1} for n in range(1, 31)]
    records.append({"step": 30, "eval_loss": 2.5})
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 31, "lo')
    folder.standing.write_text('{"steps": 120}')
    live = LiveRun(folder)
    drawn = live.html()
    page = tree.fromstring(drawn)  # well-formed: the name has been escaped
    assert not page.findall(".//img")
    text = "".join(page.itertext())
    assert "step 30 of 120" in text
    assert "held-out loss 2.5000" in text
    assert HOSTILE.replace("/", "") in text
    assert '<progress value="30" max="120">' in drawn
    charts = page.findall(".//svg")
    assert [chart.get("aria-label").partition(":")[0] for chart in charts] == ["Loss", "Gradient norm"]
    folder.summary.write_text('{"stopped_early": {"text": "ended early at step 30: <no better loss>"}}')
    assert "ended early at step 30: &lt;no better loss&gt;<progress" in live.html()
    assert all(path.get("d").count("L") == 29 for path in page.findall(".//path[@class='line s0']"))


def test_the_package_is_an_attribute_of_ftkit():
    assert repr(ftkit.__getattr__("notebook").Ranks(2)) == "<Ranks: not started>"


def test_the_magic_runs_a_cell_on_the_ranks_of_a_variable(shell):
    asked = []
    load_ipython_extension(shell)
    shell.user_ns["ranks"] = SimpleNamespace(run=lambda source: asked.append(("ranks", source)))
    shell.user_ns["others"] = SimpleNamespace(run=lambda source: asked.append(("others", source)))
    shell.run_cell("%%ranks\nx = 1")
    shell.run_cell("%%ranks others\nx = 2")
    assert asked == [("ranks", "x = 1\n"), ("others", "x = 2\n")]


def test_a_second_start_is_refused_while_ranks_run(shell):
    shell.user_ns["ranks"] = running = Ranks(2)
    running._cluster = SimpleNamespace(is_lost=False, pids={0: 1, 1: 2})
    with pytest.raises(UserError, match=r"^ranks = <Ranks: 2 ranks> run in this notebook"):
        Ranks(1).start()


@pytest.mark.parametrize("error", [RankError(1, "rank 1 raised KeyError: 3"), Interrupted("interrupted")])
def test_an_error_shows_its_text_and_no_traceback(shell, capsys, error):
    shell.user_ns["error"] = error
    shell.run_cell("raise error")
    shown = capsys.readouterr()
    assert (shown.out + shown.err).strip() == str(error)
