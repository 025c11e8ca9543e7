"""Upper bound of the bytes that PyTorch's memory-efficient attention allocates in backward, for `memory.py`.

[Note: workspace]   beside the three gradients

    gradient of queries   fp32, for each sequence of a launch and head: tiles of (query block, 64) up to the longest one
    gradients of keys,    fp32, for each sequence, head and split: (64, head). Only if a head is wider than the block of
    of values             queries, so that registers do not store them
    delta                 fp32 (batch, heads, tokens). If the kernel does not compute it, three fp32 copies of the output

The kernels are those of a V100. Kernels of newer GPUs need no more. A launch over packed samples counts every sample as
long as the longest. `ftkit.hf.kernels.varlen.launches` divides the samples so that no launch exceeds `most_launch_tokens`.

Source: torch 2.13, aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h (`workspace_size`,
`kKernelComputesDelta`, `kOutputInRF`), kernels/cutlassB.h (the kernels in order), attention_backward.cu (splits of keys).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

ROUND_TOKENS = 128
"""The widest block of queries. Tokens of a sequence are rounded up to a multiple of it."""

EXTRA_TOKENS = 4096
"""Tokens by which a launch over packed samples may exceed unpacked rows. They take 84 MB at a hidden size of 5120."""

MOST_SPLITS = 200
"""Blocks among which keys are split if gradients of keys need a workspace."""

KERNELS = {
    "fp16": ((64, 64, 32), (64, 64, 64), (128, 64, 128), (64, 64, 128), (128, 64, 65536), (64, 64, 65536)),
    "fp32": ((64, 64, 32), (64, 64, 64), (64, 64, 128), (64, 64, 65536)),
}
"""Backward kernels by dtype, in torch's order: (block of queries, block of keys, widest head)."""


@dataclass(frozen=True)
class Attention:
    """The attention of a block."""

    heads: int
    key_heads: int  # of keys and values, fewer if keys are grouped
    head_dim: int  # elements of a query's and key's head
    value_dim: int


def launch_tokens(sequences: int, longest: int) -> int:
    """Return the tokens for which a launch allocates its workspace. Those of splits are counted as one more block."""
    return sequences * (_up(longest, ROUND_TOKENS) + ROUND_TOKENS)


def most_launch_tokens(rows: int, tokens: int) -> int:
    """Return the limit of `launch_tokens` for packed rows of `tokens` tokens each."""
    return launch_tokens(rows, tokens) + EXTRA_TOKENS


@lru_cache
def backward_bytes(attention: Attention, rows: int, tokens: int, itemsize: int, *, packed: bool) -> int:
    """Return the most bytes that the kernel's backward allocates beside the gradients, for one block.

    Args:
        attention: Heads of the block and their sizes.
        rows: Sequences of a micro-batch.
        tokens: Tokens of each sequence.
        itemsize: Bytes per element.
        packed: Rows store several samples, in several launches whose gradients are copied together.
    """
    heads, dim, value = attention.heads, attention.head_dim, attention.value_dim
    fitting = [kernel for kernel in KERNELS["fp32" if itemsize == 4 else "fp16"] if kernel[2] >= max(dim, value)]
    sizes = []
    # torch takes the first kernel that fits shared memory, which depends on the GPU. A kernel of wider heads comes only if
    # both blocks of queries of the first one are too large.
    for block, block_keys, head in (kernel for kernel in fitting if kernel[2] == fitting[0][2]):
        long = most_launch_tokens(rows, tokens) if packed else rows * _up(tokens, block)
        size = 4 * heads * long * _up(dim, block_keys) + 16 * heads * (long // block) * (_up(dim, block_keys) // block_keys)
        copies = 0
        if itemsize == 4 or head > block:
            copies = 3 * 4 * rows * tokens * heads * value
        if itemsize == 2 and head > block:
            most = max(MOST_SPLITS, heads * rows)  # `launch_tokens` has counted the others of packed samples
            size += 4 * most * block_keys * (_up(dim, block) + _up(value, block))
        sizes.append(max(copies, size + 4 * rows * heads * tokens))
    gathered = rows * tokens * heads * (2 * dim + value) * itemsize
    return max(sizes) + (gathered if packed else 0)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
