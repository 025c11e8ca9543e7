"""`Ranks`: workers behind one notebook, as one object in the kernel.

What is asked for is checked here first, as `ftkit finetune` does it, and then done by all ranks together. Between cells they
keep model, optimizer and the user's names. They end with `shutdown`, with the kernel, or when one of them is lost;
`restart` starts them anew, with the model of the last checkpoint in memory.

It refuses a second request while one is on its way, and more ranks than GPUs. What it costs: starting takes as long as
torch and transformers are imported.
"""

from __future__ import annotations

import ast
import atexit
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ftkit.config.recipe import Recipe, load, parse
from ftkit.config.wording import counted
from ftkit.errors import UserError
from ftkit.launch.ranks import check_ranks, signal_name
from ftkit.notebook.crew import Crew
from ftkit.notebook.exchange import Exchange, View
from ftkit.notebook.failures import Interrupted, RankFailed, Refused, in_notebook
from ftkit.notebook.live import LiveRun, Output
from ftkit.output.run_folder import RunFolder
from ftkit.report.page import note_end

HANG_SECONDS = 60.0
AT_THE_NEXT_STEP = "stopping after this step, with a checkpoint; interrupt again to end the ranks at once"
AT_THE_END = "the ranks finish this first; interrupt again to end them at once"


class Value:
    """What rank 0 showed of a value that is no plain data: its repr, and what it shows richly.

    Args:
        data: MIME types to texts.
    """

    def __init__(self, data: Mapping[str, str]) -> None:
        self.data = dict(data)

    def __repr__(self) -> str:
        return self.data["text/plain"]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self.data


class Summary(dict):
    """What summary.json holds of a run; shown as a line."""

    def __repr__(self) -> str:
        told = [counted(self["steps"], "step"), f"{self['seconds']:.0f} s"]
        if self.get("train_loss") is not None:
            told.append(f"training loss {self['train_loss']:.4f}")
        if self.get("eval_loss_after") is not None:
            before = self.get("eval_loss_before")
            first = f"{before:.4f} -> " if before is not None else ""
            told.append(f"held-out loss {first}{self['eval_loss_after']:.4f}")
        return f"<run: {', '.join(told)}>"


class Ranks:
    """Workers, one a device or on the CPU, that live until `shutdown`.

    Args:
        n: Number of workers; default: one a GPU, or 1 on a CPU.
        hang_seconds: How long a rank may wait for another that will not come, before that is called a hang.

    Raises:
        UserError: More ranks than GPUs.
    """

    def __init__(self, n: int | None = None, *, hang_seconds: float = HANG_SECONDS) -> None:
        if n is not None and n < 1:
            raise Refused(f"Ranks: {n} ranks were asked for; needed: at least 1")
        if not hang_seconds > 0:
            raise Refused(f"Ranks: hang_seconds is {hang_seconds}; needed: more than 0")
        self.n, self.hang_seconds = n, hang_seconds
        self._crew: Crew | None = None
        self._recipe: Recipe | None = None  # of the last run
        self._cells = 0
        self._busy = False
        self._requests = 0

    # --- life

    def start(self) -> Ranks:
        """Start the workers, unless they run; returns this object.

        Raises:
            Refused: More ranks than GPUs, or others run in this notebook. RankFailed: One could not start.
            Interrupted: The user interrupted the kernel: the ranks run.
        """
        if self.runs:
            return self
        self._lose()
        magics = self._magics()
        if magics is not None and getattr(magics.ranks, "runs", False):  # the cell that started them was run again
            raise Refused(f"{magics.ranks!r} run in this notebook: go on with them, or end them first: ranks.shutdown()")
        if magics is not None and isinstance(magics.ranks, Ranks):
            magics.ranks._lose()  # of which some have ended: the others must not live on unseen
        gpus = torch.cuda.device_count()
        number = self.n or max(1, gpus)
        try:
            check_ranks(number, gpus)
        except UserError as error:
            raise Refused(in_notebook(str(error))) from None
        self._busy = True
        try:
            self._crew = Crew(number, os.environ, self._gone)
            atexit.register(self.shutdown)
            way_out = "mend that and start them again"
            exchange = Exchange(self._crew, Output(), self.hang_seconds, lambda: way_out, AT_THE_END)
            exchange.wait()
        except BaseException:
            self._lose()
            raise
        finally:
            self._busy = False
        if magics is not None:
            magics.ranks = self
        if exchange.interrupts:
            raise Interrupted("interrupted; the ranks have started, and run")
        return self

    def shutdown(self) -> None:
        """End the workers; what they hold in memory is lost."""
        atexit.unregister(self.shutdown)
        if self._crew is not None:
            crew, self._crew = self._crew, None
            crew.end()

    def restart(self, *, restore: bool = True) -> Ranks:
        """Start the workers anew, and bring the newest whole checkpoint of the last run into their memory; returns this.

        Args:
            restore: Whether to read the checkpoint.

        Raises:
            Refused: No checkpoint is whole. RankFailed: As `start`.
        """
        self.shutdown()
        self.start()
        if restore and self._checkpoints():
            assert self._recipe is not None
            checkpoints = [str(path) for path in self._checkpoints()]
            step = self._ask("restore", recipe=self._recipe.model_dump(mode="json"), checkpoints=checkpoints)
            print(f'the model of step {step} is in memory; ranks.finetune(resume="auto") goes on from there')
        return self

    def __enter__(self) -> Ranks:
        try:
            return self.start()
        except Interrupted:
            self.shutdown()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    @property
    def runs(self) -> bool:
        """Whether all workers are there."""
        return self._crew is not None and not self._crew.dead()

    @property
    def pids(self) -> dict[int, int]:
        """Process number of each rank; empty where none run."""
        return {} if self._crew is None else self._crew.pids

    def __repr__(self) -> str:
        if self._crew is None:
            return "<Ranks: not started>"
        dead = self._crew.dead()
        return f"<Ranks: {counted(self._crew.ranks, 'rank')}{f', {len(dead)} of them ended' if dead else ''}>"

    # --- what they do

    def finetune(
        self,
        recipe: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        *,
        settings: Sequence[str] = (),
        resume: str | None = None,
        overwrite: bool = False,
    ) -> Summary:
        """Fine-tune as a recipe says; the trained model, its tokenizer and trainer stay on the ranks.

        Args:
            recipe: A YAML file, the name of a packaged recipe, or a dictionary; default: that of the last run.
            settings: `key.sub=value`, laid over the recipe in order.
            resume: "auto", or a checkpoint's folder, to continue from.
            overwrite: Remove what an earlier run left in output.dir, and start anew.

        Returns:
            What summary.json holds.

        Raises:
            Refused: The recipe, the data or the folder cannot be used. RankFailed: A rank was lost or raised.
            Interrupted: The user interrupted the kernel: the run has ended after a step, with a checkpoint.
        """
        facts = self._facts(recipe, settings)
        folder = RunFolder(Path(facts.output.dir))
        view = LiveRun(folder, folder.path.name)
        try:
            with self._at_work() as crew, folder.lock():  # before an earlier run is removed
                found = folder.prepare(resume, overwrite=overwrite, inputs=facts.inputs())
                self._recipe = facts
                return self._finetune(crew, facts, folder, view, [str(path) for path in found])
        except UserError as error:
            raise error if isinstance(error, Refused) else Refused(in_notebook(str(error))) from None

    def _finetune(self, crew: Crew, facts: Recipe, folder: RunFolder, view: LiveRun, checkpoints: list[str]) -> Summary:
        """Run it, and show and note how it ended."""
        status = "early"
        try:
            told = self._request(
                crew,
                "finetune",
                view,
                AT_THE_NEXT_STEP,
                recipe=facts.model_dump(mode="json"),
                checkpoints=checkpoints,
            )
            if "stopped" in told:
                raise Interrupted(in_notebook(told["stopped"]))
            status = "good"
        except (RankFailed, Refused, Interrupted) as error:
            note_end(folder, str(error))
            raise
        finally:
            view.end(status)
        return Summary(told)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[Mapping[str, str]]],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        **generation: Any,
    ) -> list[str]:
        """Answer prompts with the model on the ranks.

        Args:
            prompts: Questions, or conversations (lists of dictionaries with role and content).
            max_new_tokens: Most tokens of an answer.
            temperature: Temperature of drawing; 0 takes the likeliest token each time.
            top_p: Draw from the likeliest tokens that together have this probability.
            seed: Seed of drawing.
            generation: Further settings of transformers' `GenerationConfig`, such as top_k or num_beams.

        Returns:
            An answer a prompt.

        Raises:
            Refused: There is no model yet. RankFailed: A rank was lost or raised.
        """
        options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, **generation}
        asked = [prompts] if isinstance(prompts, str) else [_plain_prompt(each) for each in prompts]
        return self._ask("generate", None, AT_THE_END, prompts=asked, options=options)

    def evaluate(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Return the loss (nats a label token), the perplexity and the label tokens of held-out rows.

        Args:
            path: A file of rows; default: what the recipe of the run holds out.

        Raises:
            Refused: There is no model, or no rows. RankFailed: A rank was lost or raised.
        """
        return self._ask("evaluate", None, AT_THE_END, path=None if path is None else os.path.abspath(path))

    def save(self, folder: str | os.PathLike[str]) -> str:
        """Write the model on the ranks as a Hugging Face folder, with its tokenizer; returns the folder.

        Raises:
            Refused: There is no model, or the folder cannot be written. RankFailed: A rank was lost or raised.
        """
        return self._ask("save", None, AT_THE_END, folder=os.path.abspath(folder))

    def run(self, source: str, *, name: str | None = None) -> Any:
        """Run Python code on every rank, in names of its own that stay; `%%ranks` does the same.

        `rank`, `world_size` and `device` are there, `display`, and after a run `model`, `tokenizer` and `trainer`.

        Args:
            source: The code.
            name: What tracebacks call it; default: "cell N".

        Returns:
            Of the last expression, on rank 0: plain data as it is, anything else as it is shown.

        Raises:
            RankFailed: A rank raised, was lost, or waits in vain. Interrupted: The user interrupted the kernel.
        """
        self._cells += 1
        told = self._ask("cell", Output(calm=False), "", source=source, name=name or f"cell {self._cells}")
        return ast.literal_eval(told["literal"]) if "literal" in told else Value(told["data"])

    # --- within

    def _ask(self, verb: str, view: View | None = None, on_interrupt: str = "", **arguments: Any) -> Any:
        with self._at_work() as crew:
            return self._request(crew, verb, view, on_interrupt, **arguments)

    @contextmanager
    def _at_work(self) -> Iterator[Crew]:
        """Have the ranks for oneself; they are let go of if one is lost meanwhile."""
        crew = self._crew
        if crew is None:
            raise Refused("the ranks do not run: call ranks.start(), or ranks.restart() to go on from the last checkpoint")
        if self._busy:
            raise Refused("the ranks are at work for another cell or thread; wait for its end, or interrupt it")
        self._busy = True
        try:
            yield crew
        finally:
            self._busy = False
            if crew is self._crew and crew.dead():
                self._lose()

    def _request(self, crew: Crew, verb: str, view: View | None, on_interrupt: str, **arguments: Any) -> Any:
        self._requests += 1
        exchange = Exchange(crew, view or Output(), self.hang_seconds, self._way_out, on_interrupt, self._requests)
        answer = exchange.ask(verb, **arguments)
        if exchange.interrupts and on_interrupt == AT_THE_END:  # whatever follows in the user's cell must not go on
            raise Interrupted("interrupted; the ranks have finished this first, and keep their state")
        return answer

    def _gone(self, rank: int) -> None:
        """Say at once that a worker is gone with which nobody talks; called in a thread of the crew's."""
        crew = self._crew
        if crew is None or self._busy:  # it was ended, or a request that is on its way will tell
            return
        code = crew.exit_code(rank)
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        print(f"rank {rank} (pid {crew.pids[rank]}) {how}; {self._way_out()}", file=sys.stderr, flush=True)

    def _lose(self) -> None:
        """Let go of workers of which some have ended."""
        if self._crew is not None:
            atexit.unregister(self.shutdown)
            self._crew.kill()
            self._crew = None

    def _checkpoints(self) -> list[Path]:
        return [] if self._recipe is None else RunFolder(Path(self._recipe.output.dir)).checkpoints()[::-1]

    def _way_out(self) -> str:
        found = self._checkpoints()
        if found:
            return f"ranks.restart() starts them anew, from {found[0].name} of {found[0].parent}"
        saved = "; no checkpoint was saved (output.save_every_steps)" if self._recipe is not None else ""
        return f"ranks.restart() starts them anew{saved}"

    def _facts(self, recipe: str | os.PathLike[str] | Mapping[str, Any] | None, settings: Sequence[str]) -> Recipe:
        """Read and check a recipe."""
        if isinstance(settings, str):
            raise Refused(f"settings: found the text {settings!r}; needed: a list, such as ['train.max_steps=10']")
        if recipe is None and self._recipe is None:
            raise Refused("finetune: there is no earlier run; name a recipe: a YAML file, a packaged name, or a dictionary")
        try:
            if recipe is None or isinstance(recipe, Mapping):
                assert recipe is not None or self._recipe is not None
                facts = recipe if self._recipe is None or recipe is not None else self._recipe.model_dump(mode="json")
                return parse(json.dumps(facts), "recipe", list(settings))  # JSON is YAML
            return load(os.fspath(recipe), list(settings))
        except UserError as error:
            raise Refused(in_notebook(str(error))) from None
        except TypeError as error:
            raise Refused(f"recipe: {error}; needed: a dictionary of texts, numbers, lists and dictionaries") from None

    def _magics(self) -> Any:
        """Return what holds `%%ranks`, which it gives the shell; None where this is not IPython."""
        if "IPython" not in sys.modules or (shell := sys.modules["IPython"].get_ipython()) is None:
            return None
        from ftkit.notebook.magic import register  # here: without IPython it cannot be imported

        return register(shell)


def _plain_prompt(prompt: str | Sequence[Mapping[str, str]]) -> Any:
    return prompt if isinstance(prompt, str) else [dict(turn) for turn in prompt]
