"""`make dry-runs`: plan every packaged full-size recipe for 8xV100-16GB, and execute the plan with fake tensors.

Each recipe is `python -m benchmarks.fake_run NAME 8xv100-16gb` in its own process. It passes if the peaks of device and host
are within 5 % of the plan.

Cost: ten minutes on one core.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from ftkit.config.recipe import packaged

HARDWARE = "8xv100-16gb"


def main() -> None:
    """Run the recipes and print a line for each."""
    failed = 0
    print(f"{'device':>7} {'host':>7} {'seconds':>7}  of the plan")
    for name in packaged():
        if not name.endswith(HARDWARE):
            continue
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "benchmarks.fake_run", name, HARDWARE], capture_output=True, text=True)
        seconds = time.perf_counter() - began
        try:
            found = json.loads(done.stdout)
        except ValueError:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            print(f"{'':22} {seconds:7.0f}  {name}: {reason}")
            failed += 1
            continue
        failed += not found["agrees"]
        share = found["share"]
        line = f"{share['device']:7.1%} {share['host']:7.1%} {found['seconds']:7.1f}  {name} ({seconds:.0f} s with the plan)"
        print(line + ("" if found["agrees"] else "  <- outside"), flush=True)
    print("all within 5 %" if not failed else f"{failed} outside")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
