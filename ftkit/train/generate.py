"""`ftkit generate`: answers of a base model, a fine-tuned folder or an adapter folder.

With a chat template a prompt is a user's turn, otherwise plain text. The base model of an adapter folder is loaded from
where the folder says. One process loads the whole model on one device; several ranks shard it. No code that comes with a
model is run.

Cost: the model in memory, in the dtype it is stored in. This is for a look at answers, not for serving.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftConfig, PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging

from ftkit.config.values import looks_like_a_path
from ftkit.engine.checkpoint.sealed import CONTENTS
from ftkit.engine.comm.communicator import GROUP_TIMEOUT
from ftkit.errors import UserError
from ftkit.hf.generate.generation import generate
from ftkit.hf.load.config import read_config, reading
from ftkit.hf.load.model import load_model
from ftkit.hf.sharding import shard
from ftkit.launch.ranks import Stop

NEEDED = "needed: a model folder with config.json and safetensors, an adapter folder, or a hub id"
ADAPTER = "adapter_config.json"


def answers(folder: str, prompts: Sequence[str], **settings: Any) -> Iterator[tuple[str, str]]:
    """Yield each prompt with the model's answer, once all answers are there.

    Args:
        folder: A model folder, an adapter folder, or a hub id.
        prompts: Questions, each a user's turn.
        settings: Keyword arguments of `ftkit.hf.generate.generation.generate`.
    """
    model, tokenizer = load(folder)
    yield from zip(prompts, generate(model, tokenizer, prompts, **settings))


def sharded_answers(stop: Stop, folder: str, prompts: Sequence[str], settings: dict[str, Any]) -> list[str]:
    """Return the answers to all prompts, as one of several ranks that share the model. They load no adapter folders."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(stop.rank % torch.cuda.device_count())
    dist.init_process_group("nccl" if cuda else "gloo", timeout=GROUP_TIMEOUT)
    folder = _checked(folder)
    model = load_model(folder, task="seq2seq" if read_config(folder, None).is_encoder_decoder else "causal-lm")
    with reading(folder, "cannot be loaded", advice=NEEDED):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model.requires_grad_(False)  # no gradients and no optimizer state to shard
    no_bf16 = cuda and torch.cuda.get_device_capability()[0] < 8 and model.dtype == torch.bfloat16
    strategy = {"stage": 3, "activations": "recompute", "reshard_after_forward": True, "affinity": False}
    shard(model, {**strategy, "dtype": "fp16" if no_bf16 else "auto"})
    return generate(model, tokenizer, prompts, **settings)


def load(folder: str) -> tuple[Any, Any]:
    """Load a model, adapter included, and its tokenizer."""
    folder = _checked(folder)
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # in a log file each tick is a line
    is_adapter = Path(folder, ADAPTER).is_file()
    with reading(folder, "cannot be loaded", NEEDED):
        base = PeftConfig.from_pretrained(folder).base_model_name_or_path if is_adapter else folder
        # Without `trust_remote_code`, transformers asks on stdin whether to run code from the folder.
        config = AutoConfig.from_pretrained(base, trust_remote_code=False)
        kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model: Any = kind.from_pretrained(base, dtype="auto", use_safetensors=True, trust_remote_code=False)
        if is_adapter:
            model = PeftModel.from_pretrained(model, folder)
        has_tokenizer = not is_adapter or Path(folder, "tokenizer_config.json").exists()
        tokenizer = AutoTokenizer.from_pretrained(folder if has_tokenizer else base, trust_remote_code=False)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def _checked(folder: str) -> str:
    """Return a folder or hub id with `~` expanded; raise UserError for a run, a checkpoint or a missing folder."""
    path = Path(folder).expanduser()
    if not path.exists() and looks_like_a_path(folder):
        raise UserError(f"no such folder: {folder}; {NEEDED}")
    if (path / CONTENTS).is_file() and not any(path.glob("*.safetensors")):
        raise UserError(f"{folder}: is a checkpoint, not a model; ftkit export {folder} OUT makes one of it")
    model = path / "model"
    if model.is_dir() and not (path / "config.json").exists() and not (path / ADAPTER).exists():
        raise UserError(f"{folder}: is the folder of a run, not a model; did you mean {model}?")
    return str(path)
