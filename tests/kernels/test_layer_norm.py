"""LayerNorm, interpreted, beside fp64."""

from __future__ import annotations

from functools import partial

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from ftkit.kernels.layer_norm import layer_norm, layer_norm_reference
from tests.kernels.proof import DRAWN, prove

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@st.composite
def leaves(draw: st.DrawFn) -> dict[str, Tensor]:
    """Draw x (..., N) of any strides, a weight (N,), perhaps a bias (N,) and a residual like x, of one dtype."""
    columns = draw(st.integers(3, 70) | st.just(0))  # of fewer, backward is all cancellation
    shape = [*draw(st.lists(st.integers(0, 4), max_size=2)), columns]
    chance = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    spread = draw(st.sampled_from([0.1, 1.0, 50.0]))
    found = {"x": torch.randn(shape, generator=chance) * spread + draw(st.sampled_from([0.0, 2.0])) * spread}
    found["weight"] = 1 + torch.randn(columns, generator=chance) / 5
    if draw(st.booleans()):
        found["bias"] = torch.randn(columns, generator=chance)
    if draw(st.booleans()):
        found["residual"] = torch.randn(shape, generator=chance) * spread
    dtype = draw(st.sampled_from(DTYPES))
    found = {name: value.to(dtype) for name, value in found.items()}
    if len(shape) > 1 and draw(st.booleans()):
        found["x"] = found["x"].transpose(0, 1).contiguous().transpose(0, 1)
    return found


def with_or_without_bias(function, x, weight, bias=None, residual=None):
    return function(x, weight, bias, 1e-5, residual=residual)


def proved(found: dict[str, Tensor], **how: int) -> None:
    prove(partial(with_or_without_bias, layer_norm), partial(with_or_without_bias, layer_norm_reference), found, **how)


@hypothesis.settings(max_examples=60)
@hypothesis.given(found=leaves())
def test_as_exact_as_pytorch(found: dict[str, Tensor]) -> None:
    proved(found, roundings=DRAWN)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [768, 5120])
def test_sizes_of_real_models(columns: int, dtype: torch.dtype) -> None:
    found = {"x": torch.randn(3, columns), "weight": torch.randn(columns), "bias": torch.randn(columns)}
    proved({name: value.to(dtype) for name, value in found.items()})


def test_a_mean_far_from_zero_does_not_cancel() -> None:
    x = (torch.randn(4, 512) + 1000).requires_grad_()
    y, total = layer_norm(x, torch.ones(512), None, 1e-5)
    assert total is x
    torch.testing.assert_close(y.double(), layer_norm_reference(x.double(), None, None, 1e-5)[0], rtol=0, atol=2e-4)
