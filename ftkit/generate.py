"""Answers to prompts: from a base model, a fine-tuned folder or an adapter folder, whole on one device.

A tokenizer with a chat template gets the prompt as a user's turn, another one as plain text: the tokens are those that
stood before an answer in training (`ftkit.hf.data.prompt_tokens`). An adapter folder names its base model, which is
loaded beneath it.

It refuses code that comes with a model, and folders that are no model. What it costs: the whole model in memory, in
the dtype it is stored in; this is for a look at the answers, not for serving.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging

from ftkit.errors import UserError
from ftkit.hf.data import prompt_tokens
from ftkit.hf.formats import Conversation
from ftkit.hf.rendering import Rendering
from ftkit.recipe import looks_like_a_path


def answers(
    folder: str, prompts: Sequence[str], *, max_new_tokens: int = 128, temperature: float = 0.0
) -> Iterator[tuple[str, str]]:
    """Yield each prompt with the model's answer.

    Args:
        folder: A model folder, an adapter folder, or a hub id.
        prompts: Questions, one a turn.
        max_new_tokens: Length of an answer.
        temperature: 0 takes the likeliest token each time.

    Raises:
        UserError: The folder is no model, or its tokenizer refuses the prompt.
    """
    model, tokenizer = load(folder)
    for prompt in prompts:
        turns = [{"role": "user", "content": prompt}]
        yield prompt, answer(model, tokenizer, turns, max_new_tokens=max_new_tokens, temperature=temperature)


def answer(
    model: Any, tokenizer: Any, turns: Sequence[dict], *, max_new_tokens: int, temperature: float = 0.0, glue: str = ""
) -> str:
    """Return the model's next turn.

    Args:
        model: Of transformers or peft; a sharded one answers on all ranks alike.
        tokenizer: Its tokenizer.
        turns: Dictionaries with role and content, the last to be answered.
        max_new_tokens: Length of the answer.
        temperature: 0 takes the likeliest token each time.
        glue: What stood between question and answer in training where there is no chat template.
    """
    if model.config.is_encoder_decoder:
        asked = Conversation((*turns, {"role": "assistant", "content": "."}), glue=glue)
        ids, _ = Rendering.of(tokenizer).pair(asked)
    else:
        ids = prompt_tokens(tokenizer, turns, glue=glue)
    tokens = torch.tensor([ids], device=model.device)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    if temperature == 0:  # what the folder's own settings say about sampling does not apply
        sampling.update(temperature=None, top_p=None, top_k=None)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with torch.no_grad():
        out = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_new_tokens,
            pad_token_id=pad,
            **sampling,
        )
    start = 0 if model.config.is_encoder_decoder else tokens.shape[1]
    return tokenizer.decode(out[0, start:], skip_special_tokens=True).strip()


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
    try:
        # Said, not left out: where it is left out, transformers asks on stdin whether to run the folder's code.
        config = AutoConfig.from_pretrained(base, trust_remote_code=False)
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = kind.from_pretrained(base, dtype="auto", use_safetensors=True, trust_remote_code=False)
        if adapter:
            model = PeftModel.from_pretrained(model, folder)
        named = folder if _has_tokenizer(folder) else base
        tokenizer = AutoTokenizer.from_pretrained(named, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        first = str(error).strip().splitlines()[0]
        beneath = f" (the base model of {folder})" if adapter else ""
        raise UserError(
            f"{base}{beneath}: cannot be loaded: {first}; needed: a model folder with config.json and safetensors, "
            "an adapter folder, or a hub id"
        ) from error
    return model.to(device).eval(), tokenizer


def _check_folder(folder: str) -> None:
    """Refuse a folder that is missing or holds a run in place of a model, before the hub is asked for its name."""
    path = Path(folder)
    names = ("config.json", "adapter_config.json")
    if not path.exists() and looks_like_a_path(folder):
        raise UserError(f"no such folder: {folder}; needed: a model folder, an adapter folder, or a hub id")
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
