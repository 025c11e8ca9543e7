"""Under every launcher all ranks end when one goes wrong, and what they say names it; on short clocks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = str(ROOT / "tests" / "standing.py")
SECONDS = 60
"""In which all ranks have to be gone after one went wrong; with a run's clocks as well."""

TOLD = {
    "killed": r"rank 1 \(pid \d+ on .*\) is gone: its process has ended\. It was last in",
    "stopped": r"rank 1 \(pid \d+ on .*\) has given no sign of life for 2 s: its process is stopped",
    "raises": "LookupError: a user's mistake",
    "row": "row 20 cannot be read",
    "leaves": r"rank 1 \(pid \d+ on .*\) (has ended|is gone)",
    "uneven": r"rank 1 is in sum \(standing\.py, line \d+, in train\)[\s\S]*equally many batches",
    "skips": r"rank 0 to \S+ of model\.layers\.\d; rank 1 to \S+ of model\.layers\.\d",
    "generates": "`generate` runs on rank 0 only",
    "loop": r"rank 1 \(pid \d+ on .*\) has ended its part while others still work with the model",
    "loop raises": "LookupError: a user's mistake",
}
GONE = r"rank +: 1 \(local_rank: 1\)\s+exitcode +: -9"
QUICKER = {
    ("torchrun", "killed"): GONE,
    ("accelerate", "killed"): GONE,
    ("spawn", "killed"): r"process 1 terminated with signal SIGKILL",
}
"""What the launcher says where it has ended the others before they could tell: it names the rank and the signal itself."""
LAUNCHERS = {
    "torchrun": ["torchrun", "--nproc_per_node", "2"],
    "accelerate": [
        *("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1"),
        *("--main_process_port", "0"),
    ],
    "spawn": ["python"],
}
CASES = [("torchrun", case) for case in TOLD]
CASES += [("accelerate", case) for case in ("killed", "stopped")]  # its agent is torchrun's
CASES += [("spawn", case) for case in ("killed", "raises", "row")]


def launched(launcher: str, case: str, folder: Path) -> tuple[int, str]:
    """Run the script; return its exit code and what was written to stderr."""
    command = [str(Path(sys.executable).parent / LAUNCHERS[launcher][0]), *LAUNCHERS[launcher][1:]]
    if launcher == "spawn":
        command[0] = sys.executable
    options = ["--short", *(["--spawn"] if launcher == "spawn" else [])]
    known = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        [*command, SCRIPT, case, str(folder), *options],
        env={**os.environ, **known},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=3 * SECONDS,
    )
    return process.returncode, process.stderr


@pytest.mark.slow
@pytest.mark.parametrize("launcher, case", CASES)
def test_every_rank_ends_and_the_one_that_went_wrong_is_named(launcher, case, tmp_path):
    code, text = launched(launcher, case, tmp_path)
    ended, wrong = time.time(), tmp_path / "wrong"
    assert code != 0
    quicker = QUICKER.get((launcher, case))
    assert re.search(TOLD[case], text) or (quicker and re.search(quicker, text)), text[-4000:]
    assert not wrong.exists() or ended - float(wrong.read_text()) < SECONDS
    assert not [path for path in tmp_path.glob("pid-*") if psutil.pid_exists(int(path.read_text()))]
    assert "gloo" not in text.lower()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_is_late_is_waited_for(launcher, tmp_path):
    code, text = launched(launcher, "late", tmp_path)
    assert code == 0, text[-4000:]
    assert re.search(r"rank 1 waits for \d+ s in .*; rank 0 is at standing\.py, line \d+, in on_step_end", text)
