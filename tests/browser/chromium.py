"""A browser for tests: Debian's Chromium without a screen, driven by the DevTools protocol over a pipe; no package needed.

Messages are JSON, each ended by a zero byte: commands go in at file 3, answers and events come out at file 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.worlds import PATIENCE

NAMES = ("chromium", "chromium-browser", "google-chrome")
ANSWER_SECONDS = 60 * PATIENCE


def find() -> str:
    """Return the path of Chromium.

    Raises:
        AssertionError: It is not installed.
    """
    program = next(filter(None, map(shutil.which, NAMES)), None)
    assert program, f"none of {', '.join(NAMES)} is installed: apt-get install chromium"
    return program


class Chromium:
    """One browser with one page.

    Raises:
        AssertionError: There is no Chromium here, or it does not answer.
    """

    def __init__(self) -> None:
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self.commands = os.pipe()
        self.answers, theirs_out = os.pipe()
        arguments = [find(), "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={self.profile.name}"]
        arguments += ["--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run", "--disable-sync"]
        arguments += ["--disable-background-networking", "--disable-component-update", "--disable-default-apps"]
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")
        script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "bash", *arguments],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.buffer, self.number = b"", 0
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for room in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{room}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command; return its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self.number:
                assert "error" not in told, (method, told["error"])
                return told["result"]
            self.events.append(told)

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + ANSWER_SECONDS
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.answers], [], [], max(until - time.monotonic(), 0))
            assert ready, f"Chromium said nothing for {ANSWER_SECONDS:.0f} s"
            data = os.read(self.answers, 1 << 20)
            assert data, f"Chromium ended with {self.process.wait(10)}"
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(line)

    def open(self, path: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Open a file and wait until it is loaded; what happens from here on is in `events`."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.ask("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + ANSWER_SECONDS
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            assert time.monotonic() < until, f"{path} was not loaded within {ANSWER_SECONDS:.0f} s"
            self.events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        """Return what an expression of JavaScript gives in the page, as JSON."""
        told = self.ask("Runtime.evaluate", expression=f"JSON.stringify({expression})")
        assert "exceptionDetails" not in told, told
        return json.loads(told["result"]["value"])

    def screenshot(self, path: Path, *, height: int | None = None) -> None:
        """Write what the page looks like, to its end or to a height, as PNG."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(height or size["height"], size["height"]), "scale": 1}
        told = self.ask("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(told["data"]))

    @property
    def complaints(self) -> list[str]:
        """What the console says since the page was opened: errors and warnings, of scripts, policies and the network."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.loadingFailed")
        return [json.dumps(event) for event in self.events if event.get("method") in kinds]

    @property
    def requests(self) -> list[str]:
        """The addresses that were asked for since the page was opened."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.commands)
        os.close(self.answers)
        self.profile.cleanup()
