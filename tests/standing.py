"""A user's script for tests of launchers: two ranks train, and something goes wrong on one of them.

    torchrun --nproc_per_node 2 tests/standing.py CASE FOLDER [--short]
    python tests/standing.py CASE FOLDER --spawn [--short]

Each rank writes its process number to FOLDER. `--short` sets clocks that are about ten times as fast as a run's.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers

import ftkit
from ftkit.engine.comm import communicator as comm
from ftkit.engine.comm import watchdog
from ftkit.engine.comm.standstill import Patience
from tests.hf.runs import llama, token_rows

SHORT = Patience(beat=0.1, look=0.3, stuck=2.0, stopped=2.0, silent=20.0, grace=1.0, remind=6.0)
SETTINGS = {"stage": 3}


class Broken(torch.utils.data.Dataset):
    """Rows of which one cannot be read."""

    def __init__(self, at: int) -> None:
        self.rows, self.at = token_rows(24), at

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        if number == self.at:
            raise OSError(f"row {number} cannot be read")
        return self.rows[number]


class Wrong(transformers.TrainerCallback):
    """Does what goes wrong after the second step."""

    def __init__(self, case: str, folder: str) -> None:
        self.case, self.folder = case, Path(folder)
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step != 2:
            return
        rank = args.process_index
        if self.case == "skips":
            model.model.layers[rank].forward = lambda hidden, *args, **kwargs: hidden
        if self.case == "late" and rank == 0:
            time.sleep(4 * watchdog.PATIENCE.stuck if watchdog.PATIENCE == SHORT else 180.0)
        if self.case == "generates" and rank == 0:
            self.trainer.model.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=4)
        if rank == 1:
            (self.folder / "wrong").write_text(str(time.time()))
            act(self.case)


def act(case: str) -> None:
    """Go wrong on this rank alone."""
    if case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if case == "raises":
        raise LookupError("a user's mistake")
    if case == "leaves":
        sys.exit(0)
    if case == "hangs in C":  # holds the GIL: no thread of Python goes on
        import ctypes

        ctypes.PyDLL(None).sleep(600)


class Uneven(ftkit.Trainer):
    """Loaders of its own, which forget that all ranks need as many batches."""

    def get_train_dataloader(self) -> Any:
        rows = token_rows(18 if self.args.process_index == 0 else 9)
        return torch.utils.data.DataLoader(rows, 3, collate_fn=transformers.default_data_collator)


def train(case: str, folder: str) -> None:
    rows: Any = token_rows(24)
    more: dict[str, Any] = {"max_steps": 4}
    if case == "row":
        rows, more = Broken(20), {"dataloader_num_workers": 1, "num_train_epochs": 1}
    if case == "uneven":
        more = {"num_train_epochs": 1}
    arguments = ftkit.TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=3,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
        ftkit=SETTINGS,
        **more,
    )
    wrong = Wrong(case, folder)
    kind = Uneven if case == "uneven" else ftkit.Trainer
    trainer = kind(llama(), arguments, train_dataset=rows, callbacks=[wrong])
    wrong.trainer = trainer
    trainer.train()


def loop(case: str, folder: str) -> None:
    """Train without a Trainer, and leave the loop early on rank 1."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = llama()
    units = ftkit.shard(model, SETTINGS)
    optimizer = ftkit.ShardedAdamW(units, lr=1e-3)
    for step in range(4 - rank if case == "loop" else 4):
        ids = torch.stack([row["input_ids"] for row in token_rows(3)])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and rank == 1:
            act(case.removeprefix("loop "))


def main(case: str, folder: str, *options: str) -> None:
    if "--short" in options:
        watchdog.PATIENCE, comm.WAKE = SHORT, timedelta(seconds=0.1)
    Path(folder, f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    try:
        (loop if case.startswith("loop") else train)(case, folder)
    finally:
        Path(folder, f"unwound-{os.environ['RANK']}").write_text("")


def spawned(rank: int, port: int, arguments: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    main(*arguments)


if __name__ == "__main__":
    if "--spawn" in sys.argv:
        from tests.worlds import free_port

        torch.multiprocessing.spawn(spawned, (free_port(), sys.argv[1:]), nprocs=2)
    else:
        main(*sys.argv[1:])
