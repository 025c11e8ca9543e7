"""Check the models of other systems (benchmarks/literature), numbers beside numbers:

    python -m benchmarks.peer_models

It prints one step of each system on a machine of round numbers beside seconds that were worked out by hand, published
figures that were held back beside the model, and whether fitted constants have a better neighbour. It ends with 1 where
one of them is wrong. `make published` writes all published figures to docs/published.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.literature.published import compare, constants, machines
from benchmarks.literature.schedules import patrickstar, zero2, zero3, zero_offload
from benchmarks.literature.work import Machine, Work
from benchmarks.published import badness

ROUND = Machine(
    gpus=8, compute={4096: 50e12}, link=100e9, pcie=10e9, pcie_box=40e9, pageable=2e9, adam=4e9, network=10e9, nvme=16e9
)
TEN_B = Work(layers=50, hidden=4096, sequences=10, gpus=1)
"""10.28e9 parameters, 10,240 tokens: 217.9e12 operations a forward, 871e12 a step."""
EIGHT = replace(TEN_B, gpus=8)
TOLERANCE = 0.03
"""Of a number that was worked out by hand."""


def by_hand() -> Iterator[tuple[str, float, float]]:
    """Yield what is simulated: its name, seconds (or operations) of the model, and those worked out by hand."""
    done = sum(event.work.get("compute", 0.0) for event in zero2(TEN_B).script.events)
    yield "ZeRO-2, operations of a step", done, 85.1e9 * 10240
    alone = zero_offload(TEN_B).seconds(ROUND.rates(TEN_B))
    yield "ZeRO-Offload, forward: compute, 4.19 GB of checkpoints at 2 GB/s", alone.forward, 4.36 + 2.10
    yield "ZeRO-Offload, backward: compute, checkpoints, 41.1 GB down at 10 GB/s", alone.backward, 13.06 + 2.10 + 4.11
    yield "ZeRO-Offload, update: 36 bytes a parameter at 112 GB/s, 41.1 GB up", alone.update, 10.28e9 * 36 / 112e9 + 4.11
    slow = replace(ROUND, pcie=1e9).rates(TEN_B)
    yield "ZeRO-Offload, backward bound by PCIe", zero_offload(TEN_B, overlap="all").seconds(slow).backward, 41.1
    rates, outside = ROUND.rates(EIGHT), 2 * 0.21e9 * 7 / 8 / 100e9
    serial, hidden = (zero3(EIGHT, overlap=each, state="device").seconds(rates).forward for each in ("none", "all"))
    yield "ZeRO-3, forward, gathers beside nothing: 17.99 GB at 100 GB/s", serial, 4.36 + 0.18 + outside
    yield "ZeRO-3, forward, gathers hidden", hidden, 4.36 + 2 * outside + 0.18 / 50
    nvme, host = (zero3(EIGHT, overlap="all", parameters="host", state=state) for state in ("nvme", "host"))
    yield "ZeRO-Infinity, update on NVMe: 28 bytes a parameter at 2 GB/s a rank", nvme.seconds(rates).update, 18.0
    yield "ZeRO-Infinity, update on the host: 42 bytes at 14 GB/s a rank", host.seconds(rates).update, 3.85
    work = replace(EIGHT, has_head=False)
    star = patrickstar(work, device_bytes=0).seconds(ROUND.rates(work))
    yield "PatrickStar, update: 2.57 GB down, 28 bytes a parameter, 2.57 GB up", star.update, 0.514 + 2.57 + 0.514


def better_neighbours() -> Iterator[str]:
    """Yield the fitted constants that 1.5 % more or less would make better."""
    for machine, known in constants().items():
        for each in (each for each in known if each.how == "fitted"):
            least = badness(machines(), machine)
            for value in (0.985 * each.value, 1.015 * each.value):
                if each.low <= value <= each.high and badness(machines({(machine, each.name): value}), machine) < least:
                    yield f"{machine} {each.name}: {value:.4g} is better than {each.value:.4g}"


def main() -> int:
    """Print the comparison; return the exit code."""
    wrong = 0
    for name, simulated, hand in by_hand():
        holds = abs(simulated / hand - 1) <= TOLERANCE
        wrong += not holds
        print(f"{name:<72} {simulated:10.4g} {hand:10.4g} {'' if holds else 'WRONG'}")
    for each in compare():
        if each.figure.role == "held back":
            wrong += not each.holds
            verdict = "" if each.holds else "MISSES"
            name = f"{each.run.id} {each.run.title}: {each.figure.what}"
            print(f"{name:<72} {each.simulated:10.4g} {each.figure.printed:10.4g} {verdict}")
    for told in better_neighbours():
        wrong += 1
        print(told)
    print(f"{wrong} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
