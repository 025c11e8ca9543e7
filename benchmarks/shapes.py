"""The Llamas that benchmarks train."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES = {  # hidden size, layers, heads, intermediate size, vocabulary
    "12m": (256, 8, 8, 1024, 8000),
    "13m": (128, 4, 4, 352, 32000),
    "34m": (512, 8, 8, 1376, 8000),
    "70m": (512, 12, 8, 2048, 16000),
    "134m": (768, 12, 12, 2048, 32000),
    "374m": (1024, 24, 16, 2816, 32000),
    "700m": (1536, 20, 16, 4096, 32000),
    "1b": (2048, 18, 16, 5632, 32000),
    "1.1b": (2048, 20, 8, 5632, 32000),
    "2b": (2560, 24, 20, 6912, 32000),
}
GROWING = ("13m", "134m", "374m", "700m", "1b", "2b")
"""Sizes from which `benchmarks.cap` finds the largest that trains."""


def llama(size: str) -> LlamaConfig:
    """Return the configuration of one of the Llamas."""
    hidden, layers, heads, intermediate, vocabulary = SHAPES[size]
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=intermediate,
        max_position_embeddings=4096,
        use_cache=False,
    )


def write_model(size: str, folder: Path) -> None:
    """Write a Llama with random bf16 weights as a folder of the hub."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM._from_config(llama(size), dtype=torch.bfloat16)
    model.save_pretrained(folder)
