"""Measured peaks of memory beside the plan: runs of different shapes, tiers and world sizes (`make bench-plan`).

Each run is `ftkit finetune` as a user starts it: a few steps of a Llama from a bf16 safetensors folder, then the export.
On CPU ranks the peak is the largest resident size of a rank. On a GPU it is the most that PyTorch allocated on the device,
beside the plan's device bytes without CUDA's own memory. A run passes if

    85 % of the plan <= measured <= the plan

Cost: five minutes on two cores, 2 GiB of memory and 4 GiB of disk; on a GPU about a minute a run, and 23 GiB of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

MIB = 1 << 20
LEAST = 0.85
ROWS = 400
LLAMAS = {  # hidden, inner, layers, vocabulary
    "13M": (256, 1024, 8, 8000),
    "34M": (512, 1376, 8, 8000),
    "70M": (512, 2048, 12, 16000),
    "134M": (768, 2048, 12, 32000),
    "1.1B": (2048, 5632, 20, 32000),
}


@dataclass(frozen=True)
class Case:
    """One run: a Llama of `LLAMAS`, ranks, tokens of a sequence, sequences of a rank, and forced choices."""

    llama: str
    ranks: int
    dtype: str
    sequence_tokens: int
    micro_batch: int
    engine: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    save: bool = False

    def __str__(self) -> str:
        said = ", ".join(f"{key} {value}" for key, value in self.engine.items())
        return f"{self.llama} x{self.ranks} {self.dtype} {self.micro_batch}x{self.sequence_tokens} {said or 'auto'}"


NVME = {"parameters": "nvme", "gradients": "nvme", "state": "nvme", "activation_offload": "nvme"}
CASES = (
    Case("13M", 1, "fp32", 256, 4),
    Case("34M", 2, "fp32", 256, 2, save=True),
    Case("134M", 2, "bf16", 256, 1, {"stage": 3, "activations": "recompute"}),
    Case("134M", 1, "fp32", 256, 2, {"activations": "recompute"}),
    Case("34M", 2, "bf16", 256, 2, {"stage": 3, "activations": "recompute", "state": "nvme"}, save=True),
    Case("70M", 2, "bf16", 256, 1, {"stage": 3, "activations": "recompute", **NVME}),
    Case("70M", 3, "bf16", 128, 1, {"stage": 1, "activations": "keep"}, accumulation=2),
    Case("34M", 3, "fp32", 256, 1, {"stage": 3, "activations": "keep", "reshard_after_forward": False}),
    Case(
        "70M",
        2,
        "bf16",
        256,
        1,
        {"stage": 2, "activations": "recompute", "gradients": "host", "activation_offload": "host"},
        2,
    ),
    Case("34M", 1, "fp32", 1024, 1, {"activations": "keep"}),
)
GPU_CASES = (
    Case("1.1B", 1, "fp16", 2048, 2),
    Case("1.1B", 1, "fp16", 2048, 2, {"stage": 3, "activations": "recompute"}),
    Case("1.1B", 1, "fp16", 2048, 2, {"stage": 3, "activations": "recompute", "gradients": "host", "state": "host"}, 4),
    Case("1.1B", 1, "fp16", 2048, 2, {"stage": 3, "activations": "recompute", **dict.fromkeys(NVME, "host")}, 4, save=True),
    Case("1.1B", 1, "fp16", 2048, 2, {"stage": 3, "activations": "recompute", **NVME}, 4),
)


def llama(case: Case) -> LlamaConfig:
    """Return the configuration of a case's Llama."""
    hidden, inner, layers, vocabulary = LLAMAS[case.llama]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
    )


def write_model(case: Case, folder: Path) -> None:
    """Write a Llama with random weights, as the hub would have it."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        LlamaForCausalLM(llama(case)).to(torch.bfloat16).save_pretrained(folder)


def recipe_of(case: Case, folder: Path, steps: int) -> dict[str, Any]:
    """Return the recipe of a run."""
    sequences = case.ranks * case.micro_batch * case.accumulation
    return {
        "ranks": case.ranks,
        "model": {"name": str(folder / "model"), "tokenizer": "bundled/tiny-base"},
        "data": {
            "path": str(folder / "rows.jsonl"),
            "sequence_tokens": case.sequence_tokens,
            "packing": True,
            "on_bad_row": "skip",
            "cache_dir": str(folder / "cache"),
        },
        "train": {"batch_tokens": sequences * case.sequence_tokens, "max_steps": steps, "dtype": case.dtype},
        "memory": {"nvme_dir": str(folder)} if "nvme" in case.engine.values() else {},
        "engine": {**case.engine, "micro_batch": case.micro_batch, "accumulation": case.accumulation},
        "output": {"dir": str(folder / "run"), **({"save_every_steps": 1, "keep": 1} if case.save else {})},
    }


def prepare(case: Case, folder: Path, steps: int = 2) -> Path:
    """Write the model, rows and recipe of a run into a folder; return the recipe's path."""
    write_model(case, folder / "model")
    rows = (Path(__file__).parent.parent / "data" / "python-docs.jsonl").read_text().splitlines()[:ROWS]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_of(case, folder, steps)))
    return path


def run(case: Case) -> dict[str, Any]:
    """Run a case; return its summary."""
    with tempfile.TemporaryDirectory(prefix="ftkit-bench-plan-") as name:
        folder = Path(name)
        start = f"from ftkit.cli.app import main; main(['finetune', {str(prepare(case, folder))!r}])"
        told = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True)
        if told.returncode:
            raise SystemExit(f"{case}: exit code {told.returncode}\n{told.stdout}{told.stderr}")
        summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
        return summary


def main() -> None:
    """Run the cases and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cases, from 0")
    parser.add_argument("--purposes", action="store_true", help="also print the plan by purpose")
    chosen = parser.parse_args()
    cuda = torch.cuda.is_available()
    key, cases = ("device_bytes", GPU_CASES) if cuda else ("host_bytes", CASES)
    failed = 0
    print(f"{'measured':>8} {'planned':>8} {'share':>6}  MiB a rank")
    for number, case in enumerate(cases):
        if chosen.only and number not in chosen.only:
            continue
        began = time.perf_counter()
        summary = run(case)
        measured = max(each[key] for each in summary["peaks_per_rank"])
        planned = summary["planned_per_rank"][key]
        share = measured / planned
        good = LEAST <= share <= 1
        failed += not good
        line = f"{measured / MIB:8.0f} {planned / MIB:8.0f} {share:6.1%}  {case} ({time.perf_counter() - began:.0f} s)"
        print(line + ("" if good else "  <- outside"), flush=True)
        if chosen.purposes:
            tier = summary["plan"]["tiers"]["device" if cuda else "host"]
            sizes = {name: round(size / case.ranks / MIB) for name, size in tier["purposes"].items()}
            print(f"{'':26}to {tier['peak_phase']}: {sizes}; {summary['plan']['strategy']['says']}", flush=True)
    print("all within" if not failed else f"{failed} outside")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
