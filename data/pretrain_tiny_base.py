"""Pretrain the bundled tiny base model on the standard library's source, held-out modules left out.

    torchrun --nproc-per-node 2 data/pretrain_tiny_base.py --output data/tiny-base

The folder gets a byte-level BPE tokenizer with a chat template, a Llama of 3.7M parameters in bf16, and the log of the
training.
"""

import argparse
import json
import platform
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ftkit.bundled.make_python_docs import is_held_out, library_modules

VOCABULARY = 3072
SEQUENCE_TOKENS = 256
BEGIN, END, PAD, SYSTEM, USER, ASSISTANT = "<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"
# Words break at case changes, underscores and digits, so that `getItem`, `get_item` and "get item" share their pieces.
WORDS = Regex(r" ?[A-Z]?[a-z]+| ?[A-Z]+(?![a-z])| ?[0-9]| ?_+| ?[^\s\w]+|\s+(?!\S)|\s+|.")
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' %}"
    "{{- '<|assistant|>' }}{% generation %}{{- message['content'] + eos_token }}{% endgeneration %}"
    "{%- elif message['role'] in ['system', 'user'] %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{%- else %}{{- raise_exception('unknown role ' + message['role']) }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def pretraining_texts() -> list[str]:
    """Return the source of every module that is not held out, one text a module."""
    return [text for module, text in library_modules() if not is_held_out(module)]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE tokenizer and give it the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(WORDS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BEGIN, END, SYSTEM, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )


class PackedText(Dataset):
    """All texts as one line of tokens, cut into equal sequences; labels are the tokens.

    Args:
        tokens: the line, (n,) int64.
    """

    def __init__(self, tokens: torch.Tensor):
        count = len(tokens) // SEQUENCE_TOKENS
        self.sequences_BT = tokens[: count * SEQUENCE_TOKENS].view(count, SEQUENCE_TOKENS)

    def __len__(self) -> int:
        return len(self.sequences_BT)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.sequences_BT[index], "labels": self.sequences_BT[index]}


def model_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Return the architecture: four blocks of width 256, tied embeddings, grouped key-value heads."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def save_as_bf16(trained: Path, output: Path) -> int:
    """Copy a trained folder's model to `output` with its weights in bf16, and return the number of parameters."""
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(trained / "model.safetensors").items()}
    (output / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    config = json.loads((trained / "config.json").read_text())
    config["dtype"] = "bfloat16"
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copyfile(trained / "generation_config.json", output / "generation_config.json")
    return sum(tensor.numel() for tensor in weights.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "tiny-base")
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--batch-sequences", type=int, default=16, help="sequences a step, over all ranks")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--stock", action="store_true", help="use transformers' own Trainer, to compare")
    options = parser.parse_args()
    if options.stock:
        from transformers import Trainer, TrainingArguments
    else:
        from ftkit import Trainer, TrainingArguments

    scratch = options.output / "unfinished"  # one path for all ranks: each writes its share of the weights
    arguments = TrainingArguments(
        output_dir=str(scratch),
        max_steps=options.steps,
        learning_rate=options.lr,
        lr_scheduler_type="linear",
        warmup_steps=100,
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=1.0,
        logging_steps=20,
        save_strategy="no",
        report_to=[],
        seed=17,
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    arguments.per_device_train_batch_size = options.batch_sequences // arguments.world_size
    texts = pretraining_texts()
    with arguments.main_process_first(desc="tokenizer"):
        if arguments.process_index == 0:
            options.output.mkdir(parents=True, exist_ok=True)
            train_tokenizer(texts).save_pretrained(options.output)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.output)
    encoded = tokenizer([BEGIN + text + END for text in texts], verbose=False)["input_ids"]
    data = PackedText(torch.tensor([token for text in encoded for token in text]))

    torch.manual_seed(arguments.seed)
    model = LlamaForCausalLM(model_config(tokenizer))
    trainer = Trainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(str(scratch))
    if arguments.process_index == 0:
        parameters = save_as_bf16(scratch, options.output)
        facts = {
            "trainer": f"{Trainer.__module__}.{Trainer.__qualname__}",
            "world_size": arguments.world_size,
            "step_tokens": options.batch_sequences * SEQUENCE_TOKENS,
            "text_bytes": sum(len(text.encode()) for text in texts),
            "text_tokens": data.sequences_BT.numel(),
            "parameters": parameters,
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        lines = [json.dumps(line) + "\n" for line in (facts, *trainer.state.log_history)]
        (options.output / "pretraining-log.jsonl").write_text("".join(lines))
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
