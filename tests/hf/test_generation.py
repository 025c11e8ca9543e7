"""Answers of sharded models are those of the whole model, token for token, on any number of ranks, gathered or streamed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BartConfig, BartForConditionalGeneration

import ftkit
from ftkit.engine.comm.shared_memory import of_other_ranks
from ftkit.engine.holding import gathered_bytes
from ftkit.hf.generate import generation, holding
from ftkit.hf.generate.generation import generate, generate_ids
from ftkit.launch.ranks import Stop
from ftkit.train.generate import answers
from tests.engine import families
from tests.engine.families import VOCABULARY, token_loss
from tests.hf import runs
from tests.tiny import TEMPLATE, make_base, make_tokenizer

ENDS = (*range(2, 12), 47, 84)
"""Tokens that end an answer: so many that answers differ in length."""
MANY = {"max_new_tokens": 9, "batch_size": 2, "eos_token_ids": ENDS, "pad_token_id": 0}
SAMPLED = {**MANY, "temperature": 1.3, "top_p": 0.9, "seed": 5}
STREAMED = {"hold": False}
HELD = {"hold": True}
SHARDED = {"stage": 3, "affinity": False}


def prompts(count: int = 7) -> list[list[int]]:
    """Prompts of 1 to 11 tokens."""
    random = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 12, (count,), generator=random).tolist()
    return [torch.randint(12, VOCABULARY, (length,), generator=random).tolist() for length in lengths]


def lora(family: str) -> nn.Module:
    torch.manual_seed(7)
    adapter = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(families.build(family), adapter)


MODELS: dict[str, Any] = {"llama, LoRA": lambda: lora("llama"), "t5": runs.t5}


def build(name: str) -> nn.Module:
    return MODELS[name]() if name in MODELS else families.build(name)


def sharded(name: str, settings: dict[str, Any], wanted: dict[str, Any]) -> list[list[int]]:
    """On every rank: all answers of the sharded model, which draws nothing of torch's random numbers."""
    model = build(name)
    ftkit.shard(model, {**SHARDED, **settings})
    before = torch.get_rng_state()
    found = generate_ids(model, prompts(), **wanted)
    assert torch.equal(torch.get_rng_state(), before)
    return found


def whole(name: str, wanted: dict[str, Any]) -> list[list[int]]:
    return generate_ids(build(name), prompts(), **wanted)


def one_by_one(name: str) -> list[list[int]]:
    """What transformers' own generate gives for each prompt alone."""
    model = build(name).eval()
    found = []
    for prompt in prompts():
        made = model.generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=list(ENDS), pad_token_id=0
        )
        found.append(made[0, 1 if model.config.is_encoder_decoder else len(prompt) :].tolist())
    return found


QUICK = [
    (2, "llama", {"debug": True}, STREAMED),
    (2, "llama", {}, HELD),
    (3, "t5", {}, STREAMED),
    (3, "gpt2", {}, HELD),
]
SLOW = [
    *((world, family, {"debug": True}, hold) for world in (2, 3) for family in ("gemma3", "t5", "llama, LoRA", "opt", "gpt2")
      for hold in (STREAMED, HELD)),
    *((2, "qwen3", {"stage": stage}, {}) for stage in (0, 1, 2)),
    *((world, "llama", {"parameters": "host", "gradients": "host", "state": "host", "debug": True}, hold)
      for world in (1, 2) for hold in (STREAMED, HELD)),
    *((world, "t5", {"parameters": "nvme", "gradients": "nvme", "state": "nvme"}, hold)
      for world in (1, 2) for hold in (STREAMED, HELD)),
    (1, "llama", {}, HELD),
    (3, "gpt_neox", {"reshard_after_forward": False, "activations": "keep"}, STREAMED),
]  # fmt: skip


def check(worlds, tmp_path, world, name, settings, hold):
    if "nvme" in settings.values():
        settings = {**settings, "nvme_dir": str(tmp_path)}
    for wanted in (MANY, SAMPLED):
        expected = whole(name, wanted)
        assert worlds[world].run(sharded, name, settings, {**wanted, **hold}) == [expected] * world
        assert len({len(answer) for answer in expected}) > 1  # some ranks are done before others


@pytest.mark.quick(2)
@pytest.mark.parametrize(("world", "name", "settings", "hold"), QUICK, ids=str)
def test_the_same_tokens_as_of_the_whole_model(worlds, tmp_path, world, name, settings, hold):
    check(worlds, tmp_path, world, name, settings, hold)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name", "settings", "hold"), SLOW, ids=str)
def test_the_same_tokens_as_of_the_whole_model_in_more_settings(worlds, tmp_path, world, name, settings, hold):
    check(worlds, tmp_path, world, name, settings, hold)


@pytest.mark.parametrize("name", ["llama", "gemma3", "t5"])
def test_greedy_answers_are_those_of_transformers(name):
    assert whole(name, MANY) == one_by_one(name)


def batches_seen() -> list[tuple[int, ...]]:
    """Lengths of the prompts of each batch, on all ranks."""
    model = families.build("llama")
    units = ftkit.shard(model, {**SHARDED})
    seen = []

    def note(model: Any, given: Any, *others: Any, **settings: Any) -> list[list[int]]:
        seen.append(tuple(len(prompt) for prompt in given))
        return [[] for _ in given]

    with mock.patch.object(generation, "_answer_batch", note):
        generate_ids(model, prompts(), **{**MANY, "batch_size": 3})
    return [lengths for each in units.comm.all(seen) for lengths in each]


def test_batches_are_the_same_on_any_number_of_ranks(worlds):
    expected = set(worlds[1].run(batches_seen)[0])
    assert len(expected) == 3
    assert [set(each) for each in worlds[2].run(batches_seen)] == [expected] * 2


# --- settings of transformers' generation

SETTINGS = {
    "top_k": {"temperature": 1.3, "seed": 5, "top_k": 4},
    "min_p": {"temperature": 1.3, "seed": 5, "min_p": 0.3},
    "beams": {"num_beams": 3},
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("wanted", SETTINGS.values(), ids=SETTINGS)
def test_top_k_min_p_and_beams_give_the_same_tokens_on_any_number_of_ranks(world2, wanted):
    wanted = {**MANY, **wanted}
    expected = whole("llama", wanted)
    assert len({len(answer) for answer in expected}) > 1
    for hold in (STREAMED, HELD):
        assert world2.run(sharded, "llama", {"debug": True}, {**wanted, **hold}) == [expected] * 2


def test_settings_of_transformers_generation_count():
    sampled = {**MANY, "temperature": 1.3, "seed": 5}
    greedy, free = whole("llama", MANY), whole("llama", sampled)
    assert whole("llama", {**sampled, "top_k": 1}) == greedy
    assert whole("llama", {**sampled, "min_p": 0.999}) == greedy
    assert free != greedy
    assert whole("llama", {**sampled, "top_k": 4}) not in (greedy, free)
    assert whole("llama", {**sampled, "min_p": 0.3}) not in (greedy, free)
    assert whole("llama", {**MANY, "num_beams": 3}) != greedy
    model = build("llama").eval()
    prompt = prompts()[0]
    beams = model.generate(torch.tensor([prompt]), num_beams=3, max_new_tokens=9, eos_token_id=None, pad_token_id=0)
    alone = {"num_beams": 3, "max_new_tokens": 9, "eos_token_ids": [], "pad_token_id": 0}
    assert generate_ids(model, [prompt], **alone) == [beams[0, len(prompt) :].tolist()]


def test_the_models_own_settings_of_sampling_do_not_count():
    model = build("llama")
    model.generation_config.update(do_sample=True, temperature=0.1, top_k=1, top_p=0.1, min_p=0.9)
    sampled = {**MANY, "temperature": 1.3, "seed": 5}
    assert generate_ids(model, prompts(), **MANY) == whole("llama", MANY)
    assert generate_ids(model, prompts(), **sampled) == whole("llama", sampled) != whole("llama", MANY)


def refused_settings() -> list[str]:
    """Errors of one prompt, which only one rank answers first, of a sharded model."""
    model = build("llama")
    ftkit.shard(model, {**SHARDED})
    found = []
    for hold in (True, False):
        with pytest.raises(ValueError, match="not used by the model") as error:
            generate_ids(model, [[3, 4]], hold=hold, num_beam=3)
        found.append(str(error.value))
    return found


def test_unknown_settings_raise_the_error_of_transformers_on_all_ranks(world2):
    for found in world2.run(refused_settings):
        assert all("num_beam" in text for text in found)
    with pytest.raises(TypeError, match="num_return_sequences"):  # an answer for each prompt is returned
        generate_ids(build("llama"), [[3, 4]], num_return_sequences=2)


# --- sampling


def test_draws_depend_on_the_seed_the_batch_and_the_row():
    model = families.build("llama")
    first = prompts()[0]
    alone = generate_ids(model, [first], **SAMPLED)
    assert alone == generate_ids(model, [first], **SAMPLED)
    assert alone != generate_ids(model, [first], **{**SAMPLED, "seed": 6})
    rows = generate_ids(model, [first] * 4, **SAMPLED)  # two batches of two
    assert len({tuple(answer) for answer in rows}) == 4


# --- transformers' own generate


def plainly(name: str, fits: bool) -> list[list[int]]:
    """transformers' own `generate` on ranks whose prompts and answers differ in length."""
    model = build(name)
    ftkit.shard(model, {**SHARDED, "debug": True})
    with mock.patch.object(holding, "usable_host", holding.usable_host if fits else lambda share: (0, "nothing", 0)):
        return by_transformers(model.eval(), runs.rank())


def by_transformers(model: nn.Module, rank: int) -> list[list[int]]:
    ids = torch.tensor([prompts()[rank] * 4])[:, : [10, 3][rank]]
    tokens = [6, 20][rank]
    return model.generate(input_ids=ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0).tolist()


@pytest.mark.quick(2)
@pytest.mark.parametrize(("name", "fits"), [("gpt2", True), ("t5", False), ("llama, LoRA", False), ("gpt2", False)])
def test_transformers_own_generate(world2, name, fits):
    assert world2.run(plainly, name, fits) == [by_transformers(build(name).eval(), rank) for rank in (0, 1)]


CALLS = [
    (1, {"max_new_tokens": 8}, True),
    (1, {"max_length": 8}, True),
    (1, {"max_new_tokens": 9}, False),
    (1, {"max_length": 9}, False),
    (1, {}, False),
    (2, {"max_new_tokens": 3}, False),
    (1, {"max_new_tokens": 3, "num_beams": 2}, False),
]
"""Rows of 4 tokens, settings of a call, and whether weights and cache fit where a cache of 12 tokens does."""


def gathered_by_transformers() -> list[bool]:
    """Whether transformers' `generate` gathers all weights, for each of `CALLS`."""
    model = build("llama").eval()
    units = ftkit.shard(model, {**SHARDED})
    needed = gathered_bytes(units) + holding.cache_bytes(model, 1, 12)
    found = []
    model.model.register_forward_pre_hook(lambda module, args: found.append(units.transfer.whole is not None))
    gathered = []
    for rows, settings, _ in CALLS:
        found.clear()
        ids = torch.ones(rows, 4, dtype=torch.int64)
        greedy = {"use_cache": True, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with mock.patch.object(holding, "usable_host", return_value=(2 * needed, "this node", 0)):
            model.generate(ids, **{**greedy, **settings})
        gathered.append(any(found))
    return gathered


def test_transformers_own_generate_counts_its_cache(world2):
    assert world2.run(gathered_by_transformers) == [[gathered for _, _, gathered in CALLS]] * 2


# --- training, and caches


def trains_generates_trains(name: str, wanted: dict[str, Any] | None) -> list[float]:
    """Losses of steps with answers in between, and of steps without."""
    model = build(name).train()
    units = ftkit.shard(model, {**SHARDED, "debug": True, "update": "deferred", "state": "host"})
    optimizer = ftkit.ShardedAdamW(units, lr=1e-3)
    losses = []
    for step in range(3):
        rows = families.batch("llama", step)
        loss = token_loss(model, rows, families.label_tokens(rows))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if wanted is not None:
            generate_ids(model, prompts(), **wanted)
            assert model.training
    return losses


def test_training_goes_on_after_answers(world2):
    expected = world2.run(trains_generates_trains, "llama", None)
    assert world2.run(trains_generates_trains, "llama", {**SAMPLED, "hold": False}) == expected


def forward_of_rank_0_after_an_update(settings: dict[str, Any]) -> list[Any]:
    """Tokens of forwards that only rank 0 makes, after a step and after another."""
    model = build("llama").train()
    units = ftkit.shard(model, {**SHARDED, **settings})
    optimizer = ftkit.ShardedAdamW(units, lr=1e-2)
    found = []
    for step in range(2):
        rows = families.batch("llama", step)
        token_loss(model, rows, families.label_tokens(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad(), holding.holding(units):
            found.append(model(input_ids=rows["input_ids"]).logits.argmax(-1).tolist() if runs.rank() == 0 else None)
    return found


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_rank_that_makes_no_forward_takes_part_in_the_deferred_update(world2, stage):
    at_once = world2.run(forward_of_rank_0_after_an_update, {"stage": stage})
    assert world2.run(forward_of_rank_0_after_an_update, {"stage": stage, "update": "deferred"}, seconds=30) == at_once


def with_a_cache(hold: bool | str) -> list[bool]:
    """Logits of one text in three calls that share a cache, beside those of one call of the whole model."""
    model, plain = families.build("gemma3").eval(), families.build("gemma3").eval()
    units = ftkit.shard(model, {**SHARDED, "debug": True})
    ids = torch.tensor([prompts()[0] * 3])[:, :12]
    expected, cache, found = plain(input_ids=ids).logits, None, []
    with torch.no_grad():
        for part, wanted in zip(ids.split(4, dim=1), (hold, False, hold)):
            with holding.holding(units, wanted):
                out = model(input_ids=part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits)
    return torch.allclose(torch.cat(found, dim=1), expected, atol=1e-4)


@pytest.mark.parametrize("hold", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_cache_lives_across_calls(world2, hold):
    assert world2.run(with_a_cache, hold) == [True, True]


# --- what fits


def asked(hold: bool | str, fits: bool) -> tuple[bool, str]:
    """Return whether all weights are gathered, and the refusal."""
    units = ftkit.shard(families.build("llama"), {**SHARDED})
    grant = {True: 1 << 40, False: 1000}[fits if runs.rank() == 1 else True]  # one rank decides for all
    memory = mock.patch.object(holding, "usable_host", return_value=(grant, "this node", grant))
    try:
        with memory, holding.holding(units, hold):
            return units.transfer.whole is not None, ""
    except ftkit.UserError as error:
        return False, str(error)


def test_weights_are_gathered_where_they_fit_on_every_rank(world2):
    assert world2.run(asked, "auto", True) == [(True, "")] * 2
    assert world2.run(asked, "auto", False) == [(False, "")] * 2
    assert world2.run(asked, False, True) == [(False, "")] * 2
    for gathered, text in world2.run(asked, True, False):
        assert not gathered
        assert "all weights take 0.00 GiB and the key/value cache 0.00 GiB on rank 1" in text
        assert "its share of host memory (this node) has 0.00 GiB left" in text


def granted() -> str:
    """Return the limit of a grant by number, minus the memory in use, for weights that would fit the node."""
    units = ftkit.shard(families.build("llama"), {**SHARDED, "host_gib": 6.0})
    used = sum(units.comm.all(holding.psutil.Process().memory_info().rss - of_other_ranks()))
    free, source = holding.free_memory(units.comm, units.plan.limits)
    assert free <= (6 * 2**30 - used + 2**26) // 2
    return source


def test_what_was_granted_counts(world2):
    assert world2.run(granted) == ["its share of host memory (memory.host_gib)"] * 2


def bart() -> nn.Module:
    """An encoder-decoder with 32 learned positions on each side."""
    torch.manual_seed(7)
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder")
             for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))}  # fmt: skip
    config = BartConfig(vocab_size=VOCABULARY, d_model=16, max_position_embeddings=32, pad_token_id=0, bos_token_id=1,
                        eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None, **sizes)  # fmt: skip
    return BartForConditionalGeneration(config)


def test_an_answer_is_as_long_as_the_decoders_positions():
    model, wanted = bart(), {"eos_token_ids": [], "pad_token_id": 0}
    assert len(generate_ids(model, [[3, 4]], max_new_tokens=31, **wanted)[0]) == 31
    with pytest.raises(ftkit.UserError, match="asks for 32 more, and the model has 32 positions"):
        generate_ids(model, [[3, 4]], max_new_tokens=32, **wanted)
    with pytest.raises(ftkit.UserError, match="prompt 0 has 33 tokens and asks for 3 more, and the model has 32 positions"):
        generate_ids(model, [[3] * 33], max_new_tokens=3, **wanted)


def test_a_refusal_names_the_prompt_by_its_place_in_the_whole_list():
    with pytest.raises(ftkit.UserError, match="prompt 2 has 30 tokens"):
        generate_ids(families.build("gpt2"), [[3], [3, 4], [4] * 30, [5] * 3], max_new_tokens=9)


# --- texts


def texts(folder: str, shards: bool, wanted: dict[str, Any]) -> list[str]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    if shards:
        ftkit.shard(model, {**SHARDED})
    asked = ["1+1?", "22+22?", "3?"]
    turns = [[{"role": "user", "content": text}] for text in asked]
    answers = generate(model, tokenizer, asked, max_new_tokens=8, **wanted)
    assert answers == generate(model, tokenizer, turns, max_new_tokens=8, **wanted)
    return answers


@contextlib.contextmanager
def as_a_job() -> Iterator[Stop]:
    """Leave the group of the world. The ranks of a command meet at a store of rank 0, on a port that the system chose."""
    rank = runs.rank()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [store.port if store is not None else None]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    joins = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_PORT": str(port[0])}
    with mock.patch.dict(os.environ, joins):
        yield Stop(rank=rank)


def from_the_command_line(folder: str) -> list[str]:
    """What each rank of `ftkit generate --nproc 2` does."""
    with as_a_job() as stop:
        return answers(stop, 2, folder, ["1+1?", "22+22?", "3?"], FROM_SHELL)


FROM_SHELL = {"max_new_tokens": 8, "temperature": 1.0, "top_p": 0.9, "seed": 3}


def test_the_command_answers_alike_with_one_process_and_two(world2, tmp_path):
    make_base(tmp_path / "base")
    alone = answers(Stop(), 1, str(tmp_path / "base"), ["1+1?", "22+22?", "3?"], FROM_SHELL)
    assert len(set(alone)) == 3
    assert world2.run(from_the_command_line, str(tmp_path / "base")) == [alone] * 2
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    adapted.save_pretrained(tmp_path / "adapter")
    other = answers(Stop(), 1, str(tmp_path / "adapter"), ["1+1?", "22+22?", "3?"], FROM_SHELL)
    assert other != alone
    assert world2.run(from_the_command_line, str(tmp_path / "adapter")) == [other] * 2


def test_texts_come_back_in_order_on_all_ranks(world1, world2, tmp_path):
    make_base(tmp_path)
    wanted = {"temperature": 1.0, "seed": 3, "batch_size": 2}
    expected = world1.run(texts, str(tmp_path), False, wanted)[0]
    assert world2.run(texts, str(tmp_path), True, wanted) == [expected] * 2
    assert len(set(expected)) == 3


@pytest.mark.parametrize("prompts", ["hello", [{"role": "user", "content": "hello"}]])
def test_prompts_that_are_no_list_of_them_stop(prompts):
    with pytest.raises(ftkit.UserError, match=r"^prompts: "):
        generate(runs.llama(), None, prompts)


USER = {"role": "user", "content": "1+1?"}


@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["chat template", "none"])
def test_a_turn_that_cannot_be_read_names_the_prompt(tmp_path, template):
    make_base(tmp_path)
    with pytest.raises(ftkit.UserError, match=r"^prompts: number 1: .*has the unknown role 'usr'"):
        generate(runs.llama(), make_tokenizer(tmp_path, template), ["1+1?", [{"role": "usr", "content": "1+1?"}]])


def test_a_prompt_that_the_template_refuses_is_named(tmp_path):
    make_base(tmp_path)
    refusing = "{% for message in messages %}{{ raise_exception('no system turns') }}{% endfor %}"
    with pytest.raises(ftkit.UserError, match=r"^prompts: number 0: .*no system turns"):
        generate(runs.llama(), make_tokenizer(tmp_path, refusing), [[USER]])


@pytest.mark.parametrize(
    ("turns", "same"),
    [
        ([{"from": "human", "value": "1+1?"}], [USER]),
        ([{"role": "human", "content": "1+1?"}], [USER]),
        ([{"role": "user", "content": [{"type": "text", "text": "1+1?"}]}], [USER]),
        ([USER, {"role": "gpt", "content": "2", "weight": 0}, USER], [USER, {"role": "assistant", "content": "2"}, USER]),
    ],
)
def test_turns_of_a_prompt_are_read_as_those_of_rows(tmp_path, turns, same):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(make_base(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    answers = generate(model, tokenizer, [turns, same], max_new_tokens=5)
    assert answers[0] == answers[1]


def test_strings_that_stop_an_answer(tmp_path):
    make_base(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    model.generation_config.eos_token_id = None
    (whole,) = generate_ids(model, [[5, 6]], max_new_tokens=9, eos_token_ids=[], pad_token_id=0)
    stop = next(text for token in whole[1:] if (text := tokenizer.decode([token])).isascii())
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"stop_strings": [stop]}))
    loaded = ftkit.load_model(tmp_path)
    wanted = {"max_new_tokens": 9, "eos_token_ids": [], "pad_token_id": 0}
    first = next(place for place in range(1, 10) if stop in tokenizer.decode(whole[:place]))
    model.generation_config = loaded.generation_config
    assert generate_ids(model, [[5, 6]], tokenizer=tokenizer, **wanted) == [whole[:first]]
    model.generation_config.stop_strings = None
    assert generate_ids(model, [[5, 6]], tokenizer=tokenizer, stop_strings=[stop], **wanted) == [whole[:first]]
    assert len(answers(Stop(), 1, str(tmp_path), ["1+1?"], {"max_new_tokens": 4})) == 1
