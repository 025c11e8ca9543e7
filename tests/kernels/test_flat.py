"""What is done to flat shards, interpreted: AdamW, and the squared norm with its finite check."""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from ftkit.kernels.adamw import AdamW, adamw_, adamw_reference
from ftkit.kernels.squared_norm import BLOCK, ROUNDS, squared_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HOW = AdamW(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, scale=0.25)


def shards(numel: int, gradient: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Return a gradient, master weights and two moments."""
    chance = torch.Generator().manual_seed(seed)
    g, p, m, v = (torch.randn(numel, generator=chance) for _ in range(4))
    return [g.to(gradient), p, m / 10, v.square() / 100]


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    numel=st.sampled_from([0, 1, 1023, 1024, 1025, 3000]),
    gradient=st.sampled_from(DTYPES),
    weight=st.sampled_from([None, *DTYPES]),
    step=st.sampled_from([1, 2, 1000]),
    seed=st.integers(0, 99),
)
def test_adamw_as_exact_as_pytorch(
    numel: int, gradient: torch.dtype, weight: torch.dtype | None, step: int, seed: int
) -> None:
    how = replace(HOW, step=step)
    ours, plain = shards(numel, gradient, seed), shards(numel, gradient, seed)
    exact = [each.double() for each in shards(numel, gradient, seed)]
    written = None if weight is None else torch.full((numel,), math.nan, dtype=weight)
    adamw_(*ours, written, how)
    adamw_reference(*plain, None, how)
    adamw_reference(*exact, None, how)
    for name, mine, theirs, truth in zip(("master", "m", "v"), ours[1:], plain[1:], exact[1:]):
        if numel:
            off, allowed = ((each.double() - truth).abs().max().item() for each in (mine, theirs))
            assert off <= 2 * allowed + 2**-23 * truth.abs().max().item(), name
    if written is not None:
        torch.testing.assert_close(written, ours[1].to(weight), rtol=2**-7 if weight == torch.bfloat16 else 0, atol=0)


def test_adamw_as_torch_does_it() -> None:
    torch.manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(700))
    master, m, v = theirs.detach().clone(), torch.zeros(700), torch.zeros(700)
    optimizer = torch.optim.AdamW([theirs], lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(1, 6):
        gradient = torch.randn(700)
        theirs.grad = gradient * 0.25
        optimizer.step()
        adamw_(gradient, master, m, v, None, replace(HOW, step=step))
    torch.testing.assert_close(master, theirs.detach(), rtol=1e-5, atol=1e-7)


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    numel=st.sampled_from([0, 1, BLOCK, BLOCK * ROUNDS - 1, BLOCK * ROUNDS + 1]),
    dtype=st.sampled_from(DTYPES),
    spoiled=st.sampled_from([None, math.inf, -math.inf, math.nan]),
    seed=st.integers(0, 99),
)
def test_squared_norm(numel: int, dtype: torch.dtype, spoiled: float | None, seed: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if spoiled is not None and numel:
        x[seed * numel // 100] = spoiled
    squares, finite = squared_norm(x)
    assert squares.dtype == torch.float64
    assert finite.item() is (spoiled is None or not numel)
    if finite:
        assert squares.item() == pytest.approx(x.double().square().sum().item(), rel=1e-6)


def test_numbers_whose_squares_are_not_finite_are() -> None:
    squares, finite = squared_norm(torch.tensor([1e30, 1.0]))
    assert (squares.item(), finite.item()) == (math.inf, True)
