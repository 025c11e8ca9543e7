"""Whether ranks wait for each other in vain, and the message that says so: a judgement on records, without any waiting.

Each rank publishes a `Stand`. `judge` finds, in this order: a verdict that another rank has given, two ranks whose courses
differ, a rank without a sign of life, a rank that has ended, and ranks that all wait at different places. It gives the same
text on every rank that sees the same records.

A rank that waits for a rank which computes or sleeps is not judged: that rank is behind, and will come. Nor are ranks that
are in different collectives of one course: a rank leaves a broadcast before the last one has all of it.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ftkit.engine.comm.ledger import first_difference
from ftkit.errors import LostRank, RanksDiffer, UserError

ALONE = ("generate", "evaluate", "predict", "save_model", "save_pretrained", "save_state", "state_dict", "save_checkpoint")
"""Functions that users call on one rank only, although all ranks have to take part."""

COLLECTIVES = ("barrier", "all_", "broadcast", "gather", "scatter", "reduce")
"""Beginnings of names in `torch.distributed` that all ranks must call; others (send, recv) pair up."""

ENDED = "has ended its part while others still work with the model"

_SIZE = struct.Struct("<I")


@dataclass(frozen=True)
class Patience:
    """Seconds.

    Args:
        beat: time between two signs of life.
        look: time for which a rank stands still before it reads the records of others.
        stuck: time for which all ranks stand still, at different places outside ftkit, before they are judged.
        stopped: time without a sign of life after which a process that is stopped or gone counts as lost.
        silent: such a time for any other process; that a process on this machine works is a sign of life.
        leave: time that a process may take to end, before others tell what they know.
        grace: time for which a verdict may stay unread before the process ends.
        remind: time that a rank waits until a line says for whom.
    """

    beat: float = 1.0
    look: float = 2.0
    stuck: float = 20.0
    stopped: float = 20.0
    silent: float = 45.0
    leave: float = 10.0
    grace: float = 8.0
    remind: float = 60.0


@dataclass(frozen=True)
class Stand:
    """Where one rank stands.

    Args:
        rank: the rank in the group.
        host: name of the machine on which its process runs.
        pid: number of its process.
        entered: collectives that it entered.
        inside: whether it is in the last of these.
        name: name of that last one.
        outside: function of `torch.distributed` in which it waits without ftkit; empty if it does not.
        line: the user's line of code.
        calls: functions of `ALONE` that it is in.
        still_s: seconds for which it has been there.
        ended: whether it has let its model go, or its process has ended in order.
        exit: how its process ended, in words; empty while that goes on.
        verdict: message that it ended with; empty while there is none.
        lost: whether that verdict is about a lost rank.
        codes: see `Ledger.recent`; empty while it moves.
        trail: names of the last collectives that it entered, in order.
    """

    rank: int
    host: str
    pid: int
    entered: int = 0
    inside: bool = False
    name: str = ""
    outside: str = ""
    line: str = ""
    calls: tuple[str, ...] = ()
    still_s: float = 0.0
    ended: bool = False
    exit: str = ""
    verdict: str = ""
    lost: bool = False
    codes: bytes = b""
    trail: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """Return it as bytes."""
        text = json.dumps({key: value for key, value in asdict(self).items() if key != "codes"}).encode()
        return _SIZE.pack(len(text)) + text + self.codes

    @classmethod
    def from_bytes(cls, data: bytes) -> Stand:
        """Return what `to_bytes` packed."""
        (size,) = _SIZE.unpack_from(data)
        fields: dict[str, Any] = json.loads(data[_SIZE.size : _SIZE.size + size])
        tuples = {key: tuple(fields[key]) for key in ("calls", "trail")}
        return cls(**{**fields, **tuples, "codes": data[_SIZE.size + size :]})

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return self.inside or bool(self.outside)

    @property
    def place(self) -> str:
        """Where it is, in words."""
        line = f" ({self.line})" if self.line else ""
        if self.outside:
            return f"waits in torch.distributed.{self.outside}{line}, outside ftkit"
        if self.inside:
            return f"is in {self.name}{line}"
        return f"is at {self.line}" if self.line else f"was last in {self.name}" if self.name else "has begun nothing"

    @property
    def who(self) -> str:
        """The rank and its process, in words."""
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


@dataclass(frozen=True)
class Verdict:
    """Why nobody goes on.

    Args:
        text: message for the user, the same on all ranks.
        lost: whether a rank is dead or hung; False where ranks differ.
    """

    text: str
    lost: bool = False

    def error(self) -> UserError:
        """Return it as the error to raise."""
        return LostRank(self.text) if self.lost else RanksDiffer(self.text)


def judge(
    stands: Sequence[Stand], silent: Mapping[int, tuple[float, str]], names: Mapping[int, str], patience: Patience
) -> Verdict | None:
    """Return why ranks wait in vain; None while a rank may still come.

    Args:
        stands: stands of all ranks that have published one, in order; one of them waits.
        silent: for each other rank, seconds without a sign of life, and what its process does ('' if nobody knows).
        names: names of collectives, by code.
        patience: see `Patience`.
    """
    for stand in stands:
        if stand.verdict:
            return Verdict(stand.verdict, stand.lost)
    still = [stand for stand in stands if stand.codes]
    number = first_difference([(stand.entered, stand.codes) for stand in still]) if len(still) > 1 else None
    if number is not None:
        return differ({stand.rank: _named(stand, number, names) for stand in still}, stands)
    for stand in stands:
        seconds, state = silent.get(stand.rank, (0.0, ""))
        allowed = patience.stopped if state in ("stopped", "gone", "zombie") else patience.silent
        if not stand.ended and seconds > allowed:
            return lost(stand, f"has given no sign of life for {allowed:.0f} s{_state(state)}")
    furthest = max(stand.entered for stand in stands if stand.inside) if any(stand.inside for stand in stands) else 0
    vain = any(stand.outside.startswith(COLLECTIVES) and stand.still_s >= patience.stuck for stand in stands)
    for stand in stands:
        seconds, state = silent.get(stand.rank, (patience.leave, ""))
        if seconds < patience.leave and state not in ("gone", "zombie"):
            continue  # its process may be about to end with an error of its own, which a launcher is to see first
        if stand.ended and (stand.entered < furthest or (stand.exit and vain)):
            return lost(stand, stand.exit or ENDED)
    together = all(stand.waits and stand.still_s >= patience.stuck for stand in stands)
    kinds = {(stand.outside, -1) if stand.outside else ("", stand.entered) for stand in stands}
    known = all(stand.outside.startswith(COLLECTIVES) for stand in stands if stand.outside)
    slow = all(stand.inside and stand.codes for stand in stands)  # on one course: a difference was looked for above
    if together and known and len(kinds) > 1 and not slow:
        return differ({}, stands)
    return None


def _state(state: str) -> str:
    known = {"stopped": "stopped", "gone": "gone", "zombie": "gone"}
    return f": its process is {known[state]}" if state in known else ""


def _named(stand: Stand, number: int, names: Mapping[int, str]) -> str:
    if (place := number - stand.entered + len(stand.trail)) >= 0:
        return stand.trail[place]
    (code,) = struct.unpack_from("=I", stand.codes, 4 * (number % (len(stand.codes) // 4)))
    return names.get(code, "another collective")


def differ(went: Mapping[int, str], stands: Sequence[Stand]) -> Verdict:
    """Return the verdict on ranks that take different collectives.

    Args:
        went: for each rank, the name of the first collective in which they differ; may be empty.
        stands: stands of all ranks that have published one.
    """
    parted = "; ".join(f"rank {rank} to {name}" for rank, name in sorted(went.items()))
    lines = ["the ranks wait for each other in vain: they do not do the same."]
    lines += [f"At the same point they went {parted}."] if parted else []
    lines += [f"  rank {stand.rank} {stand.place}" for stand in stands]
    alone = sorted({call for stand in stands for call in stand.calls if not all(call in each.calls for each in stands)})
    if alone:
        where = ", ".join(str(stand.rank) for stand in stands if alone[0] in stand.calls)
        dealt = " (ftkit.hf.inference.generation.generate deals prompts to ranks)" if alone[0] == "generate" else ""
        lines.append(
            f"`{alone[0]}` runs on rank {where} only. All ranks must call it, because each has a part of the weights: call "
            f"it outside `if rank == 0`{dealt}."
        )
    else:
        lines.append(
            "All ranks must run the same blocks in the same order, as often as each other: no LayerDrop, no condition on "
            "the rank, equally many batches, and images (or audio) in every rank's batch or in none."
        )
    return Verdict("\n".join(lines))


def lost(stand: Stand, what: str) -> Verdict:
    """Return the verdict on a rank that does not come back. It tells nothing of the others: they see each other too late.

    Args:
        stand: the last known stand of the rank.
        what: what happened to it, in words.
    """
    last = f"It was last in {stand.name}." if stand.name else "It had not come to any collective."
    way_out = "The others cannot go on without it; resume from a checkpoint if one was saved."
    return Verdict(f"{stand.who} {what}. {last} {way_out}", lost=True)


_OWN = os.path.join(str(Path(__file__).resolve().parents[2]), "")
_LIBRARY = (os.path.join(sys.prefix, "lib"), os.path.join(sys.base_prefix, "lib"), _OWN, "<frozen")


def look_at(frame: FrameType | None) -> tuple[str, str, tuple[str, ...]]:
    """Return where a thread stands: `Stand`'s outside, line and calls.

    Args:
        frame: innermost frame of the thread.
    """
    outside, line, calls, innermost = "", "", [], True
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if innermost and "/torch/distributed/" in file:
            outside = outside if file.endswith("c10d_logger.py") else code.co_name
        else:
            innermost = False
        if not line and not file.startswith(_LIBRARY) and "-packages/" not in file:
            line = f"{os.path.basename(file)}, line {frame.f_lineno}, in {code.co_name}"
        if code.co_name in ALONE:
            calls.append(code.co_name)
        frame = frame.f_back
    return outside, line, tuple(dict.fromkeys(calls))
