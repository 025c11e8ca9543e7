"""Write docs/models.md, the models of the catalogue on nodes of V100s as planned, and the short table in README.md.

`make recipes` runs it, in some minutes. A test plans a few cells again and compares.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.recipes import Entry
from ftkit.plan.catalog import architectures
from ftkit.plan.refuse import DoesNotFit

PAGE, README = Path(__file__).parent / "models.md", Path(__file__).parents[1] / "README.md"
HARDWARE = {"8xv100-16gb": "8 x V100 16 GB", "8xv100-32gb": "8 x V100 32 GB", "1xv100-32gb": "1 x V100 32 GB"}
METHODS = {"full": "All parameters", "lora": "LoRA, rank 16"}
SHORT = (
    "tiiuae/Falcon3-10B-Base", "google/gemma-3-12b-pt", "mistralai/Mistral-Nemo-Base-2407", "meta-llama/Llama-2-13b-hf",
    "Qwen/Qwen3-14B", "microsoft/phi-4", "bigcode/starcoder2-15b",
)  # fmt: skip
MARKS = "<!-- models: written by `make recipes` -->", "<!-- end of models -->"
HEAD = """\
# Models by card

<!-- written by `make recipes` from the packaged catalogue; a test compares -->

**Simulated, not measured.** Each cell is a result of `ftkit plan`: **tokens/s** (GiB of one GPU / GiB of host memory), or
"no" if the plan refuses the run. Sequences have 2,048 tokens (T5: 512), packed where the family allows it; a step has
16,384 tokens per GPU. Training uses fp16 with fp32 master weights and AdamW, without NVMe. Eight GPUs have about 303 GiB of
host memory, one GPU about 34 GiB. With [8-bit state](optimizers.md#8-bit-state-and-split-master) 24B and 32B models
train with all parameters on eight GPUs of 16 GB: `ftkit recipes list` has the recipes. [Plan](plan.md) says how accurate the
figures are. More memory, a drive or other lengths change what fits; for other models use
`ftkit plan MODEL --hardware 8xv100-16gb`.
"""


def cell(model: str, method: str, hardware: str) -> str:
    """Return what the plan says of a model on a node: tokens/s and GiB, or "no" if nothing fits."""
    try:
        row = Entry(model, method, hardware).row
    except DoesNotFit:
        return "no"
    return f"**{row['tokens_per_s']:,}** ({row['device_gib']:.1f} / {row['host_gib']})"


def page() -> str:
    """Return the text of the page: a table for each method. Plans every cell."""
    lines = [HEAD]
    for method, title in METHODS.items():
        lines += [f"## {title}\n", f"| model | {' | '.join(HARDWARE.values())} |", "|---|" + "---|" * len(HARDWARE)]
        for model in architectures():
            lines.append(f"| {model} | {' | '.join(cell(model, method, hardware) for hardware in HARDWARE)} |")
        lines.append("")
    return "\n".join(lines)


def cells(text: str) -> dict[tuple[str, str], list[str]]:
    """Return the cells of the page's text, by model and method, one for each hardware."""
    found = {}
    for method, title in METHODS.items():
        for line in text.partition(f"## {title}\n")[2].partition("\n## ")[0].splitlines():
            model, *rest = line.strip("| ").split(" | ")
            found[model, method] = rest
    return found


def short(text: str) -> str:
    """Return the table of the README, tokens/s of a few models, from the text of the page."""
    names = [f"{method}, {card}" for method in ("all parameters", "LoRA") for card in HARDWARE.values()]
    lines = [f"| model | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    known = cells(text)
    for model in SHORT:
        speeds = [each.partition(" ")[0].strip("*") for method in METHODS for each in known[model, method]]
        lines.append(f"| {model.rpartition('/')[2]} | {' | '.join(speeds)} |")
    return "\n".join(lines)


def readme(text: str) -> str:
    """Return the README with the short table of the page between its marks."""
    before, after = text.partition(MARKS[0])[0], text.partition(MARKS[1])[2]
    return f"{before}{MARKS[0]}\n\n{short(PAGE.read_text(encoding='utf-8'))}\n\n{MARKS[1]}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(readme(README.read_text(encoding="utf-8")), encoding="utf-8")
