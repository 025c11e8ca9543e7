"""Which kernel PyTorch takes for `scaled_dot_product_attention` on a GPU, and the bytes that its backward allocates.

    flash       from sm_80; fp16 and bf16, no mask, heads of at most 256; takes grouped keys
    efficient   from sm_50; fp16, fp32, from sm_80 bf16 too; takes a mask; the only fused kernel of a V100. In torch 2.10 to
                2.13 it has no grouped keys; ftkit and transformers repeat them
    math        everything else: the scores are whole, in fp32 on the way to the softmax

[Note: workspace]   of the memory-efficient kernel's backward, beside the three gradients

    gradient of queries   fp32, for each sequence of a launch and head: tiles of (query block, 64) up to the longest one
    gradients of keys,    fp32, for each sequence, head and split: (64, head); only where a head is wider than the block of
    of values             queries, so that registers do not hold them
    delta                 fp32 (batch, heads, tokens); where the kernel does not compute it, three fp32 copies of the output

A launch over packed samples counts every sample as long as the longest. `launches` therefore divides the samples so that no
launch takes much more than the same tokens would as unpacked rows.

Source: torch 2.13, aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h (`workspace_size`,
`kKernelComputesDelta`, `kOutputInRF`) and kernels/cutlassB.h (the kernels in order), both in the wheel's include folder,
where tests compare `KERNELS` with them; attention_backward.cu (splits of keys) and sdp_utils.cpp (the choice), in its
repository.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

FLASH, EFFICIENT, MATH = "flash", "efficient", "math"

ROUND_TOKENS = 128
"""The widest block of queries: tokens of a sequence are rounded up to a multiple of it."""

EXTRA_TOKENS = 4096
"""By which a launch over packed samples may exceed unpacked rows: fewer launches, for 84 MB at a hidden size of 5120."""

MOST_SPLITS = 200
"""Blocks among which keys are split where gradients of keys need a workspace (attention_backward.cu)."""

ANY = 65536
"""The head size up to which torch's kernels for every head go."""

KERNELS: dict[tuple[int, str], tuple[tuple[int, int, int], ...]] = {
    (70, "fp16"): ((64, 64, 32), (64, 64, 64), (128, 64, 128), (64, 64, 128), (128, 64, ANY), (64, 64, ANY)),
    (70, "fp32"): ((64, 64, 32), (64, 64, 64), (64, 64, 128), (64, 64, ANY)),
    (75, "fp16"): ((64, 64, 32), (64, 64, 64), (128, 64, 128), (64, 64, 128), (128, 64, ANY), (64, 64, ANY)),
    (75, "fp32"): ((64, 64, 32), (64, 64, 64), (64, 64, 128), (64, 64, ANY)),
    (80, "fp16"): (
        (64, 64, 32), (64, 64, 64), (128, 64, 96), (128, 128, 128), (64, 64, 128), (128, 64, ANY), (64, 64, ANY)
    ),
    (80, "bf16"): (
        (64, 64, 32), (64, 64, 64), (128, 64, 96), (128, 128, 128), (64, 64, 128), (128, 64, ANY), (64, 64, ANY)
    ),
    (80, "fp32"): ((64, 64, 32), (64, 64, 64), (128, 64, 128), (64, 64, 128), (128, 64, ANY), (64, 64, ANY)),
}  # fmt: skip
"""Backward kernels by generation and dtype, in torch's order: (block of queries, block of keys, widest head)."""


@dataclass(frozen=True)
class Attention:
    """The attention of a block.

    Args:
        heads: of queries.
        key_heads: of keys and values; fewer than `heads` where keys are grouped.
        head_dim: elements of a query's and key's head.
        value_dim: elements of a value's head.
    """

    heads: int
    key_heads: int
    head_dim: int
    value_dim: int


def backend(sm: int, dtype: str, attention: Attention, *, masked: bool, repeated: bool = True) -> str:
    """Return the kernel that torch takes.

    Args:
        sm: compute capability, 70 for 7.0.
        dtype: fp16, bf16 or fp32.
        attention: heads of the block and their sizes.
        masked: a mask is given; causal attention without one is not masked.
        repeated: grouped keys are repeated first, as ftkit does where no fused kernel takes them.
    """
    grouped = attention.key_heads < attention.heads
    alike = attention.head_dim == attention.value_dim
    if sm >= 80 and dtype != "fp32" and not masked and alike and attention.head_dim <= 256:
        return FLASH
    known = dtype in ("fp16", "fp32") or sm >= 80
    aligned = _alignment(sm, dtype)
    fits = not attention.head_dim % aligned and not attention.value_dim % aligned
    return EFFICIENT if known and fits and (repeated or not grouped) else MATH


def _alignment(sm: int, dtype: str) -> int:
    """Return the multiple of elements that a head must have (`minimum_gemm_alignment` in sdp_utils.cpp)."""
    if dtype == "fp32":
        return 4 if sm >= 80 else 1
    return 8 if sm >= 70 else 1


def launch_tokens(sequences: int, longest: int) -> int:
    """Return the tokens for which a launch allocates its workspace; those of splits are counted as one more block."""
    return sequences * (_up(longest, ROUND_TOKENS) + ROUND_TOKENS)


def most_launch_tokens(rows: int, tokens: int) -> int:
    """Return the limit of `launch_tokens` for packed rows of so many tokens each."""
    return launch_tokens(rows, tokens) + EXTRA_TOKENS


def launches(cuts: Sequence[int], row_tokens: int) -> list[tuple[int, int]]:
    """Divide packed samples into launches, none of which exceeds `most_launch_tokens`.

    Args:
        cuts: where samples begin, and where the last one ends: rising from 0 to the number of tokens.
        row_tokens: tokens of a row; no sample has more.

    Returns:
        Ranges of samples [first, last), in order; sample s has the tokens [cuts[s], cuts[s + 1]).
    """
    limit = most_launch_tokens(max(cuts[-1] // row_tokens, 1), row_tokens)
    found, first, longest = [], 0, 0
    for number, (start, stop) in enumerate(pairwise(cuts)):
        widest = max(longest, stop - start)
        if number > first and launch_tokens(number + 1 - first, widest) > limit:
            found.append((first, number))
            first, widest = number, stop - start
        longest = widest
    return [*found, (first, len(cuts) - 1)]


def backward_bytes(attention: Attention, rows: int, tokens: int, dtype: str, *, sm: int, packed: bool) -> int:
    """Return the most bytes that a fused kernel's backward allocates beside the gradients, for one block.

    Args:
        attention: heads of the block and their sizes.
        rows: sequences of a micro-batch.
        tokens: tokens of each sequence.
        dtype: fp16, bf16 or fp32.
        sm: compute capability, 70 for 7.0.
        packed: rows hold several samples, in several launches whose gradients are copied together.
    """
    kernels = _possible(attention, dtype, sm)
    itemsize = 4 if dtype == "fp32" else 2
    size = max(_kernel_bytes(kernel, attention, rows, tokens, itemsize, sm, packed) for kernel in kernels)
    gathered = rows * tokens * attention.heads * (2 * attention.head_dim + attention.value_dim) * itemsize
    return size + (gathered if packed else 0)


def _possible(attention: Attention, dtype: str, sm: int) -> list[tuple[int, int, int]]:
    """Return the kernels that torch may take: the first that fits shared memory, which depends on the card."""
    generation = max(each for each, known in KERNELS if known == dtype and each <= max(sm, 70))
    widest = max(attention.head_dim, attention.value_dim)
    fitting = [kernel for kernel in KERNELS[generation, dtype] if kernel[2] >= widest]
    smallest = fitting[0][2]  # a wider kernel comes only where both blocks of queries of this one are too large
    return [kernel for kernel in fitting if kernel[2] == smallest]


def _kernel_bytes(
    kernel: tuple[int, int, int], attention: Attention, rows: int, tokens: int, itemsize: int, sm: int, packed: bool
) -> int:
    """Return the bytes of one launch over unpacked rows; of packed ones, of the largest launch."""
    block, block_keys, head = kernel
    heads, dim = attention.heads, attention.head_dim
    long = rows * (_up(tokens, block))
    if packed:
        long = most_launch_tokens(rows, tokens)
    size = 4 * heads * long * _up(dim, block_keys) + 16 * heads * (long // block) * (_up(dim, block_keys) // block_keys)
    in_registers = itemsize == 2 and head <= block
    if not in_registers and itemsize == 2:
        most = max(MOST_SPLITS, heads * rows)  # of packed samples `launch_tokens` has counted what is beyond
        size += 4 * most * block_keys * (_up(dim, block) + _up(attention.value_dim, block))
    copies = 0
    if not (itemsize == 2 and (in_registers or sm // 5 * 5 != 70)):
        copies = 3 * 4 * rows * tokens * heads * attention.value_dim
    return max(copies, size + 4 * rows * heads * tokens)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
