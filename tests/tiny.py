"""A model of a few thousand parameters with a tokenizer of bytes, and rows to train it on."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}{%- if message['role'] == 'assistant' %}"
    "{{- 'A:' }}{% generation %}{{- message['content'] + eos_token }}{% endgeneration %}"
    "{%- else %}{{- 'Q:' + message['content'] + eos_token }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'A:' }}{%- endif %}"
)


def make_tokenizer(folder: Path, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Save a byte-level tokenizer of 280 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<pad>", "<begin>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["1+1?"], trainer)
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<begin>", eos_token="<end>", chat_template=template
    )
    whole.save_pretrained(folder)
    return whole


def make_base(folder: Path) -> Path:
    """Save a Llama of two blocks with its tokenizer."""
    tokenizer = make_tokenizer(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_overflowing_base(folder: Path) -> Path:
    """Save a small model whose first block adds 100000 to one feature of the residual stream, as large ones have them.

    The norms that follow undo what that does to the scale of the others, so the model learns as any other does.
    """
    make_base(folder)
    config = LlamaConfig.from_pretrained(folder, attention_bias=True, mlp_bias=True)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    first, last = model.model.layers
    with torch.no_grad():
        for part in (first.self_attn.o_proj, first.mlp.down_proj):
            part.bias[0] = 5e4
        for norm, size in ((first.post_attention_layernorm, 5e4), (last.input_layernorm, 1e5), (model.model.norm, 1e5)):
            norm.weight[1:] *= size / config.hidden_size**0.5
        last.post_attention_layernorm.weight[1:] *= 1e5 / config.hidden_size**0.5
    model.save_pretrained(folder)
    return folder


def write_rows(path: Path, count: int, first: int = 0) -> Path:
    """Write sums as prompt and completion."""
    rows = [{"prompt": f"{n}+1?", "completion": str(n + 1)} for n in range(first, first + count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
