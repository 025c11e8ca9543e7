"""A watch on the box's memory that acts before the kernel's OOM killer does.

[Note: two marks]  for every limit that `host_memory` finds, by its bytes left

    save   less than 3 % of the limit (at least 96 MiB) for 0.5 s, or it will be reached within as much time as four windows
           took, because use rose in each of the last four (a window: 2 s or a step, whichever is longer): save a checkpoint
           at the end of this step and end
    end    less than 1 % of the limit (at least 32 MiB) for 0.1 s: end at once, with a report, while there is memory to
           write it

Use in a healthy run is a saw-tooth: it rises in each step and falls again, and it jumps once at the first evaluation and
the first save. So growth means that the highest use of a window is above that of the window before, four times in
succession, and the smallest of those rises counts; a jump is not growth. A dip below a mark that is shorter than the time
above is not seen. What happened before the first step ended (loading) never asks for a checkpoint.

Every rank watches for itself. Each may have a limit of its own (Slurm's steps), the end mark must not wait for
another rank's word when nobody may be able to speak, and a report needs each rank's numbers; the save mark is agreed upon
at step ends, in the collective that asks for Ctrl-C. The price, a reading of 0.1 ms twice a second, is less than telling.

It refuses to judge what it cannot read. What it costs: the last 1 % of the limit is the guard's, and the last 3 % are not
for a run that means to stay longer than half a second. Memory taken faster than the end mark's size in 0.15 s (1 % of
6 GiB: 400 MB/s, of 330 GB: 20 GB/s) reaches the kernel first, and one allocation larger than what is left cannot be
foreseen by anybody.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Protocol

from ftkit.plan.host_memory import GUARDED_LEAST_BYTES, GUARDED_SHARE, Reading


@dataclass(frozen=True)
class Mark:
    """How little must be left, and for how long, before the guard acts. See [Note: two marks].

    Args:
        share: Share of the limit that must be left.
        least_bytes: Bytes that must be left in any case: of a small limit the share is less than a few tensors and the
            report itself.
        seconds: How long less must be left, at every look, before the guard acts.
    """

    share: float
    least_bytes: int
    seconds: float

    def bytes(self, limit: int) -> int:
        """Return the mark of a limit, in bytes left."""
        return max(round(self.share * limit), self.least_bytes)


MIB = 1 << 20
SAVE = Mark(GUARDED_SHARE, GUARDED_LEAST_BYTES, 0.5)
END = Mark(0.01, 32 * MIB, 0.1)
WINDOWS = 4
WINDOW_SECONDS = 2.0
POLL_SECONDS = 0.5
NEAR_POLL_SECONDS = 0.05
"""Between two looks once less than twice the save mark is left."""


class Memory(Protocol):
    """What says how much is used: `plan.host_memory.HostMemory`."""

    def read(self) -> list[Reading]:
        """Return what each limit says now."""


@dataclass(frozen=True)
class Alarm:
    """Why the guard acts.

    Args:
        reading: Reading of the limit that is about to be reached.
        reason: A clause for the user.
    """

    reading: Reading
    reason: str


@dataclass
class History:
    """What one limit said so far.

    Args:
        last: The last reading.
    """

    last: Reading
    below: dict[Mark, float] = field(default_factory=dict)  # since when less is left (seconds)
    low: Alarm | None = None  # the save mark was passed since the last step end
    highest: int = 0  # bytes used, in the window that is open
    window_began: float | None = None  # None until the first step has ended
    peaks: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOWS + 1))  # bytes, of the windows that closed

    def note(self, now: float, reading: Reading) -> Alarm | None:
        """Take a reading; return an alarm if it is time to end at once."""
        self.last = reading
        self.highest = max(self.highest, reading.used)
        if self._stays_below(SAVE, now):
            self.low = Alarm(reading, f"less than {SAVE.bytes(reading.limit) / MIB:,.0f} MiB were left for {SAVE.seconds} s")
        if self._stays_below(END, now):
            return Alarm(reading, f"less than {END.bytes(reading.limit) / MIB:,.0f} MiB were left for {END.seconds} s")
        return None

    @property
    def near(self) -> bool:
        """Whether the save mark may soon be reached."""
        return self.last.free < 2 * SAVE.bytes(self.last.limit)

    def _stays_below(self, mark: Mark, now: float) -> bool:
        if self.last.free >= mark.bytes(self.last.limit):
            self.below.pop(mark, None)
            return False
        return now - self.below.setdefault(mark, now) >= mark.seconds

    def step_ended(self, now: float) -> Alarm | None:
        """Return an alarm if it is time to save and end. See [Note: two marks]."""
        low, self.low = self.low, None
        if self.window_began is None:
            self.window_began, self.highest = now, self.last.used
        elif now - self.window_began >= WINDOW_SECONDS:
            self.peaks.append(self.highest)
            self.window_began, self.highest = now, self.last.used
        return low or self._growing()

    def _growing(self) -> Alarm | None:
        if len(self.peaks) <= WINDOWS:
            return None
        peaks = list(self.peaks)
        rise = min(later - earlier for earlier, later in pairwise(peaks))
        if self.last.limit - peaks[-1] >= WINDOWS * rise:  # a rise of nothing never asks
            return None
        reason = f"use rose by {rise / MIB:,.0f} MiB or more in each of the last {WINDOWS} windows of time"
        return Alarm(self.last, reason)


class Guard:
    """Watches from a thread of its own, from `with guard:` on.

    Args:
        memory: Says what is used.
        end: Called once, in the thread, when it is time to end at once; it should not return.
        clock: Seconds; another one in tests.
    """

    def __init__(self, memory: Memory, end: Callable[[Alarm], None], clock: Callable[[], float] = time.monotonic):
        self.memory, self.end, self.clock = memory, end, clock
        self.histories: dict[str, History] = {}
        self.ended = False
        self.lock = threading.Lock()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="ftkit-guard", daemon=True)

    def __enter__(self) -> Guard:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.done.set()
        self.thread.join()

    def look(self) -> None:
        """Read once, and end if it is time to. Any thread may call it. Cost: about 0.1 ms."""
        alarm = None
        with self.lock:
            now = self.clock()
            for reading in self.memory.read():
                history = self.histories.setdefault(reading.source, History(reading))
                alarm = alarm or history.note(now, reading)
            alarm = None if self.ended else alarm
            self.ended = self.ended or alarm is not None
        if alarm is not None:
            self.end(alarm)

    def begin(self) -> None:
        """Forget what was seen: the first step begins."""
        with self.lock:
            self.histories.clear()

    def step_ended(self) -> Alarm | None:
        """Return an alarm if the run should save a checkpoint and end; to be called at each step's end."""
        self.look()
        with self.lock:
            now = self.clock()
            alarms = [alarm for history in self.histories.values() if (alarm := history.step_ended(now)) is not None]
        return min(alarms, key=lambda alarm: alarm.reading.share, default=None)

    def pause_seconds(self) -> float:
        """Return the time until the next look: short when memory is."""
        with self.lock:
            near = any(history.near for history in self.histories.values())
        return NEAR_POLL_SECONDS if near else POLL_SECONDS

    def _watch(self) -> None:
        while not self.done.wait(self.pause_seconds()):
            self.look()
