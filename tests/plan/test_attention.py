"""The workspace of PyTorch's memory-efficient attention, compared with the installed wheel's headers and by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftkit.hf.kernels.varlen import launches
from ftkit.plan.attention import KERNELS, Attention, backward_bytes
from ftkit.plan.memory import memory
from ftkit.plan.shape import Flat, Shape
from ftkit.spec.strategy import Strategy

HEADERS = Path(torch.__file__).parent / "include/ATen/native/transformers/cuda/mem_eff_attention"
NAMES = {"half_t": "fp16", "float": "fp32"}
LLAMA = Attention(heads=40, key_heads=40, head_dim=128, value_dim=128)


@pytest.mark.parametrize("dtype", KERNELS)
def test_kernels_are_those_of_the_installed_torch(dtype: str) -> None:
    text = (HEADERS / "kernels/cutlassB.h").read_text()
    body = re.search(rf"void dispatch_cutlassB_{dtype.replace('p', '')}_sm70\(.*?\n}}", text, re.DOTALL)
    assert body is not None
    found = []
    for arguments in re.findall(r"cb\(AttentionBackwardKernel<([^>]*)>", body[0]):
        arch, kind, aligned, dropout, _, queries, keys, head, *_ = (each.strip() for each in arguments.split(","))
        assert (arch, NAMES[kind.removeprefix("cutlass::")]) == ("cutlass::arch::Sm70", dtype)
        kernel = int(queries), int(keys), int(head)
        if (aligned, dropout) == ("true", "false") and kernel not in found:
            found.append(kernel)
    assert tuple(found) == KERNELS[dtype]


def test_the_workspace_by_hand() -> None:
    """A row of 2048 tokens, 40 heads of 64: fp32 gradients of the queries, 16 bytes a tile of 64 by 64, and delta."""
    narrow = Attention(40, 40, 64, 64)
    tiles = 40 * (2048 // 64)
    by_hand = tiles * (64 * 64 * 4 + 16) + 40 * 2048 * 4
    assert backward_bytes(narrow, 1, 2048, 2, packed=False) == by_hand


def test_fp32_has_copies_of_the_output() -> None:
    assert backward_bytes(LLAMA, 4, 2048, 4, packed=False) == 3 * 4 * 4 * 2048 * 5120


def test_a_row_of_many_samples_takes_what_an_unpacked_one_does() -> None:
    """The defect: 25 samples counted as long as the row took 1.1 GB at a hidden size of 5120."""
    plain = backward_bytes(LLAMA, 1, 2048, 2, packed=False)
    packed = backward_bytes(LLAMA, 1, 2048, 2, packed=True)
    assert packed < plain + 160e6 < 300e6


def exact_bytes(kernel: tuple[int, int, int], attention: Attention, sequences: int, longest: int) -> int:
    """Return `workspace_size` of an fp16 launch, as kernel_backward.h computes it."""
    queries, keys, head = kernel
    batches = sequences * attention.heads
    splits = -(-longest // keys)
    wide = head > queries
    if wide:
        splits = max(min(splits, 200 // batches), 1)
    rounded = -(-attention.head_dim // queries) * queries
    gradient = -(-longest // queries) * -(-attention.head_dim // keys) * (queries * keys + 4)
    return batches * 4 * (gradient + 2 * wide * splits * keys * rounded)


@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=60),
    rows=st.integers(1, 3),
    heads=st.sampled_from([8, 40]),
    head=st.sampled_from([64, 80, 128, 256]),
)
def test_no_launch_takes_more_than_the_plan_counts(lengths: list[int], rows: int, heads: int, head: int) -> None:
    tokens = max(sum(lengths), 1)
    cuts = [0]
    for _ in range(rows):
        for length in lengths:
            cuts.append(cuts[-1] + length)
    attention = Attention(heads, heads, head, head)
    planned = backward_bytes(attention, rows, tokens, 2, packed=True)
    parts = launches(cuts, tokens)
    assert [first for first, _ in parts] + [len(cuts) - 1] == [0] + [last for _, last in parts]
    for first, last in parts:
        longest = max(stop - start for start, stop in pairwise(cuts[first : last + 1]))
        for kernel in KERNELS["fp16"]:
            if kernel[2] == min(each[2] for each in KERNELS["fp16"] if each[2] >= head):
                assert exact_bytes(kernel, attention, last - first, longest) <= planned


@pytest.mark.parametrize(
    ("cuts", "expected"),
    [
        ([0, 2048], [(0, 1)]),
        ([0, 1024, 2048], [(0, 2)]),
        ([0, *range(1000, 2049, 40), 2048], [(0, 5), (5, 28)]),
        ([*range(0, 2049, 16)], [(0, 24), (24, 48), (48, 72), (72, 96), (96, 120), (120, 128)]),
    ],
    ids=["one", "two halves", "a long one before short ones", "many short ones"],
)
def test_samples_that_one_launch_takes(cuts: list[int], expected: list[tuple[int, int]]) -> None:
    assert launches(cuts, 2048) == expected


@pytest.mark.parametrize("packed", [False, True])
def test_the_plan_of_a_gpu_counts_the_workspace(packed: bool) -> None:
    lines = (Flat(10_000, 2, True),)
    shape = Shape((lines,) * 4, lines, lines, 256, 97, 1000, 1000, 2048, 2, 2)
    attention = Attention(40, 40, 64, 64)
    counted = [
        memory(each, Strategy.of(micro_batch=2), cpu=cpu).peak("device")
        for each in (shape, replace(shape, attention=attention, packed=packed))
        for cpu in (False, True)
    ]
    needed = backward_bytes(attention, 2, 2048, 2, packed=packed)
    assert 0.8 * needed < counted[2] - counted[0] <= needed
    assert counted[3] == counted[1]
