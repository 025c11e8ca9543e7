"""`make kernels`: every kernel at the sizes of real models, compiled for cards that need not be present.

Triton and its ptxas compile a cubin for any compute capability. `cuobjdump -res-usage` reads registers, shared memory and
spilled bytes from it. Instructions are counted in the PTX (a loop's count once): `issued` is their number for the first
capability, `wide` the share of loads and stores that move 16 bytes. `moved` is the least traffic in bytes per element of
16-bit data; it bounds a kernel's time. A V100 moves at most 900e9 bytes per second.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ftkit.kernels import adamw, cross_entropy, gated, rms_norm, rotary, squared_norm
from ftkit.kernels.launch import options, row_block

HALF, FULL, INT, LONG, NUMBER, LABELS = "*fp16", "*fp32", "i32", "i64", "fp32", "*i64"
CAPABILITIES = (70, 75, 80, 90)
ROUND = ("columns", "stride", "half", "numel")
CUOBJDUMP = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Specimen:
    """A kernel as it is launched.

    Args:
        name: names of the kernel and of the size.
        kernel: the kernel's function.
        types: types of its arguments, by name; None for an argument that is absent.
        known: its constants, by name.
        warps: warps of a program.
        moved: bytes an element, of 16-bit data (see above).
    """

    name: str
    kernel: Any
    types: dict[str, str | None]
    known: dict[str, Any]
    warps: int
    moved: float


@dataclass(frozen=True)
class Compiled:
    """The result of compiling a specimen.

    Args:
        specimen: the kernel that was compiled.
        cubin: its machine code.
        registers: registers of a thread.
        shared: bytes of shared memory of a program.
        local: bytes of local memory per thread (spills).
        instructions: instructions of the PTX, by name.
    """

    specimen: Specimen
    cubin: bytes
    registers: int
    shared: int
    local: int
    instructions: Counter[str] = field(repr=False)

    @property
    def tensor_cores(self) -> int:
        """Instructions of tensor cores: none is needed."""
        return sum(number for name, number in self.instructions.items() if "mma" in name)


def _aligned(types: dict[str, str | None]) -> dict[tuple[int, ...], Any]:
    """Return what Triton finds out of real arguments: addresses, rows and strides are multiples of 16."""
    found = {}
    for place, (name, kind) in enumerate(types.items()):
        stride = kind == INT and "_" in name and name != "ignore_index"
        if kind is not None and (kind.startswith("*") or name in ROUND or stride):
            found[place,] = [["tt.divisibility", 16]]
    return found


def compile_for(specimen: Specimen, capability: int) -> Compiled:
    """Compile for a compute capability (70 is a V100), by Triton's cache if it has it.

    Raises:
        RuntimeError: if the tools beside Triton's ptxas do not say what is expected of them.
    """
    absent = {name: None for name, kind in specimen.types.items() if kind is None}
    signature = {name: kind or "constexpr" for name, kind in specimen.types.items()}
    source = ASTSource(
        fn=specimen.kernel,
        signature=signature | dict.fromkeys(specimen.known, "constexpr"),
        constexprs={**specimen.known, **absent},
        attrs=_aligned(specimen.types),
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options(specimen.warps))
    cubin: bytes = made.asm["cubin"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        usage = subprocess.run([CUOBJDUMP, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing of {specimen.name}: {usage}")
    registers, stack, shared, local = map(int, found.groups())
    names = re.findall(r"^\t(?:@!?%\w+ )?([a-z][\w.:]*)[\s;]", made.asm["ptx"], re.MULTILINE)
    shared += made.metadata.shared
    return Compiled(specimen, cubin, registers, shared, stack + local, Counter(names))


def _norms() -> list[Specimen]:
    found = []
    for columns in (4096, 5120):
        block, warps = row_block(columns)
        known, rest = {"CASTING": 0, "BLOCK": block}, {"rows": INT, "columns": INT, "offset": NUMBER}
        found += [
            Specimen(
                f"rms_norm forward, {columns}", rms_norm._forward,
                {"x": HALF, "weight": HALF, "y": HALF, "scale": FULL, "columns": INT, "eps": NUMBER, "offset": NUMBER},
                known, warps, 4,
            ),
            Specimen(
                f"rms_norm backward, {columns}", rms_norm._backward,
                {"dy": HALF, "x": HALF, "weight": HALF, "scale": FULL, "dx": HALF, "dweight": FULL, **rest},
                known, warps, 6,
            ),
        ]  # fmt: skip
    return found


def _activations() -> list[Specimen]:
    found = []
    for kind, name in enumerate(gated.ACTIVATIONS):
        known = {"KIND": kind, "BLOCK": gated.BLOCK}
        pair, strides = {"gate": HALF, "up": HALF}, {"gate_stride": INT, "up_stride": INT, "columns": INT}
        found += [
            Specimen(f"gated {name} forward", gated._forward, {**pair, "y": HALF, **strides}, known, gated.WARPS, 6),
            Specimen(
                f"gated {name} backward", gated._backward, {"dy": HALF, **pair, "dgate": HALF, "dup": HALF, **strides},
                known, gated.WARPS, 10,
            ),
        ]  # fmt: skip
    return found


def _rotations() -> list[Specimen]:
    sizes = ("heads", "tokens", "half", "rest")
    strides = ("x_batch", "x_head", "x_token", "y_batch", "y_head", "y_token", "angle_batch", "angle_token")
    types = {"x": HALF, "cos": HALF, "sin": HALF, "y": HALF, **dict.fromkeys(sizes + strides, INT)}
    return [
        Specimen(
            f"rotary {'backward' if back else 'forward'}, {size}", rotary._rotate, types,
            {"BACK": back, "HEADS": rotary.ELEMENTS // half, "HALF": half, "REST": rest}, 4, 4,
        )
        for back in (False, True)
        for size, half, rest in (("heads of 128", 64, 0), ("a quarter of 96", 16, 128))
    ]  # fmt: skip


def _losses() -> list[Specimen]:
    terms = {"ignore_index": INT, "cap": NUMBER}
    types = {"logits": HALF, "labels": LABELS, "loss": FULL, "total": FULL, "stride": INT, "columns": INT, **terms}
    ahead = {"logits": HALF, "labels": LABELS, "total": FULL, "stride": INT, "columns": INT}
    back = {"dloss": FULL, **ahead, "first": INT, **terms}
    return [
        Specimen(
            f"cross_entropy {direction}{', with a soft cap' if cap else ''}", kernel, own,
            {"CAP": cap, "BLOCK": cross_entropy.BLOCK}, cross_entropy.WARPS, moved,
        )
        for cap in (False, True)
        for direction, kernel, own, moved in (
            ("forward", cross_entropy._forward, types, 2),
            ("backward", cross_entropy._backward, back, 4),
        )
    ]  # fmt: skip


def _flat() -> list[Specimen]:
    state = dict.fromkeys(("master", "m", "v"), FULL)
    numbers = ("scale", "decay", "beta1", "beta2", "rest1", "rest2", "eps", "step_size", "root_correction")
    return [
        Specimen(
            "adamw, of 16-bit weights", adamw._update,
            {"gradient": HALF, **state, "weight": HALF, "numel": LONG, **dict.fromkeys(numbers, NUMBER)},
            {"WEIGHT": True, "BLOCK": adamw.BLOCK}, adamw.WARPS, 28,
        ),
        Specimen(
            "squared_norm", squared_norm._sum, {"x": HALF, "sums": FULL, "strange": "*i32", "numel": LONG},
            {"ROUNDS": squared_norm.ROUNDS, "BLOCK": squared_norm.BLOCK}, squared_norm.WARPS, 2,
        ),
    ]  # fmt: skip


SPECIMENS: tuple[Specimen, ...] = (*_norms(), *_activations(), *_rotations(), *_losses(), *_flat())


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
        compiled = track(zip(SPECIMENS, rows), "compiling", total=len(SPECIMENS), console=Console(stderr=True))
        for specimen, made in compiled:
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
