"""Writes docs/attention.md: which attention kernel a GPU takes, and the bytes of its backward, from `ftkit.plan.attention`.

`make docs` runs it; a test compares the page with the functions that the plan uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from ftkit.plan.attention import Attention, backward_bytes

FLASH, EFFICIENT, MATH = "flash", "efficient", "math"
PAGE = Path(__file__).parent / "attention.md"
TOKENS = 2048
HIDDEN = 5120
CARDS = ((70, "fp16", "V100"), (70, "fp32", "V100"), (75, "fp16", "T4, RTX 20"), (80, "bf16", "A100 and newer"))
HEADS = (64, 80, 100, 128, 256)

HEAD = f"""\
# Attention on a GPU

<!-- written by `make docs` from ftkit/plan/attention.py; a test compares -->

A V100 has one fused attention kernel: PyTorch's memory-efficient one. Flash attention begins at compute capability 8.0. What
neither takes is computed by the math kernel, whose scores grow with the square of the sequence.

- **Grouped keys.** In torch 2.10 to 2.13 the memory-efficient kernel takes no grouped keys. Where no fused kernel takes
  them, ftkit repeats keys and values first. It asks PyTorch for the card at hand (`torch.backends.cuda.can_use_…`). This
  holds for packed rows, for other rows, and for models that a script brings with transformers' own `sdpa`.
- **Packed samples.** The kernel's backward allocates memory for every sample of a launch as if it were as long as the
  longest. ftkit divides the samples of a row into launches of samples of like length, so that a row of thirty samples takes
  little more than an unpacked row. The boundaries of samples stay on the host for this.
- **The plan** counts these bytes for one block: activation checkpointing runs one block's backward at a time.

Bytes are those of one row of {TOKENS:,} tokens at a hidden size of about {HIDDEN:,}, beside the three gradients. No GPU has
confirmed them. Source: torch 2.13. `kernel_backward.h` and `cutlassB.h` are in the wheel's include folder, and tests compare
the table with them; `attention_backward.cu` and `sdp_utils.cpp` are in PyTorch's repository.

| GPU | dtype | head | mask | kernel | grouped keys, not repeated | backward, unpacked | backward, packed |
|---|---|---|---|---|---|---|---|
"""


def backend(sm: int, dtype: str, attention: Attention, *, masked: bool, repeated: bool = True) -> str:
    """Return the kernel that torch takes (sdp_utils.cpp).

    Args:
        sm: Compute capability, 70 for 7.0.
        dtype: fp16, bf16 or fp32.
        attention: Heads of the block and their sizes.
        masked: A mask is given. Causal attention without one is not masked.
        repeated: Grouped keys are repeated first, as ftkit does if no fused kernel takes them.
    """
    grouped = attention.key_heads < attention.heads
    alike = attention.head_dim == attention.value_dim
    if sm >= 80 and dtype != "fp32" and not masked and alike and attention.head_dim <= 256:
        return FLASH
    known = dtype in ("fp16", "fp32") or sm >= 80
    aligned = (4 if sm >= 80 else 1) if dtype == "fp32" else (8 if sm >= 70 else 1)  # `minimum_gemm_alignment`
    fits = not attention.head_dim % aligned and not attention.value_dim % aligned
    return EFFICIENT if known and fits and (repeated or not grouped) else MATH


def rows() -> Iterator[str]:
    """Return the table's rows."""
    for (sm, dtype, card), head, masked in product(CARDS, HEADS, (False, True)):
        heads = HIDDEN // head
        attention = Attention(heads, heads, head, head)
        kernel = backend(sm, dtype, attention, masked=masked)
        grouped = backend(sm, dtype, Attention(heads, heads // 4, head, head), masked=masked, repeated=False)
        sizes = ["scores whole"] * 2
        if kernel == EFFICIENT:
            counted = (backward_bytes(attention, 1, TOKENS, dtype, sm=sm, packed=packed) for packed in (False, True))
            sizes = [f"{size / 1e6:.0f} MB" for size in counted]
        if kernel == FLASH:
            sizes = ["not counted apart"] * 2
        if masked:
            sizes[1] = "-"
        cells = [f"{card} (sm_{sm})", dtype, str(head), "yes" if masked else "no", kernel, grouped, *sizes]
        yield f"| {' | '.join(cells)} |"


def page() -> str:
    """Return the page."""
    return HEAD + "\n".join(rows()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
