"""The rows of a run: the recipe's tokenizer, what is trained on, what is held out, and what is wrong with either.

Every rank prepares them, before the ranks wait for each other; one of a machine does the work, the others find it done.
It refuses what `ftkit.data.prepare` refuses, and a tokenizer that cannot be loaded.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import datasets
from transformers import AutoTokenizer

from ftkit.config.recipe import Model, Recipe
from ftkit.config.wording import counted
from ftkit.data.batches import StepOrder
from ftkit.data.columns import refuse_marks
from ftkit.data.prepare import Prepared, prepare, prepare_section, split
from ftkit.data.report import Report, Warned
from ftkit.hf.load.config import reading


@dataclass(frozen=True)
class Rows:
    """The prepared rows of a run.

    Args:
        train: Data set to train on: input_ids, labels, position_ids if packed.
        held_out: Data set to evaluate on, or None.
        prepared: What `train` was made of, with its report and its order.
        prepared_held_out: What `held_out` was made of, where that is another file.
        spare: Held-out rows of `eval.share` that `eval.max_rows` leaves out: neither trained on nor measured.
    """

    train: Any
    held_out: Any
    prepared: Prepared
    prepared_held_out: Prepared | None = None
    spare: int = 0

    @property
    def report(self) -> Report:
        """Counts of the rows to train on, and of those of `eval.share`."""
        return self.prepared.report

    @property
    def held_out_report(self) -> Report | None:
        """Counts of the held-out rows; None if they are a share of the others, or if there are none."""
        return None if self.prepared_held_out is None else self.prepared_held_out.report

    def warnings(self, tokenizer: Any, stops: Collection[int]) -> list[Warned]:
        """Return the warnings for rows that can be trained on; see `Prepared.warnings`.

        Cost: sorts the checksums of all samples where a file is held out.
        """
        apart = self.prepared_held_out
        found = self.prepared.warnings(tokenizer, stops, shared=self.held_out is not None and apart is None)
        if apart is not None:
            found += [each.of("held-out rows") for each in apart.warnings(tokenizer, stops)]
            overlap = self.prepared.overlap(apart)
            found += [overlap] if overlap is not None else []
        return found

    def left_out(self, order: StepOrder) -> list[str]:
        """Return which rows, though handed in, an epoch does not come to, or nothing does; one line each.

        Args:
            order: The order of the samples to train on.
        """
        lines = []
        if self.spare:
            spare = counted(self.spare, "row")
            lines.append(f"eval.max_rows leaves out {spare} of eval.share, neither trained on nor measured")
        for source, members, count in zip(self.prepared.report.sources, order.members, order.counts()):
            if count < len(members):
                lines.append(
                    f"{source.label}: by the weights an epoch takes {count} of its {counted(len(members), 'sequence')}, and "
                    "others the next time"
                )
        return lines


def load_tokenizer(model: Model) -> Any:
    """Load the tokenizer of a recipe.

    Raises:
        UserError: There is no tokenizer of that name, or it needs its own code.
    """
    name = model.tokenizer_name
    revision = model.revision if model.tokenizer is None else None
    needed = "needed: a folder with tokenizer.json, or a hub id; set model.name or model.tokenizer"
    with reading(name, "no tokenizer could be loaded from it", advice=needed):
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=model.trust_remote_code)


def prepare_rows(recipe: Recipe, tokenizer: Any) -> Rows:
    """Prepare the rows to train on and those held out; one rank of a machine does the work.

    Raises:
        UserError: See `ftkit.data.prepare.prepare`.
    """
    data, held_out, seed = recipe.data, recipe.eval, recipe.train.seed
    prepared = prepare_section(data, tokenizer, seed=seed, task=recipe.task, must_match=False)
    train, spare = prepared.dataset, 0
    evaluation: datasets.Dataset | None = None
    apart: Prepared | None = None
    if held_out is not None and held_out.share is not None:
        train, evaluation = split(train, held_out.share, seed)
    elif held_out is not None and held_out.path is not None:
        apart = prepare(
            held_out.path,
            tokenizer,
            sequence_tokens=data.sequence_tokens,
            loss_on=data.loss_on,
            on_bad_row=data.on_bad_row,
            task=recipe.task,
            long_text=data.long_text,
            ignore_columns=data.ignore_columns,
            must_match=False,
            cache_dir=data.cache_dir,
            workers=data.workers,
        )
        evaluation = apart.dataset
    reports = [each.report for each in (prepared, apart) if each is not None]
    refuse_marks(data.loss_on, reports)
    if held_out is not None and held_out.max_rows is not None and evaluation is not None:
        kept = min(held_out.max_rows, len(evaluation))
        spare = len(evaluation) - kept if apart is None else 0
        evaluation = evaluation.select(range(kept))
    return Rows(train, evaluation, replace(prepared, dataset=train), apart, spare)
