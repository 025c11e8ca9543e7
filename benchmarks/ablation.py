"""`make ablation`: the largest GPT that fits 8xV100-16GB with each technique off, as a table in docs/benchmarks.md.

Each row is a plan of the packaged recipe of a GPT, with as many blocks as fit: hidden size 4096, 1024 tokens per sequence,
128K tokens per step. A test compares the page with the planner. Needs no GPU, and a minute or two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.published import PAGE, fill
from ftkit.config.recipe import load
from ftkit.plan.catalog import find_hardware
from ftkit.plan.memory import GIB
from ftkit.plan.plan import Asked
from ftkit.plan.refuse import DoesNotFit
from ftkit.plan.whatif import largest
from ftkit.spec.strategy import Strategy
from ftkit.train.planning import ask

HARDWARE, RECIPE = "8xv100-16gb", "gpt-15b-full-8xv100-16gb"


def asked(dtype: str = "fp16") -> Asked:
    """Return the planner's input for a GPT whose weights are read, not initialised."""
    made = ask(load(RECIPE, [f"train.dtype={dtype}"]), 8, find_hardware(HARDWARE))
    return replace(made, shape=replace(made.shape, fresh=False))


def cases() -> Iterator[tuple[str, Asked]]:
    """Yield the name of each row and the planner's input."""
    whole = asked()
    on_device = Strategy(parameters="device", gradients="device", state="device", activation_offload="device")
    yield "all techniques", whole
    yield "no accumulation: 16 sequences per GPU at once", replace(whole, wanted=Strategy(micro_batch=whole.sequences))
    yield "no offload", replace(whole, wanted=on_device)
    yield "no recomputation", replace(whole, wanted=Strategy(activations="keep"))
    yield "no 16-bit arithmetic (fp32)", asked("fp32")
    yield "no sharding (ZeRO stage 0)", replace(whole, wanted=Strategy(stage=0))
    nothing = replace(on_device, stage=0, activations="keep", micro_batch=1)
    yield "none of them, one sequence per GPU", replace(asked("fp32"), wanted=nothing, sequences=1)


def fragment() -> str:
    """Return the table."""
    rows = ["| technique off | largest | GiB per GPU | GiB host | tokens/s |", "|---|---|---|---|---|"]
    for name, each in cases():
        try:
            plan = largest(each)
        except DoesNotFit:
            rows.append(f"| {name} | none | | | |")
            continue
        device, host = (plan.needed_bytes(tier) / GIB for tier in ("device", "host"))
        speed = "" if plan.speed is None else f"{plan.speed.tokens_per_s:,.0f}"
        rows.append(f"| {name} | {plan.shape.numel / 1e9:.1f}B | {device:.1f} | {host:.0f} | {speed} |")
    return "\n".join(rows)


def main() -> None:
    """Write the table into the page."""
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), "ablation", fragment()), encoding="utf-8")


if __name__ == "__main__":
    main()
