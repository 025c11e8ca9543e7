"""The collectives that this rank has entered, by number and name: the course that all ranks of a model must share.

`Ledger` is written in the hot path, so it writes little: a number, a code, a name that it was given. The names of the last
collectives are kept as codes (CRC-32 of the name), so that ranks can find the first collective in which they differ.

What it refuses: nothing; others judge (`standstill.py`). Cost: about a microsecond a collective.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Sequence

RECENT = 4096
"""Collectives whose codes are kept: more than a step of most runs has."""

TRAIL = 24
"""Collectives whose names are shown to other ranks: where ranks part, the first difference is mostly among them."""

HEADER_BYTES = 256
"""Bytes of a collective's number and name in shared memory."""

_FORM = struct.Struct(f"<Q{HEADER_BYTES - 8}s")
_MASK = (1 << 20) - 1


class Ledger:
    """What this rank has entered and left, oldest first.

    Attributes:
        entered: number of collectives begun.
        left: number of collectives done.
        name: name of the last one begun.
        header: its number and name as bytes.
        digest: digest of the whole course, below 2**20.
        counter: a place (1,) that always has `entered`, for other ranks to see; None where nobody looks.
    """

    def __init__(self) -> None:
        self.entered = self.left = self.digest = 0
        self.name = ""
        self.codes = array("I", bytes(4 * RECENT))
        self.names: dict[int, str] = {}
        self.counter: memoryview | None = None
        self._known: dict[tuple[str, str], tuple[int, str, bytes]] = {}

    def enter(self, operation: str, of: str) -> None:
        """Note that a collective begins.

        Args:
            operation: name of the operation, in words.
            of: what is exchanged, in the user's words (a module's name).
        """
        known = self._known.get((operation, of))
        if known is None:
            name = f"{operation} of {of}" if of else operation
            code = zlib.crc32(name.encode())
            known = self._known[operation, of] = code, name, name.encode()
            self.names[code] = name
        code, self.name, self._encoded = known
        self.codes[self.entered % RECENT] = code
        self.digest = (self.digest * 31 + code) & _MASK
        self.entered += 1
        if self.counter is not None:
            self.counter[0] = self.entered

    def leave(self) -> None:
        """Note that the last collective begun is done."""
        self.left = self.entered

    def digits(self) -> list[int]:
        """Return `digest` as four numbers below 32, whose squares add up exactly in fp32 over thousands of ranks."""
        return [self.digest >> shift & 31 for shift in (0, 5, 10, 15)]

    @property
    def inside(self) -> bool:
        """Whether this rank is in a collective now."""
        return self.entered != self.left

    def header(self) -> bytes:
        """Return the number and the name of the collective that this rank is in."""
        return _FORM.pack(self.entered, self._encoded)

    def name_of(self, number: int) -> str:
        """Return the name of collective `number`, counted from 1; empty if that is not known any more."""
        known = max(self.entered - RECENT, 0) < number <= self.entered
        return self.names.get(self.codes[(number - 1) % RECENT], "") if known else ""

    def trail(self) -> tuple[str, ...]:
        """Return the names of the last collectives that were entered, in order."""
        return tuple(self.name_of(number)[:120] for number in range(max(self.entered - TRAIL, 0) + 1, self.entered + 1))

    def recent(self) -> bytes:
        """Return the codes as they lie: collective n has place n mod `RECENT`."""
        return self.codes.tobytes()


def read_header(header: bytes) -> tuple[int, str]:
    """Return the number and the name that `Ledger.header` packed."""
    number, name = _FORM.unpack(header)
    return number, name.rstrip(b"\0").decode(errors="replace")


def first_difference(courses: Sequence[tuple[int, bytes]]) -> int | None:
    """Return the number, counted from 0, of the first collective that two ranks name differently; None if there is none.

    Args:
        courses: for each rank, how many collectives it entered, and `Ledger.recent`.

    Cost: a comparison of `RECENT` integers a rank.
    """
    codes = [array("I", recent) for _, recent in courses]
    most = max(entered for entered, _ in courses)
    last = min(entered for entered, _ in courses)
    for number in range(max(0, most - RECENT + 64), last):  # the oldest may be overwritten while they are copied
        if len({code[number % RECENT] for code in codes}) > 1:
            return number
    return None
