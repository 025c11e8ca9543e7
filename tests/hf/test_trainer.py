"""The stock Trainer on one rank and ours on several write the same log, by one import changed."""

from __future__ import annotations

import pytest

from tests.hf.runs import Run, assert_same_history, assert_same_weights, train

BASE = Run(
    rows=45,
    eval_rows=10,
    arguments={
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
    },
)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_same_log_by_one_import_changed(ranks, worlds, stock, tmp_path):
    ours = worlds[ranks].run(train, "ours", str(tmp_path), BASE)
    theirs = stock(BASE)
    for outcome in ours:
        assert_same_history(outcome, theirs)
    assert_same_weights(ours[0].weights, theirs.weights)
