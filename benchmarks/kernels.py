"""`make bench-kernels`: each fused kernel on a GPU beside eager PyTorch, torch.compile and Liger-Kernel, if installed.

Forward and backward together, in fp16, at the sizes of a 13B model and 8192 tokens. The table shows median times, the least
traffic (`cases`) over them, and its share of the rate of a large copy in the same run. Goals: 85 % of the copy, and
no slower than the best other.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.run import RESULTS, write_result
from ftkit.kernels.adamw import AdamW, adamw_, adamw_reference
from ftkit.kernels.cross_entropy import cross_entropy, cross_entropy_reference
from ftkit.kernels.gated import gated, gated_reference
from ftkit.kernels.rms_norm import rms_norm, rms_norm_reference
from ftkit.kernels.rotary import rotary, rotary_reference
from ftkit.kernels.squared_norm import squared_norm, squared_norm_reference

TOKENS, HIDDEN, INNER, HEADS, CLASSES = 8192, 5120, 13824, 40, 32000
FLAT = 64 << 20
Call = Callable[[], Any]


def timed(call: Call, rounds: int) -> float:
    """Return the median device seconds of a call. The device spins first, so that launches by the host are not measured."""
    times = []
    for _ in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(10_000_000)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])


def there_and_back(function: Callable[..., Any], *leaves: Tensor) -> Call:
    """Return a call of a function and its backward."""
    own = [leaf.detach().requires_grad_() for leaf in leaves]
    gradients: list[Tensor] = []

    def call() -> None:
        found = function(*own)
        outputs = [out for out in (found if isinstance(found, tuple) else (found,)) if out.grad_fn is not None]
        if not gradients:
            gradients.extend(torch.randn_like(out) for out in outputs)
        torch.autograd.grad(outputs, own, gradients)

    return call


def liger(name: str) -> Callable[..., Any] | None:
    """Return Liger-Kernel's function for a case, or None."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    import liger_kernel.transformers.functional as functional

    found: dict[str, Callable[..., Any]] = {
        "rms_norm": lambda x, w: functional.liger_rms_norm(x, w, 1e-5),
        "swiglu": functional.liger_swiglu,
    }
    return found.get(name)


def cases() -> dict[str, tuple[float, Callable[..., Any], Callable[..., Any], list[Tensor]]]:
    """Return name to (bytes moved, ours, plain PyTorch, leaves)."""

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float16)

    x, w = some(TOKENS, HIDDEN), some(HIDDEN)
    gate, up = some(TOKENS, INNER), some(TOKENS, INNER)
    q, k = (some(1, TOKENS, HEADS, 128).transpose(1, 2) for _ in range(2))
    cos, sin = some(1, TOKENS, 128), some(1, TOKENS, 128)
    logits, labels = some(2048, CLASSES), torch.randint(0, CLASSES, (2048,), device="cuda")
    rows, inner, heads = TOKENS * HIDDEN, TOKENS * INNER, 2 * TOKENS * HEADS * 128
    eps = 1e-5
    return {
        "rms_norm": (10 * rows, lambda x, w: rms_norm(x, w, eps), lambda x, w: rms_norm_reference(x, w, eps), [x, w]),
        "swiglu": (16 * inner, gated, gated_reference, [gate, up]),
        "rotary": (8 * heads, lambda q, k: rotary(q, k, cos, sin), lambda q, k: rotary_reference(q, k, cos, sin), [q, k]),
        "cross_entropy": (
            6 * logits.numel(),
            lambda z: cross_entropy(z * 1.0, labels),
            lambda z: cross_entropy_reference(z * 1.0, labels),
            [logits],
        ),
    }


def flat_cases() -> dict[str, tuple[float, Call, Call]]:
    """Return name to (bytes moved, ours, plain PyTorch) of what is done to flat shards."""
    gradient, weight = (torch.randn(FLAT, device="cuda").half() for _ in range(2))
    master, m, v = (torch.rand(FLAT, device="cuda") for _ in range(3))
    how = AdamW(lr=1e-5, step=10)
    return {
        "adamw": (
            28 * FLAT,
            lambda: adamw_(gradient, master, m, v, weight, how),
            lambda: adamw_reference(gradient, master, m, v, weight, how),
        ),
        "squared_norm": (2 * FLAT, lambda: squared_norm(gradient), lambda: squared_norm_reference(gradient)),
    }


def measure(rounds: int) -> dict[str, Any]:
    """Return the copy's bytes a second, and of each case the seconds of each contender."""
    big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(big)
    copied = 2 * big.numel() / timed(lambda: other.copy_(big), rounds)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "copy_bytes_per_s": copied, "cases": {}}
    ready: dict[str, tuple[float, dict[str, Call]]] = {}
    for name, (moved, ours, plain, leaves) in cases().items():
        calls = {"ftkit": there_and_back(ours, *leaves), "eager": there_and_back(plain, *leaves)}
        calls["compile"] = there_and_back(torch.compile(plain), *leaves)
        if (theirs := liger(name)) is not None:
            calls["liger"] = there_and_back(theirs, *leaves)
        ready[name] = moved, calls
    for name, (moved, ours, plain) in flat_cases().items():
        ready[name] = moved, {"ftkit": ours, "eager": plain, "compile": torch.compile(plain)}
    for name, (moved, calls) in ready.items():
        seconds: dict[str, Any] = {}
        for engine, call in calls.items():
            try:
                seconds[engine] = timed(call, rounds)
            except Exception as error:  # it is reported, and the others are measured
                seconds[engine] = f"{type(error).__name__}: {error}".splitlines()[0]
        found["cases"][name] = {"moved_bytes": moved, "seconds": seconds}
    return found


def main() -> None:
    """Measure, print a table, write JSON to runs/bench/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: times are not measured; `make kernels` shows what the kernels become on each card")
    found = measure(options.rounds)
    table = Table("", "ftkit us", "GB/s", "of a copy", "eager", "compile", "liger", "x best")
    for name, case in found["cases"].items():
        seconds = {engine: value for engine, value in case["seconds"].items() if isinstance(value, float)}
        own = seconds.pop("ftkit", float("nan"))
        rate = case["moved_bytes"] / own
        others = [f"{seconds[each] * 1e6:.0f}" if each in seconds else "-" for each in ("eager", "compile", "liger")]
        best = min(seconds.values()) / own if seconds else float("nan")
        share = rate / found["copy_bytes_per_s"]
        table.add_row(name, f"{own * 1e6:.0f}", f"{rate / 1e9:.0f}", f"{share:.0%}", *others, f"{best:.2f}")
    console = Console(width=110)
    console.print(f"{found['device']}: a copy moves {found['copy_bytes_per_s'] / 1e9:.0f} GB/s", highlight=False)
    console.print(table)
    write_result("kernels", found, console, options.out)
    if failed := [name for name, case in found["cases"].items() if not isinstance(case["seconds"]["ftkit"], float)]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
