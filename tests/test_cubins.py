"""Each kernel compiles for each GPU generation that ftkit names, on a machine without a GPU."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest
from triton.runtime.jit import JITFunction

import ftkit.kernels
from benchmarks.specimens import CAPABILITIES, SPECIMENS, Specimen, compile_for

HELPERS = ("act", "_bits", "_capped", "_decoded", "_float", "_power", "_read", "_store_encoded", "_write")
"""Functions that kernels call, never launched."""
NEWER = [pytest.param(capability, marks=pytest.mark.slow) for capability in CAPABILITIES[1:]]


@pytest.mark.quick(20)
@pytest.mark.parametrize("capability", [CAPABILITIES[0], *NEWER])
@pytest.mark.parametrize("specimen", SPECIMENS, ids=lambda specimen: specimen.name)
def test_a_cubin_comes_out(specimen: Specimen, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = compile_for(specimen, capability)
    assert made.cubin[:4] == b"\x7fELF"
    assert 0 < made.registers <= 65536 // (32 * specimen.warps), "a program must fit a multiprocessor"
    assert made.spilled == 0, "it spills"
    if not specimen.fused:
        words = made.ptx.replace(".", " ").split()
        assert not {"fma", "ftz", "approx", "full"} & set(words), "it does not give the bits of plain PyTorch"


def test_no_kernel_is_left_out() -> None:
    launched = {specimen.kernel for specimen in SPECIMENS}
    for module in pkgutil.iter_modules(ftkit.kernels.__path__):
        for name, value in vars(importlib.import_module(f"ftkit.kernels.{module.name}")).items():
            if isinstance(value, JITFunction) and value.__module__ == f"ftkit.kernels.{module.name}":
                helper = name in HELPERS
                assert helper or value in launched, f"{module.name}.{name}"
