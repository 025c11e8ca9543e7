"""The Llamas that benchmarks train: hidden size, layers, heads, intermediate size."""

from transformers import LlamaConfig

VOCABULARY = 32000
SHAPES = {
    "13m": (128, 4, 4, 352),
    "134m": (768, 12, 12, 2048),
    "374m": (1024, 24, 16, 2816),
    "700m": (1536, 20, 16, 4096),
    "1b": (2048, 18, 16, 5632),
    "2b": (2560, 24, 20, 6912),
    "3b": (3072, 26, 24, 8192),
}


def llama(size: str) -> LlamaConfig:
    """Return the configuration of one of the Llamas that benchmarks train."""
    hidden, layers, heads, intermediate = SHAPES[size]
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=intermediate,
        max_position_embeddings=2048,
        use_cache=False,
        architectures=["LlamaForCausalLM"],
    )
