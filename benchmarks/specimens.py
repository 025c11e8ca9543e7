"""`make kernels`: every kernel at the sizes of real models, compiled for cards that need not be present.

Triton and its ptxas compile a cubin for any compute capability. `cuobjdump -res-usage` reads registers, shared memory and
spilled bytes from it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ftkit.kernels import adamw, adamw_8bit, cross_entropy, gated, rms_norm, rotary, squared_norm
from ftkit.kernels.launch import options, row_block

HALF, FULL, INT, LONG, NUMBER, LABELS = "*fp16", "*fp32", "i32", "i64", "fp32", "*i64"
CAPABILITIES = (70, 75, 80, 90)
ROUND = ("columns", "stride", "half", "numel")
CUOBJDUMP = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Specimen:
    """A kernel as it is launched.

    Args:
        name: Names of the kernel and of the size.
        kernel: The kernel's function.
        types: Types of its arguments, by name. None for an argument that is absent.
        known: Its constants, by name.
        warps: Warps of a program.
        fused: Whether products are fused with sums.
    """

    name: str
    kernel: Any
    types: dict[str, str | None]
    known: dict[str, Any]
    warps: int
    fused: bool = True


@dataclass(frozen=True)
class Compiled:
    """PTX, a cubin, registers of a thread, bytes of shared memory of a program, and bytes that a thread spills."""

    ptx: str
    cubin: bytes
    registers: int
    shared: int
    spilled: int


def _aligned(types: dict[str, str | None]) -> dict[tuple[int, ...], Any]:
    """Return the attributes that Triton finds in real arguments: addresses, rows and strides are multiples of 16."""
    found = {}
    for place, (name, kind) in enumerate(types.items()):
        stride = kind == INT and "_" in name and name != "ignore_index"
        if kind is not None and (kind.startswith("*") or name in ROUND or stride):
            found[place,] = [["tt.divisibility", 16]]
    return found


def compile_for(specimen: Specimen, capability: int) -> Compiled:
    """Compile for a compute capability (70 is a V100), by Triton's cache if it has it."""
    absent = {name: None for name, kind in specimen.types.items() if kind is None}
    signature = {name: kind or "constexpr" for name, kind in specimen.types.items()}
    source = ASTSource(
        fn=specimen.kernel,
        signature=signature | dict.fromkeys(specimen.known, "constexpr"),
        constexprs={**specimen.known, **absent},
        attrs=_aligned(specimen.types),
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options(specimen.warps, specimen.fused))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, shared, local = map(int, found.groups())
    return Compiled(made.asm["ptx"], made.asm["cubin"], registers, shared + made.metadata.shared, stack + local)


def _norms() -> list[Specimen]:
    found = []
    for columns in (4096, 5120):
        block, warps = row_block(columns)
        known, rest = {"CASTING": 0, "BLOCK": block}, {"rows": INT, "columns": INT, "offset": NUMBER}
        found += [
            Specimen(
                f"rms_norm forward, {columns}", rms_norm._forward,
                {"x": HALF, "weight": HALF, "y": HALF, "scale": FULL, "columns": INT, "eps": NUMBER, "offset": NUMBER},
                known, warps,
            ),
            Specimen(
                f"rms_norm backward, {columns}", rms_norm._backward,
                {"dy": HALF, "x": HALF, "weight": HALF, "scale": FULL, "dx": HALF, "dweight": FULL, **rest},
                known, warps,
            ),
        ]  # fmt: skip
    return found


def _activations() -> list[Specimen]:
    found = []
    for kind, name in enumerate(gated.ACTIVATIONS):
        known = {"KIND": kind, "BLOCK": gated.BLOCK}
        pair, strides = {"gate": HALF, "up": HALF}, {"gate_stride": INT, "up_stride": INT, "columns": INT}
        found += [
            Specimen(f"gated {name} forward", gated._forward, {**pair, "y": HALF, **strides}, known, gated.WARPS),
            Specimen(
                f"gated {name} backward", gated._backward, {"dy": HALF, **pair, "dgate": HALF, "dup": HALF, **strides},
                known, gated.WARPS,
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
            {"BACK": back, "HEADS": rotary.ELEMENTS // half, "HALF": half, "REST": rest}, 4,
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
            {"CAP": cap, "BLOCK": cross_entropy.BLOCK}, cross_entropy.WARPS,
        )
        for cap in (False, True)
        for direction, kernel, own in (
            ("forward", cross_entropy._forward, types),
            ("backward", cross_entropy._backward, back),
        )
    ]  # fmt: skip


def _coded() -> list[Specimen]:
    found = []
    rest = ("factor", "keep", "beta1", "rest1", "beta2", "rest2")
    moment = {"m": "*u8", "m_scales": FULL}
    for name, kernel, state, more in (
        ("adamw_8bit", adamw_8bit._adamw, {**moment, "s": "*u8", "s_scales": FULL}, ("root", "eps", "rate")),
        ("lion_8bit", adamw_8bit._lion, moment, ("rate",)),
    ):
        for split, kind in ((False, HALF), (True, HALF), (True, "*bf16")):
            types = {"gradient": kind, "master": None if split else FULL, **state, "weight": kind}
            types |= {"residual": "*i16" if split else None, "groups": LONG, **dict.fromkeys((*rest, *more), NUMBER)}
            known = {"SPLIT": split, "WEIGHT": True, "GROUPS": adamw_8bit.GROUPS, "GROUP": adamw_8bit.GROUP}
            title = f"{name}, {'split' if split else 'fp32'} master, {kind[1:]} weight"
            found.append(Specimen(title, kernel, types, known, adamw_8bit.WARPS, fused=False))
    return found


def _flat() -> list[Specimen]:
    state = dict.fromkeys(("master", "m", "v"), FULL)
    numbers = ("scale", "decay", "beta1", "beta2", "rest1", "rest2", "eps", "step_size", "root_correction")
    return [
        Specimen(
            "adamw, of 16-bit weights", adamw._update,
            {"gradient": HALF, **state, "weight": HALF, "numel": LONG, **dict.fromkeys(numbers, NUMBER)},
            {"WEIGHT": True, "BLOCK": adamw.BLOCK}, adamw.WARPS,
        ),
        Specimen(
            "squared_norm", squared_norm._sum, {"x": HALF, "sums": FULL, "strange": "*i32", "numel": LONG},
            {"ROUNDS": squared_norm.ROUNDS, "BLOCK": squared_norm.BLOCK}, squared_norm.WARPS,
        ),
    ]  # fmt: skip


SPECIMENS: tuple[Specimen, ...] = (*_norms(), *_activations(), *_rotations(), *_losses(), *_flat(), *_coded())


def main() -> None:
    """Compile and print."""
    cards = (f"sm_{capability}" for capability in CAPABILITIES)
    table = Table("kernel", "warps", *cards, title="registers / shared bytes / bytes spilled")
    for specimen in track(SPECIMENS, "compiling", console=Console(stderr=True)):
        made = [compile_for(specimen, capability) for capability in CAPABILITIES]
        cells = (f"{each.registers} / {each.shared} / {each.spilled}" for each in made)
        table.add_row(specimen.name, str(specimen.warps), *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
