"""Order of samples after a resume: on any number of ranks, in epoch 1 or 7, packed or not.

The tests record the rows that the Trainer passes to the model, per step and rank, and compare them with an uninterrupted
run. Checkpoints are at the first step of an epoch, in its middle, at its end, and in the partial last epoch. A recipe's step
has the same samples on any number of ranks. The plain Trainer keeps its own order, batch by batch, on the same number.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import TrainerCallback

from ftkit.train.trainer import RecipeTrainer
from tests.hf.runs import Run, train
from tests.jobs import job, lines, recipe
from tests.tiny import make_base, write_rows
from tests.worlds import Worlds

Row = tuple[int, ...]
Seen = dict[int, list[list[Row]]]
"""By step, counted from 1: the micro-batches of a rank, each a list of rows of tokens."""

STEP_SEQUENCES, EPOCH_STEPS, EPOCHS, STEPS = 12, 3, 8.5, 26
"""26 steps: eight epochs of three steps, which leave some rows out, and two thirds of a ninth (25.5, rounded up)."""


SAVED = (3, 4, 5, 6, 21, 22, 23, 24, 25)
"""Steps after which a run that nobody broke off saves: around epoch 1, around epoch 7, and in the part of an epoch."""


class SaveAt(TrainerCallback):
    """Saves after the steps of `SAVED`."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save |= state.global_step in SAVED


def rows_of(inputs: dict[str, Any]) -> list[Row]:
    """Return the rows of a batch without their padding, whose token is 0 in both models here."""
    return [tuple(token for token in row if token) for row in inputs["input_ids"].tolist()]


# --- a recipe


def watched_job(text: str, settings: tuple[str, ...], checkpoint: str | None) -> Seen:
    """A case for a world: be one rank of a run, and return what its model was trained on."""
    seen: Seen = {}
    inner = RecipeTrainer.training_step

    def step(self: Any, model: Any, inputs: Any, *others: Any) -> Any:
        if not seen and checkpoint is None:
            self.add_callback(SaveAt())
        seen.setdefault(self.state.global_step + 1, []).append(rows_of(inputs))
        return inner(self, model, inputs, *others)

    with mock.patch.object(RecipeTrainer, "training_step", step):
        job(text, settings, checkpoint)
    return seen


def global_batches(ranks: list[Seen]) -> dict[int, list[Row]]:
    """Return the rows of each step, of all ranks and micro-batches together, sorted."""
    assert all(seen.keys() == ranks[0].keys() for seen in ranks)
    return {step: sorted(row for seen in ranks for micro in seen[step] for row in micro) for step in ranks[0]}


@dataclass(frozen=True)
class Whole:
    """A run from beginning to end: its folder, with its checkpoints, and each step's rows and loss."""

    folder: Path
    batches: dict[int, list[Row]]
    losses: list[float]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model and rows: 40 of them are three steps and four rows that are left out of each epoch."""
    folder = tmp_path_factory.mktemp("cursor")
    make_base(folder / "base")
    write_rows(folder / "rows.jsonl", 40)
    write_rows(folder / "short.jsonl", 84)
    write_rows(folder / "other.jsonl", 12, first=100)
    return folder


def text_of(home: Path, out: Path, data: str) -> str:
    """Return a recipe on rows that are plain, packed, or from two sources of which the smaller one counts more."""
    sources = {
        "plain": {"path": str(home / "rows.jsonl")},
        "packed": {"path": str(home / "short.jsonl"), "packing": True},
        "weighted": {
            "sources": [
                {"path": str(home / "rows.jsonl"), "weight": 1},
                {"path": str(home / "other.jsonl"), "weight": 2},
            ]
        },
    }
    sections: dict[str, Any] = {
        "data": {**sources[data], "sequence_tokens": 32, "cache_dir": str(home / "cache")},
        "train": {"batch_tokens": 32 * STEP_SEQUENCES, "epochs": EPOCHS if data != "weighted" else 6.5},
        "output": {"dir": str(out)},
        "eval": None,
    }
    return recipe(home, "unused", **sections)


@pytest.fixture(scope="module")
def whole(home: Path, worlds: Worlds) -> Callable[[str, int], Whole]:
    """`whole(data, ranks)` is a run that nobody broke off; each is made once."""

    @cache
    def run(data: str, ranks: int) -> Whole:
        folder = home / f"whole-{data}-{ranks}"
        folder.mkdir()
        batches = global_batches(worlds[ranks].run(watched_job, text_of(home, folder, data), (), None))
        return Whole(folder, batches, [line["loss"] for line in lines(folder)])

    return run


WAYS = {
    "whole": (),
    "in two": ("engine.accumulation=2",),
    "in unit": ("engine.accumulation=2", "engine.accumulate_in=unit", "engine.activations=recompute"),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("data", ["plain", "packed"])
def test_an_epoch_has_each_sample_once_and_an_order_of_its_own(data, whole):
    run = whole(data, 2)
    assert sorted(run.batches) == list(range(1, STEPS + 1))
    assert {len(rows) for rows in run.batches.values()} == {STEP_SEQUENCES}
    orders = []
    for first in range(1, STEPS + 1, EPOCH_STEPS):
        steps = [run.batches[step] for step in range(first, min(first + EPOCH_STEPS, STEPS + 1))]
        assert len({row for rows in steps for row in rows}) == STEP_SEQUENCES * len(steps)
        orders.append(tuple(map(tuple, steps[:2])))
    assert len(set(orders)) == len(orders) == 9
    state = json.loads((run.folder / f"checkpoint-{2 * EPOCH_STEPS}" / "trainer_state.json").read_text())
    assert state["epoch"] == 2.0, "three steps are an epoch"
    if data == "packed":
        assert max(row.count(1) for rows in run.batches.values() for row in rows) > 1, "several samples begin in a row"


@pytest.mark.parametrize(
    "data, reader, step, way",
    [
        pytest.param("plain", 1, 5, "whole", marks=pytest.mark.slow),
        ("plain", 3, 22, "in two"),
        pytest.param("plain", 2, 21, "in unit", marks=pytest.mark.slow),
        pytest.param("plain", 3, 24, "whole", marks=pytest.mark.slow),
        ("packed", 3, 4, "in unit"),
        pytest.param("packed", 1, 23, "in two", marks=pytest.mark.slow),
        pytest.param("packed", 2, 6, "whole", marks=pytest.mark.slow),
        pytest.param("packed", 3, 25, "whole", marks=pytest.mark.slow),
        pytest.param("weighted", 3, 23, "whole", marks=pytest.mark.slow),
    ],
)
def test_the_next_sample_is_the_one_that_would_have_come(data, reader, step, way, whole, home, worlds, tmp_path):
    before = whole(data, 2)
    text = text_of(home, tmp_path, data)
    seen = worlds[reader].run(watched_job, text, WAYS[way], str(before.folder / f"checkpoint-{step}"))
    assert {len(micro) for rank in seen for micro in rank.values()} == {2 if way == "in two" else 1}
    batches = global_batches(seen)
    expected = {number: rows for number, rows in before.batches.items() if number > step}
    assert sorted(batches) == sorted(expected), "no step is repeated, none is lost"
    assert [number for number in expected if batches[number] != expected[number]] == []
    assert [record["loss"] for record in lines(tmp_path)] == pytest.approx(before.losses[step:], rel=1e-5)


# --- the plain Trainer


class Noting:
    """A user's Trainer that writes down what the model is trained on."""

    def training_step(self, model: Any, inputs: Any, *others: Any) -> Any:
        seen = self.__dict__.setdefault("seen", {})
        seen.setdefault(self.state.global_step + 1, []).append(rows_of(inputs))
        return super().training_step(model, inputs, *others)


def seen_by(trainer: Any) -> Seen:
    return trainer.seen


PLAIN = Run(
    rows=27,
    mixin=Noting,
    after=seen_by,
    arguments={"gradient_accumulation_steps": 2, "num_train_epochs": 8},
)
"""Shuffled; three steps an epoch, of which the last has one micro-batch, and that of three rows."""
SETTINGS: dict[str, Any] = {"step": {"stage": 3}, "unit": {"stage": 3, "accumulate_in": "unit"}}


@pytest.fixture(scope="module")
def trained(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], tuple[Path, list[Seen]]]:
    """`trained(ranks, how)` is a Trainer's run from beginning to end: its folder and what each rank was trained on."""

    @cache
    def run(ranks: int, how: str) -> tuple[Path, list[Seen]]:
        folder = tmp_path_factory.mktemp("plain")
        saving = replace(PLAIN, ftkit=SETTINGS[how], options={"callbacks": [SaveAt()]})
        outcomes = worlds[ranks].run(train, "ours", str(folder), saving)
        return folder, [outcome.after for outcome in outcomes]

    return run


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks, how, step", [(2, "step", 22), (3, "step", 21), (2, "unit", 23), (1, "unit", 4)])
def test_the_plain_trainer_goes_on_with_its_own_order(ranks, how, step, trained, worlds, tmp_path):
    folder, before = trained(ranks, how)
    assert len({str(before[0][step]) for step in (1, 4, 22)}) == 3, "every epoch has an order of its own"
    run = replace(PLAIN, ftkit=SETTINGS[how], resume=f"{folder}/checkpoint-{step}")
    outcomes = worlds[ranks].run(train, "ours", str(tmp_path), run)
    for outcome, seen in zip(outcomes, before, strict=True):
        assert outcome.after == {number: micros for number, micros in seen.items() if number > step}
