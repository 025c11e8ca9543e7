"""`ftkit.Seq2SeqTrainer`: what a script with transformers' classes does is the same with one import changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import transformers

import ftkit
from tests.hf import runs
from tests.hf.runs import Run, assert_same_history, train
from tests.hf.test_trainer import SEQ2SEQ, sequence_rows


def predict(trainer: Any) -> dict[str, Any]:
    """Predict by generation, with keywords that beat the arguments."""
    found = trainer.predict(sequence_rows(4), max_length=9, num_beams=2)
    return {"tokens": found.predictions.tolist(), "loss": found.metrics["test_loss"], "sum": found.metrics["test_sum"]}


TWO_STEPS = {**SEQ2SEQ.arguments, "eval_strategy": "no", "max_steps": 2}
PREDICTS = replace(SEQ2SEQ, before=None, after=predict, arguments=TWO_STEPS)


def changed(run: Run, **arguments: Any) -> Run:
    return replace(run, arguments={**run.arguments, **arguments})


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(PREDICTS, id="predict with keywords"),
        pytest.param(changed(PREDICTS, generation_num_beams=3, sortish_sampler=True), id="beams in the arguments"),
        pytest.param(
            changed(PREDICTS, generation_config=transformers.GenerationConfig(max_length=7, decoder_start_token_id=0)),
            id="a generation config",
        ),
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_prediction_by_generation(worlds, world, run, tmp_path):
    theirs = worlds[1].run(train, "stock", str(tmp_path / "stock"), run)[0]  # on two ranks stock doubles T5's loss
    generated = worlds[world].run(train, "stock", str(tmp_path / "there"), run)[0].after["tokens"] if world > 1 else None
    ours = worlds[world].run(train, "ours", str(tmp_path / "ours"), run)[0]
    assert ours.after["tokens"] == (generated or theirs.after["tokens"])
    assert ours.after["loss"] == pytest.approx(theirs.after["loss"], rel=1e-4)
    assert_same_history(ours, theirs, relative=1e-4)


def test_the_arguments_come_from_a_command_line(tmp_path):
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--predict_with_generate", "--ftkit", '{"stage": 3}']
    (parsed,) = transformers.HfArgumentParser(ftkit.Seq2SeqTrainingArguments).parse_args_into_dataclasses(words)
    assert parsed.predict_with_generate
    assert parsed.ftkit == {"stage": 3}


def test_arguments_of_the_plain_trainer_are_refused_as_in_stock(tmp_path):
    runs.fresh_state()
    with pytest.raises(AttributeError, match="generation_config"):
        ftkit.Seq2SeqTrainer(runs.t5(), ftkit.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))


class Beams:
    """A user's subclass that hands keywords of generation on, as transformers' own method takes them."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys, max_length=5)


def test_keywords_of_generation_reach_the_prediction_of_a_batch(worlds, tmp_path):
    run = replace(PREDICTS, mixin=Beams, after=tokens_of)
    theirs = worlds[1].run(train, "stock", str(tmp_path / "stock"), run)[0]
    ours = worlds[1].run(train, "ours", str(tmp_path / "ours"), run)[0]
    assert ours.after == theirs.after


def tokens_of(trainer: Any) -> list[list[int]]:
    """Predict by generation with what the subclass says."""
    return trainer.predict(sequence_rows(4)).predictions.tolist()
