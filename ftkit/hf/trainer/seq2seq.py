"""transformers' `Seq2SeqTrainer` and its arguments on ftkit's engine: evaluation and prediction by generation.

Ranks stop generating at different lengths; at stage 3 a rank that has finished goes on taking part in the gathers
(rank_sync.py).
Both classes are subclasses of `ftkit.Trainer` and `ftkit.TrainingArguments`, as transformers' are of its own.
"""

from __future__ import annotations

from typing import Any

import transformers

from ftkit.hf.models.config_names import check_generation
from ftkit.hf.trainer.arguments import TrainingArguments
from ftkit.hf.trainer.trainer import Trainer


class Seq2SeqTrainingArguments(TrainingArguments, transformers.Seq2SeqTrainingArguments):  # type: ignore[misc]  # as TrainingArguments
    """`transformers.Seq2SeqTrainingArguments` with `ftkit`."""


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):  # type: ignore[misc]  # ours takes any keywords
    """`transformers.Seq2SeqTrainer` on ftkit's engine. Takes `ftkit.Seq2SeqTrainingArguments`.

    Raises:
        UserError: a field of the generation configuration that nobody reads.
    """

    def __init__(self, model: Any = None, args: Any = None, *others: Any, **kwargs: Any) -> None:
        args = args if args is not None else Seq2SeqTrainingArguments("tmp_trainer")
        if getattr(args, "ftkit", None) is not None and getattr(args, "generation_config", None) is not None:
            check_generation(args.generation_config)
        super().__init__(model, args, *others, **kwargs)
