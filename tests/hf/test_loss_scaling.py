"""The loss of W ranks is that of one: sums, means over rows and tokens, counted losses, users' losses, random numbers.

The reference is transformers' own Trainer on one rank whose batch is that of all ranks together. Where it adds up means of
micro-batches (a model that ignores `num_items_in_batch`), the reference is its run without accumulation.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from torch import nn

import ftkit
from ftkit.hf.kernels.head import proven_head_loss
from ftkit.hf.trainer.loss import first_rows, rows_of
from ftkit.hf.trainer.seeding import SeededCollator, seeded
from tests.hf import losses, runs
from tests.hf.losses import TEN, THREE_PARTS, case
from tests.hf.runs import Run, assert_same_history, assert_same_weights, train


def declared(kind: str) -> dict[str, Any]:
    """Return settings that say how a loss is reduced, which neither a probe nor the labels show."""
    return {"loss_reduction": kind}


EVALUATED = {**TEN, "eval_strategy": "epoch"}
KINDS = {
    "rows": (case(runs.classifier, losses.labelled, eval_rows=losses.labelled, arguments=EVALUATED), "mean-rows"),
    "tokens": (case(losses.tagger, losses.tagged, eval_rows=losses.tagged, arguments=EVALUATED), "mean-tokens"),
    "sum": (case(losses.speech_sum, losses.spoken, eval_rows=losses.spoken, arguments=EVALUATED), "sum"),
    "users counted": (case(runs.llama, 27, mixin=losses.OwnCounted, arguments=THREE_PARTS), "counted"),
    "users mean": (case(runs.llama, 27, mixin=losses.OwnTokens, arguments=THREE_PARTS), "mean-tokens"),
}
MORE = {
    "t5": (case(losses.t5, losses.translated, eval_rows=losses.translated, arguments=EVALUATED), "mean-tokens"),
    "bart": (case(losses.bart, losses.translated), "mean-tokens"),
    "ctc mean": (case(losses.speech_mean, losses.spoken), "mean-rows"),
    "regression": (case(losses.regressor, losses.measured, eval_rows=losses.measured, arguments=EVALUATED), "mean-rows"),
    "several labels": (case(losses.multi_label, losses.several), "mean-rows"),
    "answers": (case(losses.reader, losses.asked, eval_rows=losses.asked, arguments=EVALUATED), "mean-rows"),
    "choices": (case(losses.chooser, losses.chosen), "mean-rows"),
    "users sum": (case(runs.classifier, losses.labelled, mixin=losses.OwnSum, ftkit=declared("sum")), "sum"),
    "users function": (case(runs.llama, 27, options={"compute_loss_func": losses.last_token}), "mean-tokens"),
    "smoothed": (case(runs.llama, 27, arguments={**THREE_PARTS, "label_smoothing_factor": 0.1}), "counted"),
    "smoothed t5": (case(losses.t5, losses.prompted, arguments={**TEN, "label_smoothing_factor": 0.1}), "counted"),
}


def scaling_of(trainer: Any) -> str:
    losses_of = getattr(trainer, "loss_of_ranks", None)
    return losses_of.kind if losses_of is not None else ""


def check(name: str, ranks: int, worlds: Any, stock: Any, folder: str) -> None:
    run, kind = {**KINDS, **MORE}[name]
    ours = worlds[ranks].run(train, "ours", folder, replace(run, after=scaling_of))[0]
    assert ours.after == kind
    assert_same_history(ours, stock(run), absolute=5e-6)
    if name not in ("answers", "choices"):  # whose last biases have no gradient but rounding
        assert_same_weights(ours.weights, stock(run).weights, limit=1e-3)


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", KINDS)
def test_the_loss_of_two_ranks_is_that_of_one(name, worlds, stock, tmp_path):
    check(name, 2, worlds, stock, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KINDS, *MORE])
def test_the_loss_of_ranks_is_that_of_one_in_more_cases(name, worlds, stock, tmp_path):
    check(name, 3, worlds, stock, str(tmp_path))


# --- what is declared


def even() -> Any:
    return losses.labelled(24)


def test_a_loss_with_negatives_from_the_batch_is_the_mean_of_ranks(world2, tmp_path):
    run = case(runs.classifier, even, mixin=losses.Contrastive, ftkit=declared("mean-ranks"), after=scaling_of)
    ours = world2.run(train, "ours", str(tmp_path / "ours"), run)[0]
    theirs = world2.run(train, "stock", str(tmp_path / "stock"), replace(run, after=None))[0]
    assert ours.after == "mean-ranks"
    assert_same_history(ours, theirs)


@pytest.mark.quick(1)
@pytest.mark.parametrize("given", ["mean-ranks", "mean-tokens"])
def test_what_is_declared_is_not_looked_for(given, world2, stock, tmp_path):
    run = case(losses.tagger, losses.tagged, ftkit={"stage": 3, "loss_reduction": given}, after=scaling_of)
    ours = world2.run(train, "ours", str(tmp_path), run)[0]
    assert ours.after == given
    off = abs(ours.column("loss")[0] - stock(replace(run, after=None, ftkit="default")).column("loss")[0])
    assert (off < 1e-5) == (given == "mean-tokens")


# --- the probe


class Normed(nn.Module):
    """A classifier with BatchNorm, and a draw of random numbers; it accepts the count."""

    accepts_loss_kwargs = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bert = runs.classifier()
        self.norm = nn.BatchNorm1d(runs.LENGTH)

    def forward(self, input_ids, labels=None, **kwargs):
        drawn = self.norm(input_ids.float()).mean() * 0 + torch.rand(()) * 0
        out = self.bert(input_ids=input_ids, labels=labels)
        return {"loss": out.loss + drawn, "logits": out.logits}


def state_of_the_norm(trainer: Any) -> tuple[Any, ...]:
    norm = trainer.model.norm
    return int(norm.num_batches_tracked), norm.running_mean.tolist(), float(torch.rand(()))


def test_the_probe_leaves_statistics_and_random_numbers_alone(world2, tmp_path):
    run = case(Normed, even, arguments={**TEN, "num_train_epochs": 1}, after=state_of_the_norm)
    told = replace(run, ftkit=declared("mean-rows"))  # without a probe
    outcomes = (world2.run(train, "ours", str(tmp_path / name), each)[0] for name, each in (("a", run), ("b", told)))
    ours, known = (outcome.after for outcome in outcomes)
    assert ours == known
    assert ours[0] > 0


# --- random numbers


def dropping() -> nn.Module:
    return runs.llama(attention_dropout=0.3)


def tokenizer() -> Any:
    names = {f"w{number}": number for number in range(3, runs.VOCABULARY)} | {"[PAD]": 0, "[MASK]": 1, "[UNK]": 2}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="[UNK]"))
    special = {"pad_token": "[PAD]", "mask_token": "[MASK]", "unk_token": "[UNK]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def mask(rows: Any) -> Any:
    return transformers.DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.4)(rows)


def draw(rows: Any) -> Any:
    """A collator that draws by all three."""
    batch = transformers.default_data_collator(rows)
    drawn = int(torch.randint(3, 97, ())) + np.random.randint(3, 97) + random.randint(3, 97)
    batch["input_ids"][:, 0] = drawn % 90 + 3
    return batch


NOISY = {**TEN, "learning_rate": 1e-3}
DRAWN = {
    "masks and dropout": case(losses.masked, losses.unmasked, options={"data_collator": mask}),
    "noise": case(dropping, 24, arguments={**NOISY, "neftune_noise_alpha": 5.0}),
    "three sources": case(dropping, 24, options={"data_collator": draw}),
}


def drawn_alike(name: str, worlds: Any, folder: Any) -> None:
    """Compare two ranks with one rank that takes the same micro-batches one after the other."""
    run = replace(DRAWN[name], batch=6)
    alone = replace(run, batch=3, arguments={**run.arguments, "gradient_accumulation_steps": 2})
    ours, other = (
        worlds[2].run(train, "ours", str(folder / "2"), run)[0],
        worlds[1].run(train, "ours", str(folder / "1"), alone)[0],
    )
    assert_same_history(ours, other, absolute=5e-6)
    assert len(ours.column("loss")) >= 8
    dry = worlds[1].run(train, "ours", str(folder / "dry"), replace(alone, arguments={**alone.arguments, "seed": 7}))[0]
    assert abs(dry.column("loss")[0] - ours.column("loss")[0]) > 1e-3


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["masks and dropout", "noise"])
def test_random_numbers_do_not_depend_on_the_number_of_ranks(name, worlds, tmp_path):
    drawn_alike(name, worlds, tmp_path)


@pytest.mark.slow
def test_random_numbers_of_all_sources_do_not_depend_on_the_number_of_ranks(worlds, tmp_path):
    drawn_alike("three sources", worlds, tmp_path)


def test_masks_go_on_where_they_were_after_a_resume(world2, tmp_path):
    arguments = {**TEN, "num_train_epochs": 1, "save_strategy": "steps", "save_steps": 3}
    run = replace(DRAWN["masks and dropout"], arguments=arguments)
    whole = world2.run(train, "ours", str(tmp_path / "whole"), run)[0]
    resumed = replace(run, resume=str(tmp_path / "whole" / "checkpoint-3"))
    again = world2.run(train, "ours", str(tmp_path / "again"), resumed)[0]
    assert_same_history(again, whole, relative=0, absolute=0, leave_out=["train_loss"])


def test_one_micro_batch_draws_as_stock(world1, stock, tmp_path):
    run = case(losses.masked, losses.unmasked, options={"data_collator": mask}, batch=3)
    assert_same_history(world1.run(train, "ours", str(tmp_path), run)[0], stock(run))


def test_a_collator_leaves_the_random_numbers_outside_alone():
    collate = SeededCollator(lambda rows: (torch.rand(()), np.random.rand(), random.random()), 3, rank=1, ranks=2)
    collate.begin(0)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first, second = collate([]), collate([])
    assert first != second
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    other = SeededCollator(collate.collate, 3, rank=0, ranks=1)
    other.begin(0, first=1)
    assert other([]) == first
    collate.begin(1)
    assert collate([]) != first


def numbers(rows: Any) -> list[float]:
    return [float(torch.rand(())), np.random.rand(), random.random()]


@pytest.mark.slow
@pytest.mark.parametrize("kept", [False, True])
def test_worker_processes_draw_as_the_rank_itself(kept):
    found = []
    for workers in (0, 2):
        collate = SeededCollator(numbers, 3, rank=1, ranks=2)
        kwargs = {"persistent_workers": kept, "multiprocessing_context": "fork"} if workers else {}
        loader = torch.utils.data.DataLoader(range(10), 2, collate_fn=collate, num_workers=workers, **kwargs)
        drawn = []
        for epoch in range(3):
            collate.begin(epoch)
            drawn += list(loader)
        found.append(drawn)
    assert found[0] == found[1]
    assert len({each[0] for each in found[0]}) == 15


# --- rows of a batch


def test_the_first_rows_of_a_batch():
    batch = {"a": torch.arange(8).view(4, 2), "texts": ["a", "b", "c", "d"], "one": torch.zeros(1, 3), "name": "n"}
    batch["scale"] = torch.tensor(3.0)
    assert rows_of(batch) == 4
    part = first_rows(batch, 2, 4)
    assert part["a"].tolist() == [[0, 1], [2, 3]]
    assert (part["texts"], part["one"].shape, part["scale"].item(), part["name"]) == (["a", "b"], (1, 3), 3.0, "n")
    images = {**batch, "images": torch.zeros(7, 3)}
    assert first_rows(images, 2, 4) is images


# --- a head whose logits the model reads


class OwnLoss(transformers.LlamaForCausalLM):
    """A user's causal model that computes the cross entropy of its logits itself."""

    def forward(self, input_ids=None, labels=None, num_items_in_batch=None, **kwargs):
        out = super().forward(input_ids=input_ids, **kwargs)
        if labels is not None:
            flat = out.logits[:, :-1].reshape(-1, self.config.vocab_size)
            out.loss = nn.functional.cross_entropy(flat.float(), labels[:, 1:].reshape(-1))
        return out


class Penalised(OwnLoss):
    """One that reads the logits in another way as well."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        if labels is not None:
            out.loss = out.loss + 1e-3 * out.logits.gather(-1, input_ids[..., None]).mean()
        return out


def own_loss() -> nn.Module:
    torch.manual_seed(5)
    return OwnLoss(runs.llama().config)


@pytest.mark.parametrize("kind", [OwnLoss, Penalised])
def test_a_model_that_reads_its_logits_has_no_chunked_loss(kind):
    model = kind(runs.llama().config)
    assert "more than its head" in str(proven_head_loss(model, torch.float32, torch.device("cpu")))


def test_a_causal_model_with_its_own_mean_trains_as_on_one_rank(world2, stock, tmp_path):
    run = case(own_loss, 27)
    ours = world2.run(train, "ours", str(tmp_path), replace(run, after=scaling_of))[0]
    assert ours.after == "mean-tokens"
    assert_same_history(ours, stock(run))


def test_a_branch_by_pythons_random_numbers_is_all_ranks():
    drawn = []
    for place in (0, 1):
        with seeded(torch.device("cpu"), 0, 3, 5, place, together=0):
            drawn.append((random.random(), float(torch.rand(())), np.random.rand()))
    assert drawn[0][0] == drawn[1][0]
    assert drawn[0][1] != drawn[1][1]
    assert drawn[0][2] != drawn[1][2]


def all_masked() -> list[dict[str, torch.Tensor]]:
    """Rows without a label."""
    return [{**row, "labels": torch.full_like(row["labels"], -100)} for row in runs.token_rows(18)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("model", [runs.t5, runs.llama])
def test_a_first_step_without_labels_is_nan_as_on_one_rank(model, worlds, tmp_path):
    run = case(model, all_masked, arguments={**TEN, "max_steps": 1}, batch=18)
    run = replace(run, ftkit={"kernels": "off"})
    for ranks in (1, 2):
        found = worlds[ranks].run(train, "ours", str(tmp_path / str(ranks)), run)[0].column("loss")
        assert [math.isnan(loss) for loss in found] == [True]


# --- evaluation of rows without labels


def partly_masked() -> list[dict[str, torch.Tensor]]:
    """Rows of which some, and one whole batch of all ranks, have no label."""
    rows = runs.token_rows(18)
    for number in (1, 6, 7, 8, 9, 10, 11, 12):
        rows[number] = {**rows[number], "labels": torch.full_like(rows[number]["labels"], -100)}
    return rows


def evaluated(folder: str, run: Any) -> float:
    return float(runs.make_trainer("ours", folder, run).evaluate()["eval_loss"])


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_without_labels_do_not_count_in_an_evaluation(ranks, kernels, worlds, tmp_path):
    run = case(runs.llama, 6, eval_rows=partly_masked, ftkit={"kernels": kernels})
    model, rows = runs.llama(), partly_masked()
    batches = [rows[start : start + 6] for start in (0, 12)]
    with torch.no_grad():
        expected = [model(**transformers.default_data_collator(each)).loss.item() for each in batches]
    for found in worlds[ranks].run(evaluated, str(tmp_path), run):
        assert found == pytest.approx(sum(expected) / 2, rel=1e-5)


def refused(folder: str, run: Any) -> None:
    with pytest.raises(ftkit.UserError, match="no batch has a label that counts"):
        evaluated(folder, run)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evaluation_without_any_label_is_an_error_that_names_labels(ranks, worlds, tmp_path):
    worlds[ranks].run(refused, str(tmp_path), case(runs.llama, 6, eval_rows=all_masked))


class Tuples:
    """A user's loss of batches that are tuples."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(input_ids=inputs[0], labels=inputs[1]).loss


def tuples(rows: Any) -> Any:
    return tuple(torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))


def test_batches_that_are_tuples_train(world2, tmp_path):
    run = case(runs.llama, 24, mixin=Tuples, options={"data_collator": tuples}, arguments={**TEN, "max_steps": 2})
    assert len(world2.run(train, "ours", str(tmp_path), run)[0].column("loss")) == 2


def numbers_of(folder: str) -> list[Any]:
    """Train for a step twice; return the numbers of its micro-batches, from 1."""
    run = Run(rows=24, arguments={"max_steps": 1, "gradient_accumulation_steps": 2}, batch=4)
    trainer = runs.make_trainer("ours", folder, run)
    seen: list[Any] = []

    def look(*args: Any, **kwargs: Any) -> Any:
        seen.append(trainer._micro_batches)
        return compute(*args, **kwargs)

    compute = trainer.compute_loss
    trainer.compute_loss = look
    for _ in range(2):
        trainer.state.global_step = 0
        trainer.train()
    return seen


def test_a_second_call_of_train_numbers_its_micro_batches_anew(world2, tmp_path):
    seen = world2.run(numbers_of, str(tmp_path))[0]
    assert seen[-4:] == [1, 2] * 2


# --- a loss of a user's beneath the mixin, or one that cannot be probed


class Beneath(transformers.Trainer):
    """A user's Trainer that hands its loss to the Trainer's own."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


class OverBeneath(ftkit.TrainerMixin, Beneath):
    """And put on the engine."""


@pytest.mark.parametrize("kind", ["auto", "mean-rows"])
def test_a_mean_that_is_given_a_count_beneath_the_mixin_is_that_of_one_rank(kind, world2, stock, tmp_path):
    classes = {
        "stock_classes": (Beneath, transformers.TrainingArguments),
        "our_classes": (OverBeneath, ftkit.TrainingArguments),
    }
    run = case(runs.classifier, losses.labelled, eval_rows=losses.labelled, arguments=EVALUATED, **classes)
    ours = world2.run(train, "ours", str(tmp_path), replace(run, ftkit=declared(kind)))[0]
    assert_same_history(ours, stock(run), absolute=5e-6)
