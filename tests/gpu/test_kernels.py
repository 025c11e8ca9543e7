"""Fused kernels on a GPU, compared with fp64 at sizes of real models, and packed attention, compared with the loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ftkit.hf.kernels import varlen
from ftkit.hf.kernels.fuse import fuse
from ftkit.hf.kernels.head import attach_head_loss
from ftkit.kernels.adamw import AdamW, adamw_, adamw_reference
from ftkit.kernels.cross_entropy import cross_entropy, cross_entropy_reference
from ftkit.kernels.gated import ACTIVATIONS, gated, gated_reference
from ftkit.kernels.linear_cross_entropy import linear_cross_entropy
from ftkit.kernels.rms_norm import CASTINGS, rms_norm, rms_norm_reference
from ftkit.kernels.rotary import rotary, rotary_reference
from ftkit.kernels.squared_norm import squared_norm
from tests import fusible
from tests.kernels.proof import linear_cross_entropy_reference, prove

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HALF = torch.float16
DTYPES = [torch.float32, HALF] + ([torch.bfloat16] if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else [])


def on_card(function: Callable[..., Any], **leaves: Tensor) -> Any:
    """Call with CUDA tensors, and return the outputs on the CPU. fp64 stays on the CPU."""
    given = {name: leaf if leaf.dtype == torch.float64 else leaf.cuda() for name, leaf in leaves.items()}
    found = function(**given)
    return tuple(out.cpu() for out in found) if isinstance(found, tuple) else found.cpu()


def proved(kernel: Callable[..., Any], reference: Callable[..., Any], **leaves: Tensor) -> None:
    prove(partial(on_card, kernel), partial(on_card, reference), leaves, roundings=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1000, 4096, 5120, 16384])
def test_norms(columns: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(37, columns).to(dtype), torch.randn(columns).to(dtype)
    for casting in CASTINGS:
        how = {"eps": 1e-5, "casting": casting, "offset": 1.0}
        proved(partial(rms_norm, **how), partial(rms_norm_reference, **how), x=x, weight=weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(kind: str, dtype: torch.dtype) -> None:
    x, y = (torch.randn(33, 13824).to(dtype) * 2 for _ in range(2))
    proved(partial(gated, activation=kind), partial(gated_reference, activation=kind), gate=x, up=y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turning", [128, 32])
def test_rotary(turning: int, dtype: torch.dtype) -> None:
    angles = torch.randn(2, 65, turning)

    def turned(function: Any, q: Tensor, k: Tensor) -> Any:
        cos, sin = (each.to(q.device, q.dtype) for each in (angles.cos().to(dtype), angles.sin().to(dtype)))
        return function(q, k, cos, sin)

    q, k = (torch.randn(2, 65, heads, 128).to(dtype).transpose(1, 2) for heads in (40, 8))
    proved(partial(turned, rotary), partial(turned, rotary_reference), q=q, k=k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [32000, 262144])
def test_losses(classes: int, dtype: torch.dtype) -> None:
    labels = torch.randint(0, classes, (9,))
    labels[3] = -100

    def loss(function: Any, logits: Tensor) -> Tensor:
        return function(logits * 1.0, labels.to(logits.device), cap=30.0)

    logits = (torch.randn(9, classes) * 4).to(dtype)
    proved(partial(loss, cross_entropy), partial(loss, cross_entropy_reference), logits=logits)

    def head(function: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        return function(hidden, weight, labels.to(hidden.device), cap=30.0)

    hidden, weight = torch.randn(9, 256).to(dtype), (torch.randn(classes, 256) / 16).to(dtype)
    proved(partial(head, linear_cross_entropy), partial(head, linear_cross_entropy_reference), hidden=hidden, weight=weight)


def test_flat_shards() -> None:
    how = AdamW(lr=3e-3, beta2=0.95, weight_decay=0.1, step=7, scale=0.25)
    gradient, master, m, v = torch.randn(100_001).half(), torch.randn(100_001), torch.randn(100_001), torch.rand(100_001)
    ours = [each.cuda() for each in (gradient, master, m, v)]
    weight = torch.empty(100_001, dtype=HALF, device="cuda")
    adamw_(*ours, weight, how)
    adamw_reference(gradient, master, m, v, None, how)
    for mine, theirs in zip(ours[1:], (master, m, v)):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.cpu(), master.half(), rtol=1e-3, atol=1e-4)
    squares, finite = squared_norm(ours[0])
    torch.testing.assert_close(squares.cpu(), gradient.double().square().sum(), rtol=1e-6, atol=0)
    assert finite.item()
    ours[0][77_777] = float("inf")
    assert not squared_norm(ours[0])[1].item()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_on_a_gpu_that_is_not_the_current_one() -> None:
    x, angles = torch.randn(6, 64), torch.randn(1, 3, 32)
    labels = torch.tensor([1, 2, 3, 4, 5, -100])

    def all_of(x: Tensor) -> list[Tensor]:
        own = x.clone().requires_grad_()
        q, k = rotary(own.view(1, 4, 3, 32), own.view(1, 4, 3, 32), angles.to(x.device), angles.to(x.device))
        losses = cross_entropy(own * 1.0, labels.to(x.device)).sum() + linear_cross_entropy(own, own, labels.to(x.device))
        (rms_norm(own, own[0], 1e-5).sum() + gated(own, own).sum() + (q * k).sum() + losses).backward()
        state = [*x.abs().view(4, 96).clone()]
        adamw_(*state, None, AdamW(lr=0.1))
        return [own.grad, losses.detach(), *state, squared_norm(x.view(-1))[0]]

    with torch.cuda.device(0):
        for ours, theirs in zip(all_of(x.to("cuda:1")), all_of(x), strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", fusible.FAMILIES)
def test_families_fuse_on_a_card(name: str) -> None:
    model = fusible.build(name).cuda()
    done = {kind: len(names) for kind, names in fuse(model, HALF, torch.device("cuda")).done.items()}
    done |= {"chunked loss": 1} if attach_head_loss(model, HALF, torch.device("cuda")) is None else {}
    assert done == fusible.FAMILIES[name][1]


@pytest.mark.parametrize("kernel", ["efficient", "flash"])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("groups", [1, 4])
def test_packed_attention(kernel: str, window: int | None, groups: int) -> None:
    if kernel == "flash" and (varlen.FLASH is None or torch.cuda.get_device_capability() < (8, 0)):
        pytest.skip("needs compute capability 8.0 and torch 2.13")
    lengths = torch.tensor([5, 100, 1, 0, 64, 30])
    ends = torch.tensor([0, *lengths.cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    leaves = [torch.randn(200, heads, 64, device="cuda").half() for heads in (8, 8 // groups, 8 // groups)]
    results = []
    for each in (kernel, "loop"):
        own = [leaf.clone().requires_grad_() for leaf in leaves]
        out = varlen.attend(*own, ends, 100, window=window, kernel=each)
        (out.float() * torch.linspace(-1, 1, 64, device="cuda")).sum().backward()
        results.append([out, *(leaf.grad for leaf in own)])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=5e-3)
