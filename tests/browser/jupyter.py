"""JupyterLab for tests: a server of its own on the loopback, with all its folders in one, and a page that Chromium shows."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.worlds import PATIENCE

START_SECONDS = 60 * PATIENCE
CELL_SECONDS = 120 * PATIENCE
ANNOUNCEMENTS = "@jupyterlab/apputils-extension:announcements"  # asks whether it may ask the network


def notebook(cells: list[str]) -> dict[str, Any]:
    """Return a notebook of code cells, as its file holds it."""
    made = [
        {"cell_type": "code", "execution_count": None, "id": f"cell-{n}", "metadata": {}, "outputs": [], "source": source}
        for n, source in enumerate(cells)
    ]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


class Lab:
    """A JupyterLab server.

    Args:
        folder: Of the notebooks, and, hidden in it, of everything that Jupyter writes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.token = folder, secrets.token_hex(16)
        own = folder / ".jupyter"
        (own / "config" / "labconfig").mkdir(parents=True)
        settings = {"disabledExtensions": {ANNOUNCEMENTS: True}, "lockedExtensions": {}}
        (own / "config" / "labconfig" / "page_config.json").write_text(json.dumps(settings))
        places = {f"JUPYTER_{name.upper()}_DIR": str(own / name) for name in ("config", "data", "runtime")}
        places |= {"JUPYTERLAB_SETTINGS_DIR": str(own / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(own / "spaces")}
        places |= {"IPYTHONDIR": str(own / "ipython")}
        options = ["--no-browser", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0"]
        options += [f"--IdentityProvider.token={self.token}"]
        options += [f"--ServerApp.root_dir={folder}", "--LabApp.expose_app_in_browser=True", "--LabApp.collaborative=False"]
        options += ["--allow-root"] if os.geteuid() == 0 else []
        self.log = open(own / "log.txt", "w")  # noqa: SIM115  (lives as long as the server)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            env={**os.environ, **places},
            stdout=self.log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
        )
        self.address = self._address(own / "runtime")

    def _address(self, runtime: Path) -> str:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            assert self.process.poll() is None, f"JupyterLab ended: {Path(self.log.name).read_text()[-2000:]}"
            for path in runtime.glob("jpserver-*.json"):
                try:
                    address = json.loads(path.read_text())["url"]
                    urlopen(f"{address}api?token={self.token}", timeout=5).close()
                    return address
                except (OSError, ValueError):
                    pass
            time.sleep(0.2)
        raise AssertionError(f"JupyterLab did not start: {Path(self.log.name).read_text()[-2000:]}")

    def close(self) -> None:
        """End it, and its kernels."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()


class Page:
    """A notebook that is open in JupyterLab.

    Args:
        browser: Of playwright. lab: The server. name: Of the notebook's file.
    """

    def __init__(self, browser: Any, lab: Lab, name: str) -> None:
        self.lab = lab
        self.page = browser.new_page(viewport={"width": 1080, "height": 860})
        self.page.goto(f"{lab.address}lab/tree/{name}?token={lab.token}")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        self.page.wait_for_function("window.jupyterapp && window.jupyterapp.shell.currentWidget?.sessionContext?.isReady")
        # Cells that are out of sight are drawn, too: what they show is read.
        self.run_command("application:set-mode", mode="single-document")
        self.run_command("application:toggle-left-area") if self.page.locator("#jp-left-stack:visible").count() else None

    def run_command(self, command: str, **arguments: Any) -> None:
        """Run one of JupyterLab's commands, and wait for it."""
        self.page.evaluate("([name, args]) => window.jupyterapp.commands.execute(name, args)", [command, arguments])

    def begin(self, number: int) -> None:
        """Select a cell and run it, as Shift-Enter does; does not wait for its end."""
        self.page.evaluate("n => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = n }", number)
        self.page.evaluate("void window.jupyterapp.commands.execute('notebook:run-cell')")

    def output(self, number: int) -> str:
        """Return the text that a cell shows beneath it."""
        return self.page.evaluate(
            "n => window.jupyterapp.shell.currentWidget.content.widgets[n].outputArea?.node.innerText ?? ''", number
        )

    def is_done(self, number: int) -> bool:
        """Whether a cell that was begun has ended: its prompt has a number."""
        return self.page.evaluate(
            "n => /\\[\\d+\\]/.test(window.jupyterapp.shell.currentWidget.content.widgets[n].node"
            ".querySelector('.jp-InputPrompt').innerText)",
            number,
        )

    def wait(self, number: int, until: Any, seconds: float = CELL_SECONDS) -> str:
        """Wait until what a cell shows fulfils something; returns it."""
        deadline = time.monotonic() + seconds
        while not until(shown := self.output(number)):
            assert time.monotonic() < deadline, f"cell {number} shows after {seconds:.0f} s:\n{shown[-3000:]}"
            self.page.wait_for_timeout(150)
        return shown

    def run(self, number: int, seconds: float = CELL_SECONDS) -> str:
        """Run a cell, wait for its end, and return what it shows."""
        self.begin(number)
        deadline = time.monotonic() + seconds
        self.page.wait_for_timeout(300)
        while not self.is_done(number):
            assert time.monotonic() < deadline, f"cell {number} did not end:\n{self.output(number)[-3000:]}"
            self.page.wait_for_timeout(150)
        return self.output(number)
