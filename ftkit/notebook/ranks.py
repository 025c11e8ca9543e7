"""`Ranks`: the ranks behind a notebook, as one object in the kernel.

The kernel checks a request as `ftkit finetune` does. Then all ranks do it together. Between cells the ranks keep the model,
the optimizer and the user's names. They end with `shutdown`, with the kernel, or when one of them dies. `restart` starts
them again, with the model of the last checkpoint in memory.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from ipyparallel.error import RemoteError

from ftkit.config.recipe import Recipe, load, parse
from ftkit.config.wording import counted
from ftkit.errors import RankError, UserError
from ftkit.launch.ranks import POLL_SECONDS, Failure, check_ranks, counted_signals, explain
from ftkit.notebook import load_ipython_extension
from ftkit.notebook.cluster import STOP, Cluster
from ftkit.notebook.live import LiveRun, in_jupyter, ipython
from ftkit.output.run_folder import RunFolder
from ftkit.report.page import note_end

AFTER_FAILURE_SECONDS = 15.0
"""Time for the other ranks to end a request after one rank failed. Later they are taken to wait for it."""
CLOSE_SECONDS = 10.0
ENDING = (
    "the ranks end a run after its step, with a checkpoint, and finish all else first; interrupt again to end them at once"
)
IN_NOTEBOOK = {
    "--resume auto": 'resume="auto"',
    "--resume": "resume",
    "--overwrite": "overwrite=True",
    "--set output.dir=PATH": 'settings=["output.dir=PATH"]',
}
"""Options of the command line, and the arguments that replace them in a message."""


class Interrupted(KeyboardInterrupt):
    """The user interrupted the kernel. The text says what the ranks keep."""

    _render_traceback_ = UserError._render_traceback_


class Summary(dict):
    """The content of summary.json, shown as one line."""

    def __repr__(self) -> str:
        losses = {"training loss": self["train_loss"], "held-out loss": self["eval_loss_after"]}
        shown = "".join(f", {name} {loss:.4f}" for name, loss in losses.items() if loss is not None)
        return f"<run: {counted(self['steps'], 'step')}, {self['seconds']:.0f} s{shown}>"


class Ranks:
    """Ranks that live until `shutdown`, one per GPU or on the CPU.

    Args:
        n: Number of ranks. Default: the number of GPUs, or 1 without a GPU.
    """

    def __init__(self, n: int | None = None) -> None:
        self.n = n
        self._cluster: Cluster | None = None
        self._recipe: Recipe | None = None  # of the last run
        self._is_busy = False

    # --- start and end

    def start(self) -> Ranks:
        """Start the ranks, unless they run, and return this object.

        Raises:
            UserError: More ranks than GPUs, or another `Ranks` runs in this notebook.
            RankError: A rank could not start.
        """
        if self.runs:
            return self
        self.shutdown()
        shell = ipython()
        for name, other in {} if shell is None else dict(shell.user_ns).items():
            if isinstance(other, Ranks) and other.runs and name[0] != "_":  # the cell that starts them was run again
                raise UserError(f"{name} = {other!r} run in this notebook: use them, or end them first: {name}.shutdown()")
        gpus = torch.cuda.device_count()
        number = self.n or max(1, gpus)
        check_ranks(number, gpus)
        atexit.register(self.shutdown)
        try:
            self._cluster = Cluster(number, os.environ, self._report_loss)
            self._ask("join")
        except BaseException:
            self._kill()
            raise
        if shell is not None:
            load_ipython_extension(shell)
            self.view.activate()  # ipyparallel's own %px
        return self

    def shutdown(self) -> None:
        """End the ranks. Their memory is lost."""
        if self.runs and not self._is_busy:
            self._send("close").wait(CLOSE_SECONDS)
        self._kill()

    def _kill(self) -> None:
        atexit.unregister(self.shutdown)
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.kill()

    def restart(self) -> Ranks:
        """Start the ranks again, load the newest complete checkpoint of the last run, and return this object.

        Raises:
            UserError: No checkpoint is complete.
            RankError: As for `start`.
        """
        self.shutdown()
        self.start()
        if self._recipe is not None and (checkpoints := self._checkpoints()):
            recipe = self._recipe.model_dump(mode="json")
            step = self._ask("restore", recipe=recipe, checkpoints=[str(path) for path in checkpoints])
            print(f'the model of step {step} is in memory; ranks.finetune(resume="auto") continues from there')
        return self

    def __enter__(self) -> Ranks:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    @property
    def runs(self) -> bool:
        """Whether all ranks run."""
        return self._cluster is not None and not self._cluster.is_lost

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each rank. Empty if none run."""
        return {} if self._cluster is None else self._cluster.pids

    @property
    def view(self) -> Any:
        """The view of all ranks, of ipyparallel: `view["x"]` is the list of the values of `x`, one per rank."""
        view = self._running().client[:]
        view.block = True
        return view

    def __repr__(self) -> str:
        return f"<Ranks: {counted(len(self.pids), 'rank') if self.runs else 'not started'}>"

    # --- what the ranks do

    def finetune(
        self,
        recipe: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        *,
        settings: Sequence[str] = (),
        resume: str | None = None,
        overwrite: bool = False,
    ) -> Summary:
        """Fine-tune as a recipe says. The model, its tokenizer and trainer stay on the ranks.

        Args:
            recipe: A YAML file, the name of a packaged recipe, or a dictionary. Default: the recipe of the last run.
            settings: `key.sub=value`, applied to the recipe in order.
            resume: "auto" or the folder of a checkpoint to continue from.
            overwrite: Remove an earlier run from output.dir and start again.

        Returns:
            The content of summary.json.

        Raises:
            UserError: The recipe, the data or the folder cannot be used.
            RankError: A rank raised an error or died.
            Interrupted: The user interrupted the kernel. The run ended after a step, with a checkpoint.
        """
        facts = self._facts(recipe, settings)
        folder = RunFolder(Path(facts.output.dir))
        self._running()  # before an earlier run is removed
        try:
            with folder.lock():
                checkpoints = [str(path) for path in folder.prepare(resume, overwrite=overwrite, inputs=facts.inputs())]
                self._recipe = facts
                answer = self._finetune(folder, recipe=facts.model_dump(mode="json"), checkpoints=checkpoints)
        except UserError as error:
            raise UserError(_in_notebook(str(error))) from None
        if "stopped" in answer:
            raise Interrupted(_in_notebook(answer["stopped"]))
        return Summary(answer)

    def _finetune(self, folder: RunFolder, **arguments: Any) -> dict[str, Any]:
        """Ask for a run, draw it, and record its end."""
        live = LiveRun(folder)
        try:
            return self._ask("finetune", live, show=not in_jupyter(), **arguments)
        except (RankError, UserError, Interrupted) as error:
            note_end(folder, str(error))
            raise
        finally:
            live.end()

    def generate(self, prompts: str | Sequence[str] | Sequence[Sequence[Mapping[str, str]]], **options: Any) -> list[str]:
        """Answer prompts with the model on the ranks.

        Args:
            prompts: Questions, or conversations (lists of dictionaries with role and content).
            options: max_new_tokens (128), temperature (0: the most likely token), top_p (1), seed (0), and further settings
                of transformers' `GenerationConfig`, such as top_k or num_beams.

        Returns:
            One answer per prompt.

        Raises:
            UserError: There is no model yet.
            RankError: A rank raised an error or died.
        """
        return self._ask("generate", prompts=[prompts] if isinstance(prompts, str) else list(prompts), options=options)

    def evaluate(self) -> dict[str, Any]:
        """Return the loss (nats per label token), the perplexity and the label tokens of the held-out rows of the run.

        Raises:
            UserError: There is no run, or it has no held-out rows.
            RankError: A rank raised an error or died.
        """
        return self._ask("evaluate")

    def save(self, folder: str | os.PathLike[str]) -> str:
        """Write the model as a Hugging Face folder with its tokenizer, and return the folder.

        Raises:
            UserError: There is no run.
            RankError: A rank raised an error or died.
        """
        return self._ask("save", folder=os.path.abspath(folder))

    def run(self, source: str) -> None:
        """Run a cell on every rank, as `%%ranks` does. ipyparallel shows its output.

        The cell sees `rank`, `world_size` and `device`, and after a run `model`, `tokenizer` and `trainer`.

        Args:
            source: The code.

        Raises:
            RankError: A rank raised an error or died.
            Interrupted: The user interrupted the kernel.
        """
        cluster = self._running()
        results = self._wait(cluster, "cell", lambda: cluster.client[:].execute(source, silent=False, block=False))
        errors = {rank: each for rank, each in enumerate(results) if isinstance(each, RemoteError)}
        rank = min(errors, key=lambda each: errors[each].ename == "KeyboardInterrupt", default=None)
        if rank is None:
            return
        if errors[rank].ename == "KeyboardInterrupt":
            out_of_step = "If a sharded model was computing, the ranks may be out of step"
            raise Interrupted(f"interrupted; the ranks keep their state. {out_of_step}: {self._advice()}")
        raise RankError(rank, f"rank {rank} raised {errors[rank].ename}: {errors[rank].evalue}")

    # --- requests

    def _running(self) -> Cluster:
        cluster = self._cluster
        if cluster is None:
            raise UserError("the ranks do not run: call ranks.start(), or ranks.restart() to load the last checkpoint")
        if cluster.is_lost:
            raise self._loss(cluster)
        return cluster

    def _send(self, verb: str, **arguments: Any) -> Any:
        return self._running().client[:].apply_async(_do, verb, os.getcwd(), arguments)

    def _ask(self, verb: str, live: LiveRun | None = None, **arguments: Any) -> Any:
        """Ask every rank for something, and return the answer of rank 0."""
        cluster = self._running()
        results = self._wait(cluster, verb, lambda: self._send(verb, **arguments), live)
        failures = {rank: _failure(each) for rank, each in enumerate(results) if isinstance(each, Failure | RemoteError)}
        if failures:
            raise explain(failures, cluster.pids, "The ranks keep their state.")
        return results[0]

    def _wait(self, cluster: Cluster, verb: str, send: Any, live: LiveRun | None = None) -> list[Any]:
        """Send a request, wait for all ranks, show their output, and return their answers and errors.

        Args:
            cluster: The ranks.
            verb: Name of the request; "cell" for the user's code.
            send: Sends the request, and returns ipyparallel's result.
            live: Draws the run meanwhile.
        """
        deadline, is_asked, is_cell = float("inf"), False, verb == "cell"
        self._is_busy = True
        try:
            with counted_signals((signal.SIGINT,)) as heard:
                call = send()
                with nullcontext() if verb == "join" else call.stream_output():
                    while not call.wait(POLL_SECONDS):
                        if live is not None:
                            live.draw()
                        if cluster.is_lost:
                            raise self._loss(cluster)
                        if len(heard) > (verb != "join"):
                            self._kill()
                            raise Interrupted(f"the ranks were ended at once; {self._advice()}")
                        if heard and not is_asked:
                            is_asked = True
                            if not is_cell:
                                print(ENDING, flush=True)
                            if is_cell or live is not None:  # the other verbs cannot end early
                                cluster.send_signal(signal.SIGINT if is_cell else STOP)
                        failures = {} if is_cell else self._failures(call)
                        deadline = min(deadline, time.monotonic() + AFTER_FAILURE_SECONDS) if failures else deadline
                        if time.monotonic() > deadline:
                            self._kill()
                            raise explain(failures, cluster.pids, f"The others waited for it. {self._ended()}")
                    call.wait_for_output(1)
        finally:
            self._is_busy = False
        if heard and not is_cell and live is None:  # the rest of the user's cell must not run
            raise Interrupted("interrupted; the ranks have finished this first, and keep their state")
        return call.get(return_exceptions=True)

    @staticmethod
    def _failures(call: Any) -> dict[int, Failure]:
        """Return the failures of the ranks that have answered already."""
        done = {rank: part.get(return_exceptions=True) for rank, part in enumerate(call.split()) if part.ready()}
        return {rank: _failure(each) for rank, each in done.items() if isinstance(each, Failure | RemoteError)}

    # --- failures

    def _loss(self, cluster: Cluster) -> Exception:
        """Return the error of ranks that ended by themselves."""
        if not cluster.failures:
            return RankError(-1, f"ipyparallel's controller ended. {self._ended()}")
        return explain(cluster.failures, cluster.pids, f"The others were ended; {self._advice()}.")

    def _report_loss(self) -> None:
        """Report at once that a rank ended while no request runs. Called in a thread."""
        if self._cluster is not None and not self._is_busy:
            print(self._loss(self._cluster), file=sys.stderr, flush=True)

    def _ended(self) -> str:
        return f"The ranks were ended; {self._advice()}."

    def _checkpoints(self) -> list[Path]:
        return [] if self._recipe is None else RunFolder(Path(self._recipe.output.dir)).checkpoints()[::-1]

    def _advice(self) -> str:
        if found := self._checkpoints():
            newest = f"{found[0].name} of {found[0].parent}"
            return f'ranks.restart() loads {newest}, and ranks.finetune(resume="auto") continues from it'
        saved = "; no checkpoint was saved (output.save_every_steps)" if self._recipe is not None else ""
        return f"ranks.restart() starts them again{saved}"

    def _facts(self, recipe: str | os.PathLike[str] | Mapping[str, Any] | None, settings: Sequence[str]) -> Recipe:
        """Read and check a recipe."""
        if recipe is None and self._recipe is None:
            raise UserError("finetune: there is no earlier run; give a YAML file, the name of a recipe, or a dictionary")
        if isinstance(recipe, str | os.PathLike):
            return load(os.fspath(recipe), list(settings))
        facts = recipe if recipe is not None or self._recipe is None else self._recipe.model_dump(mode="json")
        return parse(json.dumps(facts), "recipe", list(settings))  # JSON is YAML


def _in_notebook(text: str) -> str:
    """Return a message with the options of the command line replaced by arguments."""
    for option, argument in IN_NOTEBOOK.items():
        text = text.replace(option, argument)
    return text


def _do(*arguments: Any) -> Any:
    from ftkit.notebook.engine import do  # here: an engine imports it, the kernel does not

    return do(*arguments)


def _failure(error: Failure | RemoteError) -> Failure:
    return error if isinstance(error, Failure) else Failure(1, f"{error.ename}: {error.evalue}", error.traceback)
