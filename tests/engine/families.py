"""The Hugging Face models that the engine is tried on: eight families, small enough for a step in milliseconds.

Each has three blocks or more, so that both slots are used again, and uneven sizes, so that shards are padded. Weights
are drawn wider than usual, so that gradients are far from rounding. The loss is ours, the sum over label tokens divided
by the number of them in the global batch: one formula for decoders, encoders and encoder-decoders.

A bias of the keys shifts all scores of a query alike, which softmax does not see: its gradient is zero up to rounding,
and Adam makes whole steps of that rounding. Those parts, listed by name in `KEY_BIASES`, are compared by no test.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

VOCABULARY = 67
HIDDEN = 32
HEADS = 4
ROWS = 12
"""Sequences in a global batch: divided evenly by 1, 2 or 3 ranks and 1 or 4 micro-batches."""
LENGTH = 10

_COMMON = {
    "vocab_size": VOCABULARY,
    "initializer_range": 0.15,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA_LIKE = {
    "hidden_size": HIDDEN,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
}


def _llama(**changes: object) -> nn.Module:
    config = transformers.LlamaConfig(**_COMMON, **_LLAMA_LIKE, tie_word_embeddings=False, **changes)
    return transformers.LlamaForCausalLM(config)


def _gpt2(dropout: float = 0.0) -> nn.Module:
    drop = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], dropout)
    config = transformers.GPT2Config(**_COMMON, n_embd=HIDDEN, n_layer=3, n_head=HEADS, n_positions=32, **drop)
    return transformers.GPT2LMHeadModel(config)


def _qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_COMMON, **_LLAMA_LIKE, tie_word_embeddings=True))


def _gemma3() -> nn.Module:
    config = transformers.Gemma3TextConfig(
        **_COMMON,
        **_LLAMA_LIKE,
        tie_word_embeddings=True,
        sliding_window=4,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    return transformers.Gemma3ForCausalLM(config)


def _gpt_neox() -> nn.Module:
    config = transformers.GPTNeoXConfig(
        **_COMMON,
        hidden_size=HIDDEN,
        intermediate_size=88,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    return transformers.GPTNeoXForCausalLM(config)


def _opt() -> nn.Module:
    config = transformers.OPTConfig(
        activation_function="gelu",  # its own ReLU has a kink: sums rounded differently switch a unit on or off
        vocab_size=VOCABULARY,
        init_std=0.15,
        use_cache=False,
        hidden_size=HIDDEN,
        word_embed_proj_dim=HIDDEN,
        ffn_dim=88,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        max_position_embeddings=32,
        dropout=0.0,
        attention_dropout=0.0,
    )
    return transformers.OPTForCausalLM(config)


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        initializer_range=0.15,
        hidden_size=HIDDEN,
        intermediate_size=88,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def _t5(dropout: float = 0.0) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=8,
        d_ff=88,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=HEADS,
        dropout_rate=dropout,
        initializer_factor=1.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "llama": _llama,
    "gpt2": _gpt2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "bert": _bert,
    "t5": _t5,
}

KEY_BIASES: dict[str, Callable[[Tensor], Tensor] | None] = {
    r"k_proj\.bias$": None,  # opt
    r"self\.key\.bias$": None,  # bert
    r"c_attn\.bias$": lambda bias: bias.view(3, HIDDEN)[[0, 2]],  # gpt2: queries, keys, values
    r"query_key_value\.bias$": lambda bias: bias.view(HEADS, 3, HIDDEN // HEADS)[:, [0, 2]],  # gpt_neox: by head
}
"""Names of parameters whose gradient is zero up to rounding, to the part of the tensor that has a real one."""


def determined(name: str, tensor: Tensor) -> Tensor | None:
    """Return the part of a parameter whose gradient is not mere rounding; None if there is none."""
    for pattern, part in KEY_BIASES.items():
        if re.search(pattern, name):
            return part(tensor) if part else None
    return tensor


@cache
def _initial(family: str) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return {name: tensor.clone() for name, tensor in FAMILIES[family]().state_dict().items()}


def build(family: str, **changes: object) -> nn.Module:
    """Return the model of a family, with the same weights at every call."""
    model = FAMILIES[family](**changes)
    model.load_state_dict(_initial(family))
    return model.train()


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the recomputable blocks, in order of execution."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)]


def entries(model: nn.Module) -> list[nn.Module]:
    """Return the models inside the model."""
    return [module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]


def batch(family: str, step: int) -> dict[str, Tensor]:
    """Return the global batch of a step: rows of uneven length, each with its own number of label tokens."""
    random = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=random)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=random)
    mask = torch.arange(LENGTH) < lengths
    labels = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=random)
    labelled = mask & (torch.rand(ROWS, LENGTH, generator=random) < torch.rand(ROWS, 1, generator=random) + 0.2)
    labelled[:, 1] = True
    result = {"input_ids": ids, "attention_mask": mask.long(), "labels": labels.masked_fill(~labelled, -100)}
    if family == "t5":
        result["decoder_input_ids"] = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=random)
    return result


def label_tokens(rows: dict[str, Tensor]) -> int:
    """Return how many labels count in the loss."""
    return int((rows["labels"] != -100).sum())


def token_loss(model: nn.Module, rows: dict[str, Tensor], tokens: int) -> Tensor:
    """Return the sum of the label tokens' losses, divided by `tokens`."""
    inputs = {name: tensor for name, tensor in rows.items() if name != "labels"}
    logits = model(**inputs).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), ignore_index=-100, reduction="sum") / tokens
