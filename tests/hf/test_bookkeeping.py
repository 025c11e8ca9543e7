"""The best checkpoint, and which checkpoints stay, are the stock Trainer's in every combination of its settings.

Each row of the table is a run of the stock Trainer and one of ours, in one process: same best checkpoint, metric and step,
same folders at the end, same weights. Half of the rows go on from the first checkpoint of the run. The metric of a step is
a number out of a table that goes up and down.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import TrainerCallback

import ftkit
from tests.hf import runs
from tests.pairwise import covering

STEPS = 6
SCORES = (0.0, 0.4, 0.7, 0.5, 0.9, 0.2, 0.8)
"""Of steps 0 to 6: up and down."""
SETTINGS = {
    "evaluate": ("steps 1", "steps 2", "steps 3", "epoch", "no"),
    "save": ("steps 2", "steps 3", "steps 4", "epoch", "best", "no"),
    "limit": (1, 2, None),
    "metric": ("score", "loss", None),
    "greater": (None, True, False),
    "load_best": (False, True),
    "whole": (False, True),
    "read": (False, True),
    "resumed": (False, True),
}
Row = dict[str, Any]


class Reader(TrainerCallback):
    """Somebody's callback that looks into a checkpoint when it is saved."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave a note in the folder."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        assert (folder / "trainer_state.json").is_file()
        (folder / "note.txt").write_text("read")


class Score:
    """The metric of the step at which it is asked for."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def __call__(self, prediction: Any) -> dict[str, float]:
        return {"score": SCORES[self.trainer.state.global_step]}


def tiny() -> torch.nn.Module:
    """Return the smallest Llama."""
    return runs.llama(num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=2)


def arguments_of(row: Row) -> dict[str, Any]:
    """Return the TrainingArguments of a row."""
    evaluate, _, evaluate_steps = row["evaluate"].partition(" ")
    save, _, save_steps = row["save"].partition(" ")
    return {
        "max_steps": STEPS,
        "eval_strategy": evaluate,
        "eval_steps": int(evaluate_steps or 1),
        "save_strategy": save,
        "save_steps": int(save_steps or 1),
        "save_total_limit": row["limit"],
        "metric_for_best_model": row["metric"],
        "greater_is_better": row["greater"],
        "load_best_model_at_end": row["load_best"],
        "save_only_model": row["whole"],
    }


def outcome(kind: str, folder: str, row: Row, resume: str | None = None) -> dict[str, Any]:
    """Make one run, and say what the table compares."""
    score = Score()
    options: dict[str, Any] = {"compute_metrics": score, "callbacks": [Reader()] if row["read"] else []}
    run = runs.Run(model=tiny, rows=24, eval_rows=6, arguments=arguments_of(row), options=options, resume=resume)
    trainer = runs.make_trainer(kind, folder, run)
    score.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    state = trainer.state
    best = state.best_model_checkpoint
    return {
        "best": None if best is None else str(Path(best).relative_to(folder)),
        "metric": state.best_metric,
        "step": state.best_global_step,
        "folders": sorted(path.name for path in Path(folder).glob("checkpoint-*")),
        "unfinished": sorted(path.name for path in Path(folder).glob(".*")),
        "notes": sorted(str(path.relative_to(folder)) for path in Path(folder).glob("*/note.txt")),
        "weights": runs.weights_of(trainer),
    }


def attempt(kind: str, folder: str, row: Row, resume: str | None = None) -> dict[str, Any]:
    """Return the outcome of a run, or the error that the Trainer itself makes of its settings."""
    try:
        return outcome(kind, folder, row, resume)
    except (ValueError, KeyError, AttributeError) as error:
        return {"error": type(error).__name__}


def both(folder: str, row: Row) -> list[str]:
    """Return in what a row differs between stock and ours."""
    told = [attempt(kind, f"{folder}/{kind}", row) for kind in ("stock", "ours")]
    wrong = differences(*told)
    first = [name for name in told[0].get("folders", []) if name != f"checkpoint-{STEPS}"]  # stock makes one step more there
    if row["resumed"] and not row["whole"] and not wrong and first:
        for kind in ("stock", "ours"):
            for name in told[0]["folders"][1:]:
                shutil.rmtree(f"{folder}/{kind}/{name}")
        again = [attempt(kind, f"{folder}/{kind}", row, f"{folder}/{kind}/{first[0]}") for kind in ("stock", "ours")]
        wrong = [f"resumed: {text}" for text in differences(*again)]
    return wrong


def differences(stock: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Return in what two outcomes differ."""
    one, two = stock.pop("weights", {}), ours.pop("weights", {})
    wrong = [f"{key}: {ours.get(key)}, {stock.get(key)} in stock" for key in {**stock, **ours} if not same(stock, ours, key)]
    return wrong + [name for name in one if not torch.allclose(one[name], two[name], rtol=1e-3, atol=1e-4)]


def same(stock: dict[str, Any], ours: dict[str, Any], key: str) -> bool:
    """Return whether two outcomes agree in one thing."""
    return key in stock and key in ours and runs.close(ours[key], stock[key])


def table(folder: str, rows: list[Row]) -> list[str]:
    """Run rows, and return what is wrong with which."""
    transformers.utils.logging.set_verbosity_error()
    return [f"{row}: {text}" for number, row in enumerate(rows) for text in both(f"{folder}/{number}", row)]


def allowed(row: Row) -> bool:
    """Return whether the Trainer takes these settings; it refuses some combinations, and so do we through it."""
    try:
        ftkit.TrainingArguments("nowhere", use_cpu=True, report_to="none", **arguments_of(row))
    except ValueError:
        return False
    return True


KNOWN = (
    # the evaluation comes after the save of the same step: the best one is known at the next save only
    {"evaluate": "epoch", "save": "steps 2", "limit": 2},
    {"evaluate": "steps 2", "save": "epoch", "limit": 1},
    {"evaluate": "steps 1", "save": "steps 2", "limit": 1},
    {"evaluate": "steps 2", "save": "steps 2", "limit": 1, "load_best": True},
    {"evaluate": "steps 2", "save": "steps 2", "limit": 1, "load_best": True, "whole": True, "read": True},
    {"evaluate": "epoch", "save": "epoch", "limit": 1, "load_best": True, "resumed": True},
    {"evaluate": "steps 1", "save": "best", "limit": 1, "load_best": True},
    {"evaluate": "steps 2", "save": "steps 4", "limit": 2, "load_best": True, "metric": "loss", "greater": False},
    {"evaluate": "steps 3", "save": "steps 3", "limit": 2, "greater": False, "resumed": True, "read": True},
)
"""The rows of the quick table, beside these defaults."""
DEFAULTS = {"metric": "score", "greater": True, "load_best": False, "whole": False, "read": False, "resumed": False}


def test_the_best_checkpoint_and_those_that_stay_are_stocks(world1, tmp_path):
    rows = [{**DEFAULTS, **row} for row in KNOWN]
    [wrong] = world1.run(table, str(tmp_path), rows)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_every_pair_of_settings_keeps_the_checkpoints_that_stock_keeps(world1, tmp_path):
    rows = [row for row in covering(SETTINGS, 2) if allowed(row)]
    assert len(rows) > 10
    [wrong] = world1.run(table, str(tmp_path), rows)
    assert not wrong, "\n".join(wrong)


def on_two_ranks(folder: str) -> dict[str, Any]:
    """Make one of the quick rows on every rank."""
    told = outcome("ours", folder, {**DEFAULTS, **KNOWN[3]})
    return {key: value for key, value in told.items() if key != "weights"}


def test_two_ranks_keep_the_same_checkpoints(world2, tmp_path):
    one, two = world2.run(on_two_ranks, str(tmp_path))
    assert one["best"] == two["best"] == "checkpoint-4"
    assert one["folders"] == ["checkpoint-4"]  # rank 0 removes the others; rank 1 may look before
