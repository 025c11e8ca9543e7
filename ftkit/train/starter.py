"""A recipe for a model and a data set, with the defaults of the packaged recipes.

`ftkit plan MODEL` plans it, `ftkit init` writes it: full fine-tuning if that fits, else LoRA.
"""

from __future__ import annotations

import difflib
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ftkit.config.recipe import Data, Recipe, parse
from ftkit.config.recipe_files import packaged
from ftkit.config.values import expand, looks_like_a_path
from ftkit.config.wording import counted
from ftkit.data.sources import SUFFIXES
from ftkit.errors import UserError
from ftkit.hf.load.config import read_config
from ftkit.plan.catalog import Hardware, architectures
from ftkit.plan.memory import GIB
from ftkit.plan.plan import Plan
from ftkit.plan.refuse import DoesNotFit
from ftkit.train.planning import plan_recipe

SEQUENCE_TOKENS, SEQ2SEQ_TOKENS = 2048, 512
RANK_TOKENS = 16384
"""Tokens of one GPU in one optimizer step."""
UNPACKED = ("opt",)
"""Model types that count positions from the attention mask, so that packed samples would not begin at position 0."""
SAMPLE = "bundled/python-docs.jsonl"
ADAPTER = """\
adapter:                  # LoRA
  rank: 16
  alpha: 32
  targets: all-linear
"""
TEXT = """\
{parallel}{task}model:
  name: {model}           # folder or hub id
data:
  {data}
  sequence_tokens: {tokens}   # longer samples are cut, longer texts split
  packing: {packing}         # several samples per sequence
train:
  batch_tokens: {batch}   # tokens of one optimizer step, all ranks together
  epochs: 1
optimizer:
  lr: {lr}
  weight_decay: {decay}
  warmup_steps: 30
  schedule: cosine
  max_grad_norm: 1.0
{adapter}output:
  dir: {dir}
  save_every_steps: 100
  keep: 2                 # checkpoints
"""


def find_config(model: str) -> Any:
    """Return the configuration of a model: of the catalogue, a local folder, or the hub.

    Raises:
        UserError: There is none. The message names the nearest recipes and models.
    """
    known = architectures()
    try:
        if model in known:
            return read_config(None, known[model].config)
        if Path(model).is_dir() or "/" in model:
            return read_config(expand(model), None)
        reason = "it is no file, folder, packaged recipe or model"
    except UserError as error:
        reason = str(error)
    names = {name.rpartition("/")[2].lower(): name for name in known} | {name: name for name in packaged()}
    wanted = model.removesuffix(".yaml").rpartition("/")[2].lower()
    near = [names[each] for each in difflib.get_close_matches(wanted, names, 5, cutoff=0.5)]
    hint = f"Similar: {', '.join(near)}. " if near else ""
    raise UserError(f"{model}: {reason}. {hint}`ftkit recipes list` shows the recipes; a model is OWNER/NAME or a folder")


def defaults(config: Any, *, lora: bool) -> dict[str, Any]:
    """Return the settings of a recipe that depend on the model's configuration and the method."""
    seq2seq = bool(config.is_encoder_decoder)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or SEQUENCE_TOKENS
    return {
        "tokens": min(SEQ2SEQ_TOKENS if seq2seq else SEQUENCE_TOKENS, 1 << (int(positions).bit_length() - 1)),
        "packing": str(not seq2seq and config.model_type not in UNPACKED).lower(),
        "lr": "1.0e-4" if lora else "1.0e-5",
        "decay": "0.0" if lora else "0.1",
    }


def starter_text(model: str, data: str, ranks: int, hardware: str | None = None, *, lora: bool = False) -> str:
    """Return a recipe as text.

    Args:
        model: Folder or hub id.
        data: File, folder of files, or hub data set.
        ranks: Ranks of the run, for the tokens of a step.
        hardware: Name of the hardware profile. None leaves ranks and profile to the machine that runs the recipe.
        lora: Train an adapter instead of all parameters.

    Raises:
        UserError: The model is unknown.
    """
    config = find_config(model)
    [(key, value)] = data_keys(data).items()
    name = f"{Path(model).name.lower()}-{'lora' if lora else 'full'}"
    chosen = defaults(config, lora=lora)
    return TEXT.format(
        parallel="" if hardware is None else f"ranks: {ranks}\nhardware: {_scalar(hardware)}\n",
        task="task: seq2seq\n" if config.is_encoder_decoder else "",
        model=_scalar(model),
        data=f"{key}: {_scalar(value)}",
        batch=max(RANK_TOKENS // chosen["tokens"], 1) * chosen["tokens"] * ranks,
        adapter=ADAPTER if lora else "",
        dir=_scalar(f"runs/{name}"),
        **chosen,
    )


def starter(model: str, ranks: int, hardware: str | None = None, *, lora: bool = False) -> Recipe:
    """Return a recipe for a plan, without the user's data. Arguments and errors are those of `starter_text`."""
    return parse(starter_text(model, SAMPLE, ranks, hardware, lora=lora), model, check_files=False)


@dataclass(frozen=True)
class Started:
    """A recipe that fits."""

    text: str
    plan: Plan
    lora: bool


def fitting_starter(
    model: str, data: str, ranks: int, profile: Hardware | None, hardware: str | None, *, lora: bool
) -> Started:
    """Return a recipe that fits, with its plan as comments: full fine-tuning if that fits, else LoRA.

    Args:
        model: Folder or hub id.
        data: File, folder of files, or hub data set.
        ranks: Ranks of the run.
        profile: Hardware profile to plan for. None plans for this machine.
        hardware: The profile as the user named it.
        lora: Plan LoRA only.

    Raises:
        UserError: The model or the data are unknown.
        DoesNotFit: Neither fits.
    """
    for adapter in (True,) if lora else (False, True):
        text = starter_text(model, data, ranks, hardware, lora=adapter)
        try:
            plan = plan_recipe(parse(text, "recipe"), ranks, profile)
        except DoesNotFit:
            if adapter:
                raise
            continue
        return Started(_comments(model, plan, hardware, lora=adapter) + text, plan, adapter)
    raise AssertionError


def _comments(model: str, plan: Plan, hardware: str | None, *, lora: bool) -> str:
    ranks = plan.shape.world_size
    lines = [
        f"{model}, {'LoRA' if lora else 'all parameters'}, on {hardware or 'this machine'}, {counted(ranks, 'rank')}.",
        "Planned, not measured:",
        f"  strategy: {plan.strategy}",
    ]
    for tier in plan.tiers:
        granted = plan.limits.granted(tier)
        of = "" if granted is None else f" of {granted / GIB:.1f}"
        lines.append(f"  {tier}: {plan.needed_bytes(tier) / GIB:.1f}{of} GiB per {'GPU' if tier == 'device' else 'node'}")
    if plan.speed is not None:
        lines.append(f"  speed: {plan.speed.tokens_per_s:,.0f} tokens/s, {plan.speed.seconds:.1f} s per step")
    wrapped = (part for line in lines for part in textwrap.wrap(line, 110, subsequent_indent="    "))
    return "".join(f"# {line}\n" for line in wrapped)


def data_keys(data: str) -> dict[str, str]:
    """Return the keys of a recipe's `data` section that name a data set: `path` or `name`.

    Raises:
        UserError: There is no such file, and it is not the name of a hub data set.
    """
    path = Path(expand(data))
    if path.exists():
        return {"path": data}
    if looks_like_a_path(data) or path.suffix in SUFFIXES or "/" not in data:
        raise UserError(f"{data}: no such file or folder; needed: a file, a folder of files, or a hub data set OWNER/SET")
    return {"name": data}


def data_section(data: str, sequence_tokens: int) -> Data:
    """Return the settings of a data set that is not packed. Rows that cannot be used are left out."""
    return Data.model_validate({**data_keys(data), "sequence_tokens": sequence_tokens, "on_bad_row": "skip"})


def _scalar(text: str) -> str:
    """Return a text as a quoted YAML scalar."""
    quoted = yaml.safe_dump([text], default_flow_style=True, default_style='"', width=1 << 20, allow_unicode=True)
    return quoted.strip()[1:-1]
