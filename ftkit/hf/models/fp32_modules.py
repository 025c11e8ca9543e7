"""fp32 modules as facts: modules that compute in fp32 where the rest does in fp16; fp32_search.py finds them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ftkit.errors import UserError

LIMIT = 2.0**14
"""A quarter of what fp16 holds: training moves activations, and the next batch is another."""

FORMS = ("projection", "part", "stream")


@dataclass
class Fp32Modules:
    """What was made an fp32 module in a model.

    Args:
        found: name of a module to its kind, one of `FORMS`.
        largest: name of a module to the largest value seen there in fp16; inf beyond its range.
        finite: whether all forwards that were looked at last ended without an infinity.
        looked: whether any forward was looked at.
    """

    found: dict[str, str] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    finite: bool = True
    looked: bool = False

    def describe(self) -> str:
        """Return one line with every module that computes in fp32, and why."""
        if not self.found and not self.looked:
            return "not looked for"
        if not self.found and not self.finite:
            return "none helps: the forward is not finite in fp32 either"
        if not self.found:
            return f"none needed: no activation is beyond {LIMIT:g}, and fp16 holds 65504"
        sums = [
            f"residual sums from {name} on ({self._seen(name)})" for name, kind in self.found.items() if kind == "stream"
        ]
        others = [f"{name} ({self._seen(name)})" for name, kind in self.found.items() if kind != "stream"]
        return ", ".join(others + sums)

    def _seen(self, name: str) -> str:
        largest = self.largest.get(name, math.inf)
        return "overflowed" if largest == math.inf else f"reached {largest:.3g}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fp32 modules for JSON; what overflowed has no largest value."""
        return {"found": self.found, "largest": {name: seen for name, seen in self.largest.items() if seen < math.inf}}

    @classmethod
    def from_dict(cls, given: Any, where: str) -> Fp32Modules:
        """Return the fp32 modules that `as_dict` gave.

        Raises:
            UserError: if it did not; `where` is named.
        """
        found = given.get("found") if isinstance(given, dict) else None
        if not isinstance(found, dict) or not all(kind in FORMS for kind in found.values()):
            raise UserError(f"{where}: its fp32 modules are not names with one of {', '.join(FORMS)}")
        seen = given.get("largest")
        largest = seen if isinstance(seen, dict) else {}
        return cls(dict(found), {name: value for name, value in largest.items() if isinstance(value, float)})
