"""Rotary embedding, interpreted, compared with fp64 and with the models' own functions."""

from __future__ import annotations

from functools import partial

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

from ftkit.kernels.rotary import rotary, rotary_reference
from tests.kernels.proof import DRAWN, prove

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@st.composite
def heads(draw: st.DrawFn) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Draw q and k (B, H, T, D) in the layouts of projections, and cos and sin (B or 1, T, R)."""
    batch, tokens = draw(st.integers(0, 3)), draw(st.integers(0, 5))
    half = draw(st.integers(1, 9))
    width = 2 * half + draw(st.sampled_from([0, 0, 3, 8]))
    dtype = draw(st.sampled_from(DTYPES))
    chance = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def some(number: int) -> Tensor:
        """In one of three layouts: tokens first, heads first, or a third of one projection's output."""
        shape = (batch, tokens, number, width)
        how = draw(st.sampled_from(["tokens first", "heads first", "third"]))
        if how == "third":
            return torch.randn((*shape[:3], 3 * width), generator=chance).to(dtype).transpose(1, 2)[..., width : 2 * width]
        found = torch.randn(shape, generator=chance).to(dtype).transpose(1, 2)
        return found.contiguous() if how == "heads first" else found

    angles = torch.randn(draw(st.sampled_from([1, batch])), tokens, 2 * half, generator=chance) * 3
    cast = draw(st.sampled_from([dtype, torch.float32]))
    leaves = {"q": some(draw(st.integers(1, 6))), "k": some(draw(st.integers(1, 3)))}
    return leaves, {"cos": angles.cos().to(cast), "sin": angles.sin().to(cast)}


def turned(function, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else cos.dtype
    return function(q, k, cos.to(wide), sin.to(wide))


@hypothesis.settings(max_examples=30)
@hypothesis.given(drawn=heads())
def test_as_exact_as_pytorch(drawn: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    leaves, angles = drawn
    prove(partial(turned, rotary, **angles), partial(turned, rotary_reference, **angles), leaves, roundings=DRAWN)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_of_real_models(dtype: torch.dtype) -> None:
    q, k = (torch.randn(2, 7, heads, 128).to(dtype).transpose(1, 2) for heads in (40, 8))
    angles = torch.randn(2, 7, 128)
    how = {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}
    prove(partial(turned, rotary, **how), partial(turned, rotary_reference, **how), {"q": q, "k": k})


@pytest.mark.parametrize(("module", "part"), [(modeling_llama, 1.0), (modeling_gpt_neox, 0.25)])
def test_as_the_models_turn(module, part: float) -> None:
    q, k = torch.randn(2, 4, 5, 32), torch.randn(2, 2, 5, 32)
    angles = torch.randn(1, 5, int(32 * part))
    for ours, theirs in zip(
        rotary(q, k, angles.cos(), angles.sin()), module.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    ):
        torch.testing.assert_close(ours, theirs)
