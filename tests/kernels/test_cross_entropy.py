"""Cross-entropy of logits and of a head's chunks, interpreted and in PyTorch, compared with fp64."""

from __future__ import annotations

import math
from functools import partial
from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from ftkit.kernels import cross_entropy as module
from ftkit.kernels import linear_cross_entropy as head_module
from ftkit.kernels.cross_entropy import cross_entropy, cross_entropy_reference, gradients_into, losses_of
from ftkit.kernels.launch import KernelError
from ftkit.kernels.linear_cross_entropy import linear_cross_entropy
from tests.kernels.proof import DRAWN, linear_cross_entropy_reference, prove

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CAPS = st.sampled_from([0.0, 5.0])


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
    """Return the loss of a copy, as backward overwrites it."""
    return cross_entropy(logits * 1.0, **how)


@pytest.mark.parametrize("interpreted", [True, False])
@hypothesis.settings(max_examples=40)
@hypothesis.given(task=tasks(), cap=CAPS)
def test_as_exact_as_pytorch(interpreted: bool, task: Any, cap: float) -> None:
    logits, labels = task
    how = {"labels": labels, "cap": cap}
    with mock.patch.object(module, "as_on_gpu", return_value=interpreted):
        prove(partial(of_a_copy, **how), partial(cross_entropy_reference, **how), {"logits": logits}, roundings=DRAWN)


@pytest.mark.parametrize("columns", [8192, 8193, pytest.param(262144, marks=pytest.mark.slow)])
def test_rows_of_many_blocks(columns: int) -> None:
    logits, labels = torch.randn(8, columns) * 4, torch.tensor([columns - 1, 0] * 4)
    # In every other row the last block has the largest logit. Gradients there are as exact as the rounding of the
    # normaliser, which is chance for one row and averages out over some.
    logits[::2, -1] = 18 + torch.rand(4)
    how = {"labels": labels}
    prove(partial(of_a_copy, **how), partial(cross_entropy_reference, **how), {"logits": logits})


@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_a_first_block_of_minus_infinity(cap: float) -> None:
    """As a mask over the vocabulary makes it. In the last row only the label's class is left."""
    logits, labels = torch.randn(3, module.BLOCK + 9), torch.tensor([module.BLOCK, module.BLOCK + 8, module.BLOCK + 1])
    logits[:, : module.BLOCK] = -math.inf
    logits[2, module.BLOCK + 2 :] = logits[2, module.BLOCK] = -math.inf
    own, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss, truth = cross_entropy(own * 1.0, labels, cap=cap), cross_entropy_reference(exact, labels, cap=cap)
    assert torch.isfinite(truth).all()
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=1e-6)
    loss.sum().backward()
    truth.sum().backward()
    torch.testing.assert_close(own.grad.double(), exact.grad, rtol=1e-4, atol=1e-7)


def test_the_gradient_overwrites_the_logits() -> None:
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


def test_changed_logits_are_noticed() -> None:
    logits = torch.randn(2, 8, requires_grad=True) * 1.0
    loss = cross_entropy(logits, torch.tensor([1, 2])).sum()
    with torch.no_grad():
        logits.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("interpreted", [True, False])
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_second_backward_raises(interpreted: bool, contiguous: bool) -> None:
    """The first one has overwritten the logits."""
    leaf = torch.randn(2, 8, requires_grad=True) if contiguous else torch.randn(8, 2, requires_grad=True).T
    with mock.patch.object(module, "as_on_gpu", return_value=interpreted):
        loss = cross_entropy(leaf * 1.0, torch.tensor([1, 2])).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@st.composite
def heads(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Draw hidden (R, H), weight (V, H), perhaps a bias (V,), and labels (R,)."""
    rows, width = draw(st.integers(0, 9)), draw(st.integers(1, 12))
    columns = draw(st.integers(5, 30))  # with fewer, gradients are differences of nearly equal numbers
    chance = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    found = {"hidden": torch.randn(rows, width, generator=chance), "weight": torch.randn(columns, width, generator=chance)}
    if draw(st.booleans()):
        found["bias"] = torch.randn(columns, generator=chance)
    labels = torch.randint(0, columns, (rows,), generator=chance)
    return {**found, "labels": labels.where(torch.rand(rows, generator=chance) < 0.7, -100)}


@pytest.mark.parametrize("interpreted", [True, False])
@hypothesis.settings(max_examples=15)
@hypothesis.given(head=heads(), cap=CAPS, rows=st.integers(1, 4), scale=st.sampled_from([1.0, 0.25]))
def test_a_heads_chunks_make_the_loss_and_gradients_of_the_whole(
    interpreted: bool, head: dict[str, torch.Tensor], cap: float, rows: int, scale: float
) -> None:
    labels = head.pop("labels")
    how = {"cap": cap, "labels": labels, "scale": scale}
    chunk = {"chunk_bytes": rows * head["weight"].shape[0] * 4}
    with mock.patch.object(module, "as_on_gpu", return_value=interpreted):
        kernel, reference = partial(linear_cross_entropy, **how, **chunk), partial(linear_cross_entropy_reference, **how)
        # Rounding of a logit of size L moves exp(logit - normaliser) by L roundings, and chunks round their products apart.
        logits = torch.nn.functional.linear(head["hidden"], head["weight"], head.get("bias")) * scale
        prove(kernel, reference, head, roundings=DRAWN + math.ceil(logits.abs().max()) if logits.numel() else DRAWN)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_head_of_16_bits(dtype: torch.dtype) -> None:
    hidden, weight = torch.randn(40, 16), torch.randn(60, 16) / 4
    labels = torch.randint(0, 60, (40,))
    chunk = {"labels": labels, "chunk_bytes": 7 * 60 * 2}
    leaves = {"hidden": hidden.to(dtype), "weight": weight.to(dtype)}
    prove(partial(linear_cross_entropy, **chunk), partial(linear_cross_entropy_reference, labels=labels), leaves)


def test_a_class_of_many_rows_does_not_overflow_nor_do_small_gradients_vanish() -> None:
    """In fp16: the rows of one class add up beyond 65504, and the probabilities of one row are below the smallest fp16."""
    hidden = torch.full((40, 4), 3000.0).half().requires_grad_()
    weight = torch.zeros(3, 4).half().requires_grad_()
    (linear_cross_entropy(hidden, weight, torch.zeros(40, dtype=torch.long)) * 0.1).backward()
    exact = torch.tensor([-2 / 3, 1 / 3, 1 / 3]) * 40 * 3000 * 0.1
    torch.testing.assert_close(weight.grad.float(), exact[:, None].expand(3, 4), rtol=2e-3, atol=0)
    sure = torch.tensor([[18.0]]).half().requires_grad_()  # only the other class matters
    weight = torch.tensor([[0.0], [-1.0]]).half().requires_grad_()
    (linear_cross_entropy(sure, weight, torch.zeros(1, dtype=torch.long)) * 65536).backward()
    torch.testing.assert_close(sure.grad.float().item(), -65536 / (1 + math.exp(18)), rtol=0.01, atol=0)


def test_logits_exist_only_by_chunks() -> None:
    hidden, weight = torch.randn(10, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    seen = []

    def noted(function: Any, logits: torch.Tensor, *rest: Any, **how: Any) -> Any:
        seen.append(logits.shape)
        return function(logits, *rest, **how)

    with (
        mock.patch.object(head_module, "losses_of", partial(noted, losses_of)),
        mock.patch.object(head_module, "gradients_into", partial(noted, gradients_into)),
    ):
        loss = linear_cross_entropy(hidden, weight, torch.zeros(10, dtype=torch.long), chunk_bytes=50 * 4 * 3)
        assert seen == [(3, 50), (3, 50), (3, 50), (1, 50)]
        seen.clear()
        loss.backward()
    assert seen == [(10, 15), (10, 15), (10, 15), (10, 5)]


@pytest.mark.parametrize("interpreted", [True, False])
def test_a_label_outside_the_classes_is_noticed(interpreted: bool) -> None:
    logits, labels = torch.randn(3, 8), torch.tensor([1, 8, -7])
    with mock.patch.object(module, "as_on_gpu", return_value=interpreted):
        if interpreted:
            assert torch.isnan(cross_entropy(logits, labels)).tolist() == [False, True, True]
        else:
            with pytest.raises(RuntimeError, match="out of bounds"):
                cross_entropy(logits, labels)


@pytest.mark.parametrize("labels", [torch.zeros(1, dtype=torch.long), torch.zeros(2, dtype=torch.int32)], ids=["few", "int"])
def test_labels_that_a_kernel_would_read_beyond_are_refused(labels: torch.Tensor) -> None:
    with pytest.raises(KernelError, match="is needed"):
        cross_entropy(torch.ones(2, 8), labels)
