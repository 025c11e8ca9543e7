"""`python -m benchmarks.generation`: tokens a second of a sharded model's answers, gathered and streamed, and the whole's.

Each rank is a process with as many threads as the others. In turns, round by round, all ranks at the same time answer one
batch of prompts each: with a whole model of their own (so the ranks share memory bandwidth as with the sharded one); with
the sharded model, its weights gathered once for all tokens, the gathering included; the same within an outer `holding`, the
gathering left out; and with weights that are gathered block by block for each token. Prompts differ in length.

Reported are medians over rounds of a rank's tokens a second (the slowest rank's), and the ratio of the whole model's time:
1.3 is the most that gathered weights may take. The machine should be otherwise idle: the share of CPU time that others used
is printed, and beside the time that passed the CPU time that a rank used, which others change less. The result is also
written as JSON to runs/bench/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transformers import LlamaForCausalLM

import ftkit
from benchmarks.run import ROOT, busy_s
from benchmarks.shapes import SHAPES, VOCABULARY, llama
from ftkit.hf.generate.generation import generate_ids
from ftkit.hf.generate.holding import holding
from ftkit.launch import ranks as launch

WAYS = ("whole", "gathered", "gathered before", "streamed")
LIMIT = 1.3


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="134m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--prompts", type=int, default=2, help="of each rank, answered together")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    return parser.parse_args()


def rank(stop: launch.Stop, asked: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Measure as one of the ranks; return the slowest rank's seconds of each way, round by round: passed, and of CPU."""
    torch.set_num_threads(asked["threads"])
    dist.init_process_group("gloo")
    config = llama(asked["model"])
    config.eos_token_id = None
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[asked["dtype"]]
    torch.manual_seed(0)
    whole = LlamaForCausalLM(config).to(dtype).requires_grad_(False).eval()
    torch.manual_seed(0)
    sharded = LlamaForCausalLM(config).to(dtype).requires_grad_(False).eval()
    units = ftkit.shard(
        sharded, {"stage": 3, "activations": "recompute", "reshard_after_forward": True, "kernels": "off", "affinity": False}
    )
    random = torch.Generator().manual_seed(0)
    lengths = [16 + 8 * rank + number for rank in range(units.comm.world_size) for number in range(asked["prompts"])]
    prompts = [torch.randint(9, VOCABULARY, (n,), generator=random).tolist() for n in sorted(lengths, reverse=True)]
    own = slice(stop.rank * asked["prompts"], (stop.rank + 1) * asked["prompts"])  # the batch that this rank is dealt
    settings = {"max_new_tokens": asked["tokens"], "pad_token_id": 0, "batch_size": asked["prompts"]}

    def answer(way: str) -> tuple[float, float]:
        model = whole if way == "whole" else sharded
        with holding(units) if way == "gathered before" else nullcontext():
            units.comm.barrier()
            start, used = time.perf_counter(), time.process_time()
            if way == "whole":
                found = generate_ids(model, prompts[own], **settings)
            else:
                found = generate_ids(model, prompts, **settings, hold=way != "streamed")[own]
            seconds = time.perf_counter() - start, time.process_time() - used
        assert all(len(each) == asked["tokens"] for each in found)
        answers.setdefault(way, found)
        assert answers[way] == found
        passed, of_cpu = zip(*units.comm.all(seconds))
        return max(passed), max(of_cpu)

    answers: dict[str, list[list[int]]] = {}
    for way in WAYS:  # not counted: pages, caches, compiled kernels
        answer(way)
    assert dtype != torch.float32 or all(found == answers["whole"] for found in answers.values())
    rounds = [{way: answer(way) for way in WAYS} for _ in range(asked["rounds"])]
    return {way: [each[way] for each in rounds] for way in WAYS}


def main() -> None:
    """Measure and report."""
    asked = vars(parse())
    start, busy, own = time.perf_counter(), busy_s(), sum(os.times()[:4])
    seconds = launch.start("benchmarks.generation:rank", (asked,), asked["ranks"], environ=os.environ)
    others = busy_s() - busy - (sum(os.times()[:4]) - own)
    others = max(others, 0.0) / ((time.perf_counter() - start) * (os.cpu_count() or 1))
    tokens = asked["prompts"] * asked["tokens"]
    table = Table("weights", "tokens/s a rank", "time / whole's", "lowest and highest", "CPU time / whole's")
    result = {}
    for way in WAYS:
        ratios, of_cpu = ([m[i] / b[i] for m, b in zip(seconds[way], seconds["whole"])] for i in (0, 1))
        result[way] = {
            "tokens_per_second": tokens / statistics.median(passed for passed, _ in seconds[way]),
            "ratio": statistics.median(ratios),
            "cpu_ratio": statistics.median(of_cpu),
        }
        speed, ratio, cpu_ratio = result[way].values()
        table.add_row(way, f"{speed:.1f}", f"{ratio:.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}", f"{cpu_ratio:.2f}")
    console = Console()
    console.print(f"{asked['model']}, {asked['dtype']}, {asked['ranks']} ranks of {asked['threads']} threads, medians of "
                  f"{asked['rounds']} rounds; others had {100 * others:.0f} % of the CPU time")  # fmt: skip
    console.print(table)
    folder = ROOT / "runs" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"generation-{datetime.datetime.now():%Y%m%d-%H%M%S}.json"
    written = {"asked": asked, "seconds": seconds, "result": result, "others": others}
    (folder / name).write_text(json.dumps(written, indent=1))
    if result["gathered"]["ratio"] > LIMIT:
        ratio = result["gathered"]["ratio"]
        raise SystemExit(f"gathered weights take {ratio:.2f} times the whole model's time; {LIMIT} is allowed")


if __name__ == "__main__":
    main()
