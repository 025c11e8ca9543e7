"""`make bench-convergence`: one Llama trained with each form of optimizer state, and its held-out loss.

All forms of a seed begin at the same 16-bit weights and read the same batches of the bundled data, packed into sequences.
They train on the engine, on one rank and one thread each. The learning rate rises for 5 % of the steps and then falls
linearly to zero. Loss over steps is that of the first held-out sequences, the final loss that of all.

A finished run is kept as `runs/bench/convergence/NAME.json`, and a later call does not repeat it. The last table shows means
over seeds, their spread, and the difference to fp32 state. All curves are also written as JSON to runs/bench/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks.run import RESULTS, ROOT, write_result
from benchmarks.shapes import llama
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.memory.tiers import Tiers
from ftkit.hf.blocks import find_blocks
from ftkit.hf.sharding import shard_as
from ftkit.hf.trainer.optimizers import SHARDED
from ftkit.spec.strategy import Strategy

KEPT = RESULTS / "convergence"
DATA = ROOT / "data"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FORMS = {
    "fp32": ("adamw", "fp32"),
    "8-bit": ("adamw_8bit", "fp32"),
    "split": ("adamw", "split"),
    "8-bit, split": ("adamw_8bit", "split"),
}
"""Update rule and form of the master weight. The first is the reference."""
CURVE_SEQUENCES = 64
"""Held-out sequences of the loss over steps."""


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="12m", help="a name in shapes.py")
    parser.add_argument("--forms", default=";".join(FORMS), help=f"semicolon-separated; default: {'; '.join(FORMS)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=2, help="sequences per step")
    parser.add_argument("--tokens", type=int, default=128, help="per sequence")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--beta2", type=float, default=0.95, help="a recipe's default; the Trainer's is 0.999")
    parser.add_argument("--dtype", default="bf16", choices=tuple(DTYPES))
    parser.add_argument("--evaluations", type=int, default=20, help="points of a curve")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, each on one thread")
    return parser.parse_args()


def sequences(file: str, tokens: int) -> Tensor:
    """Return the conversations of a bundled file as one stream of token ids, cut into rows of `tokens`."""
    tokenizer = AutoTokenizer.from_pretrained(DATA / "tiny-base")
    rows = [json.loads(line)["messages"] for line in (DATA / file).read_text(encoding="utf-8").splitlines()]
    texts = [tokenizer.apply_chat_template(row, tokenize=False) for row in rows]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    stream = torch.tensor([token for ids in encoded for token in ids])
    count = len(stream) // tokens
    return stream[: count * tokens].view(count, tokens)


@torch.no_grad()
def mean_loss(model: LlamaForCausalLM, rows: Tensor) -> float:
    """Return the mean loss per token."""
    model.eval()
    losses = [model(input_ids=part, labels=part).loss.item() * len(part) for part in rows.split(16)]
    model.train()
    return sum(losses) / len(rows)


def batches(rows: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Yield batches without end, in a new order in each epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator)
        for part in order[: len(rows) // size * size].split(size):
            yield rows[part]


def train(spec: dict[str, Any]) -> dict[str, Any]:
    """Train once, and return the result, which is also written to its file.

    Args:
        spec: Options, with `form` and `seed`.
    """
    torch.set_num_threads(1)
    started, (rule, master) = time.time(), FORMS[spec["form"]]
    steps, warmup = spec["steps"], max(1, spec["steps"] // 20)
    held = sequences("python-docs-heldout.jsonl", spec["tokens"])
    feed = batches(sequences("python-docs.jsonl", spec["tokens"]), spec["batch"], spec["seed"])
    torch.manual_seed(spec["seed"])
    model = LlamaForCausalLM(llama(spec["model"])).to(DTYPES[spec["dtype"]])
    comm = Communicator(torch.device("cpu"))
    strategy = Strategy.of(activations="keep", reshard_after_forward=False, master=master)
    units = shard_as(model, find_blocks(model), comm, strategy, Tiers.open(comm, strategy))
    optimizer = SHARDED[rule](units, lr=spec["lr"], betas=(0.9, spec["beta2"]), eps=1e-8, weight_decay=0.1)
    scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / warmup, (steps - step) / (steps - warmup)))
    recent: list[float] = []
    curve: list[dict[str, float]] = []
    for step in range(1, steps + 1):
        batch = next(feed)
        loss = model(input_ids=batch, labels=batch).loss
        with units.last_backward():
            (loss * optimizer.loss_scale.value).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        recent.append(loss.item())
        if step % max(1, steps // spec["evaluations"]) == 0:
            training, recent = statistics.mean(recent), []
            curve.append({"step": step, "training": training, "loss": mean_loss(model, held[:CURVE_SEQUENCES])})
    found = {
        **spec,
        "parameters": sum(segment.numel for flat in units.flats for segment in flat.layout.segments),
        "loss": mean_loss(model, held),
        "curve": curve,
        "skipped_steps": optimizer.loss_scale.skipped_steps,
        "seconds": time.time() - started,
    }
    write_whole(file_of(spec), found)
    return found


def file_of(spec: dict[str, Any]) -> Path:
    """Return the file of a run, named for everything that changes its result."""
    size = "{steps}x{batch}x{tokens}-lr{lr:g}-beta{beta2:g}".format(**spec)
    form = spec["form"].replace(", ", "-")
    return KEPT / f"{spec['model']}-{spec['dtype']}-{size}-{form}-seed{spec['seed']}.json"


def write_whole(path: Path, found: dict[str, Any]) -> None:
    """Write a result so that an interrupted run leaves no file under its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.replace(path)


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each form, the mean final loss over seeds, its spread, and the differences to fp32 state in percent.

    Differences are taken seed by seed: both runs have the same weights at the start and the same batches.
    """
    rows = []
    reference = {run["seed"]: run["loss"] for run in runs if run["form"] == next(iter(FORMS))}
    for form in FORMS:
        losses = {run["seed"]: run["loss"] for run in runs if run["form"] == form}
        if not losses:
            continue
        row = {"form": form, "seeds": len(losses), "mean": statistics.mean(losses.values())}
        row |= {"lowest": min(losses.values()), "highest": max(losses.values())}
        apart = [100 * (loss / reference[seed] - 1) for seed, loss in losses.items() if seed in reference]
        rows.append(row | ({"apart_percent": statistics.mean(apart), "apart_by_seed": apart} if apart else {}))
    return rows


def report(rows: list[dict[str, Any]], model: str, console: Console) -> None:
    """Print the table."""
    table = Table("state", "seeds", "mean loss", "lowest to highest", "to fp32, %", "by seed, %", title=f"Llama {model}")
    for row in rows:
        by_seed = ", ".join(f"{each:+.2f}" for each in row.get("apart_by_seed", ()))
        apart = f"{row['apart_percent']:+.3f}" if by_seed else ""
        spread = f"{row['lowest']:.4f} to {row['highest']:.4f}"
        table.add_row(row["form"], str(row["seeds"]), f"{row['mean']:.4f}", spread, apart, by_seed)
    console.print(table)


def main() -> None:
    """Make the runs that have no file yet, print the table, and write JSON to runs/bench/."""
    options = parse()
    console = Console(width=120)
    chosen = {key: value for key, value in vars(options).items() if key not in ("forms", "seeds", "jobs")}
    forms = [form.strip() for form in options.forms.split(";")]
    specs = [{**chosen, "form": form, "seed": seed} for seed in range(1, options.seeds + 1) for form in forms]
    runs = [json.loads(file_of(spec).read_text()) for spec in specs if file_of(spec).exists()]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(train, spec) for spec in specs if not file_of(spec).exists()]):
            runs.append(run := done.result())
            console.print("{form}, seed {seed}: {loss:.4f} in {seconds:.0f} s".format(**run), highlight=False)
    rows = summary(runs)
    report(rows, options.model, console)
    write_result(f"convergence-{options.model}", {"options": vars(options), "summary": rows, "runs": runs}, console)


if __name__ == "__main__":
    main()
