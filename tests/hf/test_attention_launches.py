"""Packed attention's launches, with the GPU's kernels emulated on the CPU; and who repeats grouped keys."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ftkit.hf.kernels import attention as module
from ftkit.hf.kernels.attention import REPEATED, attention, repeat_grouped_keys, takes_groups
from ftkit.hf.kernels.varlen import attend
from ftkit.hf.memory.fake import CudaAttentionBackward
from ftkit.plan.attention import Attention, backward_bytes
from tests import fusible

LENGTHS = {
    "one": [40],
    "short ones": [1] * 40,
    "a long one first": [33, 1, 2, 1, 3],
    "a long one in between": [2, 1, 30, 1, 6],
    "empty ones": [0, 5, 0, 0, 30, 5, 0],
}


def computed(query: Tensor, key: Tensor, value: Tensor, ends: list[int], longest: int, scale: float) -> Tensor:
    """Attention of samples, as the kernel: queries beyond `longest` are not computed."""
    out = torch.full_like(query, float("nan"))
    for start, stop in pairwise(ends):
        q, k, v = (each[start:stop].transpose(0, 1) for each in (query, key, value))
        seen = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
        found = ((q @ k.transpose(1, 2)) * scale).masked_fill(~seen, float("-inf")).softmax(-1) @ v
        out = torch.cat([out[:start], found.transpose(0, 1)[:longest], out[start + min(longest, stop - start) :]])
    return out


class Kernels:
    """The two operations of aten, on CPU tensors, with a note of each launch: (samples, longest)."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, int]] = []

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: None, ends: Tensor, others: Tensor, longest: int,
        longest_key: int, *rest: Any, scale: float, window_size: None,
    ) -> Any:  # fmt: skip
        assert ends.dtype == torch.int32
        self.launches.append((len(ends) - 1, longest))
        found = computed(query[0], key[0], value[0], ends.tolist(), longest, scale)
        return found[None], torch.zeros(1), torch.zeros(1), torch.zeros(1), longest, longest_key

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: None, out: Tensor, ends: Tensor,
        others: Tensor, longest: int, *rest: Any, scale: float, window_size: None,
    ) -> Any:  # fmt: skip
        leaves = [each[0].detach().requires_grad_() for each in (query, key, value)]
        with torch.enable_grad():
            again = computed(*leaves, ends.tolist(), longest, scale)
        torch.testing.assert_close(again[None], out)
        return *(each[None] for each in torch.autograd.grad(again, leaves, gradient[0])), None


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    found = Kernels()
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", found.forward, raising=False)
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_backward", found.backward, raising=False)
    monkeypatch.setattr("ftkit.plan.attention.ROUND_TOKENS", 4)
    monkeypatch.setattr("ftkit.plan.attention.EXTRA_TOKENS", 8)
    return found


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_launches_compute_what_the_loop_does(kernels: Kernels, lengths: list[int], groups: int) -> None:
    rows = [lengths, lengths[::-1]]
    cuts = [0, *torch.tensor([length for row in rows for length in row]).cumsum(0).tolist()]
    shapes = [(80, 4, 8), (80, 4 // groups, 8), (80, 4 // groups, 8)]
    drawn = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    results = []
    for how in ("efficient", "loop"):
        leaves = [each.clone().requires_grad_() for each in drawn]
        out = attend(*leaves, torch.tensor(cuts, dtype=torch.int32), 40, scale=0.3, kernel=how)
        (out * torch.arange(out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs)
    assert sum(samples for samples, _ in kernels.launches) == sum(length > 0 for row in rows for length in row)
    assert all(samples * (longest + 4) <= 2 * 44 + 8 for samples, longest in kernels.launches)


def test_a_row_of_short_samples_takes_no_more_than_one_of_long_ones(kernels: Kernels) -> None:
    """The defect: with the row's length for every sample, 40 samples of one token took forty rows' workspace."""
    leaves = [torch.randn(40, 2, 8, dtype=torch.float64) for _ in range(3)]
    attend(*leaves, torch.arange(41, dtype=torch.int32), 40, scale=1.0, kernel="efficient")
    assert {longest for _, longest in kernels.launches} == {1}


@pytest.mark.parametrize(("fused", "repeats"), [(False, True), (True, False)], ids=["no kernel", "a kernel"])
def test_grouped_keys_are_repeated_where_torch_has_no_kernel_for_them(fused: bool, repeats: bool) -> None:
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    owner = mock.Mock(num_key_value_groups=2, is_causal=True)
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention

    def noted(*args: Tensor, **kwargs: Any) -> Tensor:
        seen.append((args[1].shape[1], kwargs.get("enable_gqa", False)))
        return real(*args, **kwargs)

    with (
        mock.patch.object(module, "takes_groups", return_value=fused),
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", noted),
    ):
        found, _ = attention(owner, query, key, key, None)
        attention(owner, query, key, key, torch.zeros(2, 1, 6, 6))
        attention(owner, query[:, :, :1], key, key, None)
    assert seen[0] == ((4, False) if repeats else (2, True))
    assert seen[1] == (4, False)
    assert seen[2][1], "one token a sample needs no repeated keys"
    torch.testing.assert_close(found, attention(owner, query, key, key, None)[0])


@pytest.mark.parametrize("kernel", ["can_use_flash_attention", "can_use_efficient_attention", None])
def test_torch_is_asked_and_not_its_version(kernel: str | None) -> None:
    query = mock.Mock(device=torch.device("cuda", 0))
    backends = mock.Mock()
    for name in ("flash", "efficient", "cudnn"):
        getattr(backends, f"can_use_{name}_attention").return_value = kernel == f"can_use_{name}_attention"
    with mock.patch.object(torch.backends, "cuda", backends):
        assert takes_groups(query, query, query, 0.0) == (kernel is not None)
    assert backends.SDPAParams.call_args.args[-1] is True, "grouped"


def test_models_of_the_stock_trainer_repeat_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "takes_groups", lambda *args: False)
    monkeypatch.setattr(torch, "empty", lambda *shape, device, dtype: torch.zeros(*shape))
    card = torch.device("cuda", 0)
    grouped, alike = fusible.build("llama"), fusible.build("opt")
    assert grouped.config.num_key_value_heads < grouped.config.num_attention_heads
    before = grouped(torch.arange(6)[None]).logits
    assert not repeat_grouped_keys(grouped, torch.device("cpu"))
    assert repeat_grouped_keys(grouped, card)
    assert grouped.config._attn_implementation == REPEATED
    torch.testing.assert_close(grouped(torch.arange(6)[None]).logits, before)
    assert not repeat_grouped_keys(alike, card)
    assert not repeat_grouped_keys(torch.nn.Linear(2, 2), card)


def test_a_dry_run_allocates_the_workspace_that_the_plan_counts() -> None:
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.empty.memory_format and found.dtype == torch.uint8:
                sizes.append(found.numel())
            return found

    leaves = [torch.empty(2, 4, 256, 64, device="meta", dtype=torch.float16, requires_grad=True) for _ in range(3)]
    with Sizes(), CudaAttentionBackward():
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        kernel(*leaves, None, True, 0.0, True)[0].sum().backward()
    assert sizes == [backward_bytes(Attention(4, 4, 64, 64), 2, 256, 2, packed=False)]
