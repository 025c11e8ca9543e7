"""The chooser: the fastest way that fits, what is forced stays forced, and a refusal has the numbers."""

from __future__ import annotations

import pytest

from ftkit.errors import UserError
from ftkit.plan.memory import GIB, WAYS, Shape, choose, expected_bytes

LLAMA_13B = Shape(
    numel=13_016_000_000,
    trainable_numel=13_016_000_000,
    widest_numel=317_000_000,
    leaf_numel=163_840_000,
    blocks=40,
    hidden=5120,
    vocabulary=32000,
    tokens=2048,
    itemsize=2,
    world_size=8,
)


def test_states_follow_the_zero_papers_bytes() -> None:
    small = Shape(**{**vars(LLAMA_13B), "tokens": 0, "widest_numel": 0, "leaf_numel": 0, "world_size": 4})
    numel = small.numel
    per_stage = [16 * numel, 4 * numel + 12 * numel // 4, 2 * numel + 14 * numel // 4, 16 * numel // 4]
    for stage, expected in enumerate(per_stage):
        assert expected_bytes(small, stage, "recompute", "free") == pytest.approx(expected, rel=1e-6)


def test_more_memory_buys_a_faster_way() -> None:
    chosen = [choose(LLAMA_13B, gib * GIB) for gib in (200, 70, 36)]
    ranks = [WAYS.index((c.stage, c.activations, c.weights)) for c in chosen]
    assert ranks == sorted(ranks)
    assert ranks[0] == 0
    assert all(c.expected_bytes <= gib * GIB for c, gib in zip(chosen, (200, 70, 36)))


def test_what_is_forced_stays() -> None:
    choice = choose(LLAMA_13B, 200 * GIB, stage=3, activations="recompute")
    assert (choice.stage, choice.activations) == (3, "recompute")
    whole = choose(LLAMA_13B, 1 * GIB, stage=0, activations="keep", weights="hold")
    assert (whole.stage, whole.activations, whole.weights) == (0, "keep", "hold")


def test_the_refusal_says_what_is_needed_and_what_to_change() -> None:
    with pytest.raises(UserError, match=r"does not fit: 2\d\.\d GiB a rank needed at stage 3 .* 14\.5 GiB granted"):
        choose(LLAMA_13B, int(14.5 * GIB))


def test_an_adapter_fits_where_the_whole_model_does_not() -> None:
    lora = Shape(**{**vars(LLAMA_13B), "trainable_numel": 62_000_000})
    assert choose(lora, int(14.5 * GIB)).stage == 3
