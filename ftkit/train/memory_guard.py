"""A guard of host memory that acts before the kernel's OOM killer does.

[Note: two marks]  for each limit that `HostMemory` finds (the machine, and each cgroup above this process)

    save   less than 3 % of the limit (at least 96 MiB) is free for 0.5 s: save a checkpoint after this step and end
    end    less than 1 % of the limit (at least 32 MiB) is free for 0.1 s: end at once

A run that saved a checkpoint ends with exit code 75 (start it again with --resume auto), one that saved none with 71.

Each rank watches from a thread of its own. At the save mark the ranks agree at the end of the step, in the collective that
also handles Ctrl-C (`EndOnRequest`). At the end mark there is no time to ask: the rank that saw it leaves, and the launcher
ends the others. Memory that is allocated faster than the end mark's size in 0.15 s is not caught.

Cost: 20 readings of 0.1 ms per second. The last 3 % of each limit cannot be used for longer than half a second.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from ftkit.cgroups import GUARDED_LEAST_BYTES, GUARDED_SHARE, MACHINE, HostMemory, Reading
from ftkit.errors import MemoryShort
from ftkit.spec.tiers import NVME
from ftkit.train.trainer import RecipeTrainer

MIB = 1 << 20
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Mark:
    """How little must be free, and for how long, before the guard acts. See [Note: two marks]."""

    share: float
    least_bytes: int
    seconds: float

    def bytes(self, limit: int) -> int:
        """Return the mark of a limit, in free bytes."""
        return max(round(self.share * limit), self.least_bytes)


SAVE = Mark(GUARDED_SHARE, GUARDED_LEAST_BYTES, 0.5)
END = Mark(0.01, 32 * MIB, 0.1)


class Guard:
    """Watch the limits from a thread, which calls `end` once when less than the end mark is free.

    Attributes:
        low: The reading that asked for a checkpoint, or None.
    """

    def __init__(self, memory: HostMemory, end: Callable[[Reading], None], clock: Callable[[], float] = time.monotonic):
        self.memory, self.end, self.clock = memory, end, clock
        self.low: Reading | None = None
        self.below: dict[tuple[str, Mark], float] = {}  # since when a limit has been below a mark
        self.ended = False
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="ftkit-guard", daemon=True)

    def look(self) -> None:
        """Read all limits once, and act on them."""
        now = self.clock()
        for reading in self.memory.read():
            if self._stays_below(SAVE, reading, now):
                self.low = reading
            if self._stays_below(END, reading, now) and not self.ended:
                self.ended = True
                self.end(reading)

    def _stays_below(self, mark: Mark, reading: Reading, now: float) -> bool:
        key = (reading.source, mark)
        if reading.free >= mark.bytes(reading.limit):
            self.below.pop(key, None)
            return False
        return now - self.below.setdefault(key, now) >= mark.seconds

    def _watch(self) -> None:
        while not self.done.wait(POLL_SECONDS):
            self.look()


class MemoryStop(TrainerCallback):
    """Guard the host memory of a run on one rank, as a context manager.

    Args:
        rank: Rank of this process.
        leave: Ends this process at once with an error, from any thread.
    """

    def __init__(self, rank: int, leave: Callable[[MemoryShort], Any]) -> None:
        self.rank, self.leave = rank, leave
        self.guard = Guard(HostMemory.find(), self.end_at_once)
        self.trainer: Any = None
        self.engine_bytes: dict[str, int] = {}
        self.begun = False

    def __enter__(self) -> MemoryStop:
        self.guard.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.guard.done.set()
        self.guard.thread.join()

    def attach(self, trainer: RecipeTrainer) -> None:
        """Follow the steps of a Trainer, and count what its engine holds."""
        self.trainer = trainer
        trainer.add_callback(self)

    @property
    def asked(self) -> bool:
        """Whether this rank asks to save and end."""
        return self.guard.low is not None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget the memory use before the first step."""
        if not self.begun:
            self.begun, self.guard.low = True, None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count what the engine holds, here and not in the thread, which would read while it changes."""
        self.engine_bytes = host_bytes(self.trainer)

    def leave_if_asked(self) -> None:
        """End the process with an error if the guard of any rank asked for the end of training. A collective."""
        trainer, low = self.trainer, self.guard.low
        texts = trainer.engine.comm.all(None if low is None else self._text(low, SAVE))
        if text := next(filter(None, texts), None):
            trainer.end()
            self.leave(MemoryShort(text, resumable=self._saved is not None))

    def end_at_once(self, reading: Reading) -> None:
        """End the process; called in the guard's thread."""
        self.leave(MemoryShort(self._text(reading, END), resumable=self._saved is not None))

    @property
    def _saved(self) -> str | None:
        """Name of the last checkpoint of this process. Older ones do not count: a restart would end there for ever."""
        return self.trainer.checkpoints.published if self.trainer is not None else None

    def _text(self, reading: Reading, mark: Mark) -> str:
        whose = reading.source if reading.source == MACHINE else f"the cgroup {reading.source}"
        least = f"less than {_mib(mark.bytes(reading.limit))} were free for {mark.seconds} s"
        sizes = ", ".join(f"{kind} {_mib(size)}" for kind, size in self.engine_bytes.items() if size)
        saved = f"--resume auto continues from {self._saved}" if self._saved else "no checkpoint was saved since it began"
        if self.trainer is not None and self.trainer.checkpoints.problem:
            saved = f"the checkpoint could not be written: {self.trainer.checkpoints.problem}"
        return (
            f"host memory is nearly used up on {socket.gethostname()}, rank {self.rank}: {least}. The limit of {whose} is "
            f"{_mib(reading.limit)}: {_mib(reading.used)} are used, {_mib(reading.free)} are free.\n"
            f"The run ended {'after the step' if mark == SAVE else 'at once'}; {saved}.\n"
            f"The engine of this rank holds {sizes or 'nothing yet'}. The rest is Python, torch, data and other processes.\n"
            "Set memory.nvme_dir to move state and gradients to disk, lower engine.micro_batch or data.sequence_tokens, or "
            "train an adapter."
        )


def host_bytes(trainer: RecipeTrainer) -> dict[str, int]:
    """Return the bytes of host memory that the engine holds on this rank, by kind."""
    units, optimizer = trainer.engine, trainer.engine_optimizer
    counted, arenas = units.state_bytes() | {"state": optimizer.state_bytes()}, units.tiers.arenas
    on_cpu = units.comm.device.type == "cpu"
    found = {}
    for kind in ("parameters", "gradients", "state"):
        if on_cpu and units.tiers.tier(kind) != NVME:
            found[kind] = counted[kind]
        else:
            found[kind] = arenas[kind].requested_bytes if kind in arenas else 0
    found["slots"] = counted["slots"] if on_cpu else 0
    found["staging"] = counted["staging"] + optimizer.updater.staging_bytes
    found["activations"] = units.transfer.activations.host_bytes
    return found


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.0f} MiB"
