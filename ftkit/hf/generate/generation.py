"""Generate answers with a whole or sharded model: the same tokens on any number of ranks.

Prompts are sorted by length and cut into batches, and whole batches are dealt to the ranks. The shapes of a batch do not
depend on the rank that answers it, and its random numbers depend only on the seed and the number of the batch. `generate` of
transformers does the rest: sampling, beams, cache and stopping.

A sharded model gathers its weights once for all prompts if they fit. Otherwise it gathers them block by block for each
token, and the ranks are kept in step (`holding.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from ftkit.data.formats import BadRowError, Conversation, turn_of
from ftkit.data.template import Template
from ftkit.errors import UserError
from ftkit.hf.adapters import base_of
from ftkit.hf.generate.holding import cache_bytes, holding
from ftkit.hf.sharding import units_of

DEFAULTS: dict[str, Any] = {"top_k": None, "min_p": None, "num_beams": 1, "use_cache": True}
"""Settings that override the model's own, beside do_sample, temperature and top_p.

Training sets `use_cache` to False in the configuration.
"""


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[Mapping[str, Any]]],
    *,
    separator: str | Sequence[str] = "",
    **settings: Any,
) -> list[str]:
    """Answer prompts. All ranks of a sharded model call this with the same list, and all get all answers in its order.

    Args:
        model: A transformers or PEFT model with its weights, whole or sharded by `ftkit.shard`.
        tokenizer: The model's tokenizer. Its chat template, if it has one, renders the prompts.
        prompts: Texts, or conversations: lists of dictionaries with role and content. A text is one user turn.
        separator: Text between question and answer if the tokenizer has no chat template: one for all prompts, or one each.
        settings: Keyword arguments of `generate_ids`: max_new_tokens, temperature, top_p, seed, hold, batch_size and others.

    Returns:
        The answers without special tokens.

    Raises:
        UserError: A prompt cannot be rendered or is too long; or hold=True and the weights do not fit.
    """
    if isinstance(prompts, str):
        raise UserError("prompts: found one text, a list of prompts is needed: [prompt]")
    seq2seq = base_of(model).config.is_encoder_decoder
    separators = [separator] * len(prompts) if isinstance(separator, str) else separator
    ids = []
    for number, (prompt, own) in enumerate(zip(prompts, separators, strict=True)):
        try:
            given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            turns = [turn_of(turn, f"turn {place}") for place, turn in enumerate(given, 1)]
            ids.append(prompt_ids(tokenizer, turns, seq2seq=seq2seq, separator=own))
        except (BadRowError, UserError) as error:
            raise UserError(f"prompts: number {number}: {error}") from error
    tokens = {"eos_token_ids": _eos_token_ids(model, tokenizer), "pad_token_id": tokenizer.pad_token_id}
    answers = generate_ids(model, ids, **{**tokens, "tokenizer": tokenizer, **settings})
    return [tokenizer.decode(answer, skip_special_tokens=True).strip() for answer in answers]


def generate_ids(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    hold: bool | str = "auto",
    batch_size: int = 8,
    eos_token_ids: Sequence[int] | None = None,
    pad_token_id: int | None = None,
    **generation: Any,
) -> list[list[int]]:
    """Answer prompts of token ids. All ranks of a sharded model call this with the same list, and all get all answers.

    Args:
        model: As in `generate`.
        prompts: Token ids of each prompt.
        max_new_tokens: Maximum length of an answer, tokens.
        temperature: Divides the logits before sampling. 0 takes the most likely token.
        top_p: Samples from the most likely tokens that together have this probability.
        seed: Seed of sampling. The random state of torch is restored afterwards.
        hold: "auto" gathers all weights once if they fit, True gathers or raises, False gathers them block by block.
        batch_size: Prompts that one rank answers together. Answers may depend on it, by rounding and by the draws.
        eos_token_ids: Tokens that end an answer. None uses the model's generation settings.
        pad_token_id: Token that pads a batch. None uses the model's generation settings, or an EOS token.
        generation: Further settings of transformers' `GenerationConfig`, such as top_k, min_p, num_beams, repetition_penalty
            or stop_strings. transformers raises its own error for a name that it does not know.

    Returns:
        The new tokens of each answer, including the EOS token if there is one.

    Raises:
        UserError: A prompt is empty or too long; or hold=True and the weights do not fit.

    Cost: the key/value cache of one batch, and the gathered weights.
    """
    base = base_of(model)
    units = units_of(model)
    problem = unanswerable(base, prompts, max_new_tokens)
    if problem is not None:
        raise UserError(problem)
    ends = _eos_token_ids(model) if eos_token_ids is None else list(eos_token_ids)
    pad = next(n for n in (pad_token_id, base.generation_config.pad_token_id, *ends, 0) if n is not None)
    settings = {**DEFAULTS, **generation}
    longest = max(map(len, prompts), default=0) + max_new_tokens
    cache = cache_bytes(base, min(batch_size, len(prompts)) * settings["num_beams"], longest)
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    rank, ranks = (units.comm.rank, units.comm.world_size) if units is not None else (0, 1)
    answers: dict[int, list[int]] = {}
    with torch.no_grad(), evaluating(model), holding(units, hold, cache):
        for first in range(0, len(batches), ranks):
            # In the last round, ranks without a batch repeat the last one: all ranks do, and refuse, the same.
            number = min(first + rank, len(batches) - 1)
            with _seeded(base.device, seed, number):
                found = _answer_batch(
                    model,
                    [prompts[place] for place in batches[number]],
                    ends,
                    pad,
                    max_new_tokens=max_new_tokens,
                    do_sample=temperature != 0,
                    temperature=temperature or None,
                    top_p=top_p,
                    **settings,
                )
            answers.update(zip(batches[number], found))
    for others in units.comm.all(answers) if units is not None else ():
        answers.update(others)
    return [answers[number] for number in range(len(prompts))]


def prompt_ids(tokenizer: Any, turns: Sequence[dict], *, seq2seq: bool = False, separator: str = "") -> list[int]:
    """Return the tokens that precede an answer to these turns in training.

    Raises:
        UserError: The chat template refuses the turns.
    """
    asked = Conversation(tuple(turns), separator=separator)
    try:
        return Template.of(tokenizer).prompt(asked, seq2seq=seq2seq)
    except BadRowError as error:
        raise UserError(str(error)) from error


def unanswerable(base: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> str | None:
    """Return why a model cannot answer prompts of token ids, or None. The learned positions limit a model without RoPE."""
    config = base.config.get_text_config(decoder=True)
    learned = getattr(config, "rope_parameters", None) is None
    positions = getattr(config, "max_position_embeddings", None) if learned else None
    for number, prompt in enumerate(prompts):
        if not prompt:
            return f"prompt {number} has no tokens"
        needed = len(prompt) + max_new_tokens
        if base.config.is_encoder_decoder:  # the decoder has positions of its own, the first for its start token
            needed = max(len(prompt), 1 + max_new_tokens)
        if positions and needed > positions:
            return (
                f"prompt {number} has {len(prompt)} tokens and asks for {max_new_tokens} more, and the model has "
                f"{positions} positions; shorten it or lower max_new_tokens"
            )
    return None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode for the body, and then each of its modules back into its own mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])  # some modules of PEFT act on the call itself
        for module, training in modes:
            module.training = training


def _eos_token_ids(model: nn.Module, tokenizer: Any = None) -> list[int]:
    """Return the EOS token ids of the model's generation settings, and the tokenizer's."""
    own = base_of(model).generation_config.eos_token_id
    found = [*(own if isinstance(own, list) else [own]), getattr(tokenizer, "eos_token_id", None)]
    return list(dict.fromkeys(token for token in found if token is not None))


@contextmanager
def _seeded(device: torch.device, seed: int, number: int) -> Iterator[None]:
    """Seed torch from (seed, number) for the body, and restore its random state afterwards."""
    mixed = int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0])
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, device_type="cuda"):
        torch.manual_seed(mixed)
        yield


def _answer_batch(
    model: Any, prompts: Sequence[Sequence[int]], ends: list[int], pad: int, **settings: Any
) -> list[list[int]]:
    """Answer one batch with transformers' `generate`. Return the new tokens of each row."""
    base = base_of(model)
    side = "right" if base.config.is_encoder_decoder else "left"
    ids = pad_sequence([torch.tensor(prompt) for prompt in prompts], True, pad, side)
    mask = pad_sequence([torch.ones(len(prompt), dtype=torch.int64) for prompt in prompts], True, 0, side)
    out = model.generate(
        input_ids=ids.to(base.device),
        attention_mask=mask.to(base.device),
        eos_token_id=ends or None,
        pad_token_id=pad,
        num_return_sequences=1,
        return_dict_in_generate=False,
        **settings,
    )
    start = 1 if base.config.is_encoder_decoder else ids.shape[1]  # a decoder's answer follows its start token
    rows = out[:, start:].tolist()
    stops = settings.get("stop_strings") or base.generation_config.stop_strings
    return [_without_padding(row, ends, pad if stops else None) for row in rows]


def _without_padding(tokens: list[int], ends: Sequence[int], pad: int | None) -> list[int]:
    """Return tokens up to the first EOS token, or without the padding after a stop string."""
    end = next((place for place, token in enumerate(tokens, 1) if token in ends), None)
    if end is None and pad is not None:
        end = next((place for place in range(len(tokens), 0, -1) if tokens[place - 1] != pad), 0)
    return tokens[:end]
