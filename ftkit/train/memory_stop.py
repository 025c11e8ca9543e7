"""What a fine-tuning run does when the memory guard speaks: save and end after the step, or end at once.

`MemoryStop` is a callback of the HF Trainer around a `Guard`. At each step's end it counts what this rank holds and asks
the guard; its `asked` goes into the same collective as Ctrl-C (`progress.EndOnRequest`), so that all ranks save together.
Then `leave_if_asked` gathers the word of all ranks. At the end mark nobody can be asked any
more: the rank that saw it writes what it knows (the others' tenants as they were exchanged when training began and after
its first step; their RSS is the kernel's, and fresh), and leaves.

It refuses to let a run that resumed, and died before it saved again, be called resumable: a script that starts it again
and again would do so for ever. What it costs: an exchange of a few numbers twice a run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers import TrainerCallback

from ftkit.errors import MemoryShort
from ftkit.output.run_folder import RunFolder, written_at
from ftkit.plan.host_memory import HostMemory
from ftkit.train.memory_guard import Alarm, Guard, Memory
from ftkit.train.memory_report import Seat, host_tenants, make_report, text_of
from ftkit.train.trainer import RecipeTrainer


class MemoryStop(TrainerCallback):
    """Guards the host memory of a run, from `with` on; a rank each.

    Args:
        folder: The run's folder.
        rank: The rank of this process.
        leave: Ends this process at once with an error, from any thread.
        memory: What says how much is used; default: the limits above this process.
    """

    def __init__(
        self, folder: RunFolder, rank: int, leave: Callable[[MemoryShort], Any], memory: Memory | None = None
    ) -> None:
        self.folder, self.rank, self.leave = folder, rank, leave
        self.guard = Guard(memory or HostMemory.find(), self.end_at_once)
        self.last_written = max(map(written_at, folder.checkpoints()), default=0.0)
        self.trainer: RecipeTrainer | None = None
        self.step = 0
        self.seats = [Seat.own(rank, 0, host_tenants(None, None))]
        self.exchanges = 0
        self.alarm: Alarm | None = None

    def __enter__(self) -> MemoryStop:
        self.guard.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.guard.__exit__(kind, error, traceback)

    def attach(self, trainer: RecipeTrainer) -> None:
        """Take the trainer whose tenants are to be counted, and be its callback."""
        self.trainer = trainer
        trainer.add_callback(self)

    @property
    def asked(self) -> bool:
        """Whether this rank wants to save and end."""
        return self.alarm is not None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the others what this rank holds."""
        self.step = state.global_step
        self._exchange()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget loading and what came before the first step: only training is to be judged."""
        if self.exchanges == 1:
            self.guard.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count what this rank holds, and ask the guard."""
        self.step = state.global_step
        if self.exchanges == 1:  # the first step has made gradients and slots
            self._exchange()
        else:
            own = self._own()
            self.seats = [own if seat.rank == self.rank else seat for seat in self.seats]
        self.alarm = self.alarm or self.guard.step_ended()

    def _attached(self) -> RecipeTrainer:
        assert self.trainer is not None
        return self.trainer

    def _own(self) -> Seat:
        trainer = self._attached()
        tenants = host_tenants(trainer.units, trainer.sharded_optimizer)
        return Seat.own(self.rank, self.step, tenants)

    def _exchange(self) -> None:
        self.seats = self._attached().all_ranks(self._own())
        self.exchanges += 1

    def leave_if_asked(self) -> None:
        """Report and leave, if this run saved and ended because the guard of a rank asked for it.

        A collective: every rank calls it after training. The process is not torn down in order, because that holds the
        memory for some seconds more; the guard watches until it is gone.
        """
        trainer = self._attached()
        if not trainer.any_rank(self.asked):
            return
        self._exchange()
        checkpoint = self._last_checkpoint()
        own = None
        if self.alarm is not None:
            own = make_report(self.alarm, self.seats, outcome="saved", step=self.step, checkpoint=checkpoint)
        told = next(each for each in trainer.all_ranks(own) if each is not None)
        trainer.any_rank(False)  # nobody leaves before all have heard it
        trainer.end()
        self.leave(MemoryShort(text_of(told), resumable=trainer.checkpoints.problem is None))

    def end_at_once(self, alarm: Alarm) -> None:
        """Write the report with what is known here, and leave; in the guard's thread."""
        text, resumable = f"host memory is running out: {alarm.reason} ({alarm.reading})", False
        try:
            checkpoint = self._last_checkpoint()
            resumable = checkpoint is not None and written_at(checkpoint) > self.last_written
            text = text_of(make_report(alarm, self.seats, outcome="ended", step=self.step, checkpoint=checkpoint))
        except Exception as error:  # whatever it is: there is no time, and nobody else who would end the run in order
            text = f"{text}\nthere is no report: {type(error).__name__}: {error}"
        self.leave(MemoryShort(text, resumable))

    def _last_checkpoint(self) -> Path | None:
        """Return the newest checkpoint of this run; no manifest is read, as there is no time."""
        return next(iter(self.folder.newest_first()), None)
