"""Write docs/compatibility.md: `python -m tests.compat`."""

from __future__ import annotations

import sys

from tests.compat.case import judge
from tests.compat.page import CASES, FILE, page


def main() -> int:
    """Run all cases, write the page, and return 1 if a case is wrong."""
    found = {}
    for case in CASES:
        found[case.name] = outcome = judge(case)
        print(f"{outcome.outcome:8} {case.name}" + (f": {outcome.reason}" if outcome.outcome == "wrong" else ""), flush=True)
    FILE.write_text(page(found))
    return int(any(outcome.outcome == "wrong" for outcome in found.values()))


if __name__ == "__main__":
    sys.exit(main())
