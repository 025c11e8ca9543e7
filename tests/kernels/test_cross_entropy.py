"""Cross-entropy, of logits and of a head's chunks, interpreted and in PyTorch, beside fp64."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from ftkit.kernels import cross_entropy as module
from ftkit.kernels import linear_cross_entropy as head_module
from ftkit.kernels.cross_entropy import cross_entropy, cross_entropy_reference, losses_of
from ftkit.kernels.launch import KernelError
from ftkit.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from tests.kernels.proof import DRAWN, prove

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@st.composite
def settings(draw: st.DrawFn) -> dict[str, float]:
    """Draw what a loss may have."""
    cap, smoothing = draw(st.sampled_from([0.0, 5.0])), draw(st.sampled_from([0.0, 0.1]))
    return {"smoothing": smoothing, "cap": cap, "z_weight": draw(st.sampled_from([0.0, 1e-3]))}


@st.composite
def tasks(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw logits (R, V) and labels (R,), some of them ignored."""
    rows, columns = draw(st.integers(0, 5)), draw(st.integers(1, 40))
    chance = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    logits = (torch.randn(rows, columns, generator=chance) * draw(st.sampled_from([0.1, 3.0, 30.0]))).to(
        draw(st.sampled_from(DTYPES))
    )
    labels = torch.randint(0, columns, (rows,), generator=chance)
    return logits, labels.where(torch.rand(rows, generator=chance) < 0.7, -100)


def of_a_copy(logits: torch.Tensor, **how: Any) -> torch.Tensor:
    """The kernel overwrites what it is given."""
    return cross_entropy(logits * 1.0, **how)


@pytest.mark.parametrize("interpreted", [True, False])
@hypothesis.settings(max_examples=40)
@hypothesis.given(task=tasks(), how=settings())
def test_as_exact_as_pytorch(interpreted: bool, task: Any, how: dict[str, float]) -> None:
    logits, labels = task
    how = {**how, "labels": labels}
    with mock.patch.object(module, "use_triton", return_value=interpreted):
        prove(partial(of_a_copy, **how), partial(cross_entropy_reference, **how), {"logits": logits}, roundings=DRAWN)


@pytest.mark.parametrize("columns", [8192, 8193, 262144])
def test_rows_of_many_blocks(columns: int) -> None:
    logits, labels = torch.randn(2, columns) * 4, torch.tensor([columns - 1, 0])
    how = {"labels": labels, "smoothing": 0.1, "z_weight": 1e-4}
    prove(partial(of_a_copy, **how), partial(cross_entropy_reference, **how), {"logits": logits})


def test_the_gradient_takes_the_place_of_the_logits() -> None:
    leaf = torch.randn(3, 50, requires_grad=True)
    logits = leaf * 1.0
    loss = cross_entropy(logits, torch.tensor([1, -100, 49]))
    loss.sum().backward()
    assert torch.equal(logits, leaf.grad)
    assert loss[1] == 0
    assert not leaf.grad[1].any()
    wide = (leaf.detach().double() * 1.0).requires_grad_()
    torch.nn.functional.cross_entropy(wide, torch.tensor([1, -100, 49]), reduction="sum").backward()
    torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=1e-5, atol=1e-7)


def test_logits_that_were_changed_meanwhile_are_noticed() -> None:
    logits = torch.randn(2, 8, requires_grad=True) * 1.0
    loss = cross_entropy(logits, torch.tensor([1, 2])).sum()
    with torch.no_grad():
        logits.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@st.composite
def heads(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Draw hidden (R, H), weight (V, H), perhaps a bias (V,), and labels (R,)."""
    rows, width, columns = draw(st.integers(0, 9)), draw(st.integers(1, 12)), draw(st.integers(1, 30))
    chance = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    found = {"hidden": torch.randn(rows, width, generator=chance), "weight": torch.randn(columns, width, generator=chance)}
    if draw(st.booleans()):
        found["bias"] = torch.randn(columns, generator=chance)
    labels = torch.randint(0, columns, (rows,), generator=chance)
    return {**found, "labels": labels.where(torch.rand(rows, generator=chance) < 0.7, -100)}


@pytest.mark.parametrize("interpreted", [True, False])
@hypothesis.settings(max_examples=40)
@hypothesis.given(head=heads(), how=settings(), rows=st.integers(1, 4), scale=st.sampled_from([1.0, 0.25]))
def test_a_heads_chunks_make_the_loss_and_gradients_of_the_whole(
    interpreted: bool, head: dict[str, torch.Tensor], how: dict[str, float], rows: int, scale: float
) -> None:
    labels = head.pop("labels")
    how = {**how, "labels": labels, "scale": scale}
    chunk = {"chunk_bytes": rows * head["weight"].shape[0] * 4}
    with mock.patch.object(module, "use_triton", return_value=interpreted):
        kernel, reference = partial(linear_cross_entropy, **how, **chunk), partial(linear_cross_entropy_reference, **how)
        prove(kernel, reference, head, roundings=DRAWN)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_head_of_16_bits(dtype: torch.dtype) -> None:
    hidden, weight = torch.randn(40, 16), torch.randn(60, 16) / 4
    labels = torch.randint(0, 60, (40,))
    chunk = {"labels": labels, "chunk_bytes": 7 * 60 * 2}
    leaves = {"hidden": hidden.to(dtype), "weight": weight.to(dtype)}
    prove(partial(linear_cross_entropy, **chunk), partial(linear_cross_entropy_reference, labels=labels), leaves)


def test_no_more_logits_than_a_chunk_exist() -> None:
    hidden, weight = torch.randn(100, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    seen = []

    def noted(logits: torch.Tensor, *rest: Any) -> Any:
        seen.append(logits.shape)
        return losses_of(logits, *rest)

    with mock.patch.object(head_module, "losses_of", noted):
        linear_cross_entropy(hidden, weight, torch.zeros(100, dtype=torch.long), chunk_bytes=50 * 4 * 30).backward()
    assert seen == [(30, 50), (30, 50), (30, 50), (10, 50)]


def test_what_is_refused() -> None:
    logits, labels, weight = torch.ones(2, 8), torch.zeros(2, dtype=torch.long), torch.ones(5, 8)
    for told, call in {
        r"not \(8,\) of torch.float32": lambda: cross_entropy(logits[0], labels),
        "of torch.int64$": lambda: cross_entropy(logits.long(), labels),
        r"labels \(2,\) of int64 on cpu are needed, not \(1,\)": lambda: cross_entropy(logits, labels[:1]),
        "are needed, not .* of torch.int32": lambda: cross_entropy(logits, labels.int()),
        r"weight \(5, 7\) do not fit": lambda: linear_cross_entropy(logits, weight[:, :7], labels),
        "weight torch.float16": lambda: linear_cross_entropy(logits, weight.half(), labels),
        r"\(2,\) of int64 is needed": lambda: linear_cross_entropy(logits, weight, labels[:1]),
    }.items():
        with pytest.raises(KernelError, match=told):
            call()
