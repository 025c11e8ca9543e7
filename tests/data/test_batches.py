"""Packing, the order of samples, and batches of tensors."""

import itertools

import accelerate.data_loader
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from ftkit.data.batches import Collator, StepOrder
from ftkit.data.packing import best_fit, check_isolation
from ftkit.errors import UserError


def test_best_fit_keeps_every_sample_once_and_fills_well():
    lengths = np.random.RandomState(0).randint(1, 65, 500).tolist()
    sequences = best_fit(lengths, 64, seed=3)
    assert sorted(number for members in sequences for number in members) == list(range(500))
    assert max(sum(lengths[number] for number in members) for members in sequences) <= 64
    assert sum(lengths) / (64 * len(sequences)) > 0.97
    assert sequences == best_fit(lengths, 64, seed=3)
    assert sequences != best_fit(lengths, 64, seed=4)


def test_packed_sequences(ready, tokenizer_of):
    rows = [{"text": "the" + " cat" * count} for count in (1, 2, 3, 4)]
    prepared = ready(rows, tokenizer_of(), sequence_tokens=9, packing=True)
    assert prepared.train.column_names == ["input_ids", "labels", "position_ids", "place"]
    for sequence in prepared.train:
        starts = [at for at, position in enumerate(sequence["position_ids"]) if position == 0]
        assert [at for at, label in enumerate(sequence["labels"]) if label == -100] == starts
        for start, stop in zip(starts, [*starts[1:], len(sequence["labels"])]):
            assert sequence["position_ids"][start:stop] == list(range(stop - start))
            assert sequence["labels"][start + 1 : stop] == sequence["input_ids"][start + 1 : stop]
    assert prepared.report.sequences == len(prepared.train) == 2
    assert prepared.report.packing_efficiency == 1.0


def tiny_llama(attention="sdpa"):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=340,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    config._attn_implementation = attention
    return LlamaForCausalLM(config)


def token_losses(model, batch):
    """Loss of each token that is trained on, in order; (number of trained tokens,)."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs).logits[:, :-1].flatten(0, 1)
    labels = batch["labels"][:, 1:].flatten()
    losses = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    return losses[labels != -100]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_samples_do_not_see_each_other(ready, tokenizer_of, attention):
    tokenizer, model = tokenizer_of(), tiny_llama(attention)
    assert model.config.use_cache, "the collator must turn the cache off by itself"
    rows = [{"text": text} for text in ("the cat sat", "on the mat", "the dog sat on", "user the cat", "the")]
    collate = Collator.of(tokenizer)
    packed = ready(rows, tokenizer, sequence_tokens=10, packing=True).train
    assert len(packed) == 2
    assert len({len(sequence["input_ids"]) for sequence in packed}) == 2, "one row must be padded"
    batch = collate(list(packed))
    assert batch["input_ids"].shape == (2, 10)
    alone = ready(rows, tokenizer, sequence_tokens=10).train
    separate = torch.cat([token_losses(model, collate([sample])) for sample in alone])
    together = token_losses(model, batch)
    torch.testing.assert_close(together.sort().values, separate.sort().values, atol=2e-5, rtol=1e-5)
    loss = model(**batch).loss
    torch.testing.assert_close(loss, separate.mean(), atol=2e-5, rtol=1e-5)

    # Another first sample in the first row: no loss of any other sample moves.
    first_tokens = packed[0]["position_ids"].index(0, 1)
    changed = {name: value.clone() if torch.is_tensor(value) else value for name, value in batch.items()}
    changed["input_ids"][0, :first_tokens] = 77
    trained_in_first = int((batch["labels"][0, :first_tokens] != -100).sum())
    moved = token_losses(model, changed)
    assert (moved[:trained_in_first] - together[:trained_in_first]).abs().max() > 0.01
    torch.testing.assert_close(moved[trained_in_first:], together[trained_in_first:], atol=1e-6, rtol=1e-6)


def test_families_that_let_samples_see_each_other_are_refused():
    model = tiny_llama().train()
    check_isolation(model, Collator(0))
    assert model.training
    config = OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=32
    )
    with pytest.raises(UserError, match=r"data.packing: opt with .* attention does not keep packed samples apart"):
        check_isolation(OPTForCausalLM(config), Collator(0))


def test_the_collator_pads_to_the_longest():
    collate = Collator(pad_token_id=9)
    batch = collate([{"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "source": 1}, {"input_ids": [4], "labels": [-100]}])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 2, 3], [-100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert set(batch) == {"input_ids", "labels", "attention_mask"}
    packed = [{"input_ids": [1, 2, 3], "labels": [-100, 2, -100], "position_ids": [0, 1, 0]}]
    batch = collate([*packed, {"input_ids": [1], "labels": [-100], "position_ids": [0]}])
    assert batch["position_ids"].tolist() == [[0, 1, 0], [0, 0, 1]]
    assert batch["use_cache"] is False
    assert "attention_mask" not in batch


def test_the_padding_token(tokenizer_of):
    assert Collator.of(tokenizer_of()).pad_token_id == tokenizer_of().eos_token_id
    assert Collator.of(tokenizer_of(pad_token="<|im_start|>")).pad_token_id == 2
    with pytest.raises(UserError, match=r"neither a padding nor"):
        Collator.of(tokenizer_of(eos_token=None))


def test_the_order_is_a_function_of_seed_and_epoch():
    order = StepOrder(20, seed=17)
    first, again = list(order), list(StepOrder(20, seed=17))
    assert first == again
    assert first == [0, 11, 2, 7, 13, 9, 3, 5, 17, 4, 15, 16, 6, 14, 10, 19, 12, 8, 1, 18], "resuming needs it frozen"
    assert sorted(first) == list(range(20))
    order.set_epoch(1)
    assert list(order) != first
    assert sorted(order) == list(range(20))
    assert list(StepOrder(20, seed=18)) != first
    assert list(StepOrder(20, seed=17 + 2**32)) != first
    assert len(order) == 20


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_a_step_has_the_same_samples_on_any_number_of_ranks(world_size):
    global_batch, micro_batch = 6, 6 // world_size
    order = StepOrder(24, seed=5)
    order.set_epoch(2)
    expected = [sorted(list(order)[start : start + global_batch]) for start in range(0, 24, global_batch)]
    ranks = []
    for rank in range(world_size):
        batches = torch.utils.data.BatchSampler(order, micro_batch, drop_last=False)
        ranks.append(list(accelerate.data_loader.BatchSamplerShard(batches, world_size, rank)))
    assert [sorted(itertools.chain(*batches)) for batches in zip(*ranks)] == expected


def test_weights_are_shares_of_the_samples():
    sources = [0] * 900 + [1] * 100
    order = StepOrder(1000, seed=3, sources=sources, weights=[1, 3])
    drawn = np.asarray(list(order))
    assert len(drawn) == len(order) == 1000
    small = drawn[drawn >= 900]
    assert len(small) == 750
    assert set(np.bincount(small - 900).tolist()) == {7, 8}
    assert len(set(drawn[drawn < 900].tolist())) == 250
    order.set_epoch(1)
    assert set(order) != set(drawn.tolist())
    assert list(StepOrder(1000, seed=3, sources=sources, weights=[1, 3])) == drawn.tolist()
    thirds = list(StepOrder(10, seed=3, sources=[0, 1, 1, 1, 1, 2, 2, 2, 2, 2], weights=[1, 1, 1]))
    shares = (thirds.count(0), sum(1 <= number < 5 for number in thirds), sum(number >= 5 for number in thirds))
    assert shares == (4, 3, 3)
