"""Models and data of the tests of losses: small, of every kind that a loss scales by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from tests.hf.runs import LENGTH, VOCABULARY, Run, bert, labelled_rows, rows_with, small_t5


def regressor() -> nn.Module:
    return bert("BertForSequenceClassification", num_labels=1, problem_type="regression")


def multi_label() -> nn.Module:
    return bert("BertForSequenceClassification", num_labels=3, problem_type="multi_label_classification")


def tagger() -> nn.Module:
    return bert("BertForTokenClassification", num_labels=5)


def reader() -> nn.Module:
    return bert("BertForQuestionAnswering")


def chooser() -> nn.Module:
    return bert("BertForMultipleChoice")


def masked() -> nn.Module:
    return bert("BertForMaskedLM", hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)


def bart() -> nn.Module:
    torch.manual_seed(8)
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=64,
        dropout=0.0,
        init_std=0.15,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=1,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
    )
    return transformers.BartForConditionalGeneration(config)


def t5() -> nn.Module:
    return small_t5(initializer_factor=0.3)


def speech(reduction: str) -> nn.Module:
    torch.manual_seed(9)
    config = transformers.Wav2Vec2Config(
        vocab_size=12,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        conv_dim=(8, 8),
        conv_stride=(4, 4),
        conv_kernel=(8, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        activation_dropout=0.0,
        layerdrop=0.0,
        mask_time_prob=0.0,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        ctc_loss_reduction=reduction,
        pad_token_id=0,
    )
    return transformers.Wav2Vec2ForCTC(config)


def speech_sum() -> nn.Module:
    return speech("sum")


def speech_mean() -> nn.Module:
    return speech("mean")


# --- rows


def padded(labels: Tensor, random: torch.Generator) -> Tensor:
    """Return labels that end early, as padded ones do."""
    labels = labels.clone()
    labels[int(torch.randint(2, len(labels), (1,), generator=random)) :] = -100
    return labels


def labelled(count: int = 27) -> list[dict[str, Tensor]]:
    return labelled_rows(count, seed=31)


def measured(count: int = 28) -> list[dict[str, Tensor]]:
    return rows_with(count, lambda ids, random: {"labels": torch.randn((), generator=random)}, 32)


def several(count: int = 28) -> list[dict[str, Tensor]]:
    return rows_with(count, lambda ids, random: {"labels": torch.randint(0, 2, (3,), generator=random).float()}, 33)


def tagged(count: int = 27) -> list[dict[str, Tensor]]:
    return rows_with(count, lambda ids, random: {"labels": padded(ids % 5, random)}, 34)


def translated(count: int = 28) -> list[dict[str, Tensor]]:
    return rows_with(count, lambda ids, random: {"labels": padded(ids.flip(0), random)}, 35)


def prompted(count: int = 28) -> list[dict[str, Tensor]]:
    """Return rows with the decoder's inputs: a smoothed loss hides the labels from the model."""
    return [{**row, "decoder_input_ids": row["labels"].clamp(min=0).roll(1)} for row in translated(count)]


def asked(count: int = 27) -> list[dict[str, Tensor]]:
    def answer(ids: Tensor, random: torch.Generator) -> dict[str, Tensor]:
        start, end = torch.randint(0, LENGTH, (2,), generator=random)
        return {"start_positions": start, "end_positions": end}

    return rows_with(count, answer, 36)


def chosen(count: int = 28) -> list[dict[str, Tensor]]:
    def choices(ids: Tensor, random: torch.Generator) -> dict[str, Tensor]:
        return {"input_ids": torch.stack([ids, ids.flip(0)]), "labels": torch.randint(0, 2, (), generator=random)}

    return rows_with(count, choices, 37)


def spoken(count: int = 28) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(38)
    rows = []
    for _ in range(count):
        labels = torch.randint(1, 12, (6,), generator=random)
        rows.append({"input_values": torch.randn(400, generator=random), "labels": padded(labels, random)})
    return rows


def unmasked(count: int = 30) -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"].tolist()} for row in labelled(count)]


# --- losses of users


def last_token(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A mean over label tokens that ignores the count."""
    logits = outputs["logits"][:, :-1]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))


class OwnTokens:
    """A user's compute_loss: a mean over the label tokens of the micro-batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = last_token(outputs, labels)
        return (loss, outputs) if return_outputs else loss


class OwnSum:
    """A user's compute_loss: a sum over the rows of the micro-batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits, inputs["labels"], reduction="sum") / 10
        return (loss, outputs) if return_outputs else loss


class OwnCounted:
    """A user's compute_loss that divides by the count, and forgets the ranks."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1]
        total = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), reduction="sum")
        loss = total / (num_items_in_batch if num_items_in_batch is not None else (labels[:, 1:] != -100).sum())
        return (loss, outputs) if return_outputs else loss


class Contrastive:
    """A user's compute_loss with negatives from the batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        scores = outputs.logits @ outputs.logits.flip(-1).T
        loss = F.cross_entropy(scores, torch.arange(len(scores)))
        return (loss, outputs) if return_outputs else loss


# --- runs of ten steps

TEN = {"num_train_epochs": 2, "learning_rate": 3e-3}
THREE_PARTS = {**TEN, "gradient_accumulation_steps": 3, "num_train_epochs": 5}


def case(model: Any, rows: Any, **changes: Any) -> Run:
    return replace(Run(model=model, rows=rows, arguments=TEN), **changes)
