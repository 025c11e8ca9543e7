"""`make kernels`: what every kernel becomes on a card, without a card: registers, shared memory, spills, instructions.

`issued` is the number of instructions in the PTX for sm_70 (a loop's count once), `wide` how many of its loads and stores
move 16 bytes at once. `bytes` are what an element of 16-bit data must move; time on a card is bound by them.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.specimens import CAPABILITIES, SPECIMENS, Compiled, compile_for


def wide(made: Compiled) -> str:
    """Return 'of all loads and stores, those of 16 bytes'."""
    moves = {name: n for name, n in made.instructions.items() if name.startswith(("ld.global", "st.global"))}
    whole = sum(number for name, number in moves.items() if ".v4" in name or ".v2.b64" in name)
    return f"{whole}/{sum(moves.values())}"


def main() -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capabilities", type=int, nargs="*", default=CAPABILITIES)
    capabilities = parser.parse_args().capabilities
    table = Table("kernel", "warps", "bytes", "issued", "wide", title="registers / shared bytes / bytes spilt")
    for capability in capabilities:
        table.add_column(f"sm_{capability}", justify="right")
    with ThreadPoolExecutor(2) as pool:
        rows = pool.map(lambda specimen: [compile_for(specimen, capability) for capability in capabilities], SPECIMENS)
        told = track(zip(SPECIMENS, rows), "compiling", total=len(SPECIMENS), console=Console(stderr=True))
        for specimen, made in told:
            table.add_row(
                specimen.name,
                str(specimen.warps),
                f"{specimen.moved:g}",
                str(sum(made[0].instructions.values())),
                wide(made[0]),
                *(f"{each.registers} / {each.shared} / {each.local}" for each in made),
            )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
