"""A killed rank ends the job under each launcher: no rank is left, and the launcher names the rank that was killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.worlds import PATIENCE, free_port

SCRIPT = '''
"""Train on two ranks. Rank 1 is killed after its second step."""

import os, signal, sys
from pathlib import Path

import torch, transformers

import ftkit

FOLDER = Path(sys.argv[1])


class KillRank1(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2 and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    (FOLDER / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(4)]
    options = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    arguments = ftkit.TrainingArguments(
        str(FOLDER), max_steps=100_000, per_device_train_batch_size=2, ftkit={"stage": 3}, **options
    )
    ftkit.Trainer(model, arguments, train_dataset=rows, callbacks=[KillRank1()]).train()


def spawned(rank, port):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    main()


if __name__ == "__main__":
    if sys.argv[2:]:
        torch.multiprocessing.spawn(spawned, (int(sys.argv[2]),), nprocs=2)
    else:
        main()
'''
pytestmark = pytest.mark.ranks
NAMED = r"rank +: 1 \(local_rank: 1\)\s+exitcode +: -9"
ACCELERATE = [
    *("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"),
    *("--dynamo_backend", "no", "--num_cpu_threads_per_process", "1", "--main_process_port", "0"),
]


def check(command: list[str], named: str, folder: Path, *options: str) -> None:
    """Run the script under a launcher and check how the job ends."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [str(Path(sys.executable).with_name(command[0])), *command[1:], str(script), str(folder), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=90 * PATIENCE,
    )
    assert done.returncode != 0
    assert re.search(named, done.stderr), done.stderr[-4000:]
    pids = [int((folder / f"pid-{rank}").read_text()) for rank in range(2)]
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_torchrun_ends_all_ranks_when_one_is_killed(tmp_path):
    check(["torchrun", "--standalone", "--nproc_per_node", "2"], NAMED, tmp_path)


@pytest.mark.slow
def test_accelerate_ends_all_ranks_when_one_is_killed(tmp_path):
    check(ACCELERATE, NAMED, tmp_path)


@pytest.mark.slow
def test_spawn_ends_all_ranks_when_one_is_killed(tmp_path):
    check(["python"], r"process 1 terminated with signal SIGKILL", tmp_path, str(free_port()))
