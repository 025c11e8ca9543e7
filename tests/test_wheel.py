"""The wheel contains all that a run needs: it is installed in an environment of its own and trains there."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.worlds import PATIENCE

REPOSITORY = Path(__file__).parents[1]
SOURCES = ["ftkit", "triton_kernels", "recipes", "data", "pyproject.toml", "README.md", "LICENSE"]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def run(folder, *command):
    """Run a command, return what it printed."""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=90 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.ranks
@pytest.mark.timeout(300 * PATIENCE)
def test_a_wheel_runs_outside_the_repository(tmp_path):
    source, home = tmp_path / "source", tmp_path / "venv"
    source.mkdir()
    for name in SOURCES:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPOSITORY / name, source / name)
    run(tmp_path, *PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path, source)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(home, with_pip=False)
    run(tmp_path, *PIP, "--python", home / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    # There is no network, so the dependencies are borrowed. Python does not search the borrowed folder for .pth files,
    # so the editable installation of the repository stays out of reach.
    site = next((home / "lib").glob("python*/site-packages"))
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    place = run(tmp_path, home / "bin" / "python", "-c", "import ftkit; print(ftkit.__file__)")
    assert place.startswith(str(home))
    short = ["train.max_steps=2", "train.batch_tokens=352", "data.path=bundled/python-docs-heldout.jsonl", "show=null"]
    short += ["eval=null", f"data.cache_dir={tmp_path / 'cache'}"]
    settings = [word for setting in short for word in ("--set", setting)]
    run(tmp_path, home / "bin" / "ftkit", "finetune", "tiny-cpu", "--nproc", "1", *settings)
    assert json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())["steps"] == 2
    assert (tmp_path / "runs" / "demo" / "model" / "model.safetensors").is_file()
