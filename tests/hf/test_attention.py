"""Packed attention: the same as samples alone, for what models ask of it; and the probe that finds a leak."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkit.data.batches import Collator
from ftkit.data.packing import boundaries_of, check_isolation
from ftkit.errors import UserError
from ftkit.hf.kernels import attention as module
from ftkit.hf.kernels import varlen
from ftkit.hf.kernels.attention import use_packed_attention
from ftkit.hf.kernels.varlen import attend
from tests import fusible

PACKS = sorted(set(fusible.FAMILIES) - {"falcon3", "gemma2", "gpt2", "opt", "t5", "t5-gated"})
LENGTHS = [[3, 6, 2], [9], [1, 1, 7]]


def samples(lengths: list[int], seed: int) -> list[dict[str, list[int]]]:
    chance = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(3, fusible.VOCABULARY, (length,), generator=chance).tolist() for length in lengths]
    return [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in drawn]


def packed(parts: list[dict[str, list[int]]]) -> dict[str, list[int]]:
    joined = {key: [value for part in parts for value in part[key]] for key in ("input_ids", "labels")}
    return {**joined, "position_ids": [place for part in parts for place in range(len(part["input_ids"]))]}


def token_losses(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the losses of all label tokens, in order."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    logits, labels = model(**inputs).logits[:, :-1], batch["labels"][:, 1:]
    return torch.nn.functional.cross_entropy(logits[labels != -100], labels[labels != -100], reduction="none")


def with_attention(name: str) -> torch.nn.Module:
    model = fusible.build(name)
    assert use_packed_attention(model)
    return model


@pytest.mark.parametrize("name", fusible.families(PACKS))
def test_packed_samples_have_the_losses_and_gradients_they_have_alone(name: str) -> None:
    ours, plain = with_attention(name), fusible.build(name)
    parts = [samples(lengths, seed) for seed, lengths in enumerate(LENGTHS)]
    batch = Collator(0, boundaries=True)([packed(each) for each in parts])
    assert batch["attention_mask"].dtype == torch.int32
    together = token_losses(ours, batch)
    alone = torch.cat([token_losses(plain, Collator(0)([part])) for each in parts for part in each])
    torch.testing.assert_close(together, alone, atol=2e-5, rtol=1e-5)
    together.sum().backward()
    alone.sum().backward()
    theirs = dict(plain.named_parameters())
    for key, parameter in ours.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, theirs[key].grad, atol=2e-4, rtol=1e-3, msg=f"{key}: {{}}".format)


@pytest.mark.parametrize("name", fusible.families(PACKS))
def test_what_is_not_packed_goes_on_as_before(name: str) -> None:
    ours, plain = with_attention(name).eval(), fusible.build(name).eval()
    batch = Collator(0)([samples([length], length)[0] for length in (9, 4, 6)])
    torch.testing.assert_close(token_losses(ours, batch), token_losses(plain, batch), atol=2e-5, rtol=1e-5)
    ids = batch["input_ids"][:1]
    made = [model.generate(ids, max_new_tokens=5, do_sample=False, use_cache=True) for model in (ours, plain)]
    assert torch.equal(*made)
    positions = Collator(0)([packed(samples([4, 5], 0))])  # without boundaries transformers' own mask keeps them apart
    torch.testing.assert_close(token_losses(ours, positions), token_losses(plain, positions), atol=2e-5, rtol=1e-5)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any),
    groups=st.sampled_from([1, 2]),
    window=st.sampled_from([None, 1, 3]),
    seed=st.integers(0, 99),
)
def test_the_loop_beside_fp64(lengths: list[int], groups: int, window: int | None, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    tokens, heads = sum(lengths), 4
    query = torch.randn(tokens, heads, 8, generator=chance)
    key, value = (torch.randn(tokens, heads // groups, 8, generator=chance) for _ in range(2))
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    found = attend(query, key, value, ends, max(lengths), window=window)
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(tokens)
    seen = (sample[:, None] == sample) & (place[:, None] >= place) & (place[:, None] - place < (window or tokens + 1))
    wide = [each.double().repeat_interleave(heads // each.shape[1], 1).transpose(0, 1) for each in (query, key, value)]
    scores = wide[0] @ wide[1].transpose(1, 2) * 8**-0.5
    exact = (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ wide[2]).transpose(0, 1)
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-4)


def test_boundaries() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5], [2, 3, 0, 1, 2, 3]])
    assert boundaries_of(positions).view(3, -1).tolist() == [[0, 3, 5, 6], [0, 6, 6, 6], [0, 2, 6, 6]]


def test_the_kernel_of_a_gpu() -> None:
    query = mock.Mock(is_cuda=True, dtype=torch.float16, shape=(4, 2, 8))
    narrow = mock.Mock(shape=(4, 2, 4))
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(7, 0)):
        assert varlen.kernel_for(query, query, 0.0) == "efficient"
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)):
        assert varlen.kernel_for(query, query, 0.0) == "flash"
        assert varlen.kernel_for(query, query, 0.1) == "efficient"
        assert varlen.kernel_for(query, narrow, 0.0) == "efficient"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_kernel_that_looks_past_a_boundary_is_found(name: str) -> None:
    model, collate = with_attention(name), Collator(0, boundaries=True)
    check_isolation(model, collate)
    assert model.training

    def broken(*args, **kwargs):
        """Look past the end of the sample before."""
        ends = args[3]
        return attend(*args[:3], torch.cat([ends[:1], ends[2:]]) if len(ends) > 2 else ends, *args[4:], **kwargs)

    refusal = rf"{model.config.model_type} with ftkit attention does not keep packed samples"
    with mock.patch.object(module, "attend", broken), pytest.raises(UserError, match=refusal):
        check_isolation(model, collate)


def test_a_saved_model_does_not_ask_for_our_attention(tmp_path: Path) -> None:
    model = with_attention("llama")
    model.save_pretrained(tmp_path)
    assert "ftkit" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    copy.deepcopy(model)


def test_windows_that_a_family_says_in_its_mask_alone() -> None:
    sizes = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    how = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0, **sizes}
    build = fusible._decoder("Qwen2Moe", **how)
    torch.manual_seed(0)
    ours = build().eval()
    assert use_packed_attention(ours)
    parts = samples([9, 7], 0)
    together = token_losses(ours, Collator(0, boundaries=True)([packed(parts)]))
    alone = torch.cat([token_losses(ours, Collator(0)([part])) for part in parts])
    torch.testing.assert_close(together, alone, atol=2e-5, rtol=1e-5)


def test_heads_whose_values_are_narrower() -> None:
    query, key, value = torch.randn(7, 4, 8), torch.randn(7, 4, 8), torch.randn(7, 4, 6)
    found = attend(query, key, value, torch.tensor([0, 3, 7], dtype=torch.int32), 7)
    assert found.shape == (7, 4, 6)


def test_chunks_and_position_biases_are_refused_for_packed_samples() -> None:
    module_ = torch.nn.Module()
    query = torch.randn(1, 2, 4, 8)
    ends = torch.tensor([[[[0, 2, 4]]]], dtype=torch.int32)
    with pytest.raises(ValueError, match="without a position bias"):
        module.attention(module_, query, query, query, ends, position_bias=torch.zeros(1, 2, 4, 4))
    module_.config = mock.Mock(layer_types=["chunked_attention"], sliding_window=None)
    module_.layer_idx = 0
    with pytest.raises(ValueError, match="attends within chunks"):
        module.attention(module_, query, query, query, ends)


def test_families_that_transformers_does_not_run_by_sdpa_keep_their_own() -> None:
    model = fusible.build("llama")
    type(model)._supports_sdpa, before = False, type(model)._supports_sdpa
    try:
        assert not use_packed_attention(model)
        assert model.config._attn_implementation == "sdpa"
    finally:
        type(model)._supports_sdpa = before


def test_a_window_counts_in_backward_too() -> None:
    """torch's own derivative of its memory-efficient attention leaves it out; only its shapes can be run here."""
    leaves = [torch.randn(20, 2, 8, device="meta", requires_grad=True) for _ in range(3)]
    seen = {}

    class Noted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "efficient_attention" in str(function):
                seen[str(function)] = dict(kwargs or {})
            if "attention_backward" in str(function):  # torch's own shapes of it take other arguments than it does
                return (*(torch.empty_like(each) for each in args[1:4]), torch.empty(0, device="meta"))
            return function(*args, **(kwargs or {}))

    ends = torch.tensor([0, 12, 20], dtype=torch.int32)
    with Noted():
        attend(*leaves, ends, 20, window=4, scale=0.5, kernel="efficient").sum().backward()
    assert len(seen) == 2
    assert all(each == {"scale": 0.5, "window_size": 4} for each in seen.values())
