"""`make ablation`: how large a model fits 8xV100-16GB with each technique forced off, beside a published study of that node.

The study (a talk on fine-tuning within one node of eight 16 GB V100s and 330 GB of host memory, PyTorch 1.9) prints sizes
without batches or sequences: 15B at the limit, twenty times plain data parallelism; 5B with all techniques at common
settings, 2.9B without accumulation, 0.9B without offload. Two of them are worked out here from a layout of bytes a
parameter that is declared below. The rest stands beside ours, with our batch and sequence stated; nothing is fitted to it.

Ours are plans of the same GPT (blocks of hidden size 4096, 1024 tokens a sequence, 128K tokens a step) with as many blocks
as fit. Written to docs/ablation.md, which a test makes anew and compares. It needs no GPU; it takes a minute or two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ftkit.config.recipe import parse
from ftkit.plan.catalog import find_hardware
from ftkit.plan.memory import DEVICE_RUNTIME, GIB
from ftkit.plan.plan import Asked, Plan
from ftkit.plan.refuse import DoesNotFit
from ftkit.plan.whatif import largest
from ftkit.spec.strategy import Strategy
from ftkit.train.planning import ask

PATH = Path(__file__).parents[1] / "docs" / "ablation.md"
HARDWARE = "8xv100-16gb"
GPT = """
model: {{config: {{model_type: gpt2, n_layer: {blocks}, n_embd: 4096, n_head: 32, n_positions: 1024, vocab_size: 50304}},
  tokenizer: bundled/tiny-base}}
data: {{path: bundled/python-docs.jsonl, sequence_tokens: 1024}}
train: {{batch_tokens: 131072, dtype: {dtype}}}
output: {{dir: runs/ablation}}
"""

LLAMA = parse(
    """
model: {name: meta-llama/Llama-2-13b-hf}
data: {path: bundled/python-docs.jsonl, sequence_tokens: 1024}
train: {batch_tokens: 16384}
memory: {host_gib: 300}
output: {dir: runs/ablation}
""",
    "ablation.yaml",
)

HOST_BYTES = 300e9
"""Of the study's 330 GB, what it counts with ("300GB of memory")."""
STUDY_BYTES = 20
"""Of host memory a parameter in the study's own count ("about 20B")."""
REPLICA_BYTES = 20
"""Of a GPU a parameter under plain data parallelism in fp32: weight 4, gradient 4, Adam's moments 8, and 4 in the reducer's
buckets, which copy gradients unless they are asked not to (torch 1.9, `gradient_as_bucket_view=False`)."""
ACTIVATIONS_BYTES = 1.2e9
"""Of one sequence of 1024 tokens in fp32 through a GPT of 0.75B without recomputation, the least batch: 24 blocks of hidden
size 1536 at 34 h bytes a token in 16 bits, twice that in 32 (arXiv:2205.05198, 4.1), without their scores."""


def asked(dtype: str = "fp16", blocks: int = 78) -> Asked:
    """Return what the plan of a GPT with so many blocks is made of; as if its weights were read, not initialised."""
    made = ask(parse(GPT.format(dtype=dtype, blocks=blocks), "ablation.yaml"), 8, find_hardware(HARDWARE))
    return replace(made, shape=replace(made.shape, fresh=False))


def ours() -> Iterator[tuple[str, Asked]]:
    """Yield each technique that is forced off: its name, and what is planned without it."""
    whole = asked()
    on_device = Strategy(parameters="device", gradients="device", state="device", activation_offload="device")
    yield "all techniques", whole
    yield "one micro-batch a step (all 16 sequences of a rank at once)", replace(
        whole, wanted=Strategy(micro_batch=whole.sequences)
    )
    yield "nothing off the GPUs", replace(whole, wanted=on_device)
    yield "no recomputation", replace(whole, wanted=Strategy(activations="keep"))
    yield "no 16-bit arithmetic (fp32)", asked("fp32")
    yield "nothing divided (ZeRO stage 0)", replace(whole, wanted=Strategy(stage=0))
    yield "none of them (fp32, stage 0, kept, on the GPUs, one micro-batch of one sequence)", replace(
        asked("fp32"), wanted=replace(on_device, stage=0, activations="keep", micro_batch=1), sequences=1
    )


def row(name: str, plan: Plan) -> str:
    """Return a line of the table."""
    device, host = (plan.needed_bytes(tier) / GIB for tier in ("device", "host"))
    speed = "" if plan.speed is None else f"{plan.speed.tokens_per_s:,.0f}"
    return f"| {name} | {plan.shape.numel / 1e9:.1f}B | {device:.1f} | {host:.0f} | {speed} | {plan.strategy} |"


def elsewhere() -> Iterator[str]:
    """Yield lines of two plans on other nodes: the study's largest model on its cluster, and 13B on a single GPU."""
    larger = GPT.format(dtype="fp16", blocks=480).replace("131072", "393216")
    cluster = ask(parse(larger, "ablation.yaml"), 64, find_hardware("64xv100"))
    plan = replace(cluster, shape=replace(cluster.shape, fresh=False)).plan()
    yield row("480 x 4096 on 64 V100-32GB in 8 nodes, 6 sequences a GPU and step", plan)
    alone = ask(LLAMA, 1, find_hardware("1xv100-32gb")).plan()
    yield row("Llama-2-13B on one V100-32GB, alone in a host of 300 GiB, 16 x 1024 tokens a step", alone)


def limit() -> float:
    """Return the parameters at which the study's layout fills its host memory."""
    return HOST_BYTES / STUDY_BYTES


def data_parallel() -> float:
    """Return the parameters of which every GPU holds all in plain data parallelism."""
    return (find_hardware(HARDWARE).device_gib * GIB - DEVICE_RUNTIME - ACTIVATIONS_BYTES) / REPLICA_BYTES


def text() -> str:
    """Return the page."""
    rows = []
    for name, each in ours():
        try:
            rows.append(row(name, largest(each)))
        except DoesNotFit:
            rows.append(f"| {name} | none | | | | not one block fits |")
    fifteen = asked().plan()
    return PAGE.format(
        limit=limit() / 1e9,
        limit_error=limit() / 15e9 - 1,
        base=data_parallel() / 1e9,
        base_error=data_parallel() / (15e9 / 20) - 1,
        rows="\n".join(rows),
        fifteen=row("15B, all techniques", fifteen),
        elsewhere="\n".join(elsewhere()),
    )


PAGE = """# How large a model fits 8xV100-16GB, technique by technique

<!-- written by `make ablation`; a test compares -->

Planned, not measured. A published study of the same node (eight 16 GB V100s, 330 GB of host memory)
prints the sizes in the first table, without batch or sequence.

| the study | printed | from a declared layout | off |
|---|---|---|---|
| limit of the node | 15B | {limit:.1f}B: 20 bytes of host memory a parameter, 300 of 330 GB | {limit_error:+.0%} |
| plain data parallelism, a twentieth of that | 0.75B | {base:.2f}B: 20 bytes of a GPU a parameter (fp32 weight, \
gradient, two moments, the reducer's copy), one sequence of activations | {base_error:+.0%} |
| all of its techniques, common settings | 5B | not said how | |
| without accumulation | 2.9B | not said how | |
| without offload | 0.9B | not said how | |

Ours for the same node: the largest GPT of blocks of hidden size 4096, 1024 tokens a sequence, 128K tokens a step, all
parameters trained with fp32 state. `ftkit plan RECIPE --hardware 8xv100-16gb --largest` does the same for any recipe.

| ours | largest | GiB a GPU | GiB host | tokens/s | way |
|---|---|---|---|---|---|
{rows}
{fifteen}

tokens/s are simulated from published rates (docs/published.md says how far such figures can be trusted); none for fp32, of
which no published rates of whole blocks on V100s are at hand. Speed was not looked for in the sizes: the largest model is
nearly always slow for its size.

| on other nodes, full-parameter | size | GiB a GPU | GiB host | tokens/s | way |
|---|---|---|---|---|---|
{elsewhere}

(`ftkit plan` with `--hardware 64xv100 --nproc 64`, or `--hardware 1xv100-32gb --set memory.host_gib=300`: an eighth of the
node, which that profile has otherwise, holds 13B's adapters, and not its 12 bytes of state a parameter.)

What stays on a GPU within a step and what comes and goes, the step's timeline and each tier are drawn by
`ftkit plan RECIPE --hardware 8xv100-16gb -o FILE.html`.
"""


def main() -> None:
    """Write it."""
    PATH.write_text(text(), encoding="utf-8")
    print(PATH.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
