"""State and methods of one rank. Only engines import this module.

Every verb runs on all ranks with the same arguments. A new run replaces the model of the one before.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import torch
from accelerate import PartialState
from IPython.core.getipython import get_ipython

from ftkit.config.recipe import Recipe
from ftkit.engine.comm.communicator import GROUP_TIMEOUT
from ftkit.errors import UserError
from ftkit.hf.generate.evaluation import evaluate
from ftkit.hf.generate.generation import generate
from ftkit.launch.ranks import Failure, Stop
from ftkit.notebook.cluster import LAST_WORDS, STOP
from ftkit.train.callbacks import Bar, ProgressBar
from ftkit.train.run import Job

OF_A_RUN = ("model", "tokenizer", "trainer")
"""Names that a run leaves for the user's cells."""


class Session:
    """The state of one rank.

    Attributes:
        names: The names of the user's cells.
        job: The last run, or None.
    """

    def __init__(self) -> None:
        os.environ.pop("FORCE_COLOR", None)  # ipykernel sets it, and rich would draw bars into the text
        if "OMP_NUM_THREADS" in os.environ:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        state = PartialState(cpu=not torch.cuda.is_available(), timeout=GROUP_TIMEOUT)  # makes the process group
        self.device = state.device if state.device.type == "cuda" else torch.device("cpu")
        self.ranks = int(os.environ["WORLD_SIZE"])
        words = Connection(int(os.environ[LAST_WORDS]), readable=False)
        self.stop = Stop(rank=int(os.environ["RANK"]), launcher=words)
        signal.signal(STOP, self._ask_to_stop)
        shell: Any = get_ipython()
        self.names: dict[str, Any] = shell.user_ns
        self.names.update(rank=self.stop.rank, world_size=self.ranks, device=self.device)
        self.job: Job | None = None

    def _ask_to_stop(self, number: int, frame: Any) -> None:
        self.stop.asked = True

    def finetune(self, recipe: dict[str, Any], checkpoints: list[str], show: bool) -> dict[str, Any]:
        """Train as a recipe says, and return the summary, or `stopped`. `show` prints the progress as text."""
        job = self._begin(recipe, ProgressBar if show else lambda console: Bar())  # else the kernel draws it
        try:
            return job.run(checkpoints)
        finally:
            self.stop.asked = False
            self._keep(job)

    def restore(self, recipe: dict[str, Any], checkpoints: list[str]) -> int:
        """Load a checkpoint into memory, and return its step."""
        job = self._begin(recipe, ProgressBar)
        step = job.restore(checkpoints)
        self._keep(job)
        return step

    def generate(self, prompts: list[Any], options: dict[str, Any]) -> list[str]:
        """Answer prompts."""
        if self.names.get("tokenizer") is None:
            raise UserError("generate: there is no `tokenizer` on the ranks: make one in a cell")
        return generate(self._model("generate"), self.names["tokenizer"], prompts, **options)

    def evaluate(self) -> dict[str, Any]:
        """Return loss, perplexity and label tokens of the held-out rows of the run."""
        rows = None if self.job is None or self.job.parts is None else self.job.parts.rows.held_out
        if self.job is None or rows is None:
            raise UserError("evaluate: no run with held-out rows is in memory: train with ranks.finetune and eval: first")
        trainer = self.job.trainer
        planned_rows = trainer.args.per_device_eval_batch_size  # of a micro-batch, whose memory was planned
        return asdict(evaluate(self._model("evaluate"), rows, collate=trainer.data_collator, batch_size=planned_rows))

    def save(self, folder: str) -> str:
        """Write the model as a Hugging Face folder with its tokenizer, and return the folder."""
        if self.job is None:
            raise UserError("save: no run is in memory: train with ranks.finetune, or save your own `model` in a cell")
        self.job.trainer.save_model(folder)
        return folder

    def close(self) -> None:
        """Release the run and its scratch files on NVMe."""
        units = None if self.job is None else self.job.trainer.units
        self._forget()
        if units is not None and units.tiers.disk is not None:
            units.tiers.disk.close()

    def _begin(self, recipe: dict[str, Any], bar: Callable[..., Bar]) -> Job:
        self._forget()
        return Job(self.stop, Recipe.model_validate(recipe), self.ranks, bar)

    def _keep(self, job: Job) -> None:
        if job.trainer is not None:
            self.job = job
            self.names.update(zip(OF_A_RUN, (job.trainer.model, job.trainer.processing_class, job.trainer)))

    def _forget(self) -> None:
        """Release the memory of the last run, unless the user's names refer to it."""
        if self.job is None:
            return
        trainer, self.job = self.job.trainer, None
        for name, value in zip(OF_A_RUN, (trainer.model, trainer.processing_class, trainer)):
            if self.names.get(name) is value:
                del self.names[name]
        del trainer, value
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _model(self, verb: str) -> Any:
        if self.names.get("model") is None:
            raise UserError(f"{verb}: there is no model on the ranks: train with ranks.finetune, or make `model` in a cell")
        return self.names["model"]


_sessions: list[Session] = []


def do(verb: str, folder: str, arguments: dict[str, Any]) -> Any:
    """Do one thing that the kernel asked for. The first call meets the other ranks.

    Args:
        verb: Name of a method of `Session`, or "join".
        folder: Working directory of the kernel.
        arguments: Arguments of the method.

    Returns:
        The result, or a `Failure` if an error was raised.
    """
    try:
        os.chdir(folder)
        if not _sessions:
            _sessions.append(Session())
        return None if verb == "join" else getattr(_sessions[0], verb)(**arguments)
    except BaseException as error:
        return Failure.of(error)
