"""Fine-tune the tiny base model on true and on shuffled answers, and compare both on the held-out questions.

    torchrun --nproc-per-node 2 data/pilot.py

Prints the mean loss of an answer before, after the true run and after the shuffled one, with standard errors over the
questions; apart from the whole answer also for the part that copies the name and the part that has to be thought up.
It is the measurement behind the figures in README.md and needs no recipe.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ftkit.bundled.shuffle_answers import shuffle_answers

HERE = Path(__file__).parent
IGNORED = -100


def read_rows(path: Path) -> list[dict]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def encode(row: dict, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """Return a row's tokens and its labels: the assistant's tokens, IGNORED elsewhere."""
    chat = tokenizer.apply_chat_template(row["messages"], return_assistant_tokens_mask=True, return_dict=True)
    labels = [token if own else IGNORED for token, own in zip(chat["input_ids"], chat["assistant_masks"])]
    return {"input_ids": chat["input_ids"], "labels": labels}


def collate(rows: list[dict[str, list[int]]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Pad rows on the right to the longest: input_ids, labels and attention_mask, each (B, T) int64."""
    width = max(len(row["input_ids"]) for row in rows)

    def padded(lists: list[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([own + [value] * (width - len(own)) for own in lists])

    return {
        "input_ids": padded([row["input_ids"] for row in rows], pad_token_id),
        "labels": padded([row["labels"] for row in rows], IGNORED),
        "attention_mask": padded([[1] * len(row["input_ids"]) for row in rows], 0),
    }


@torch.no_grad()
def answer_losses(model: PreTrainedModel, rows: list[dict], tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Return each row's mean loss: (3, rows) for the whole answer, its name and its summary."""
    losses = []
    for row in rows:
        batch = collate([encode(row, tokenizer)], tokenizer.pad_token_id)
        logits = model(input_ids=batch["input_ids"]).logits[0, :-1].float()
        labels = batch["labels"][0, 1:]
        loss = cross_entropy(logits[labels != IGNORED], labels[labels != IGNORED], reduction="none")
        name = row["messages"][-1]["content"].split(": ", 1)[0] + ":"
        split = len(tokenizer(name)["input_ids"])
        losses.append(torch.stack([loss.mean(), loss[:split].mean(), loss[split:].mean()]))
    return torch.stack(losses, dim=1)


def fine_tune(rows: list[dict], base: Path, folder: Path, options: argparse.Namespace) -> None:
    """Fine-tune the base model on chat rows, all ranks together, and save it in `folder`."""
    if options.stock:
        from transformers import Trainer, TrainingArguments
    else:
        from ftkit import Trainer, TrainingArguments

    tokenizer = AutoTokenizer.from_pretrained(base)
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=options.epochs,
        learning_rate=options.lr,
        lr_scheduler_type="linear",
        warmup_steps=20,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        logging_steps=20,
        save_strategy="no",
        report_to=[],
        seed=17,
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    arguments.per_device_train_batch_size = options.batch_rows // arguments.world_size
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        args=arguments,
        train_dataset=[encode(row, tokenizer) for row in rows],
        data_collator=lambda batch: collate(batch, tokenizer.pad_token_id),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(str(folder))
    trainer.accelerator.wait_for_everyone()


def mean_and_error(values: torch.Tensor) -> str:
    """Format a mean with its standard error."""
    return f"{values.mean():.4f} ± {values.std() / math.sqrt(len(values)):.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=HERE / "tiny-base")
    parser.add_argument("--output", type=Path, default=Path("runs/pilot"), help="folder for both models")
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--batch-rows", type=int, default=32, help="rows a step, over all ranks")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--stock", action="store_true", help="use transformers' own Trainer, to compare")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.base)
    train, held_out = read_rows(HERE / "python-docs.jsonl"), read_rows(HERE / "python-docs-heldout.jsonl")
    # One path for all ranks: each writes its share of the weights.
    folders = {"before": options.base, "true": options.output / "true", "shuffled": options.output / "shuffled"}
    fine_tune(train, options.base, folders["true"], options)
    fine_tune(shuffle_answers(train), options.base, folders["shuffled"], options)
    if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
        return
    losses = {}
    for name, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        losses[name] = answer_losses(model, held_out, tokenizer)
    for part, what in enumerate(("answer", "name", "summary")):
        before, true, shuffled = (losses[name][part] for name in ("before", "true", "shuffled"))
        difference = shuffled - true
        errors = difference.mean() / (difference.std() / math.sqrt(len(difference)))
        print(f"{what}: before {mean_and_error(before)}, true {mean_and_error(true)}", end=", ")
        print(f"shuffled {mean_and_error(shuffled)}, shuffled - true {mean_and_error(difference)}, {errors:.1f} errors")
        print(f"{what}: true is {100 * (1 - true.mean() / before.mean()):.1f} % lower than before", end=", ")
        print(f"shuffled {100 * (1 - shuffled.mean() / before.mean()):.1f} %")


if __name__ == "__main__":
    main()
