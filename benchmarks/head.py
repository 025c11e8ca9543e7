"""`make bench-head`: the peak memory of a head and its loss, by chunks beside all logits at once.

A hidden state (R, H), a weight (V, H) and labels; forward and backward of the mean loss, each way in a process of its own.
The peak is what the process needs beyond hidden states and weight, which it had before: logits, losses, and the gradients
of both. `plain` is what transformers computes: `linear`, `.float()`, `cross_entropy`. Losses and gradients are compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy, linear

from ftkit.kernels.linear_cross_entropy import linear_cross_entropy

WAYS = ("plain", "chunked")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that was in use since `reset`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def reset(device: torch.device) -> int:
    """Let the peak begin at what is in use now, and return that."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def work(way: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compute one way; write its gradients to `folder`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = DTYPES[options.dtype]
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden).to(device, dtype).requires_grad_()
    weight = (torch.randn(options.classes, options.hidden) * options.hidden**-0.5).to(device, dtype).requires_grad_()
    labels = torch.randint(0, options.classes, (options.tokens,)).to(device)
    before, began = reset(device), time.perf_counter()
    if way == "plain":
        loss = cross_entropy(linear(hidden, weight).float(), labels)
    else:
        loss = linear_cross_entropy(hidden, weight, labels) / options.tokens
    loss.backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds, peak = time.perf_counter() - began, peak_bytes(device) - before
    torch.save({"hidden": hidden.grad.cpu(), "weight": weight.grad.cpu()}, folder / f"{way}.pt")
    return {"way": way, "loss": loss.item(), "seconds": seconds, "peak_bytes": peak, "device": device.type}


def off(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference, as a share of the largest value."""
    return ((one.float() - other.float()).abs().max() / other.float().abs().max()).item()


def main() -> None:
    """Measure both ways, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--classes", type=int, default=128 * 1024)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--work", choices=WAYS)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(work(options.work, options, options.folder)))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.head", *sys.argv[1:], "--work", way, "--folder", folder]
            found[way] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        gradients = {way: torch.load(Path(folder, f"{way}.pt"), weights_only=True) for way in WAYS}
    title = f"{options.tokens} tokens, {options.classes} classes, {options.dtype}"
    table = Table("", "loss", "seconds", "peak GB", title=title)
    for way, each in found.items():
        table.add_row(way, f"{each['loss']:.6f}", f"{each['seconds']:.1f}", f"{each['peak_bytes'] / 1e9:.2f}")
    console = Console(width=110, highlight=False)
    console.print(table)
    ratio = found["plain"]["peak_bytes"] / found["chunked"]["peak_bytes"]
    console.print(f"{'kept  ' if ratio >= 8 else 'missed'} peak <= 1/8 of the plain path's: 1/{ratio:.1f}")
    for name in ("hidden", "weight"):
        share = off(gradients["chunked"][name], gradients["plain"][name])
        console.print(f"gradient of {name}: off by {share:.1e} of the largest")


if __name__ == "__main__":
    main()
