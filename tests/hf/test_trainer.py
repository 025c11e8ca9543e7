"""The stock Trainer on one rank and ours on several write the same log, by one import changed.

Losses, gradient norms, learning rates, evaluation losses, metrics and weights, for what users do with a Trainer. The
reference is transformers' own Trainer in one process with the same global batch. Where the random numbers or the order
of samples depend on the number of ranks in the stock Trainer itself (grouping by length), the reference is the
stock Trainer on as many ranks. One deviation is on purpose, and tested as such: a loss that is a mean over a
micro-batch keeps one rank's size.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import ftkit
from ftkit.spec.tiers import KINDS
from tests.hf import runs
from tests.hf.runs import Run, assert_same_history, assert_same_weights, train

BASE = Run(
    rows=27,
    eval_rows=10,
    arguments={
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
    },
)
"""Shuffled; three steps an epoch, of which the last has one micro-batch, and that of three rows; evaluation of one whole
batch and one of four rows, in the middle of epochs and at their end."""
QUIET = Run(rows=27, arguments={"gradient_accumulation_steps": 2, "num_train_epochs": 2})
"""The same without evaluation."""
SHORT = Run(rows=24, arguments={"gradient_accumulation_steps": 2})
"""Two even steps."""


def changed(run: Run, **arguments: Any) -> Run:
    """Return a run with other TrainingArguments."""
    return replace(run, arguments={**run.arguments, **arguments})


# --- the log


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    "ranks, settings",
    [
        (2, "default"),
        (3, {"stage": 3}),
        (3, {"stage": 1, "activations": "keep"}),
        (2, {"stage": 0}),
        (2, {"stage": 2, "gradient_dtype": "compute"}),
        (2, {"stage": 3, "activations": "keep", "reshard_after_forward": False}),
        (3, {"stage": 3, "activations": "recompute", "reshard_after_forward": True, "debug": True}),
        (2, {"stage": 3, "activations": "keep", "reshard_after_forward": True, "prefetch": False}),
        (1, {"accumulate_in": "unit", "state": "host", "update": "deferred"}),
        (2, {"accumulate_in": "unit", "stage": 3}),
        (3, {"accumulate_in": "unit", "stage": 3, "debug": True, **dict.fromkeys(KINDS[1:], "nvme")}),
        (2, {"accumulate_in": "unit", "stage": 3, "state": "nvme", "state_host_bytes": 0}),
        (2, {"stage": 3, "activations": "recompute", **dict.fromkeys(KINDS, "nvme")}),
        (1, {"stage": 3, "activations": "keep", **dict.fromkeys(("parameters", "gradients", "state"), "host")}),
    ],
)
def test_the_same_log_by_one_import_changed(ranks, settings, worlds, stock, tmp_path):
    if isinstance(settings, dict):
        settings = {**settings, "nvme_dir": str(tmp_path)}
    ours = worlds[ranks].run(train, "ours", str(tmp_path), replace(BASE, ftkit=settings))
    theirs = stock(BASE)
    assert len(theirs.column("loss")) == 6
    assert len(theirs.column("eval_loss")) == 3
    # The Trainer counts epochs in batches, and an epoch's last step here has half as many micro-batches as the others.
    in_unit = isinstance(settings, dict) and settings.get("accumulate_in") == "unit"
    for outcome in ours:
        assert_same_history(outcome, theirs, leave_out=["epoch"] if in_unit else [])
    assert_same_weights(ours[0].weights, theirs.weights)


def test_tied_weights(world2, stock, tmp_path):
    run = replace(BASE, model=runs.tied_llama)
    ours = world2.run(train, "ours", str(tmp_path), replace(run, ftkit={"stage": 3}))[0]
    assert_same_history(ours, stock(run))
    assert_same_weights(ours.weights, stock(run).weights)


def test_max_steps_stop_in_the_middle_of_an_epoch(world2, stock, tmp_path):
    run = changed(BASE, max_steps=4, lr_scheduler_type="linear", logging_steps=2)
    ours = world2.run(train, "ours", str(tmp_path), run)[0]
    assert_same_history(ours, stock(run))
    assert [line["step"] for line in ours.history if "loss" in line] == [2, 4]


def test_norms_are_logged_without_clipping(world2, stock, tmp_path):
    run = changed(SHORT, max_grad_norm=0.0)
    assert_same_history(world2.run(train, "ours", str(tmp_path), run)[0], stock(run))


def test_tokens_and_operations_are_counted(world2, stock, tmp_path):
    run = replace(changed(SHORT, include_num_input_tokens_seen="all"), after=counts)
    ours, theirs = world2.run(train, "ours", str(tmp_path), replace(run, ftkit={"stage": 3}))[0], stock(run)
    assert_same_history(ours, theirs)
    assert ours.column("num_input_tokens_seen")[-1] == 24 * runs.LENGTH
    assert ours.after == theirs.after


def counts(trainer):
    return trainer.state.total_flos, trainer.model.num_parameters(), trainer.get_num_trainable_parameters()


def test_reducing_on_a_plateau_drives_the_learning_rate(world2, stock, tmp_path):
    run = changed(
        BASE,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "threshold": 1.0},
        eval_steps=1,
        warmup_steps=0,
    )
    ours = world2.run(train, "ours", str(tmp_path), run)[0]
    assert_same_history(ours, stock(run))
    assert len(set(ours.column("learning_rate"))) > 3


# --- resuming


@pytest.fixture(scope="module")
def checkpoints(world2, tmp_path_factory):
    """The folder of a run on two ranks that saved in the middle of an epoch (2) and at the end of one (3)."""
    folder = tmp_path_factory.mktemp("checkpoints")
    world2.run(train, "ours", str(folder), replace(changed(BASE, save_strategy="steps", save_steps=1), ftkit={"stage": 3}))
    return folder


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "ranks, step, settings",
    [
        (2, 2, {"stage": 3}),
        (1, 2, "default"),
        (3, 2, {"stage": 0}),
        (3, 3, {"stage": 2}),
        (1, 3, {"stage": 1, "activations": "keep"}),
        (3, 2, {"stage": 3, "parameters": "nvme", "gradients": "nvme", "state": "nvme"}),
        (2, 5, {"stage": 1}),
    ],
)
def test_resuming_on_other_ranks_and_stages_goes_on_as_if_nothing_happened(
    ranks, step, settings, checkpoints, worlds, stock, tmp_path
):
    if isinstance(settings, dict):
        settings = {**settings, "nvme_dir": str(tmp_path)}
    run = replace(BASE, resume=f"{checkpoints}/checkpoint-{step}", ftkit=settings)
    ours = worlds[ranks].run(train, "ours", str(tmp_path), run)[0]
    assert_same_history(ours, stock(BASE), leave_out=["train_loss"])  # of this call only, after a resume
    assert_same_weights(ours.weights, stock(BASE).weights)


def dropout_llama():
    return runs.llama(attention_dropout=0.3)


def test_random_numbers_go_on_where_they_were(world2, stock, tmp_path):
    run = replace(changed(QUIET, save_strategy="steps", save_steps=2), model=dropout_llama, ftkit={"stage": 3})
    whole = world2.run(train, "ours", str(tmp_path / "whole"), run)[0]
    resumed = replace(run, resume=str(tmp_path / "whole" / "checkpoint-2"))
    again = world2.run(train, "ours", str(tmp_path / "again"), resumed)[0]
    assert_same_history(again, whole, relative=0, absolute=0, leave_out=["train_loss"])
    assert stock(QUIET).column("loss") != pytest.approx(whole.column("loss"), rel=1e-3), "no dropout"


def test_resume_true_takes_the_last_checkpoint(world2, stock, tmp_path):
    run = changed(BASE, save_strategy="steps", save_steps=2)
    world2.run(train, "ours", str(tmp_path), changed(run, max_steps=4, num_train_epochs=1))
    # the schedule of the shorter run was another: only where training goes on is looked at
    ours = world2.run(train, "ours", str(tmp_path), replace(run, resume=True))[0]
    assert [line["step"] for line in ours.history if "loss" in line] == list(range(1, 7))


# --- what users add


def keep_two(trainer):
    names = sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*"))
    best = Path(trainer.state.best_model_checkpoint)
    return names, best.name, best.is_dir(), trainer.evaluate()["eval_loss"]


def kept(trainer):
    return sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*"))


def test_saving_only_what_is_better(world2, stock, tmp_path):
    run = changed(BASE, save_strategy="best", metric_for_best_model="eval_loss", greater_is_better=False)
    run = replace(run, after=kept)
    assert 0 < len(stock(run).after) < 3
    assert world2.run(train, "ours", str(tmp_path), replace(run, ftkit={"stage": 3}))[0].after == stock(run).after


@pytest.mark.quick(2)
@pytest.mark.parametrize("only_model", [False, True])
@pytest.mark.parametrize("settings", [{"stage": 3}, {"stage": 1}])
def test_the_best_checkpoint_is_kept_and_loaded(settings, only_model, world2, stock, tmp_path):
    run = changed(
        BASE,
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # so that the best is not the last
        save_only_model=only_model,
    )
    run = replace(run, after=keep_two)
    theirs = stock(run)
    assert theirs.after[:3] == (["checkpoint-4", "checkpoint-6"], "checkpoint-4", True)
    for outcome in world2.run(train, "ours", str(tmp_path), replace(run, ftkit=settings)):
        assert_same_history(outcome, theirs)
        assert outcome.after[:3] == theirs.after[:3]
        if outcome.weights:
            assert_same_weights(outcome.weights, theirs.weights)


class Recorder(transformers.TrainerCallback):
    """Writes down every event with the step at which it came."""

    def __init__(self):
        self.events = []


def _note(event):
    def note(self, args, state, control, **kwargs):
        self.events.append((event, state.global_step, control.should_save, kwargs.get("model") is not None))

    return note


for _event in [name for name in dir(transformers.TrainerCallback) if name.startswith("on_")]:
    setattr(Recorder, _event, _note(_event))


def recorded(trainer):
    return next(c for c in trainer.callback_handler.callbacks if isinstance(c, Recorder)).events


def test_callbacks_are_called_as_in_stock(world2, stock, tmp_path):
    run = changed(BASE, save_strategy="steps", save_steps=2, num_train_epochs=1, eval_on_start=True)
    run = replace(run, options={"callbacks": [Recorder()]}, after=recorded)
    theirs = stock(run)
    events = {event for event, *_ in theirs.after}
    assert {"on_train_begin", "on_save", "on_evaluate", "on_substep_end", "on_pre_optimizer_step"} <= events
    for outcome in world2.run(train, "ours", str(tmp_path), run):
        assert outcome.after == theirs.after


def token_metrics(prediction):
    chosen = prediction.predictions.argmax(-1)[:, :-1]
    labels = prediction.label_ids[:, 1:]
    kept = labels != -100
    return {
        "accuracy": float((chosen == labels)[kept].mean()),
        "labels": int(kept.sum()),
        "rows": len(prediction.predictions),
        "spread": float(np.abs(prediction.predictions).mean()),
    }


def predict_rows(trainer):
    found = trainer.predict(runs.token_rows(8, seed=3))
    without = [{key: row[key] for key in ("input_ids", "attention_mask")} for row in runs.token_rows(7, seed=5)]
    unlabelled = trainer.predict(without).predictions
    return torch.from_numpy(found.predictions), torch.from_numpy(unlabelled), found.label_ids.tolist(), found.metrics


def evaluate(trainer):
    return trainer.evaluate()


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_evaluation_before_training_metrics_and_prediction(ranks, worlds, stock, tmp_path):
    run = replace(BASE, options={"compute_metrics": token_metrics}, before=evaluate, after=predict_rows)
    theirs = stock(run)
    assert theirs.column("eval_rows") == [10, 10, 10]
    for outcome in worlds[ranks].run(train, "ours", str(tmp_path), replace(run, ftkit={"stage": 3})):
        assert_same_history(outcome, theirs)
        assert math.isclose(outcome.before["eval_loss"], theirs.before["eval_loss"], rel_tol=1e-5)
        for one, two in zip(outcome.after[:2], theirs.after[:2]):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
        assert outcome.after[2] == theirs.after[2]
        assert outcome.after[3]["test_accuracy"] == theirs.after[3]["test_accuracy"]


def train_first(trainer):
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


class NotesReductions:
    """Notes for each micro-batch how many blocks were reduced in its backward."""

    def training_step(self, *args, **kwargs):
        trace = self.engine.transfer.trace
        trace.start()
        loss = super().training_step(*args, **kwargs)
        self.reduced = [*getattr(self, "reduced", []), sum(span.name.startswith("reduce") for span in trace.stop())]
        return loss


def reductions_and_blocks(trainer):
    return trainer.reduced, len(trainer.engine.units)


def test_blocks_are_reduced_in_the_last_micro_batch_of_a_step(world2, tmp_path):
    arguments = {"gradient_accumulation_steps": 2, "max_steps": 2}
    run = Run(
        arguments=arguments,
        ftkit={"stage": 1, "activations": "keep"},
        mixin=NotesReductions,
        after=reductions_and_blocks,
    )
    for outcome in world2.run(train, "ours", str(tmp_path), run):
        reduced, blocks = outcome.after
        assert reduced == [0, blocks] * 2


def test_training_twice(world2, stock, tmp_path):
    run = replace(SHORT, before=train_first)
    ours, theirs = world2.run(train, "ours", str(tmp_path), run)[0], stock(run)
    assert_same_history(ours, theirs)
    assert ours.before == pytest.approx(theirs.before, rel=1e-5)
    assert ours.before != pytest.approx(ours.column("loss"), rel=1e-3)


def new_llama():
    return runs.llama()


def test_model_init(world2, stock, tmp_path):
    run = replace(SHORT, options={"model_init": new_llama}, before=train_first)
    assert_same_history(world2.run(train, "ours", str(tmp_path), run)[0], stock(run))


def two_groups(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """A user's own optimizer: the head learns faster, the scheduler is made for both."""
    head = list(model.lm_head.parameters())
    rest = [p for p in model.parameters() if all(p is not h for h in head)]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": head, "lr": 3e-2, "weight_decay": 0.0}], lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def sgd(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """Plain SGD with momentum; the Trainer makes the scheduler."""
    return torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9, weight_decay=0.01), None


@pytest.mark.parametrize("optimizers", [two_groups, sgd])
@pytest.mark.filterwarnings("error")
def test_a_users_own_optimizer_and_scheduler(optimizers, world2, stock, tmp_path):
    run = replace(QUIET, options={"optimizers": optimizers})
    ours, theirs = world2.run(train, "ours", str(tmp_path), replace(run, ftkit={"stage": 3}))[0], stock(run)
    assert_same_history(ours, theirs)
    assert_same_weights(ours.weights, theirs.weights)


def test_sgd_by_name(world2, stock, tmp_path):
    run = changed(SHORT, optim="sgd", learning_rate=0.1)
    ours = world2.run(train, "ours", str(tmp_path), run)[0]
    assert_same_history(ours, stock(run))
    assert_same_weights(ours.weights, stock(run).weights, limit=1e-5)


def test_label_smoothing(world2, stock, tmp_path):
    run = changed(BASE, label_smoothing_factor=0.2)
    assert_same_history(world2.run(train, "ours", str(tmp_path), run)[0], stock(run))
    assert stock(run).column("loss") != pytest.approx(stock(BASE).column("loss"), rel=1e-3)


def summed_loss(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].flatten(0, 1)
    total = F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
    return total / (num_items_in_batch.item() if num_items_in_batch is not None else (labels != -100).sum())


class PenalisedLoss:
    """A user's compute_loss around the Trainer's."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = 1.5 * loss
        return (loss, outputs) if return_outputs else loss


class OwnMean:
    """A user's compute_loss instead of the Trainer's: a mean over the micro-batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits[:, -1], labels[:, -1])
        return (loss, outputs) if return_outputs else loss


class MeanTrainer(OwnMean, transformers.Trainer):
    """Somebody's Trainer, written without ftkit."""


class OurMeanTrainer(ftkit.TrainerMixin, MeanTrainer):
    """And put on it."""


OVER_MEAN = replace(
    SHORT,
    ftkit={"loss_reduction": "mean-rows"},
    stock_classes=(MeanTrainer, transformers.TrainingArguments),
    our_classes=(OurMeanTrainer, ftkit.TrainingArguments),
)


@pytest.mark.parametrize(
    "run",
    [
        replace(QUIET, options={"compute_loss_func": summed_loss}),
        OVER_MEAN,
        replace(QUIET, mixin=PenalisedLoss),
        replace(SHORT, mixin=OwnMean, ftkit={"loss_reduction": "mean-rows"}),
    ],
    ids=["function", "beneath", "around", "instead"],
)
def test_a_users_own_loss(run, world2, stock, tmp_path):
    ours = world2.run(train, "ours", str(tmp_path), run)[0]
    assert_same_history(ours, stock(run))
    assert_same_weights(ours.weights, stock(run).weights)


def labelled_rows():
    return runs.labelled_rows(24)


def few_labelled_rows():
    return runs.labelled_rows(10, seed=4)


CLASSIFIER = Run(
    model=runs.classifier,
    rows=labelled_rows,
    eval_rows=few_labelled_rows,
    arguments={"num_train_epochs": 2, "eval_strategy": "epoch"},
    before=evaluate,
)


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loss_that_is_a_mean_is_that_of_one_rank(ranks, worlds, stock, tmp_path):
    theirs = stock(CLASSIFIER)
    ours = worlds[ranks].run(train, "ours", str(tmp_path), CLASSIFIER)[0]
    assert_same_history(ours, theirs, leave_out=["eval_loss"])
    assert_same_weights(ours.weights, theirs.weights)
    # the rows of the last evaluation batch that are repeated stay in its mean, as in stock on several ranks
    assert ours.column("eval_loss") == pytest.approx(theirs.column("eval_loss"), rel=0.05)


def test_a_loss_that_is_a_mean_is_the_same_in_one_batch_or_four(world2, stock, tmp_path):
    """Two ranks and two micro-batches of three rows, against one batch of twelve. (Stock adds micro-batches here.)"""
    whole = replace(CLASSIFIER, batch=12, eval_rows=0, before=None, arguments={"num_train_epochs": 2})
    cut = replace(whole, batch=6, arguments={**whole.arguments, "gradient_accumulation_steps": 2})
    ours, theirs = world2.run(train, "ours", str(tmp_path), cut)[0], stock(whole)
    assert_same_history(ours, theirs)
    assert_same_weights(ours.weights, theirs.weights)
    assert stock(cut).column("grad_norm")[0] == pytest.approx(2 * theirs.column("grad_norm")[0], rel=1e-4)


# --- where random numbers or the order of samples depend on the ranks, as in stock on as many ranks


def uneven_rows():
    lengths = [runs.LENGTH - 5 + (7 * i) % 6 for i in range(24)]
    return [row for i, length in enumerate(lengths) for row in runs.token_rows(1, seed=50 + i, length=length)]


def pad(rows):
    width = max(len(row["labels"]) for row in rows)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        key: torch.stack([F.pad(row[key], (0, width - len(row[key])), value=value) for row in rows])
        for key, value in fill.items()
    }


def end_to_end(rows):
    return {key: torch.cat([row[key] for row in rows])[None] for key in rows[0]}


@pytest.mark.parametrize(
    "run",
    [
        replace(QUIET, options={"data_collator": end_to_end}),  # of samples in one row none can be told to be repeated
        replace(changed(SHORT, train_sampling_strategy="group_by_length"), rows=uneven_rows, options={"data_collator": pad}),
    ],
    ids=["end to end", "group_by_length"],
)
def test_as_stock_on_as_many_ranks(run, world2, stock, tmp_path):
    ours = world2.run(train, "ours", str(tmp_path / "ours"), replace(run, ftkit={"stage": 3}))[0]
    theirs = world2.run(train, "stock", str(tmp_path / "stock"), run)[0]
    assert_same_history(ours, theirs)
    assert_same_weights(ours.weights, theirs.weights)
    assert ours.column("loss") != pytest.approx(stock(replace(run, arguments=SHORT.arguments)).column("loss"), rel=1e-3)


def test_batches_that_are_split_among_ranks(world2, stock, tmp_path):
    batches = {"per_device_train_batch_size": 6, "per_device_eval_batch_size": 6}
    run = changed(QUIET, accelerator_config={"split_batches": True}, **batches)
    assert_same_history(world2.run(train, "ours", str(tmp_path), run)[0], stock(QUIET))


def stream():
    return Stream()


class Stream(torch.utils.data.IterableDataset):
    """Rows without a length."""

    def __iter__(self):
        return iter(runs.token_rows(30))


def test_a_stream_of_rows(world2, stock, tmp_path):
    run = replace(changed(SHORT, max_steps=4), rows=stream)
    ours = world2.run(train, "ours", str(tmp_path), run)[0]
    assert_same_history(ours, stock(run), leave_out=["epoch"])


# --- generation in evaluation


def sequence_rows(count=8):
    rows = runs.token_rows(count, seed=21)
    return [{**row, "labels": row["input_ids"].flip(0)[:7]} for row in rows]


def few_sequence_rows():
    return sequence_rows(6)  # even: Seq2SeqTrainer hands repeated samples to compute_metrics


def generated_metrics(prediction):
    tokens = np.where(prediction.predictions < 0, 0, prediction.predictions)
    ended = tokens == 84
    lengths = np.where(ended.any(-1), ended.argmax(-1), tokens.shape[1])
    return {"sum": int(tokens.sum()), "shortest": int(lengths.min()), "longest": int(lengths.max()), "rows": len(tokens)}


SEQ2SEQ = Run(
    model=runs.t5,
    rows=sequence_rows,
    eval_rows=few_sequence_rows,
    stock_classes=(transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments),
    our_classes=(ftkit.Seq2SeqTrainer, ftkit.Seq2SeqTrainingArguments),
    arguments={
        "predict_with_generate": True,
        "generation_max_length": 12,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "learning_rate": 1e-5,  # a model drawn this wide is chaotic
    },
    options={"compute_metrics": generated_metrics},
    before=evaluate,
    batch=2,
)


def test_generation_in_evaluation_where_ranks_stop_at_different_lengths(world2, stock, tmp_path):
    theirs = stock(SEQ2SEQ)
    found = theirs.before
    assert 1 < found["eval_shortest"] < found["eval_longest"]
    ours = world2.run(train, "ours", str(tmp_path), replace(SEQ2SEQ, ftkit={"stage": 3}))[0]
    assert ours.before["eval_sum"] == found["eval_sum"]
    assert_same_history(ours, theirs, relative=1e-4)
