"""Runs of pytest on a copy of the repository, forked from a process that has imported what all of them need.

Importing torch and transformers is half of what a run of one test takes. A `Warm` process imports them once; of ftkit and
the tests it imports nothing, so each run sees the copy that it is asked for, as it is then. It is told of a run by a line
of JSON, forks, waits, and answers with a line: pytest's exit code, or null where the run took too long and was ended.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

SERVE = """
import contextlib, ctypes, json, os, signal, sys, time
import torch, torch.distributed, transformers.modeling_utils, transformers.trainer, accelerate, peft, datasets, pytest

def ended(child, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # ranks that a fault left behind would slow what comes next
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)

PR_SET_PDEATHSIG = 1
for line in sys.stdin:
    told = json.loads(line)
    child = os.fork()
    if child:
        print(json.dumps(ended(child, told["seconds"])), flush=True)
        continue
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(told["output"], os.O_WRONLY | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0), os.dup2(output, 1), os.dup2(output, 2)
    os.chdir(told["folder"])
    os.environ["PYTHONPATH"] = told["folder"]
    sys.path.insert(0, told["folder"])
    sys.argv[1:] = told["tests"]
    exec(told["run"])
    raise AssertionError("what is to be run ends with sys.exit")
"""

RUN = """
import pathlib
import ftkit, ftkit.engine.core.flat_parameter, ftkit.hf.trainer.trainer, ftkit.recipes, ftkit.bundled, ftkit.kernels
here = pathlib.Path.cwd()
engine, hf = ftkit.engine.core.flat_parameter, ftkit.hf.trainer.trainer
for module in (ftkit, engine, hf, ftkit.recipes, ftkit.bundled, ftkit.kernels):
    assert here in pathlib.Path(module.__file__).parents, f"{module.__name__} comes from {module.__file__}, not the copy"
sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--tb=no", *sys.argv[1:]]))
"""


class Warm:
    """A process that runs tests, one run at a time.

    Args:
        environ: its variables, and those of its runs but for PYTHONPATH.
    """

    def __init__(self, environ: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE], env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/"
        )

    def run(self, folder: Path, tests: tuple[str, ...], seconds: float) -> tuple[int | None, str]:
        """Run tests on the copy in a folder; return pytest's exit code, None where they took too long, and what was printed.

        Raises:
            RuntimeError: if the process is gone.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.NamedTemporaryFile("r", errors="replace") as output:
            told = {"folder": str(folder), "tests": tests, "seconds": seconds, "output": output.name, "run": RUN}
            print(json.dumps(told), file=self._process.stdin, flush=True)
            if not (answer := self._process.stdout.readline()):
                raise RuntimeError(f"the process that runs tests has ended with {self._process.wait()}")
            return json.loads(answer), output.read()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
