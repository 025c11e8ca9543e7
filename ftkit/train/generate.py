"""`ftkit generate` and `ftkit eval`: a base model, a fine-tuned folder or an adapter folder on one rank or several.

One rank loads the whole model on one device. Several ranks shard it. The base of an adapter folder is loaded from where the
folder says. No code that comes with a model is run.

Cost: the model in memory, in its stored dtype. This is for checking a model, not for serving it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist
from peft import PeftConfig, PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging

from ftkit.config.values import expand, looks_like_a_path
from ftkit.config.wording import counted
from ftkit.data.batches import Collator
from ftkit.data.prepare import prepare
from ftkit.engine.checkpoint.sealed import CONTENTS
from ftkit.engine.comm.communicator import GROUP_TIMEOUT
from ftkit.errors import UserError
from ftkit.hf.adapters import base_of
from ftkit.hf.generate.evaluation import Evaluation, evaluate
from ftkit.hf.generate.generation import generate
from ftkit.hf.load.config import reading
from ftkit.hf.load.model import load_adapter, load_model
from ftkit.hf.sharding import shard
from ftkit.launch.ranks import Stop
from ftkit.train.build import positions_of
from ftkit.train.starter import data_section

NEEDED = "needed: a model folder with config.json and safetensors, an adapter folder, or a hub id"
ADAPTER = "adapter_config.json"
EVALUATED_TOKENS = 4096
"""Tokens of one forward of an evaluation."""


def answers(stop: Stop, ranks: int, folder: str, prompts: Sequence[str], settings: dict[str, Any]) -> list[str]:
    """Return the answers to all prompts, as one of the ranks.

    Args:
        stop: The rank.
        ranks: Number of ranks. Several shard the model.
        folder: A model folder, an adapter folder, or a hub id.
        prompts: Questions, each a user's turn if the tokenizer has a chat template, otherwise plain text.
        settings: Keyword arguments of `ftkit.hf.generate.generation.generate`.
    """
    model, tokenizer = load(folder, ranks, stop.rank)
    return generate(model, tokenizer, prompts, **settings)


def evaluation(stop: Stop, ranks: int, folder: str, data: str, sequence_tokens: int) -> Evaluation:
    """Return loss and perplexity of a model on rows, as one of the ranks.

    Args:
        stop: The rank.
        ranks: Number of ranks. Several shard the model.
        folder: A model folder, an adapter folder, or a hub id.
        data: File, folder of files, or hub data set.
        sequence_tokens: Tokens of the longest sequence; at most the positions of the model are used.
    """
    model, tokenizer = load(folder, ranks, stop.rank)
    base = base_of(model)
    positions = positions_of(base)
    sequence_tokens = min(sequence_tokens, positions) if positions else sequence_tokens
    task = "seq2seq" if base.config.is_encoder_decoder else "causal-lm"
    rows = prepare(data_section(data, sequence_tokens), tokenizer, task=task)
    if stop.rank == 0 and rows.report.bad_rows:
        print(f"{counted(rows.report.bad_rows, 'row')} skipped: {rows.report.bad_examples[0]}", file=sys.stderr)
    batch_size = max(EVALUATED_TOKENS // sequence_tokens, 1)
    return evaluate(model, rows.train, collate=Collator.of(tokenizer), batch_size=batch_size)


def load(folder: str, ranks: int = 1, rank: int = 0) -> tuple[Any, Any]:
    """Load a model, adapter included, and its tokenizer. Several ranks call this together and shard the model."""
    folder = _checked(folder)
    if rank or not sys.stderr.isatty():
        logging.disable_progress_bar()  # each tick would be a line of a log file
        datasets.disable_progress_bars()
    with reading(folder, "cannot be loaded", NEEDED):
        adapter = PeftConfig.from_pretrained(folder) if Path(folder, ADAPTER).is_file() else None
        if adapter is not None and adapter.is_prompt_learning:
            raise UserError(f"{folder}: prompt tuning is not supported here; needed: a LoRA adapter or a model folder")
        base = folder if adapter is None else str(adapter.base_model_name_or_path)
        # Without `trust_remote_code`, transformers asks on stdin whether to run code from the folder.
        seq2seq = AutoConfig.from_pretrained(base, trust_remote_code=False).is_encoder_decoder
        has_tokenizer = adapter is None or Path(folder, "tokenizer_config.json").exists()
        tokenizer = AutoTokenizer.from_pretrained(folder if has_tokenizer else base, trust_remote_code=False)
        if ranks > 1:
            return _sharded(folder, base, adapter, "seq2seq" if seq2seq else "causal-lm", rank), tokenizer
        kind: Any = AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM
        model: Any = kind.from_pretrained(base, dtype="auto", use_safetensors=True, trust_remote_code=False)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, folder)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def _sharded(folder: str, base: str, adapter: PeftConfig | None, task: str, rank: int) -> Any:
    """Load a model as one of several ranks."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    if not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo", timeout=GROUP_TIMEOUT)
    if adapter is not None:
        adapter.inference_mode = False  # `load_adapter` reads trainable parameters
    model = load_model(base, task=task, adapter=adapter)
    if adapter is None:
        model.requires_grad_(False)  # no gradients to shard
    no_bf16 = cuda and torch.cuda.get_device_capability()[0] < 8 and base_of(model).dtype == torch.bfloat16
    strategy = {"stage": 3, "activations": "recompute", "reshard_after_forward": True, "affinity": False}
    units = shard(model, {**strategy, "dtype": "fp16" if no_bf16 else "auto"}, evaluation=True)
    if adapter is not None:
        load_adapter(units, folder)
    return model


def _checked(folder: str) -> str:
    """Return a folder or hub id with `~` expanded; raise UserError for a run, a checkpoint or a missing folder."""
    path = Path(expand(folder))
    if not path.exists() and looks_like_a_path(folder):
        raise UserError(f"no such folder: {folder}; {NEEDED}")
    if (path / CONTENTS).is_file() and not any(path.glob("*.safetensors")):
        raise UserError(f"{folder}: is a checkpoint, not a model; convert it with: ftkit export {folder} -o FOLDER")
    model = path / "model"
    if model.is_dir() and not (path / "config.json").exists() and not (path / ADAPTER).exists():
        raise UserError(f"{folder}: is the folder of a run, not of a model; did you mean {model}?")
    return str(path)
