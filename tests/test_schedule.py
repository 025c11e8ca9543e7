"""Schedules, warm-up, minimum learning rates and parameter groups of a recipe.

The references are schedules of transformers on a plain optimizer, and for groups a plain loop with torch's AdamW.
"""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import get_args

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoModelForCausalLM, SchedulerType, get_scheduler

from ftkit.config.optimizer import END_RATES, FOLLOWING, Group, ScheduleName
from ftkit.config.recipe import RecipeError, parse
from ftkit.errors import UserError
from ftkit.train.arguments import training_arguments
from ftkit.train.build import make_parts, make_trainer
from ftkit.train.groups import split_groups
from ftkit.train.resume import compare
from ftkit.train.schedule import check_schedule
from tests.jobs import job, losses, recipe, records

LR, LEAST, STEPS, MIDDLE = 0.01, 1e-4, 6, 3
EVERY = {
    "constant": (2, {}),
    "constant_with_warmup": (2, {}),
    "linear": (2, {}),
    "cosine": (2, {"num_cycles": 0.4}),
    "cosine_with_restarts": (1, {"num_cycles": 2}),
    "cosine_with_min_lr": (1, {"min_lr_rate": 0.1}),
    "cosine_warmup_with_min_lr": (3, {"min_lr": LEAST, "warmup_lr_rate": 0.1}),
    "polynomial": (1, {"power": 2.0}),
    "inverse_sqrt": (2, {"timescale": 3}),
    "warmup_stable_decay": (1, {"num_decay_steps": 3, "decay_type": "linear"}),
    "reduce_lr_on_plateau": (0, {"patience": 0, "factor": 0.5, "threshold": 0.3, "threshold_mode": "abs"}),
    "greedy": (0, {"patience": 0, "factor": 0.5, "threshold": 0.06, "min_lr": 1e-5}),
}
"""Warm-up and arguments by schedule."""
AT_LEAST = {
    "linear": ("polynomial", {"lr_end": LEAST, "power": 1.0}),
    "cosine": ("cosine_with_min_lr", {"min_lr": LEAST}),
    "cosine_with_min_lr": ("cosine_with_min_lr", {"min_lr": LEAST}),
    "cosine_warmup_with_min_lr": ("cosine_warmup_with_min_lr", {"min_lr": LEAST}),
    "polynomial": ("polynomial", {"lr_end": LEAST}),
    "warmup_stable_decay": ("warmup_stable_decay", {"num_decay_steps": 3, "min_lr_ratio": LEAST / LR}),
}
"""Schedules with `min_lr`: name and arguments in transformers."""
GROUPS = [
    {"match": r"model\.norm|input_layernorm", "lr": 0.002, "weight_decay": 0.3},
    {"match": r"layers\.1\.", "lr": 0.03},
    {"match": "lm_head", "weight_decay": 0.0},
]


def text(home: Path, out: str, **sections) -> str:
    (home / out).mkdir(exist_ok=True)
    facts = {"train": {"batch_tokens": 64, "max_steps": STEPS}, "engine": {"stage": 3}, "eval": None}
    output = {"dir": str(home / out), "save_every_steps": MIDDLE}
    return recipe(home, out, **{**facts, "output": output, **sections})


def trained(text: str, checkpoint: str | None = None):
    """Train in this rank, without the rest of a job. Returns the trainer."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    read, ranks = parse(text, "r.yaml"), int(os.environ["WORLD_SIZE"])
    arguments = training_arguments(read, ranks)
    torch.set_num_threads(1)  # accelerate has set another number
    parts = make_parts(read, ranks, [], None, print)
    trainer = make_trainer(read, parts.rows, parts.tokenizer, parts.model, arguments, parts.plan)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def unread(*changes: str, **sections):
    """Return a recipe whose files are not there."""
    return parse(recipe(Path("/"), "x", output={"dir": "x"}, **sections), "r.yaml", list(changes), check_files=False)


def all_rates(texts: list[str]) -> list[tuple[list[float], list[float]]]:
    """Return the learning rates and the held-out losses of runs."""
    return [(rates_of(trainer), held_out_of(trainer)) for trainer in map(trained, texts)]


def rates_after(text: str, checkpoint: str) -> list[float]:
    return rates_of(trained(text, checkpoint))


def rates_of(trainer) -> list[float]:
    return [each["learning_rate"] for each in trainer.state.log_history if "learning_rate" in each]


def held_out_of(trainer) -> list[float]:
    return [each["eval_token_loss"] for each in trainer.state.log_history if "eval_token_loss" in each]


def expected(name: str, arguments: dict, warmup: float, held_out: list[float]) -> list[float]:
    """Return the rates of a schedule of transformers on a plain optimizer."""
    plain = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=LR)
    made = get_scheduler(name, plain, warmup, STEPS, arguments)
    rates = []
    for step in range(STEPS):
        rates.append(plain.param_groups[0]["lr"])
        plain.step()
        made.step(held_out[step]) if name in FOLLOWING else made.step()
    return rates


# --- schedules by name


def test_the_names_are_those_of_transformers():
    assert sorted(get_args(ScheduleName)) == sorted(each.value for each in SchedulerType) == sorted(EVERY)


def test_every_schedule_has_transformers_rates_and_goes_on(home, world1):
    texts = []
    for name, (warmup, arguments) in EVERY.items():
        evaluated = {"path": str(home / "held.jsonl"), "every_steps": 1} if name in FOLLOWING else None
        optimizer = {"lr": LR, "schedule": name, "warmup_steps": warmup, "schedule_args": arguments}
        texts.append(text(home, f"every-{name}", optimizer=optimizer, eval=evaluated))
    for (name, (warmup, arguments)), (rates, held_out), own in zip(EVERY.items(), world1.run(all_rates, texts)[0], texts):
        wanted = expected("constant_with_warmup" if name == "constant" else name, arguments, warmup, held_out)
        assert rates == pytest.approx(wanted, rel=1e-12), name
        assert len(set(rates)) > 1, name
        again = world1.run(rates_after, own, str(home / f"every-{name}" / f"checkpoint-{MIDDLE}"))[0]
        assert again == rates, name


def test_constant_without_a_warmup():
    assert training_arguments(unread(optimizer={"schedule": "constant"}), 1).lr_scheduler_type == SchedulerType.CONSTANT


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_schedule_that_follows_accuracy_waits_for_more_of_it(name):
    own = {"patience": 0, "factor": 0.5, "threshold": 0.1, "min_lr": 1e-5}
    optimizer = {"lr": LR, "schedule": name, "schedule_args": own}
    evaluated = {"path": "held.jsonl", "every_steps": 1, "best": "accuracy"}
    arguments = training_arguments(unread(optimizer=optimizer, eval=evaluated), 1)
    assert (arguments.metric_for_best_model, arguments.greater_is_better) == ("accuracy", True)
    rises, falls = [0.1, 0.3, 0.5, 0.7, 0.9, 1.2], [0.9, 0.7, 0.5, 0.4, 0.3, 0.1]
    better, worse = (expected(name, arguments.lr_scheduler_kwargs, 0, each) for each in (rises, falls))
    assert better[-1] >= LR > worse[-1]


def scheduled(read) -> list[float]:
    """Return the rates of a recipe's arguments, without a run."""
    arguments = training_arguments(read, 1)
    warmup = arguments.get_warmup_steps(STEPS)
    return expected(arguments.lr_scheduler_type, arguments.lr_scheduler_kwargs, warmup, [1.0] * STEPS)


def test_min_lr_is_the_rate_at_the_end():
    for schedule, (name, arguments) in AT_LEAST.items():
        own = {"num_decay_steps": 3} if "num_decay_steps" in arguments else {}
        optimizer = {"lr": LR, "schedule": schedule, "min_lr": LEAST, "warmup_ratio": 0.2, "schedule_args": own}
        read = unread(optimizer=optimizer)
        assert scheduled(read) == pytest.approx(expected(name, arguments, 2, []), rel=1e-12), schedule
        made = get_scheduler(name, torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR), 2, STEPS, arguments)
        assert min(made.lr_lambdas[0](step) * LR for step in (STEPS - 1, STEPS)) == pytest.approx(LEAST), schedule
    assert set(END_RATES) == {*AT_LEAST, *FOLLOWING}


def test_linear_to_a_min_lr(home, world1):
    optimizer = {"lr": LR, "schedule": "linear", "min_lr": 0.004, "warmup_ratio": 0.2}
    [(rates, _)] = world1.run(all_rates, [text(home, "linear", optimizer=optimizer)])[0]
    assert rates == pytest.approx([0, 0.005, 0.01, 0.0085, 0.007, 0.0055])


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_schedule_follows_the_held_out_loss_after_step_0(name, home, worlds):
    """No loss after the first is better by the threshold: counted from the one of step 0, the rate would fall earlier."""
    folder = home / f"follows-{name}"
    evaluated = {"path": str(home / "held.jsonl"), "every_steps": 2}
    arguments = {"patience": 0, "factor": 0.5, "threshold": 100.0, "threshold_mode": "abs"}
    arguments |= {"max_lr": LR} if name == "greedy" else {}  # the first loss is better than none
    optimizer = {"lr": LR, "schedule": name, "min_lr": 0.006, "schedule_args": arguments}
    worlds[2].run(job, text(home, folder.name, optimizer=optimizer, eval=evaluated))
    assert [each["step"] for each in records(folder) if "eval_loss" in each] == [0, 2, 4, 6]
    assert [rate for *_, rate in losses(folder)] == [LR] * 4 + [0.006] * 2


def test_a_constant_rate_with_a_warmup_as_a_share(home, worlds):
    folder = home / "share"
    worlds[2].run(job, text(home, "share", optimizer={"lr": LR, "schedule": "constant", "warmup_ratio": 0.3}))
    assert [rate for *_, rate in losses(folder)] == pytest.approx([LR * min(step / 2, 1) for step in range(STEPS)])


# --- groups


def settings_of(trainer) -> dict[str, tuple[float, float]]:
    """Return peak learning rate and decay by parameter."""
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    groups = trainer.optimizer.param_groups
    return {names[id(each)]: (group["initial_lr"], group["weight_decay"]) for group in groups for each in group["params"]}


def with_groups(text: str):
    """Return the settings, rates and weights of a run with groups, its weights after a resume, and the batches."""
    trainer = trained(text)
    keys = ("input_ids", "attention_mask", "labels")
    batches = [{key: batch[key] for key in keys} for batch in islice(trainer.get_train_dataloader(), STEPS)]
    again = trained(text, f"{trainer.args.output_dir}/checkpoint-{MIDDLE}")
    assert settings_of(again) == settings_of(trainer)
    return settings_of(trainer), rates_of(trainer), trainer.units.state_dict(), again.units.state_dict(), batches


def test_groups_train_as_those_of_a_plain_loop_and_go_on(home, worlds):
    optimizer = {"lr": LR, "weight_decay": 0.1, "schedule": "linear", "warmup_steps": 2, "groups": GROUPS}
    texts = [text(home, f"groups-{ranks}", optimizer=optimizer) for ranks in (1, 2)]
    settings, rates, *runs, batches = worlds[1].run(with_groups, texts[0])[0]
    runs += worlds[2].run(with_groups, texts[1])[0][2:4]
    model = AutoModelForCausalLM.from_pretrained(home / "base", dtype=torch.float32)
    groups = {}
    for name, parameter in model.named_parameters():
        norm = "norm" in name
        if name == "model.norm.weight" or "input_layernorm" in name:
            own = 0.002, 0.3
        elif ".layers.1." in name:
            own = 0.03, 0.0 if norm else 0.1
        else:
            own = LR, 0.0 if norm or "lm_head" in name else 0.1
        assert settings[name] == own, name
        groups.setdefault(own, []).append(parameter)
    assert len(groups) == 5
    made = [{"params": params, "lr": lr, "weight_decay": decay} for (lr, decay), params in groups.items()]
    plain = torch.optim.AdamW(made, betas=(0.9, 0.95))
    schedule = get_scheduler("linear", plain, 2, STEPS)
    for batch in batches:
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        plain.step()
        schedule.step()
        plain.zero_grad()
    for name, tensor in model.state_dict().items():
        assert all(float((weights[name] - tensor).norm() / tensor.norm()) < 1e-5 for weights in runs), name
        assert torch.equal(runs[0][name], runs[1][name]), name
        assert torch.equal(runs[2][name], runs[3][name]), name
    assert max(rates) == LR, "the log has the rate of the parameters that no group matches"


def test_groups_of_a_plain_optimizer():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 2))
    weights, others = [model[0].weight, model[2].weight], [model[0].bias, *model[1].parameters(), model[2].bias]
    plain = torch.optim.SGD([{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1.0)
    split_groups(plain, model, [Group(match=r"0\.bias|^1", weight_decay=0.2), Group(match=r"bias|^2", lr=3.0)])
    found = [(group["lr"], group["weight_decay"], group["params"]) for group in plain.param_groups]
    assert found == [
        (1.0, 0.1, [model[0].weight]),
        (1.0, 0.0, []),
        (1.0, 0.2, [model[0].bias, *model[1].parameters()]),
        (3.0, 0.1, [model[2].weight]),
        (3.0, 0.0, [model[2].bias]),
    ]


def test_what_a_continued_run_may_change():
    optimizer = {"lr": LR, "groups": GROUPS}
    before = unread(optimizer=optimizer).model_dump(mode="json")

    def change(*changes: str) -> str:
        return compare(unread(*changes, optimizer=optimizer), before, "c")

    line = change("optimizer.warmup_ratio=0.1", "optimizer.min_lr=0", "optimizer.schedule=linear")
    assert all(f"optimizer.{key}" in line for key in ("warmup_ratio", "min_lr", "schedule"))
    assert "ignored" not in line
    with pytest.raises(UserError, match=r"optimizer\.groups: "):
        change("optimizer.groups=[{match: lm_head, lr: 1}]")
    with pytest.raises(UserError, match=r"optimizer\.schedule: cosine in c, now reduce_lr_on_plateau"):
        change("optimizer.schedule=reduce_lr_on_plateau", "eval.every_steps=1")


# --- refusals


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ("{warmup_steps: 1, warmup_ratio: 0.1}", "optimizer: found both `warmup_steps` and `warmup_ratio`; keep one"),
        ("{warmup_ratio: 1}", "optimizer.warmup_ratio: found 1, needs less than 1"),
        ("{schedule: constant, min_lr: 0}", "schedule constant takes no min_lr; remove it, or choose cosine, linear,"),
        ("{lr: 0.01, min_lr: 0.01}", "min_lr is 0.01 and lr 0.01; needs a min_lr below lr"),
        ("{min_lr: 0, schedule: polynomial, schedule_args: {lr_end: 0}}", "found min_lr and schedule_args.lr_end"),
        ("{schedule: reduce_lr_on_plateau, warmup_ratio: 0.1}", "has no warm-up; set warmup_steps and warmup_ratio to 0"),
        ("{schedule: reduce_lr_on_plateau}", "optimizer.schedule: reduce_lr_on_plateau follows the held-out loss; set"),
        ("{schedule: reduce_lr_on_plateau}\neval: {share: 0.1}", "follows the held-out loss; set eval.every_steps or eval."),
        ("{schedule: greedy}", "schedule greedy does not go below 0.001 by default, and lr is 2e-05; set min_lr below it"),
        ("{groups: [{match: '(', lr: 1}]}", "optimizer.groups.0.match: found '(', needs a regular expression: missing )"),
        ("{groups: [{match: a}]}", "optimizer.groups.0: needs `lr`, `weight_decay` or both"),
        ("{groups: [{match: a, lr: 0}]}", "optimizer.groups.0.lr: found 0, needs greater than 0"),
        ("{groups: [{match: a, rate: 1}]}", "optimizer.groups.0.rate: unknown key"),
        ("{lr_scheduler_kwargs: {}}", "here it is 'optimizer.schedule_args'"),
        ("{eta_min: 0}", "here it is 'optimizer.min_lr'"),
        ("{lr_warmup_ratio: 0.1}", "here it is 'optimizer.warmup_ratio'"),
        ("{param_groups: []}", "here it is 'optimizer.groups'"),
    ],
)
def test_what_a_recipe_may_not_say(optimizer, words):
    facts = f"model: {{name: some/model}}\ndata: {{name: some/set}}\noutput: {{dir: x}}\noptimizer: {optimizer}\n"
    with pytest.raises(RecipeError) as refused:
        parse(facts, "r.yaml")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule_args": {"num_cycle": 2}}, "schedule_args: the schedule cosine refuses {'num_cycle': 2}: "),
        ({"schedule_args": {"num_cycle": 2}}, "unexpected keyword argument 'num_cycle'; it has num_cycles"),
        ({"schedule": "warmup_stable_decay"}, "needs arguments: .*'num_decay_steps'"),
        ({"schedule": "cosine_with_min_lr"}, "needs arguments: One of min_lr or min_lr_rate"),
        ({"schedule": "polynomial", "schedule_args": {"power": "two"}}, "the schedule polynomial refuses"),
        ({"schedule": "polynomial", "schedule_args": {"last_epoch": 3}}, "the schedule polynomial refuses"),
        ({"schedule": "inverse_sqrt", "schedule_args": {"timescale": 0}}, "refuses {'timescale': 0}.* it has timescale"),
        ({"schedule": "linear", "min_lr": 0.0, "warmup_steps": 6}, "cannot decay in a run of 6 steps with a warm-up of 6"),
    ],
)
def test_what_transformers_refuses(changes, words):
    with pytest.raises(UserError, match=words):
        check_schedule(unread(optimizer={"lr": LR, **changes}).optimizer, STEPS)
