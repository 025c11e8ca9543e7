"""Whether ranks wait for one another in vain, judged by where they stand, again and again.

A rank *waits* while its innermost call is one of `torch.distributed`, its whole stack stays the same and its process takes
no CPU time: a backend computes in threads of its own. If all ranks that have not ended their cell wait, nobody will come:
that is a hang, for certain. If one waits and another computes or sleeps, it may still come: that is worth a line, and the
user decides.

It refuses to judge CUDA by this, where a collective returns at once and the waiting is done elsewhere, with CPU time: there
torch's own watchdog ends a collective. What it costs: a stack a second from each rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

IDLE_SHARE = 0.05
"""Of the time, that a process which only waits may compute."""

SHOWN_FRAMES = 5
"""Of a rank that waits, the innermost ones that are the user's, ftkit's or a collective's."""

_COLLECTIVE = "/torch/distributed/"
_WRAPPER = "c10d_logger.py"


@dataclass(frozen=True)
class Frame:
    """One call of a stack: file, line, function, and the text of the line."""

    file: str
    line: int
    function: str
    text: str
    own: bool
    """Whether it is the user's own code: a cell, or a module of theirs."""

    @property
    def place(self) -> str:
        """Where it is, as a person says it: `cell 3, line 2`."""
        name = self.file
        if name.startswith("<"):
            name = name.strip("<>")
        elif "/site-packages/" in name:
            name = name.rpartition("/site-packages/")[2]
        elif "/ftkit/" in name:
            name = f"ftkit/{name.rpartition('/ftkit/')[2]}"
        return f"{name}, line {self.line}"


@dataclass
class Stand:
    """Where one rank stands, and since when it has been there.

    Args:
        frames: Frames of its stack, outermost first.
        since_s: The moment when it was first seen there.
        cpu_s: The process's CPU seconds at that moment.
        seen_s: The moment when it was last seen there.
        cpu_now_s: The process's CPU seconds at that moment.
    """

    frames: tuple[Frame, ...]
    since_s: float
    cpu_s: float
    seen_s: float
    cpu_now_s: float

    @property
    def waits(self) -> bool:
        """Whether its innermost call is a collective's, and it computes nothing."""
        if not self.frames or _COLLECTIVE not in self.frames[-1].file:
            return False
        return self.cpu_now_s - self.cpu_s <= IDLE_SHARE * max(self.seen_s - self.since_s, 1.0)

    @property
    def seconds(self) -> float:
        """How long it has been seen there."""
        return self.seen_s - self.since_s

    @property
    def collective(self) -> str:
        """Name of what it waits in."""
        inside = [frame for frame in self.frames if _COLLECTIVE in frame.file and not frame.file.endswith(_WRAPPER)]
        return inside[0].function if inside else "a collective"

    def told(self) -> str:
        """Return where it is, in a few words: `cell 3, line 2: dist.barrier()`."""
        if not self.frames:
            return "an unknown place"
        own = [frame for frame in self.frames if frame.own] or [f for f in self.frames if "/ftkit/" in f.file]
        frame = (own or self.frames)[-1]
        return f"{frame.place}: {frame.text}" if frame.text else f"{frame.place}, in {frame.function}"

    def stack(self) -> list[str]:
        """Return its innermost calls that say something, outermost first."""
        chosen = [f for f in self.frames if f.own or "/ftkit/" in f.file or _COLLECTIVE in f.file]
        chosen = [f for f in chosen if not f.file.endswith(_WRAPPER)]
        return [f"  {frame.place}, in {frame.function}: {frame.text}" for frame in chosen[-SHOWN_FRAMES:]]


@dataclass
class Hangs:
    """Where all ranks stand.

    Args:
        limit_s: How long a rank may wait.
        stands: Where each rank stands, by rank.
    """

    limit_s: float
    stands: dict[int, Stand] = field(default_factory=dict)

    def note(self, rank: int, frames: Sequence[Frame], cpu_s: float, now_s: float) -> None:
        """Note where a rank stands now."""
        known = self.stands.get(rank)
        if known is not None and known.frames == tuple(frames):
            known.seen_s, known.cpu_now_s = now_s, cpu_s
        else:
            self.stands[rank] = Stand(tuple(frames), now_s, cpu_s, now_s, cpu_s)

    def forget(self) -> None:
        """Begin anew: something went on."""
        self.stands.clear()

    def waiting(self, running: Collection[int], limit_s: float | None = None) -> list[int]:
        """Return the running ranks that have waited for the limit, in order."""
        limit_s = self.limit_s if limit_s is None else limit_s
        return [
            rank
            for rank in sorted(running)
            if rank in self.stands and self.stands[rank].waits and self.stands[rank].seconds >= limit_s
        ]

    def hang(self, running: Collection[int], ended: dict[int, str], limit_s: float | None = None) -> tuple[int, str] | None:
        """Return the rank that waits in vain and the story, if there is a hang for certain.

        Args:
            running: Ranks that have not ended.
            ended: What became of the others, by rank: "has ended its cell".
            limit_s: How long a rank may wait; None takes the limit of this object.
        """
        waiting = self.waiting(running, limit_s)
        if not waiting or len(waiting) < len(running) or len(running) + len(ended) < 2:
            return None
        rank = waiting[0]
        stand = self.stands[rank]
        others = [f"rank {other} {what}" for other, what in sorted(ended.items())]
        others += [f"rank {r} waits in {self.stands[r].collective} ({self.stands[r].told()})" for r in waiting[1:]]
        text = f"rank {rank} has waited for {stand.seconds:.0f} s in {stand.collective}, and no other rank will come: "
        return rank, "\n".join([text + ", ".join(others), *stand.stack()])

    def doubt(self, running: Collection[int]) -> str | None:
        """Return a line about a rank that waits while others do something else; None where none does."""
        waiting = self.waiting(running)
        others = [rank for rank in sorted(running) if rank not in waiting and rank in self.stands]
        if not waiting or not others:
            return None
        stand = self.stands[waiting[0]]
        where = ", ".join(f"rank {rank} is at {self.stands[rank].told()}" for rank in others)
        told = f"rank {waiting[0]} has waited for {stand.seconds:.0f} s in {stand.collective} ({stand.told()}); {where}"
        return f"{told}. Interrupt the kernel to end it"
