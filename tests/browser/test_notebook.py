"""A notebook in JupyterLab, as a browser shows it: `make browser`. Without Chromium or JupyterLab this fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.browser.chromium import find
from tests.browser.jupyter import Lab, Page, notebook
from tests.worlds import PATIENCE

pytestmark = pytest.mark.browser

HERE = Path(__file__).parents[2]
DOCS = HERE / "docs"
MOST_BYTES = 150_000
"""Of a picture in docs."""

RECIPE = """\
model:     {name: bundled/tiny-base}
data:      {path: questions.jsonl, sequence_tokens: 176, packing: true, cache_dir: cache}
eval:      {path: held-out.jsonl, metrics: [loss, perplexity]}
train:     {batch_tokens: 2112, epochs: 3, seed: 17}
optimizer: {lr: 1.5e-3, warmup_steps: 20, schedule: linear}
output:    {dir: run, save_every_steps: 10, keep: 2}
"""
CELLS = [
    "from ftkit.notebook import Ranks\nranks = Ranks(2).start()\nprint('pids', *ranks.pids.values())",
    "summary = ranks.finetune('recipe.yaml')",
    "ranks.generate(['What does `os.path.join` do?'], max_new_tokens=8)",
    "ranks.finetune('recipe.yaml', resume='auto')",
    "%%ranks\nif rank == 1:\n    raise ValueError('mine')",
    "%%ranks\n(rank, world_size)",
    "ranks.restart()",
    "%%ranks\nstep = trainer.state.global_step",
    "step = ranks.view['step'][0]\nranks.finetune(settings=['train.max_steps=' + str(step + 2)], resume='auto')",
    "ranks.shutdown()\nprint('all ended')",
]
START, TRAIN, GENERATE, RESUME, RAISE, VALUE, RESTART, STEP, GO_ON, END = range(len(CELLS))

DARK = "document.body.dataset.jpThemeLight === 'false'"
BRIGHTNESS = """selector => getComputedStyle(document.querySelector(selector)).backgroundColor
    .match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"""


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    from playwright.sync_api import sync_playwright  # here: without it the other tests of a browser still run

    (tmp_path / "ranks.ipynb").write_text(json.dumps(notebook(CELLS)))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    shutil.copyfile(HERE / "data" / "python-docs.jsonl", tmp_path / "questions.jsonl")
    shutil.copyfile(HERE / "data" / "python-docs-heldout.jsonl", tmp_path / "held-out.jsonl")
    lab = Lab(tmp_path)
    try:
        with sync_playwright() as play:
            sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = play.chromium.launch(executable_path=find(), args=["--disable-dev-shm-usage", *sandbox])
            yield Page(browser, lab, "ranks.ipynb")
            browser.close()
    finally:
        lab.close()


def step(shown: str) -> int:
    found = re.findall(r"step ([\d,]+) of", shown)
    return int(found[-1].replace(",", "")) if found else 0


def ended(pids: list[int]) -> bool:
    deadline = time.monotonic() + 30 * PATIENCE
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(map(psutil.pid_exists, pids))


def picture(page: Page, number: int, name: str) -> None:
    """Look at the cell of a run in a theme, and keep what it looks like in docs."""
    dark = name.endswith("dark")
    page.run_command("apputils:change-theme", theme="JupyterLab Dark" if dark else "JupyterLab Light")
    page.page.wait_for_function(DARK if dark else f"!({DARK})")
    page.page.wait_for_timeout(500)
    assert (page.page.evaluate(BRIGHTNESS, ".ftkit-run .frame") < 3 * 60) == dark
    cell = page.page.locator(".jp-Cell").nth(number)
    cell.scroll_into_view_if_needed()
    cell.screenshot(path=str(DOCS / f"{name}.png"))
    assert (DOCS / f"{name}.png").stat().st_size < MOST_BYTES


def test_a_notebook_trains_is_interrupted_generates_resumes_and_survives_a_kill(page: Page, tmp_path: Path) -> None:
    first = [int(pid) for pid in re.search(r"^pids (.*)$", page.run(START), re.M).group(1).split()]
    assert len(first) == 2

    page.begin(TRAIN)
    early = step(page.wait(TRAIN, lambda shown: step(shown) >= 3))
    page.wait(TRAIN, lambda shown: step(shown) >= early + 8)
    assert page.page.locator(".jp-Cell").nth(TRAIN).locator("svg.chart").count() == 2  # replaced in place, not added to
    assert page.page.locator(".jp-Cell").nth(TRAIN).locator("path.line").first.get_attribute("d").count("L") >= 5
    page.page.locator('[data-command="notebook:interrupt-kernel"], button[title^="Interrupt"]').first.click()
    shown = page.wait(TRAIN, lambda shown: "ended at step" in shown)
    stopped = int(re.search(r"ended at step (\d+) with a checkpoint; resume=\"auto\"", shown).group(1))
    assert len(shown.splitlines()) < 60
    assert "Traceback" not in shown

    assert re.search(r"^\[.+\]$", page.run(GENERATE), re.M)

    page.begin(RESUME)
    page.wait(RESUME, lambda shown: step(shown) >= stopped + 15)
    for theme in ("notebook-light", "notebook-dark"):
        picture(page, RESUME, theme)
    os.kill(first[1], signal.SIGKILL)
    shown = page.wait(RESUME, lambda shown: "was killed by SIGKILL" in shown)
    assert f"rank 1 (pid {first[1]}) was killed by SIGKILL" in shown
    assert "ranks.restart() loads checkpoint-" in shown
    assert ended(first)

    shown = page.run(RESTART)
    saved = int(re.search(r"the model of step (\d+) is in memory", shown).group(1))
    assert saved >= stopped
    assert "(0, 2)" in page.run(VALUE)
    assert re.search(r"^rank 1 raised ValueError: mine$", page.run(RAISE), re.M)
    page.run(STEP)
    assert f"step {saved + 2:,} of {saved + 2:,}" in page.run(GO_ON)
    server = psutil.Process(page.lab.process.pid)
    second = [each.pid for each in server.children(recursive=True) if "ftkit.notebook.process engine" in _command(each)]
    assert len(second) == 2
    assert "all ended" in page.run(END)
    assert ended(second)
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.endswith((".writing", ".partial"))]


def _command(process: Any) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
