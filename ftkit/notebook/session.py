"""What one rank keeps between cells, and what it can be asked for: a run's model, tokenizer, trainer, and the user's names.

Every verb is called on all ranks with the same arguments. A new run takes the place of the old one, whose memory is given
back before the new one is built, unless the user's own names hold it.

It refuses to generate, evaluate or save before there is a model.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ftkit.config.recipe import Recipe
from ftkit.data.prepare import prepare
from ftkit.errors import UserError
from ftkit.hf.generate.evaluation import evaluate
from ftkit.hf.generate.generation import generate
from ftkit.hf.save.model import save_model
from ftkit.hf.sharding import units_of
from ftkit.launch.ranks import Stop
from ftkit.notebook.cell import bundle, run_cell, shown
from ftkit.notebook.kernel_bar import KernelBar
from ftkit.notebook.output import Tell
from ftkit.train.run import Job

OF_A_RUN = ("model", "tokenizer", "trainer")
"""Names that a run leaves in the namespace of cells."""


class Session:
    """The state of one rank.

    Args:
        stop: Says whether the user asked to end.
        ranks: Number of ranks.
        device: Device of this rank.
        tell: Sends a message.
    """

    def __init__(self, stop: Stop, ranks: int, device: torch.device, tell: Tell) -> None:
        self.stop, self.ranks, self.device, self.tell = stop, ranks, device, tell
        self.job: Job | None = None
        # The cells' own module: what they define can be found by name again, by pickle for one.
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        self.names: dict[str, Any] = module.__dict__
        self.names.update(rank=stop.rank, world_size=ranks, device=device, display=self._display)
        self.verbs: Mapping[str, Callable[..., Any]] = {
            "cell": self.cell,
            "finetune": self.finetune,
            "restore": self.restore,
            "generate": self.generate,
            "evaluate": self.evaluate,
            "save": self.save,
        }

    def cell(self, source: str, name: str) -> dict[str, Any]:
        """Run the user's code; returns the value of its last expression as `cell.shown` gives it, of rank 0."""
        try:
            value = run_cell(source, name, self.names)
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # an ended cell has ended on the device, too, also one that raised
        return shown(value) if self.stop.rank == 0 else shown(None)

    def _display(self, *values: Any) -> None:
        """Show values in the notebook, of rank 0."""
        if self.stop.rank == 0:
            sys.stdout.flush()
            for value in values:
                self.tell({"display": bundle(value)})

    def finetune(self, recipe: dict[str, Any], checkpoints: list[str]) -> dict[str, Any]:
        """Train as a recipe says; returns the summary, or `stopped`."""
        job = self._begin(recipe)
        try:
            return job.run(checkpoints)
        finally:
            self._keep(job)

    def restore(self, recipe: dict[str, Any], checkpoints: list[str]) -> int:
        """Bring a checkpoint into memory; returns its step."""
        job = self._begin(recipe)
        step = job.restore(checkpoints)
        self._keep(job)
        return step

    def generate(self, prompts: list[Any], options: dict[str, Any]) -> list[str]:
        """Answer prompts with the model that is there."""
        return generate(self._model("generate"), self._tokenizer(), prompts, **options)

    def evaluate(self, path: str | None) -> dict[str, Any]:
        """Return loss, perplexity and label tokens of rows of a file, or of those that the run holds out."""
        model, job = self._model("evaluate"), self.job
        if job is None or job.parts is None:
            raise UserError("evaluate: no recipe says how rows become tokens: train with ranks.finetune first")
        rows = job.parts.rows.held_out
        if path is not None:
            data = job.recipe.data
            named = {"path": path, "name": None, "split": "train", "format": "auto", "sources": (), "packing": False}
            rows = prepare(data.model_copy(update=named), job.parts.tokenizer, task=job.recipe.task).train
        if rows is None:
            raise UserError("evaluate: the recipe holds no rows out (eval:), and no file was named: ranks.evaluate(path)")
        planned_rows = job.trainer.args.per_device_eval_batch_size  # of a micro-batch, whose memory was planned
        found = evaluate(model, rows, collate=job.trainer.data_collator, batch_size=planned_rows)
        return {"loss": found.loss, "perplexity": found.perplexity, "tokens": found.tokens}

    def save(self, folder: str) -> str:
        """Write the model as a Hugging Face folder, with its tokenizer; returns the folder."""
        model = self._model("save")
        if self.job is not None and self.job.trainer is not None and self.job.trainer.model is model:
            self.job.trainer.save_model(folder)
            return folder
        units = units_of(model)
        if units is None:
            raise UserError("save: `model` is not sharded by ftkit; save it in a cell, on rank 0")
        save_model(units, folder)
        if self.stop.rank == 0 and "tokenizer" in self.names:
            self.names["tokenizer"].save_pretrained(folder)
        return folder

    def close(self) -> None:
        """Let go of the run: its scratch files on NVMe are removed."""
        job = self.job
        self._forget()
        disk = job.trainer.units.tiers.disk if job is not None and job.trainer is not None and job.trainer.units else None
        if disk is not None:
            disk.close()

    def _begin(self, recipe: dict[str, Any]) -> Job:
        self._forget()
        return Job(self.stop, Recipe.model_validate(recipe), self.ranks, lambda console: KernelBar(self.tell))

    def _keep(self, job: Job) -> None:
        if job.trainer is not None:
            self.job = job
            self.names.update(zip(OF_A_RUN, (job.trainer.model, job.trainer.processing_class, job.trainer)))

    def _forget(self) -> None:
        """Give back the memory of the run before."""
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

    def _tokenizer(self) -> Any:
        if self.names.get("tokenizer") is None:
            raise UserError("generate: there is no `tokenizer` on the ranks: make one in a cell")
        return self.names["tokenizer"]
