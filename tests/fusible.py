"""Small models of every family whose parts are fused, and what is expected to be fused in each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

LAYERS = 2
VOCABULARY = 61

_COMMON = {"vocab_size": VOCABULARY, "initializer_range": 0.15, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}
_COMMON |= {"pad_token_id": 0}
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def _decoder(name: str, **changes: object) -> Callable[[], nn.Module]:
    """Return a builder for a family whose classes are called {name}Config and {name}ForCausalLM."""

    def build() -> nn.Module:
        suffix = "TextConfig" if name == "Gemma3" else "Config"
        config = getattr(transformers, f"{name}{suffix}")(**{**_COMMON, **_SIZES, **changes})
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return build


def _gpt2() -> nn.Module:
    drop = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**_COMMON, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=32, **drop)
    )


def _opt() -> nn.Module:
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": 4}
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY, init_std=0.15, use_cache=False, max_position_embeddings=32, dropout=0.0, **sizes
    )
    return transformers.OPTForCausalLM(config)


def _t5(act: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": LAYERS, "num_decoder_layers": LAYERS, "num_heads": 4}
        config = transformers.T5Config(
            vocab_size=VOCABULARY,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
            feed_forward_proj=act,
            **sizes,
        )
        return transformers.T5ForConditionalGeneration(config)

    return build


_SLIDING = {"sliding_window": 4, "query_pre_attn_scalar": 8, "head_dim": 8}
_ROTARY_SILU = {"gated MLP (silu)": LAYERS, "rotary": LAYERS, "chunked loss": 1}
LLAMA_PARTS = _ROTARY_SILU | {"RMSNorm (Llama's casting)": 2 * LAYERS + 1}
_GEMMA = {"gated MLP (gelu_tanh)": LAYERS, "rotary": LAYERS, "chunked loss": 1}
_LOSS = {"chunked loss": 1}

FAMILIES: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "llama": (_decoder("Llama"), LLAMA_PARTS),
    "falcon3": (_decoder("Llama", head_dim=16), LLAMA_PARTS),
    "mistral": (_decoder("Mistral", sliding_window=4), LLAMA_PARTS),
    "qwen2": (_decoder("Qwen2"), LLAMA_PARTS),
    "qwen3": (
        _decoder("Qwen3", head_dim=8, tie_word_embeddings=True),
        LLAMA_PARTS | {"RMSNorm (Llama's casting)": 4 * LAYERS + 1},
    ),
    "gemma2": (_decoder("Gemma2", **_SLIDING), _GEMMA | {"RMSNorm (Gemma's)": 4 * LAYERS + 1}),
    "gemma3": (_decoder("Gemma3", **_SLIDING), _GEMMA | {"RMSNorm (Gemma's)": 6 * LAYERS + 1}),
    "phi3": (_decoder("Phi3"), LLAMA_PARTS),
    "phi4": (_decoder("Phi3", partial_rotary_factor=0.5, tie_word_embeddings=True), LLAMA_PARTS),
    "olmo2": (_decoder("Olmo2"), _ROTARY_SILU | {"RMSNorm (OLMo-2's)": 4 * LAYERS + 1}),
    "starcoder2": (_decoder("Starcoder2"), _LOSS | {"rotary": LAYERS}),
    "stablelm": (_decoder("StableLm"), _ROTARY_SILU),
    "gpt_neox": (_decoder("GPTNeoX"), _LOSS | {"rotary": LAYERS}),
    "gpt2": (_gpt2, _LOSS),
    "opt": (_opt, _LOSS),
    "t5": (_t5("relu"), {"RMSNorm (T5's)": 5 * LAYERS + 2}),
    "t5-gated": (_t5("gated-gelu"), {"RMSNorm (T5's)": 5 * LAYERS + 2}),
}


QUICK = {"llama", "gpt_neox", "t5-gated"}
"""Between them most kinds of part; `families` marks the others slow."""


def families(names: Iterable[str] = FAMILIES) -> list[Any]:
    """Return names as parameters of a test: those of `QUICK`, and the others for `make test-all`."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def build(name: str) -> nn.Module:
    """Return a family's model, the same each time."""
    torch.manual_seed(0)
    return FAMILIES[name][0]().train()


def batch(name: str, rows: int, tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """Return input_ids and labels (rows, tokens), some of them ignored."""
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=chance)
    labels = ids.masked_fill(torch.rand(rows, tokens, generator=chance) < 0.2, -100)
    return {"input_ids": ids, "labels": labels}
