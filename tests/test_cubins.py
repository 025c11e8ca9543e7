"""Every kernel becomes machine code for every card that ftkit names, on a machine that has none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ftkit.kernels import cross_entropy, gated, rms_norm

HALF, FULL, LABELS = "*fp16", "*fp32", "*i64"


@dataclass(frozen=True)
class Case:
    """A kernel, the types of its arguments (None: absent), and what is known when it is compiled."""

    name: str
    kernel: Any
    types: dict[str, str | None]
    known: dict[str, Any]
    warps: int


NORM_IN = {"x": HALF, "residual": HALF, "weight": HALF, "y": HALF, "total": HALF, "scale": FULL}
NORM_BACK = {"dy": HALF, "dtotal": HALF, "total": HALF, "weight": HALF, "scale": FULL, "dx": HALF, "dweight": FULL}
GATE = {"gate": HALF, "up": HALF}
ENTROPY = {"columns": "i32", "ignore_index": "i32", "smoothing": "fp32", "cap": "fp32", "z_weight": "fp32"}
CASES = [
    Case(
        "rms_norm forward, 5120, with a residual",
        rms_norm._forward,
        {**NORM_IN, "columns": "i32", "eps": "fp32", "offset": "fp32"},
        {"ADD": True, "GEMMA": False, "BLOCK": 8192},
        16,
    ),
    Case(
        "rms_norm forward, 4096, as Gemma",
        rms_norm._forward,
        {**NORM_IN, "residual": None, "columns": "i32", "eps": "fp32", "offset": "fp32"},
        {"ADD": False, "GEMMA": True, "BLOCK": 4096},
        8,
    ),
    Case(
        "rms_norm backward, 5120, with a residual",
        rms_norm._backward,
        {**NORM_BACK, "rows": "i32", "columns": "i32", "offset": "fp32"},
        {"ADD": True, "GEMMA": False, "BLOCK": 8192},
        16,
    ),
    *(
        Case(
            f"{name} forward",
            gated._forward,
            {**GATE, "y": HALF, "gate_stride": "i32", "up_stride": "i32", "columns": "i32"},
            {"KIND": kind, "BLOCK": gated.BLOCK},
            gated.WARPS,
        )
        for kind, name in enumerate(gated.ACTIVATIONS)
    ),
    *(
        Case(
            f"{name} backward",
            gated._backward,
            {"dy": HALF, **GATE, "dgate": HALF, "dup": HALF, "gate_stride": "i32", "up_stride": "i32", "columns": "i32"},
            {"KIND": kind, "BLOCK": gated.BLOCK},
            gated.WARPS,
        )
        for kind, name in enumerate(gated.ACTIVATIONS)
    ),
    Case(
        "cross_entropy forward",
        cross_entropy._forward,
        {"logits": HALF, "labels": LABELS, "loss": FULL, "total": FULL, "stride": "i32", **ENTROPY},
        {"CAP": False, "BLOCK": cross_entropy.BLOCK},
        cross_entropy.WARPS,
    ),
    Case(
        "cross_entropy backward, with a soft cap",
        cross_entropy._backward,
        {"dloss": FULL, "logits": HALF, "labels": LABELS, "total": FULL, "stride": "i32", **ENTROPY},
        {"CAP": True, "BLOCK": cross_entropy.BLOCK},
        cross_entropy.WARPS,
    ),
]


@pytest.mark.parametrize("capability", [70, *(pytest.param(each, marks=pytest.mark.slow) for each in (75, 80, 90))])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_cubin_comes_out(case: Case, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    absent = {name: None for name, kind in case.types.items() if kind is None}
    signature = {name: kind or "constexpr" for name, kind in case.types.items()} | dict.fromkeys(case.known, "constexpr")
    source = ASTSource(fn=case.kernel, signature=signature, constexprs={**case.known, **absent})
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": case.warps})
    assert made.asm["cubin"][:4] == b"\x7fELF"
    assert "mma" not in made.asm["ptx"], "no tensor core is asked for"
    assert "st.local" not in made.asm["ptx"], "nothing spills before ptxas"
