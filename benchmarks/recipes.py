"""`make recipes`: write the packaged recipes with their planned memory and speed, and the index for `ftkit recipes list`.

Each model is fine-tuned on instructions, with all parameters and with LoRA. Settings are the defaults of `ftkit init`.
Variants: larger GPUs, one GPU, 8-bit optimizer state, text of a domain (which extends the first), long sequences, and GPTs
from a configuration. A recipe that does not fit its hardware is not written. A test plans every recipe again and compares.
All figures are simulated from published rates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import GPT2Config

from ftkit.config.recipe import parse
from ftkit.plan.catalog import architectures, find_hardware
from ftkit.plan.memory import GIB
from ftkit.plan.refuse import DoesNotFit
from ftkit.train.planning import plan_recipe
from ftkit.train.starter import RANK_TOKENS, defaults, find_config

FOLDER = Path(__file__).parents[1] / "recipes"
INDEX = FOLDER / "index.json"
TINY = {
    "name": "tiny-cpu", "model": "bundled/tiny-base", "method": "all parameters", "hardware": "CPU, 2 ranks",
    "device_gib": None, "host_gib": None, "tokens_per_s": None,
}  # fmt: skip
HARDWARE, LARGER, SINGLE = "8xv100-16gb", "8xv100-32gb", "1xv100-32gb"
TEXT = """ranks: {ranks}
hardware: {hardware}
model:     {model}{task}
data:      {{path: bundled/python-docs.jsonl, sequence_tokens: {tokens}, packing: {packing}{loss}}}  # a sample: name yours
train:     {{batch_tokens: {batch}, epochs: 1, seed: 17}}{batch_why}
optimizer: {{{rule}lr: {lr}, weight_decay: {decay}, {warmup}, schedule: cosine, max_grad_norm: 1.0}}
{adapter}output:    {{dir: runs/{name}, save_every_steps: 100, keep: 2}}
"""
EXTENDING = """extends: {base}
data:      {{loss_on: all}}
eval:      {{share: 0.02, every_steps: 100, patience: 3}}  # ends after 3 evaluations without a better one
optimizer: {{warmup_steps: null, warmup_ratio: 0.03, min_lr: 1.0e-6}}
output:    {{dir: runs/{name}}}
"""
ADAPTER = "adapter:   {rank: 16, alpha: 32, targets: all-linear}\n"
METHODS = {  # the method as the index names it, whether it is LoRA, and settings beside the defaults
    "full": ("all parameters", False, {}),
    "full-8bit": ("all parameters, 8-bit state", False, {}),
    "lora": ("LoRA", True, {}),
    "domain": ("all parameters, text of a domain", False, {}),
    "long": ("LoRA, long sequences", True, {"warmup": "warmup_ratio: 0.03"}),
    "scratch": ("from scratch", False, {"loss": ", loss_on: all", "lr": "1.5e-4"}),
}
SHOWN = {HARDWARE: "8xV100-16GB", LARGER: "8xV100-32GB", SINGLE: "one V100-32GB"}
EIGHT_BIT: dict[str, dict[str, Any]] = {
    "bigcode/starcoder2-15b": {"rule": "name: adamw_8bit, "},
    "EleutherAI/gpt-neox-20b": {"rule": "name: adamw_8bit, "},
    "mistralai/Mistral-Small-24B-Base-2501": {"rule": "name: adamw_8bit, "},
    "Qwen/Qwen3-32B": {
        "rule": "name: adamw_8bit, master: split, ",
        "batch": 32768,
        "batch_why": "  # one micro-batch a step: gradients need no fp32 sums",
    },
}
"""Models with a recipe for 8-bit state, and its settings beside the defaults."""
ONLY_8_BIT = ("mistralai/Mistral-Small-24B-Base-2501", "Qwen/Qwen3-32B")
"""Models whose fp32 state does not fit 8xV100-16GB."""
DOMAIN = ("meta-llama/Llama-2-13b-hf", "Qwen/Qwen2.5-14B")
LONG = {
    "codellama/CodeLlama-13b-hf": 16384,
    "meta-llama/Llama-2-13b-hf": 4096,
    "Qwen/Qwen2.5-14B": 16384,
    "mistralai/Mistral-Nemo-Base-2407": 16384,
}
GPTS = {"gpt-10b": 50, "gpt-15b": 78}
GPT = """
  config:
    {{model_type: gpt2, n_layer: {layers}, n_embd: 4096, n_head: 32, n_positions: 1024, vocab_size: 50304,
     activation_function: gelu_pytorch_tanh}}  # GPT-2's function in one operation: it keeps one tensor, not five
  tokenizer: openai-community/gpt2"""


@dataclass(frozen=True)
class Entry:
    """A recipe to be written: model (a hub name, or one of GPTS), method, hardware, unusual sequence length."""

    model: str
    method: str
    hardware: str = HARDWARE
    tokens: int | None = None

    @property
    def name(self) -> str:
        """Name of the recipe: model without owner and common suffixes, method, hardware."""
        short = self.model.rpartition("/")[2].lower()
        short = re.sub(r"(-base-\d+|-\d{4}|-hf|-base|-pt|-v1\.0|-1124)(?=-|$)", "", short)
        return f"{short}-{'full' if self.method == 'scratch' else self.method}-{self.hardware}"

    @property
    def body(self) -> str:
        """The recipe without its first line."""
        if self.method == "domain":
            return EXTENDING.format(name=self.name, base=Entry(self.model, "full", self.hardware).name)
        _, lora, more = METHODS[self.method]
        gpt = GPT.format(layers=GPTS[self.model]) if self.model in GPTS else None
        config, ranks = GPT2Config() if gpt else find_config(self.model), find_hardware(self.hardware).gpus
        chosen = {"model": gpt or f"{{name: {self.model}}}", "loss": "", "warmup": "warmup_steps: 30"}
        chosen |= {"rule": "", "batch": RANK_TOKENS * ranks, "batch_why": "", **defaults(config, lora=lora), **more}
        chosen |= EIGHT_BIT[self.model] if self.method == "full-8bit" else {}
        chosen["task"] = "\ntask:      seq2seq" if config.is_encoder_decoder else ""
        chosen["adapter"] = ADAPTER if lora else ""
        if self.tokens is not None:
            chosen["tokens"] = self.tokens
        return TEXT.format(name=self.name, hardware=self.hardware, ranks=ranks, **chosen)

    @cached_property
    def row(self) -> dict[str, Any]:
        """Its row of the index, with the plan for its hardware.

        Raises:
            DoesNotFit: It does not fit.
        """
        known = find_hardware(self.hardware)
        plan = plan_recipe(parse(self.body, "recipe.yaml"), known.gpus, known)
        assert plan.speed is not None
        device, host = (plan.needed_bytes(tier) / GIB for tier in ("device", "host"))
        return {
            "name": self.name,
            "model": self.model,
            "method": METHODS[self.method][0],
            "hardware": self.hardware,
            "device_gib": round(device, 1),
            "host_gib": round(host),
            "tokens_per_s": round(plan.speed.tokens_per_s),
        }

    @property
    def header(self) -> str:
        """The first line of the recipe: model, method, hardware and plan. Raises the errors of `row`."""
        row, short = self.row, self.model.rpartition("/")[2]
        return (
            f"# {short}, {row['method']}, on {SHOWN[self.hardware]}: {row['device_gib']:.1f} GiB a GPU, "
            f"{row['host_gib']} GiB host, {row['tokens_per_s']:,} tokens/s. Planned, not yet measured."
        )

    @property
    def text(self) -> str:
        """The whole recipe."""
        return f"{self.header}\n{self.body}"


def entries() -> Iterator[Entry]:
    """Yield all recipes that are tried."""
    for model in architectures():
        yield from (Entry(model, method) for method in ("full", "lora") if method == "lora" or model not in ONLY_8_BIT)
        yield Entry(model, "full", LARGER)
        yield Entry(model, "lora", SINGLE)
    yield from (Entry(model, "full-8bit") for model in EIGHT_BIT)
    yield from (Entry(model, "domain") for model in DOMAIN)
    yield from (Entry(model, "long", tokens=tokens) for model, tokens in LONG.items())
    yield from (Entry(model, "scratch", profile) for model in GPTS for profile in (HARDWARE, LARGER))


def index_text(rows: Iterable[dict[str, Any]]) -> str:
    """Return the text of the index: one recipe per line, sorted by name."""
    lines = (json.dumps(row, ensure_ascii=False) for row in sorted(rows, key=lambda row: row["name"]))
    return "[\n" + ",\n".join(lines) + "\n]\n"


def main() -> None:
    """Write all recipes that fit, and their index."""
    rows = [TINY]
    for entry in entries():
        path = FOLDER / f"{entry.name}.yaml"
        try:
            path.write_text(entry.text, encoding="utf-8")
            rows.append(entry.row)
            print(path.name)
        except DoesNotFit as error:
            path.unlink(missing_ok=True)
            print(f"{path.name} is not written: {error}")
    INDEX.write_text(index_text(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
