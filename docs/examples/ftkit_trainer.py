"""`stock_trainer.py` on ftkit: one import changed. `--ftkit none` is the stock Trainer, `{"stage": 3}` forces a stage.

torchrun --nproc-per-node 2 docs/examples/ftkit_trainer.py --output_dir runs/example --use_cpu --max_steps 20
"""

import json
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, HfArgumentParser
from ftkit import Trainer, TrainingArguments

DATA = Path(__file__).resolve().parents[2] / "data"


def main() -> None:
    """Fine-tune the bundled model on the bundled questions and answers."""
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(DATA / "tiny-base")
    model = AutoModelForCausalLM.from_pretrained(DATA / "tiny-base", dtype="float32")

    def encode(line: str) -> dict:
        messages = json.loads(line)["messages"]
        encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        labels = [t if answer else -100 for t, answer in zip(encoded["input_ids"], encoded["assistant_masks"])]
        return {"input_ids": encoded["input_ids"], "labels": labels}

    rows = [encode(line) for line in (DATA / "python-docs.jsonl").read_text().splitlines()[:2000]]
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
