"""Early stopping by `eval.patience`, the best evaluation, and the answers to sample prompts at each evaluation.

The ranks get the values of the evaluations from a table by step, so that each test knows where its run must stop.
"""

from __future__ import annotations

import json
import math
import shutil
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from ftkit.output.run_folder import RunFolder
from ftkit.report.facts import read
from ftkit.train import answers
from ftkit.train.divergence import LossWindow
from ftkit.train.early_stopping import Best, best_of
from ftkit.train.held_out import HeldOut
from ftkit.train.summary import _lines
from ftkit.train.trainer import RecipeTrainer
from tests.jobs import job, losses, recipe, records
from tests.report.test_page import check

LOSSES = {0: 1.0, 2: 3.0, 4: 2.0, 6: 2.5, 8: 2.4, 10: 2.5}
"""The best after the first step is that of step 4, so that a patience of 2 ends at step 8."""
TEXT = "ended early at step 8: no better held-out loss since step 4 (patience 2)"


def curve_job(text, curve, settings=(), checkpoint=None, end_at=None, count=False):
    """Run one rank whose evaluation after each step has the values of `curve`: the loss, or also the accuracy.

    With `count`, return the number of generations in place of the summary.
    """

    def metrics(self, wanted):
        loss, accuracy = curve[self.step] if isinstance(curve[self.step], tuple) else (curve[self.step], 0.5)
        return {"token_loss": loss, "perplexity": math.exp(loss), **({"accuracy": accuracy} if "accuracy" in wanted else {})}

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(HeldOut, "metrics", metrics))
        made = stack.enter_context(mock.patch.object(answers, "generate", wraps=answers.generate))
        summary = job(text, settings, checkpoint, end_at)
        return made.call_count if count else summary


def text_of(home, out, **sections):
    """Return a recipe of 10 steps, evaluated every 2, saved every 3, with a patience of 2."""
    (home / out).mkdir()
    held_out = {"path": str(home / "held.jsonl"), "every_steps": 2, "patience": 2}
    output = {"dir": str(home / out), "save_every_steps": 3}
    return recipe(home, out, **{"eval": held_out, "output": output, **sections})


def evaluated(folder):
    return [(line["step"], line["eval_loss"]) for line in records(folder) if "eval_loss" in line]


def checkpoints(folder):
    return {int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*")}


def copy_of(folder, name):
    """Copy a run's folder, and return the copy and its recipe."""
    copy = folder.with_name(name)
    shutil.copytree(folder, copy)
    return copy, (folder / "recipe.yaml").read_text().replace(str(folder), str(copy))


@pytest.fixture(scope="module")
def stopped(home, worlds):
    """Run on two ranks that stopped early, with a sample prompt: its folder and the result of rank 0."""
    show = {"prompts": ["3+1?"], "max_new_tokens": 4}
    return home / "stopped", worlds[2].run(curve_job, text_of(home, "stopped", show=show), LOSSES)[0]


def test_the_best_evaluation():
    def history(*values):
        return [{"step": 1, "loss": 0}, *({"step": 2 * n, "eval_token_loss": value} for n, value in enumerate(values))]

    assert best_of([], "loss") == Best(0, math.inf, 0)
    assert best_of(history(1.0), "loss") == Best(0, math.inf, 0), "before the first step"
    assert best_of(history(1.0, 3.0, 2.0, 2.0, 2.5), "loss") == Best(4, 2.0, 2)
    assert best_of(history(1.0, math.nan, 3.0, math.nan), "loss") == Best(4, 3.0, 1)
    assert best_of(history(1.0, math.nan, math.inf), "loss") == Best(0, math.inf, 2)
    twice = [*history(1.0, 3.0, 4.0), {"step": 4, "eval_token_loss": 4.0}]
    assert best_of(twice, "loss") == Best(2, 3.0, 1), "the evaluation at the end of a run repeats the last one"
    scores = [{"step": step, "eval_accuracy": value} for step, value in ((1, 0.0), (2, 0.5), (3, 0.4))]
    assert best_of(scores, "accuracy") == Best(2, 0.5, 1)


def test_a_run_stops_and_is_finished(stopped):
    folder, summary = stopped
    assert summary["steps"] == 8
    assert summary["best"] == {"step": 4, "metric": "loss", "value": 2.0}
    assert summary["stopped_early"] == {"step": 8, "best_step": 4, "metric": "loss", "patience": 2, "text": TEXT}
    assert dict(_lines(summary, RunFolder(folder)))["early stopping"] == TEXT
    assert evaluated(folder) == [(step, LOSSES[step]) for step in (0, 2, 4, 6, 8)]
    assert [line[0] for line in losses(folder)] == list(range(1, 9))
    assert checkpoints(folder) == {3, 6, 8}
    assert (folder / "model" / "model.safetensors").is_file()
    assert read(RunFolder(folder)).status == ("finished", "")
    page = check((folder / "report.html").read_text())
    assert ">finished<" in page
    assert TEXT in page


@pytest.mark.parametrize(("end_at", "ranks"), [(4, 2), (5, 2), (6, 1), (7, 1)])
def test_a_resumed_run_stops_at_the_same_step(end_at, ranks, stopped, home, worlds):
    """After steps 4 and 6 a run that is asked to end skips the evaluation, and the resumed run makes it."""
    name = f"resumed-{end_at}-{ranks}"
    text = text_of(home, name)
    assert "stopped" in worlds[2].run(curve_job, text, LOSSES, (), None, end_at)[0]
    before = [step for step, _ in evaluated(home / name)]
    assert before == [step for step in (0, 2, 4, 6) if step < end_at]
    summary = worlds[ranks].run(curve_job, text, LOSSES, (), str(home / name / f"checkpoint-{end_at}"))[0]
    assert_same_run(home / name, summary, stopped)


def test_a_run_resumed_after_an_evaluation_without_a_new_best(stopped, worlds):
    folder, text = copy_of(stopped[0], "resumed-saved")
    shutil.rmtree(folder / "model")
    summary = worlds[2].run(curve_job, text, LOSSES, (), str(folder / "checkpoint-6"))[0]
    assert_same_run(folder, summary, stopped)
    assert summary["answers"] == stopped[1]["answers"]


def test_a_run_killed_after_its_last_checkpoint_makes_no_step_more(stopped, worlds):
    folder, text = copy_of(stopped[0], "killed-at-end")
    shutil.rmtree(folder / "model")
    summary = worlds[2].run(curve_job, text, LOSSES, (), str(folder / "checkpoint-8"))[0]
    assert_same_run(folder, summary, stopped)
    assert (folder / "model" / "model.safetensors").is_file()


def assert_same_run(folder, summary, stopped):
    assert [line[0] for line in losses(folder)] == list(range(1, 9))
    for mine, other in zip(losses(folder), losses(stopped[0]), strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
    assert evaluated(folder) == evaluated(stopped[0])
    for key in ("steps", "best", "stopped_early"):
        assert summary[key] == stopped[1][key], key
    assert history(folder) == history(stopped[0])


def history(folder):
    """Return the evaluations and the best one that the last checkpoint stores."""
    state = json.loads((folder / "checkpoint-8" / "trainer_state.json").read_text())
    lines = [(line["step"], line["eval_token_loss"]) for line in state["log_history"] if "eval_token_loss" in line]
    return lines, state["best_metric"], state["best_global_step"]


def test_a_stopped_run_is_over_until_the_patience_is_larger(stopped, worlds):
    folder, text = copy_of(stopped[0], "over-early")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    for same in ((), ("eval.patience=1",)):
        for again in worlds[2].run(curve_job, text, LOSSES, same, str(folder / "checkpoint-8")):
            assert again == json.loads((folder / "summary.json").read_text())
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before
    more = worlds[2].run(curve_job, text, LOSSES, ("eval.patience=3",), str(folder / "checkpoint-8"))[0]
    assert (more["steps"], more["steps_before"], more["stopped_early"]) == (10, 8, None)
    assert evaluated(folder) == list(LOSSES.items())
    assert TEXT not in (folder / "report.html").read_text()
    assert [each["step"] for each in more["answers"][0]["during"]] == [2, 4, 6, 8, 10]


@pytest.mark.parametrize("change", ["eval.patience=null", "eval.best=accuracy"])
def test_a_stopped_run_continues_without_patience_or_with_another_metric(change, stopped, worlds):
    """The history has no accuracy, so the next one is the best."""
    folder, text = copy_of(stopped[0], f"goes-on-{change[5:9]}")
    more = worlds[1].run(curve_job, text, LOSSES, (change,), str(folder / "checkpoint-8"))[0]
    assert (more["steps"], more["stopped_early"]) == (10, None)
    best = {"step": 4, "metric": "loss", "value": 2.0}
    assert more["best"] == (best if "patience" in change else {"step": 10, "metric": "accuracy", "value": 0.5})


def test_accuracy_names_the_best(home, worlds):
    """The loss falls throughout. The checkpoint of the best accuracy stays beside the last one."""
    curve = {0: (5.0, 0.9), 1: (4.0, 0.2), 2: (3.0, 0.4), 3: (2.0, 0.3), 4: (1.0, 0.4), 5: (0.5, 0.1)}
    held_out = {"path": str(home / "held.jsonl"), "every_steps": 1, "patience": 3, "best": "accuracy"}
    output = {"dir": str(home / "accuracy"), "save_every_steps": 1, "keep": 2}
    summary = worlds[1].run(curve_job, text_of(home, "accuracy", eval=held_out, output=output), curve)[0]
    assert summary["best"] == {"step": 2, "metric": "accuracy", "value": 0.4}
    assert summary["stopped_early"]["text"] == "ended early at step 5: no better accuracy since step 2 (patience 3)"
    assert checkpoints(home / "accuracy") == {2, 5}


def test_evaluations_at_the_end_of_each_epoch(home, worlds):
    """The checkpoint of an epoch's last step comes before its evaluation. A run that resumes there makes it first."""
    held_out = {"path": str(home / "held.jsonl"), "every_epoch": True, "patience": 2}
    train = {"batch_tokens": 768, "max_steps": 10}  # two steps an epoch
    output = {"dir": str(home / "epochs"), "save_every_steps": 2}
    summary = worlds[2].run(curve_job, text_of(home, "epochs", eval=held_out, train=train, output=output), LOSSES)[0]
    assert summary["stopped_early"]["text"] == TEXT
    assert evaluated(home / "epochs") == [(step, LOSSES[step]) for step in (0, 2, 4, 6, 8)]
    folder, text = copy_of(home / "epochs", "epochs-resumed")
    again = worlds[2].run(curve_job, text, LOSSES, (), str(folder / "checkpoint-4"))[0]
    assert_same_run(folder, again, (home / "epochs", summary))


def test_answers_at_each_evaluation(stopped, home, worlds):
    folder, summary = stopped
    (record,) = summary["answers"]
    assert [each["step"] for each in record["during"]] == [2, 4, 6, 8]
    assert record["after"] == record["during"][-1]["answer"] != record["before"]
    assert all(isinstance(each["answer"], str) for each in record["during"])
    noted = json.loads((folder / "checkpoint-6" / "ftkit" / "manifest.json").read_text())["extra"]["answers"]
    assert noted == [{**record, "during": record["during"][:3], "after": ""}]
    page = (folder / "report.html").read_text()
    assert page.count("after step ") == 3, "the answer at step 8 is the one after training"
    shown = [page.index(name) for name in ("before training", "after step 2", "after step 6", "after training")]
    assert shown == sorted(shown)


def test_answers_do_not_change_the_training(home, worlds):
    """On one rank the noise of the embeddings depends on the random state that the step before left."""
    found = []
    for out, show in (("asked", {"prompts": ["3+1?"], "max_new_tokens": 4}), ("silent", None)):
        settings = ("train.max_steps=5", "train.neftune_noise_alpha=5")
        worlds[1].run(curve_job, text_of(home, out, show=show), {**LOSSES, 5: 1.0}, settings)
        found.append((losses(home / out), load_file(home / out / "model" / "model.safetensors")))
    (mine, weights), (other, expected) = found
    assert mine == other
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_the_notes_of_a_checkpoint_do_not_change_while_it_is_written():
    trainer = SimpleNamespace(_noted={}, losses=LossWindow(), answers=[{"during": []}])
    noted = RecipeTrainer.noted.fget(trainer)
    trainer.answers[0]["during"].append({"step": 2, "answer": "4"})
    assert noted["answers"] == [{"during": []}]


def test_one_generation_per_step(home, worlds):
    show = {"prompts": ["3+1?", "4+1?"], "max_new_tokens": 2}
    text = text_of(home, "once", show=show)
    assert worlds[2].run(curve_job, text, LOSSES, (), None, None, True) == [5, 5], "before, and at steps 2, 4, 6 and 8"
    shutil.rmtree(home / "once")
    rare = ("train.max_steps=2", "eval.patience=null", "eval.every_steps=null")
    (home / "once").mkdir()
    assert worlds[1].run(curve_job, text, LOSSES, rare, None, None, True) == [2], "before and after"
    (home / "once-more").mkdir()
    rare = ("train.max_steps=2", "eval=null", f"output.dir={home / 'once-more'}")
    assert worlds[1].run(curve_job, text, LOSSES, rare, None, None, True) == [2], "before and after, without held-out rows"
