"""Answers of a model, whole or sharded, the same tokens whatever the number of ranks.

Prompts are cut into batches, those of like length together, and whole batches are dealt to the ranks: a batch is computed in
the same shapes wherever it is computed, so greedy answers do not depend on the number of ranks. Nor do sampled ones: each
prompt has a stream of random numbers of its own, made of the seed and the prompt's place in the list, and one number of it
picks one token. transformers' `generate` does the rest: cache, stopping, what the folder's generation settings say of
penalties and forced tokens.

A sharded model's weights are gathered once and held for all prompts where they fit (`weight_holding.py`); then each rank
answers its own prompts at its own speed. Else they come block by block for each token, and ranks are kept in step
(`rank_sync.py`).

What it refuses: prompts and answers longer than the model's learned positions, a model without weights. What it costs: keys
and values of a batch, and what holding costs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ftkit.data.formats import BadRowError, Conversation
from ftkit.data.prepared import prompt_tokens
from ftkit.data.rendering import Rendering
from ftkit.data.turns import role_key, turn_of, unread_parts
from ftkit.errors import UserError
from ftkit.hf.models.rank_sync import in_step, one_token
from ftkit.hf.models.sharded_model import ShardedTransformer
from ftkit.hf.models.weight_holding import cache_bytes, held
from ftkit.hf.sharding import units_of
from ftkit.hf.weights.nonfinite import at_hand_not_finite
from ftkit.plan.limits import Limits

logger = logging.getLogger(__name__)

BATCH_SIZE = 8
"""Prompts that are answered together on a rank."""

PROMPT = "prompt"
"""Column of a prompt's turns, for the names of their keys."""


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str] | Sequence[Sequence[dict]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    hold: bool | str = "auto",
    batch_size: int = BATCH_SIZE,
    glue: str | Sequence[str] = "",
    limits: Limits | None = None,
) -> list[str]:
    """Answer prompts. All ranks of a sharded model call it with the same list, and all get all answers, in order.

    Args:
        model: a model of transformers or PEFT with its weights, sharded by `ftkit.shard` or whole.
        tokenizer: the model's tokenizer; one with a chat template gets a text as a user's turn.
        prompts: texts, or conversations as lists of dictionaries with role and content, the last turn to be answered;
            turns are read as those of rows are.
        max_new_tokens: most tokens of an answer.
        temperature: 0 takes the likeliest token each time; above, logits are divided by it and tokens drawn.
        top_p: draw from the likeliest tokens that have this probability together, in (0, 1].
        seed: seed of the draws. Prompt number i draws from a stream of (seed, i), one number a token: not from torch's
            global one, which stays as it is.
        hold: "auto" gathers all weights once where they fit; True does so or raises; False gathers them block by block.
        batch_size: number of prompts answered together. It, and not the number of ranks, decides which prompts share a
            batch.
        glue: what stood between question and answer in training where there is no chat template; of all, or of each.
        limits: memory granted; None takes the limits with which the model was sharded.

    Returns:
        The answers, without special tokens.

    Raises:
        UserError: a prompt that the template refuses, that has a key which nobody reads or that is too long; hold=True
            where the weights do not fit; weights or logits that are NaN or infinite.

    Cost: what its tokens take, and one pass over each rank's weights, to see that they are finite.
    """
    _check_prompts(prompts)
    seq2seq = base_of(model).config.is_encoder_decoder
    glues = [glue] * len(prompts) if isinstance(glue, str) else glue
    if len(glues) != len(prompts):
        raise UserError(f"glue: found {len(glues)} of them and {len(prompts)} prompts; one text, or one for each, is needed")
    turns = _conversations(tokenizer, prompts)
    ids = [prompt_ids(tokenizer, each, seq2seq=seq2seq, glue=own) for each, own in zip(turns, glues)]
    answers = generate_everywhere(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        hold=hold,
        batch_size=batch_size,
        eos_token_ids=end_tokens(model, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        tokenizer=tokenizer,
        limits=limits,
    )
    return [tokenizer.decode(answer, skip_special_tokens=True).strip() for answer in answers]


def generate_everywhere(
    model: nn.Module, prompts: Sequence[Sequence[int]], *, batch_size: int = BATCH_SIZE, **settings: Any
) -> list[list[int]]:
    """Answer token ids: all ranks call it with the same list, and all get all answers, in order.

    Args:
        model: see `generate`.
        prompts: token ids of each prompt.
        batch_size: see `generate`.
        settings: keyword arguments of `generate_ids`.
    """
    units = units_of(model)
    rank, ranks = (units.comm.rank, units.comm.world_size) if units is not None else (0, 1)
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    size = max(batch_size, 1)
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    mine = [number for batch in batches[rank::ranks] for number in batch]  # the only short batch, the last, stays last
    own_prompts = [prompts[number] for number in mine]
    answers = generate_ids(model, own_prompts, numbers=mine, batch_size=batch_size, **settings)
    own = dict(zip(mine, answers))
    told = units.comm.all(own) if units is not None else [own]
    found = {number: answer for each in told for number, answer in each.items()}
    return [found[number] for number in range(len(prompts))]


def generate_ids(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    numbers: Sequence[int] | None = None,
    hold: bool | str = "auto",
    batch_size: int = BATCH_SIZE,
    eos_token_ids: Sequence[int] | None = None,
    pad_token_id: int | None = None,
    tokenizer: Any = None,
    limits: Limits | None = None,
) -> list[list[int]]:
    """Answer this rank's own prompts, given as token ids. All ranks call it, each with its own list, which may be empty.

    Args:
        prompts: token ids of each prompt; batches are made in this order.
        max_new_tokens: see `generate`.
        temperature: see `generate`.
        top_p: see `generate`.
        seed: see `generate`.
        numbers: number of each prompt: it seeds the draws with `seed`, and errors name it; None: its place in this list.
        hold: see `generate`.
        batch_size: see `generate`.
        eos_token_ids: tokens that end an answer; None: those of the model's generation settings.
        pad_token_id: token that fills a batch; None: that of the model's settings, else an end token.
        tokenizer: the model's tokenizer, for stop_strings of its generation settings.
        limits: see `generate`.

    Returns:
        The new tokens of each answer, the end token included where there is one.

    Raises:
        UserError: see `generate`; the same on all ranks.
    """
    base, units = base_of(model), units_of(model)
    ends = list(end_tokens(model) if eos_token_ids is None else eos_token_ids)
    sampling = _Sampling(temperature, top_p, seed)
    numbers = range(len(prompts)) if numbers is None else numbers
    problem = _problem(base, prompts, numbers, max_new_tokens, batch_size, sampling)
    if base.generation_config.stop_strings and tokenizer is None:
        problem = problem or "the model's generation settings have stop_strings, which need a tokenizer: give it here"
    rounds = -(-len(prompts) // batch_size) if batch_size > 0 else 0
    told = units.comm.all((rounds, problem)) if units is not None else [(rounds, problem)]
    if problems := [each for _, each in told if each is not None]:
        raise UserError(problems[0])
    if broken := at_hand_not_finite(model, units):
        raise UserError(
            f"{', '.join(broken[:3])} holds NaN or infinite weights: every answer would be empty or noise. Fetch the "
            "model again; after training, go back to a checkpoint from before the first step whose loss is not finite"
        )
    if not temperature and (top_p < 1 or seed) and (units is None or units.comm.rank == 0):
        logger.warning("temperature is 0, which takes the likeliest token each time: top_p and seed change nothing")
    pad = next(n for n in (pad_token_id, base.generation_config.pad_token_id, *ends, 0) if n is not None)
    longest = max((len(prompt) for prompt in prompts), default=0) + max_new_tokens
    beside = cache_bytes(base, min(batch_size, len(prompts)), longest)
    answers: list[list[int]] = []
    looked = LogitsWatch()
    with torch.no_grad(), evaluating(model), held(units, hold, beside_bytes=beside, limits=limits) as whole:
        # Held weights need no other rank; else every rank has a batch in every round, some a spare one.
        for number in range(rounds if whole else max(each for each, _ in told)):
            rows = range(number * batch_size, min((number + 1) * batch_size, len(prompts)))
            with _kept_in_step(units, whole=whole):
                if rows:
                    draw = sampling.draw([numbers[row] for row in rows])
                    batch = [prompts[row] for row in rows]
                    answers += _batch(model, batch, max_new_tokens, draw, looked, ends, pad, tokenizer)
                else:
                    _batch(model, [[pad]], 1, None, LogitsWatch(), ends, pad, tokenizer)
    own = looked.found()
    if own if units is None else units.comm.any(own):
        raise UserError(
            "the model's logits are NaN or infinite, though its weights are finite: every answer would be empty or noise. "
            "Its activations overflow: compute in fp32 or bf16, or compare its configuration and weights with the originals"
        )
    return answers


def prompt_ids(tokenizer: Any, turns: Sequence[dict], *, seq2seq: bool = False, glue: str = "") -> list[int]:
    """Return the tokens after which a model answers: those that stood before an answer in training.

    Args:
        tokenizer: a Hugging Face tokenizer.
        turns: dictionaries with role and content; the last turn is to be answered.
        seq2seq: whether the model is an encoder-decoder.
        glue: see `generate`.
    """
    if not seq2seq:
        return prompt_tokens(tokenizer, turns, glue=glue)
    asked = Conversation((*turns, {"role": "assistant", "content": "."}), glue=glue)
    try:
        return Rendering.of(tokenizer).pair(asked)[0]
    except BadRowError as error:
        raise UserError(str(error)) from error


def _check_prompts(prompts: Any) -> None:
    """Raise for what is no list of texts and conversations: of one text, each letter would be answered."""
    rows = [prompts] if isinstance(prompts, Mapping) else [each for each in prompts if isinstance(each, Mapping)]
    if row := next((each for each in rows if not role_key(each)), None):
        raise UserError(
            f"prompts: found a row with {', '.join(map(str, row))}, and of each a text, or a list of turns with role and "
            "content, is needed"
        )
    if isinstance(prompts, str) or rows:
        raise UserError("prompts: found one text or conversation, and a list of them is needed: [prompt]")
    for number, prompt in enumerate(prompts):
        turns = prompt if isinstance(prompt, (list, tuple)) else [prompt]
        if not all(isinstance(turn, Mapping) for turn in turns) and not isinstance(prompt, str):
            needed = "a text, or a list of turns with role and content, is needed"
            raise UserError(f"prompts: number {number} is {str(prompt)[:60]}; {needed}")


def _conversations(tokenizer: Any, prompts: Sequence[str] | Sequence[Sequence[dict]]) -> list[list[dict]]:
    """Return prompts as turns, read as those of rows are; a text is a user's turn.

    Raises:
        UserError: a turn that is none, or that has a key which nobody reads.
    """
    rendering = Rendering.of(tokenizer)
    found = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            found.append([{"role": "user", "content": prompt}])
            continue
        try:
            given = cast(Sequence[Mapping[str, Any]], prompt)
            if strange := next((turn for turn in given if not role_key(turn)), None):
                raise BadRowError(f"a turn has no role: it has {', '.join(map(str, strange))}; role and content are needed")
            turns = [turn_of(turn, f"turn {place}") for place, turn in enumerate(given, 1)]
            unread = [name for turn in given for name in unread_parts(turn, PROMPT)]
            unread += rendering.unread_keys(Conversation(tuple(turns), column=PROMPT), asked=len(turns))
        except BadRowError as error:
            raise UserError(f"prompts: number {number}: {error}") from error
        if unread:
            named = ", ".join(name.removeprefix(f"{PROMPT}.") for name in dict.fromkeys(unread))
            reader = "the chat template does not read" if tokenizer.chat_template else "nobody reads without a chat template"
            raise UserError(f"prompts: number {number} has turns with {named}, which {reader}; correct or remove it")
        found.append(turns)
    return found


def end_tokens(model: nn.Module, tokenizer: Any = None) -> list[int]:
    """Return what ends an answer: the tokens of the model's generation settings, and the tokenizer's."""
    said = base_of(model).generation_config.eos_token_id
    found = said if isinstance(said, list) else [said]
    own = tokenizer.eos_token_id if tokenizer is not None else None
    return list(dict.fromkeys(token for token in (*found, own) if token is not None))


# --- one batch


def _batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    draw: Draw | None,
    looked: LogitsWatch,
    ends: list[int],
    pad: int,
    tokenizer: Any = None,
) -> list[list[int]]:
    """Answer a batch by transformers' own `generate`; return the new tokens of each row."""
    longest = max(map(len, prompts))
    base = base_of(model)
    left = not base.config.is_encoder_decoder
    ids, mask = torch.full((len(prompts), longest), pad), torch.zeros((len(prompts), longest), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        place = slice(longest - len(prompt), None) if left else slice(len(prompt))
        ids[row, place], mask[row, place] = torch.tensor(prompt), 1
    out = model.generate(
        input_ids=ids.to(base.device),
        attention_mask=mask.to(base.device),
        max_new_tokens=max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=pad,
        logits_processor=LogitsProcessorList([looked] if draw is None else [looked, draw]),
        do_sample=False,  # `draw` leaves one token to choose
        temperature=None,
        top_p=None,
        top_k=None,
        num_beams=1,
        num_return_sequences=1,
        use_cache=True,  # training switches it off in the configuration
        return_dict_in_generate=False,
        tokenizer=tokenizer,
    )
    start = longest if left else 1  # a decoder's answer begins after its start token
    answers = [_until_end(row, ends) for row in out[:, start:].tolist()]
    stops = base.generation_config.stop_strings and pad not in ends
    return [_unfilled(row, pad) for row in answers] if stops else answers


def _until_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    stop = next((place for place, token in enumerate(tokens, 1) if token in ends), len(tokens))
    return tokens[:stop]


def _unfilled(tokens: list[int], pad: int) -> list[int]:
    """Return an answer without what fills it behind the string at which it stopped."""
    return tokens[: next((place for place in range(len(tokens), 0, -1) if tokens[place - 1] != pad), 0)]


# --- sampling


@dataclass(frozen=True)
class _Sampling:
    temperature: float
    top_p: float
    seed: int

    def draw(self, numbers: Sequence[int]) -> Draw | None:
        return Draw(self.temperature, self.top_p, self.seed, numbers) if self.temperature > 0 else None


class LogitsWatch(LogitsProcessor):
    """Notes whether any logits were NaN or +inf, and returns them unchanged. (-inf marks a token that is ruled out.)

    It raises nothing while tokens are generated, because the other ranks generate theirs. Cost: one maximum over the logits
    of each token, on their device.
    """

    def __init__(self) -> None:
        self._seen: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Look at scores (B, V), and return them."""
        broken = ~(scores.amax() < torch.inf)  # a maximum hands NaN on, and no comparison with NaN is true
        self._seen = broken if self._seen is None else self._seen | broken
        return scores

    def found(self) -> bool:
        """Return whether there were any; waits for the device."""
        return self._seen is not None and bool(self._seen)


@dataclass
class Draw(LogitsProcessor):
    """Draws the next token of each row and leaves no other a chance.

    Row i's uniform number u comes from the stream of (seed, numbers[i]); the token is the first whose probabilities, summed
    up in fp64, exceed u of their total: in the order of the vocabulary, or of the likeliest first where `top_p` is below 1.

    Args:
        temperature: divides the logits; above 0.
        top_p: probability that the likeliest tokens to draw from have together, in (0, 1].
        seed: seed of all rows.
        numbers: number of each row's prompt.
    """

    temperature: float
    top_p: float
    seed: int
    numbers: Sequence[int]
    streams: list[torch.Generator] = field(init=False)

    def __post_init__(self) -> None:
        self.streams = [stream(self.seed, number) for number in self.numbers]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores (B, V) in which one token of each row is 0 and the others are -inf."""
        numbers = [torch.rand((), dtype=torch.float64, generator=each) for each in self.streams]
        probabilities = torch.softmax(scores.double() / self.temperature, dim=-1)
        order = None
        if self.top_p < 1:
            probabilities, order = probabilities.sort(dim=-1, descending=True, stable=True)
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
        sums = probabilities.cumsum(-1)
        wanted = torch.stack(numbers).to(scores.device)[:, None] * sums[:, -1:]
        picked = torch.searchsorted(sums, wanted, right=True).clamp(max=scores.shape[-1] - 1)
        if order is not None:
            picked = order.gather(-1, picked)
        return torch.full_like(scores, -torch.inf).scatter(-1, picked, 0.0)


def stream(seed: int, number: int) -> torch.Generator:
    """Return the random numbers of one prompt: a function of the seed and the prompt's number alone."""
    mixed = np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(mixed))


# --- around it


def base_of(model: nn.Module) -> Any:
    """Return the model of transformers inside a PEFT model, or the model itself.

    Raises:
        UserError: it generates no text.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(base, PreTrainedModel) or not base.can_generate():
        raise UserError(f"{type(base).__name__} is not a transformers model that generates text")
    return base


def _problem(
    base: Any,
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],
    max_new_tokens: int,
    batch_size: int,
    sampling: _Sampling,
) -> str | None:
    """Return why these prompts cannot be answered, or None."""
    if any(parameter.is_meta for parameter in base.parameters()):
        return f"{type(base).__name__} has no weights yet (it is on the meta device): shard it first, or begin training"
    if batch_size < 1 or max_new_tokens < 1:
        return f"batch_size is {batch_size} and max_new_tokens {max_new_tokens}: at least 1 is needed of each"
    if not sampling.temperature >= 0 or not 0 < sampling.top_p <= 1 or sampling.seed < 0:
        return (
            f"temperature is {sampling.temperature}, top_p {sampling.top_p}, seed {sampling.seed}: a temperature of 0 or "
            "more, top_p in (0, 1] and a seed of 0 or more are needed"
        )
    return unanswerable(base, prompts, numbers, max_new_tokens)


def unanswerable(base: Any, prompts: Sequence[Sequence[int]], numbers: Sequence[int], max_new_tokens: int) -> str | None:
    """Return why a model cannot answer prompts, by their lengths, or None.

    Args:
        base: the model of transformers.
        prompts: token ids of each prompt.
        numbers: number of each prompt, by which the reason names it.
        max_new_tokens: most tokens of an answer.
    """
    config = base.config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None)
    if positions and getattr(config, "rope_parameters", None) is None:  # learned: there are no more
        apart = base.config.is_encoder_decoder  # the answer has positions of its own, the first for the start token
        if apart and 1 + max_new_tokens > positions:
            return (
                f"max_new_tokens is {max_new_tokens}, and the model has {positions} positions for an answer and its start "
                "token: lower it"
            )
        answer = 0 if apart else max_new_tokens
        for number, prompt in zip(numbers, prompts):
            if len(prompt) + answer > positions:
                return (
                    f"prompt {number} has {len(prompt)} tokens"
                    + (f" and asks for {answer} more" if answer else "")
                    + f", and the model has {positions} positions; shorten it or lower max_new_tokens"
                )
    empty = next((number for number, prompt in zip(numbers, prompts) if not prompt), None)
    return None if empty is None else f"prompt {empty} has no tokens"


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off in the body, by the model's own `eval` and `train`: some merge weights there, and undo it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        if model.training != modes[0][1]:
            model.train()
        for module, training in modes:
            module.training = training


@contextmanager
def _kept_in_step(units: ShardedTransformer | None, *, whole: bool) -> Iterator[None]:
    if units is None or whole:
        yield
    else:
        with in_step(units, one_token):
            yield
