"""Activations, interpreted, beside fp64."""

from __future__ import annotations

from functools import partial

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from ftkit.kernels.activation import ACTIVATIONS, activation, activation_reference
from tests.kernels.proof import DRAWN, prove

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@st.composite
def leaves(draw: st.DrawFn) -> dict[str, Tensor]:
    """Draw x (..., N) of any strides, and perhaps a bias (N,)."""
    shape = [*draw(st.lists(st.integers(0, 4), max_size=2)), draw(st.integers(0, 60))]
    dtype, chance = draw(st.sampled_from(DTYPES)), torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x = (torch.randn([*shape[:-1], 2 * shape[-1]], generator=chance) * draw(st.sampled_from([0.1, 1.0, 6.0]))).to(dtype)
    x = x[..., : shape[-1]] if draw(st.booleans()) else x[..., : shape[-1]].contiguous()
    return {"x": x} | ({"bias": torch.randn(shape[-1], generator=chance).to(dtype)} if draw(st.booleans()) else {})


@hypothesis.settings(max_examples=50)
@hypothesis.given(found=leaves(), kind=st.sampled_from(ACTIVATIONS))
def test_as_exact_as_pytorch(found: dict[str, Tensor], kind: str) -> None:
    if kind == "relu" and "bias" in found:  # a sum that rounding takes to 0 has another slope
        del found["bias"]
    prove(partial(activation, activation=kind), partial(activation_reference, activation=kind), found, roundings=DRAWN)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_sizes_that_average_chance_out(kind: str, dtype: torch.dtype) -> None:
    found = {"x": (torch.randn(16, 2100) * 3).to(dtype)}
    if kind != "relu":
        found["bias"] = torch.randn(2100).to(dtype)
    prove(partial(activation, activation=kind), partial(activation_reference, activation=kind), found)


def test_relu_with_a_bias() -> None:
    x, bias = torch.tensor([[-1.0, 2.0], [0.5, -3.0]], requires_grad=True), torch.tensor([0.5, 1.5], requires_grad=True)
    y = activation(x, "relu", bias)
    y.sum().backward()
    assert y.tolist() == [[0.0, 3.5], [1.0, 0.0]]
    assert x.grad.tolist() == [[0.0, 1.0], [1.0, 0.0]]
    assert bias.grad.tolist() == [1.0, 1.0]
