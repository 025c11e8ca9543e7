"""transformers' `Seq2SeqTrainer` and its arguments on ftkit's engine: evaluation and prediction by generation.

Ranks stop generating at different lengths. At stage 3 a rank that has finished goes on taking part in the gathers
(`generate/holding.py`).
"""

from __future__ import annotations

from typing import Any

import transformers

from ftkit.hf.trainer.arguments import TrainingArguments
from ftkit.hf.trainer.trainer import Trainer


class Seq2SeqTrainingArguments(TrainingArguments, transformers.Seq2SeqTrainingArguments):  # type: ignore[misc]  # as TrainingArguments
    """`transformers.Seq2SeqTrainingArguments` with `ftkit`."""


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):  # type: ignore[misc]  # ours takes any keywords
    """`transformers.Seq2SeqTrainer` on ftkit's engine. Takes `ftkit.Seq2SeqTrainingArguments`."""

    def __init__(self, model: Any = None, args: Any = None, *others: Any, **kwargs: Any) -> None:
        args = args if args is not None else Seq2SeqTrainingArguments("tmp_trainer")
        super().__init__(model, args, *others, **kwargs)
