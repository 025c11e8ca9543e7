"""RMSNorm, interpreted, compared with fp64."""

from __future__ import annotations

from functools import partial

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from ftkit.kernels.rms_norm import CASTINGS, rms_norm, rms_norm_reference
from tests.kernels.proof import DRAWN, prove

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Tensor]:
    """Draw x (..., N) and a weight (N,), of any dtypes and strides."""
    columns = draw(st.integers(3, 70) | st.just(0))  # with fewer, backward is all cancellation: see below
    shape = [*draw(st.lists(st.integers(0, 4), max_size=2)), columns]
    dtype = draw(st.sampled_from(DTYPES))
    chance = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x = (torch.randn(shape, generator=chance) * draw(st.sampled_from([0.01, 1.0, 50.0]))).to(dtype)
    if len(shape) > 1 and draw(st.booleans()):
        x = x.transpose(0, 1).contiguous().transpose(0, 1)  # as attention returns it
    weight = (1 + torch.randn(shape[-1], generator=chance) / 5).to(draw(st.sampled_from([dtype, torch.float32])))
    return {"x": x, "weight": weight}


@hypothesis.settings(max_examples=60)
@hypothesis.given(leaves=rows(), casting=st.sampled_from(CASTINGS), offset=st.sampled_from([0.0, 1.0]))
def test_as_exact_as_pytorch(leaves: dict[str, Tensor], casting: str, offset: float) -> None:
    settings = {"eps": 1e-6, "casting": casting, "offset": offset}
    prove(partial(rms_norm, **settings), partial(rms_norm_reference, **settings), leaves, roundings=DRAWN)


def test_rows_of_one_element() -> None:
    """Their gradient is the difference of two equal numbers: as large as one rounding of them."""
    x, weight = torch.tensor([[0.3], [-2.0], [0.0]], requires_grad=True), torch.tensor([1.5], requires_grad=True)
    y = rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(y, 1.5 * x.detach() * torch.rsqrt(x.detach() ** 2 + 1e-5))
    y.sum().backward()
    exact = 1.5 * 1e-5 * torch.rsqrt(x.detach().double() ** 2 + 1e-5) ** 3
    torch.testing.assert_close(x.grad.double(), exact, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("columns", [4096, 5120, 16384])
def test_sizes_of_real_models(columns: int) -> None:
    x, weight = torch.randn(3, columns), torch.randn(columns)
    prove(partial(rms_norm, eps=1e-5), partial(rms_norm_reference, eps=1e-5), {"x": x.half(), "weight": weight.half()})
