"""Gated activations, interpreted, compared with fp64."""

from __future__ import annotations

from functools import partial

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from ftkit.kernels.gated import ACTIVATIONS, gated, gated_reference
from tests.kernels.proof import DRAWN, prove

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Draw gate and up (..., N), of any strides: two tensors, halves of one, transposed."""
    shape = [*draw(st.lists(st.integers(0, 3), max_size=2)), draw(st.integers(0, 60))]
    dtype, spread = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([0.1, 1.0, 6.0]))
    chance = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    both = torch.randn([*shape[:-1], 2 * shape[-1]], generator=chance).mul(spread).to(dtype)
    gate, up = both.chunk(2, -1)
    how = draw(st.sampled_from(["halves", "apart", "transposed"]))
    if how == "apart":
        return gate.contiguous(), up.contiguous()
    if how == "transposed":
        return (x.transpose(0, -1).contiguous().transpose(0, -1) for x in (gate, up))
    return gate, up


@hypothesis.settings(max_examples=40)
@hypothesis.given(drawn=pairs(), activation=st.sampled_from(ACTIVATIONS))
def test_as_exact_as_pytorch(drawn: tuple[Tensor, Tensor], activation: str) -> None:
    gate, up = drawn
    leaves, how = {"gate": gate, "up": up}, {"activation": activation}
    prove(partial(gated, **how), partial(gated_reference, **how), leaves, roundings=DRAWN)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_sizes_that_average_chance_out(activation: str, dtype: torch.dtype) -> None:
    leaves = {"gate": (torch.randn(16, 700) * 3).to(dtype), "up": torch.randn(16, 700).to(dtype)}
    prove(partial(gated, activation=activation), partial(gated_reference, activation=activation), leaves)


def test_halves_of_one_tensor_and_rows_longer_than_a_block() -> None:
    both = torch.randn(3, 2, 2 * 5000).half()
    gate, up = both.chunk(2, -1)
    torch.testing.assert_close(gated(gate, up), gated_reference(gate.float(), up.float()).half(), rtol=2e-3, atol=1e-4)


def test_large_inputs_stay_finite() -> None:
    gate = torch.tensor([-60000.0, -90.0, 90.0, 60000.0], requires_grad=True)
    for activation in ACTIVATIONS:
        gate.grad = None
        y = gated(gate, torch.ones(4), activation)
        y.sum().backward()
        assert y.tolist() == [0.0, 0.0, 90.0, 60000.0] or torch.allclose(y, gate.clamp(min=0.0).detach(), atol=1e-30)
        assert gate.grad.tolist() == pytest.approx([0.0, 0.0, 1.0, 1.0], abs=1e-30)
