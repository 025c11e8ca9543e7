"""Answers to prompts: from a base model, a fine-tuned folder or an adapter folder.

A tokenizer with a chat template gets the prompt as a user's turn, another one as plain text: the tokens are those that
stood before an answer in training (`ftkit.hf.generate.generation`). An adapter folder names its base model, which is
loaded beneath it. One process loads the model whole on one device; several ranks shard it, and no rank loads more than
its share.

It refuses code that comes with a model, folders that are no model, and adapters on several ranks. What it costs: the model
in memory, in the dtype it is stored in; this is for a look at the answers, not for serving.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
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


def answers(folder: str, prompts: Sequence[str], **settings: Any) -> Iterator[tuple[str, str]]:
    """Yield each prompt with the model's answer, once all are there: batches are those that several ranks share, too.

    Args:
        folder: A model folder, an adapter folder, or a hub id.
        prompts: Questions, each a user's turn.
        settings: Keyword arguments of `ftkit.hf.generate.generation.generate`.

    Raises:
        UserError: The folder is no model, or its tokenizer refuses the prompt.
    """
    model, tokenizer = load(folder)
    yield from zip(prompts, generate(model, tokenizer, prompts, **settings))


def sharded_answers(stop: Stop, folder: str, prompts: Sequence[str], settings: dict[str, Any]) -> list[str]:
    """Answer prompts as one of several ranks, which share the model; return all answers.

    Args:
        stop: Says which rank this is.
        folder: A model folder or a hub id.
        prompts: Questions, each a user's turn.
        settings: Keyword arguments of `ftkit.hf.generate.generation.generate`.

    Raises:
        UserError: See `answers`; or the folder is an adapter.
    """
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(stop.rank % torch.cuda.device_count())
    dist.init_process_group("nccl" if cuda else "gloo", timeout=GROUP_TIMEOUT)
    folder = os.path.expanduser(folder)
    _check_folder(folder)
    if _adapter(folder):
        raise UserError(
            f"{folder}: is an adapter, and several ranks load whole models only: add it to its base first "
            "(ftkit export CHECKPOINT OUT --merge-adapter), or leave --nproc out"
        )
    config = read_config(folder, None)
    model = load_model(folder, task="seq2seq" if config.is_encoder_decoder else "causal-lm")
    with reading(folder, "cannot be loaded", advice=NEEDED):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model.requires_grad_(False)  # then there is neither gradient nor state to shard
    old = cuda and torch.cuda.get_device_capability()[0] < 8 and model.dtype == torch.bfloat16
    shard(
        model,
        {
            "stage": 3,
            "activations": "recompute",
            "reshard_after_forward": True,
            "dtype": "fp16" if old else "auto",
            "affinity": False,
        },
    )
    return generate(model, tokenizer, prompts, **settings)


def load(folder: str) -> tuple[Any, Any]:
    """Load a model, adapter included, and its tokenizer.

    Raises:
        UserError: There is no model of that name, or it cannot be read.
    """
    folder = os.path.expanduser(folder)
    _check_folder(folder)
    adapter = _adapter(folder)
    base = adapter["base_model_name_or_path"] if adapter else folder
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # a bar in a log file is a line a tick
    device = "cuda" if torch.cuda.is_available() else "cpu"
    told = f"{base} (the base model of {folder})" if adapter else base
    with reading(told, "cannot be loaded", NEEDED):
        # Said, not left out: where it is left out, transformers asks on stdin whether to run the folder's code.
        config = AutoConfig.from_pretrained(base, trust_remote_code=False)
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model: Any = kind.from_pretrained(base, dtype="auto", use_safetensors=True, trust_remote_code=False)
    with reading(folder if adapter else base, "cannot be loaded", advice=NEEDED):
        if adapter:
            model = PeftModel.from_pretrained(model, folder)
        named = folder if _has_tokenizer(folder) else base
        tokenizer = AutoTokenizer.from_pretrained(named, trust_remote_code=False)
    return model.to(device).eval(), tokenizer


def _check_folder(folder: str) -> None:
    """Refuse a folder that is missing or holds a run in place of a model, before the hub is asked for its name."""
    path = Path(folder)
    names = ("config.json", "adapter_config.json")
    if not path.exists() and looks_like_a_path(folder):
        raise UserError(f"no such folder: {folder}; needed: a model folder, an adapter folder, or a hub id")
    if (path / CONTENTS).is_file() and not any(path.glob("*.safetensors")):
        raise UserError(f"{folder}: is a checkpoint, not a model; ftkit export {folder} OUT makes one of it")
    if not any((path / name).exists() for name in names) and any((path / "model" / name).exists() for name in names):
        raise UserError(f"{folder}: holds a run, not a model; did you mean {path / 'model'}?")


def _adapter(folder: str) -> dict[str, Any] | None:
    path = Path(folder) / "adapter_config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if config["base_model_name_or_path"]:
            return config
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not an adapter's configuration ({error})") from error
    raise UserError(f"{path}: base_model_name_or_path is empty; write the folder or hub id of the base model there")


def _has_tokenizer(folder: str) -> bool:
    names = ("tokenizer.json", "tokenizer_config.json")
    return not Path(folder).is_dir() or any((Path(folder) / name).exists() for name in names)
