"""Loops without a Trainer: on Accelerate, and in plain PyTorch.

The same loop, word for word, runs on accelerate's Accelerator in one process and on ours on several; losses, norms,
learning rates, evaluations and weights must be the same, also across a state that is saved by two ranks and loaded by
one or three. The plain loop uses the public functions alone and is compared with plain PyTorch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
import transformers
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import ftkit
from ftkit.hf.sharding import units_of
from tests.hf import runs
from tests.hf.runs import assert_same_weights, fresh_state


def full_rows(count: int, seed: int = 1) -> list[dict[str, Tensor]]:
    """Return rows in which every token is a label: the mean of means is the mean."""
    return [{**row, "labels": row["input_ids"].clone()} for row in runs.token_rows(count, seed=seed)]


def falling(step: int) -> float:
    """Return the factor on the learning rate."""
    return 1 / (1 + 0.5 * step)


def make(kind: str, settings: Any = "auto", **options: Any) -> accelerate.Accelerator:
    """Return an Accelerator of a kind; batches are split, so that the user's batch size is the global one."""
    fresh_state()
    loaders = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    options = {"cpu": True, "gradient_accumulation_steps": 2, "dataloader_config": loaders, **options}
    made = accelerate.Accelerator(**options) if kind == "stock" else ftkit.Accelerator(ftkit=settings, **options)
    torch.set_num_threads(1)
    return made


class Counter:
    """Something of the user's with a state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@dataclass
class Log:
    """What a loop saw."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    count: int = 0


def loop(kind: str, settings: Any, save: str | None = None, resume: str | None = None, epochs: int = 2) -> Log:
    """A user's loop. Saves its state after the first epoch, or begins with the second."""
    accelerator = make(kind, settings)
    set_seed(4)
    model, log, counter = runs.llama(), Log(), Counter()
    optimizer = torch.optim.AdamW(
        [{"params": model.model.parameters()}, {"params": model.lm_head.parameters(), "lr": 3e-2}], lr=1e-2, weight_decay=0.1
    )
    scheduler = LambdaLR(optimizer, falling)
    loader = DataLoader(full_rows(24), batch_size=6, shuffle=True)
    held_out = DataLoader(full_rows(10, seed=2), batch_size=6)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
    accelerator.register_for_checkpointing(counter)
    first = 0
    if resume is not None:
        accelerator.load_state(resume)
        first = loader.iteration = 1
    for epoch in range(first, epochs):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    log.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            log.losses.append(float(accelerator.gather(loss.detach().reshape(1)).mean()))
            log.rates += [group["lr"] for group in optimizer.param_groups]
            counter.count += 1
        model.eval()
        for batch in held_out:
            with torch.no_grad():
                chosen = model(**batch).logits.argmax(-1)[:, :-1]
            chosen, labels = accelerator.gather_for_metrics((chosen, batch["labels"][:, 1:]))
            log.right += [int(number) for number in (chosen == labels).sum(1)]
        if save is not None and epoch == 0:
            accelerator.save_state(save)
    log.count = counter.count
    log.weights = accelerator.get_state_dict(model)
    return log


def assert_same(ours: Log, theirs: Log, first: int = 0) -> None:
    """Compare two logs, the second from epoch `first` on."""
    for name in ("losses", "norms", "rates", "right"):
        expected = getattr(theirs, name)
        expected = expected[len(expected) // 2 * first :]
        assert getattr(ours, name) == pytest.approx(expected, rel=1e-5, abs=1e-7), name
    assert ours.count == theirs.count
    assert_same_weights(ours.weights, theirs.weights)


@pytest.fixture(scope="module")
def plain(world1):
    """The loop on accelerate, in one process."""
    return world1.run(loop, "stock", None)[0]


@pytest.mark.parametrize("ranks, settings", [(2, {"stage": 3}), (3, {"stage": 2})])
def test_a_loop_on_accelerate(ranks, settings, plain, worlds):
    assert len(plain.losses) == 8
    assert len(plain.norms) == 4
    assert len(plain.right) == 20
    assert len(set(plain.rates)) > 6
    for log in worlds[ranks].run(loop, "ours", settings):
        assert_same(log, plain)


@pytest.mark.slow
def test_ten_steps_of_a_loop_on_accelerate(world1, world2):
    plain = world1.run(loop, "stock", None, None, None, 5)[0]
    assert len(plain.norms) == 10
    for log in world2.run(loop, "ours", {"stage": 3}, None, None, 5):
        assert_same(log, plain)


@pytest.mark.parametrize("ranks, settings", [(1, "auto"), (3, {"stage": 1})])
def test_a_state_is_loaded_by_any_number_of_ranks(ranks, settings, plain, worlds, tmp_path):
    folder = str(tmp_path / "state")
    worlds[2].run(loop, "ours", {"stage": 3}, folder)
    for log in worlds[ranks].run(loop, "ours", settings, None, folder):
        assert_same(log, plain, first=1)


def refusal_of(function: Any, *arguments: Any) -> str:
    """A case for a world: return the text of the UserError that a call raises."""
    try:
        function(*arguments)
    except ftkit.UserError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def test_a_state_that_is_not_whole_is_refused(world2, tmp_path):
    folder = tmp_path / "state"
    world2.run(loop, "ours", {"stage": 3}, str(folder))
    for name in ("small.pt", "model_0/manifest.json", "contents.json"):
        file = folder / "accelerator_state" / name
        file.rename(tmp_path / "aside")
        words = world2.run(refusal_of, loop, "ours", "auto", None, str(folder))
        assert ("no complete accelerator_state" if name == "contents.json" else file.name) in words[0]
        (tmp_path / "aside").rename(file)


def on_no_device() -> None:
    """Share weights with a rank of which accelerate knows nothing: on a CPU, without saying that it is one."""
    make("ours", {"stage": 3}, cpu=False).prepare(runs.llama())


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU accelerate counts the ranks")
def test_ranks_that_would_all_train_on_the_same_rows_are_refused(world2):
    for words in world2.run(refusal_of, on_no_device):
        assert "share the weights by 2, and accelerate counts 1" in words
        assert "use_cpu=True" in words


class Number:
    """Something whose state is a number."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize("calls", range(4))
def test_a_state_is_replaced_as_a_whole_or_not_at_all(calls, tmp_path):
    """Killed at any rename of the second save: the first state is there or the second, never a part of each."""
    accelerator, number = make("ours"), Number()
    units = units_of(accelerator.prepare(runs.llama()))
    accelerator.register_for_checkpointing(number)

    def save(value: float) -> None:
        units.flats[0].weights.tensor.fill_(value)
        number.value = value
        accelerator.save_state(str(tmp_path / "state"))

    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "custom_0.pt").write_text("of the user")
    save(1.0)
    left, rename = [calls], os.rename

    def killed(*names: Any, **options: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        rename(*names, **options)

    with mock.patch.object(os, "rename", killed):
        try:
            save(2.0)
            over = True
        except KeyboardInterrupt:
            over = False
    units.saving = None
    accelerator.load_state(str(tmp_path / "state"))
    found = float(next(iter(units.state_dict().values())).flatten()[0])
    assert found == number.value
    assert over == (calls == 3)
    assert number.value == (2.0 if over else 1.0), "the second rename puts the former state aside, the third names the new"
    save(3.0)
    assert (tmp_path / "state" / "custom_0.pt").read_text() == "of the user"
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["accelerator_state", "custom_0.pt"]
    small = tmp_path / "state" / "accelerator_state" / "small.pt"
    data = bytearray(small.read_bytes())
    data[len(data) // 2] ^= 1
    small.write_bytes(data)
    with pytest.raises(ftkit.UserError, match=r"small\.pt: changed since it was written"):
        accelerator.load_state(str(tmp_path / "state"))


def several_states(folder: str) -> tuple[list[str], list[str], float]:
    """A case for a world: number the states, keep two, and go back to the last."""
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = make("ours", project_config=project)
    called: list[str] = []

    def before(models: Any, weights: Any, where: str) -> None:
        called.append(Path(where).name)
        Path(where, f"note_{accelerator.process_index}.txt").write_text("written by a hook")

    accelerator.register_save_state_pre_hook(before)
    accelerator.register_load_state_pre_hook(lambda models, where: called.append(f"from {Path(where).name}"))
    units = units_of(accelerator.prepare(runs.llama()))
    for number in range(3):
        units.flats[0].weights.tensor.fill_(float(number))
        accelerator.save_state()
    units.flats[0].weights.tensor.fill_(9.0)
    accelerator.load_state()
    assert len([*Path(folder, "checkpoints", "checkpoint_2").glob("note_*.txt")]) == accelerator.num_processes
    kept = sorted(path.name for path in Path(folder, "checkpoints").iterdir())
    return kept, called, float(next(iter(units.state_dict().values())).flatten()[0])


def test_states_are_numbered_and_the_oldest_removed(world2, tmp_path):
    last = ["checkpoint_1", "checkpoint_2"]
    called = ["checkpoint_0", *last, "from checkpoint_2"]
    assert world2.run(several_states, str(tmp_path)) == [(last, called, 2.0)] * 2


def one_more_state(folder: str, limit: int) -> tuple[str, list[str]]:
    """A case for a world: a run that was started anew in a project, and saves once."""
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=limit)
    accelerator = make("ours", project_config=project)
    accelerator.prepare(runs.llama())
    saved = accelerator.save_state()
    accelerator.load_state()
    return Path(saved).name, sorted(path.name for path in Path(saved).parent.iterdir())


def test_numbers_of_states_go_on_after_a_restart(world1, world2, tmp_path):
    folder, states = str(tmp_path), tmp_path / "checkpoints"
    assert world2.run(one_more_state, folder, 1) == [("checkpoint_0", ["checkpoint_0"])] * 2
    assert world1.run(one_more_state, folder, 2) == [("checkpoint_1", ["checkpoint_0", "checkpoint_1"])]
    assert world2.run(one_more_state, folder, 1) == [("checkpoint_2", ["checkpoint_2"])] * 2
    (states / "checkpoint_3" / ".accelerator_state.writing").mkdir(parents=True)  # of a run that was killed while it saved
    assert world2.run(one_more_state, folder, 2) == [("checkpoint_3", ["checkpoint_2", "checkpoint_3"])] * 2


def export(folder: str) -> None:
    """A case for a world: the calls by which Accelerate's users save a model."""
    accelerator = make("ours", {"stage": 3})
    model = accelerator.prepare(runs.tied_llama())
    state = accelerator.get_state_dict(model)
    unwrapped = accelerator.unwrap_model(model)
    assert unwrapped is model
    unwrapped.save_pretrained(
        f"{folder}/pretrained", state_dict=state, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    accelerator.save_model(model, f"{folder}/saved")
    accelerator.wait_for_everyone()


def test_saving_a_model_as_accelerates_users_do(world2, tmp_path):
    world2.run(export, str(tmp_path))
    expected = runs.tied_llama()
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained")
    assert_same_weights(opened.state_dict(), expected.state_dict(), limit=0)
    expected.lm_head.weight.data.zero_()
    accelerate.load_checkpoint_in_model(expected, str(tmp_path / "saved"))
    assert_same_weights(expected.state_dict(), opened.state_dict(), limit=0)


def with_reference(kind: str, settings: Any) -> list[float]:
    """A case for a world: a second model, which is only evaluated, beside the one that trains."""
    accelerator = make(kind, settings, gradient_accumulation_steps=1)
    model, reference = runs.llama(), runs.tied_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(full_rows(12), batch_size=6)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    reference = accelerator.prepare_model(reference, evaluation_mode=True).eval()
    losses = []
    for batch in loader:
        with torch.no_grad():
            aim = reference(**batch).logits.softmax(-1)
        loss = torch.nn.functional.cross_entropy(model(**batch).logits.flatten(0, 1), aim.flatten(0, 1))
        accelerator.backward(loss)
        losses += [float(accelerator.gather(loss.detach().reshape(1)).mean())]
        losses += [float(accelerator.clip_grad_norm_(model.parameters(), 1.0))]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_second_model_that_is_only_evaluated(world1, world2):
    assert world2.run(with_reference, "ours", {"stage": 3})[0] == pytest.approx(
        world1.run(with_reference, "stock", None)[0], rel=1e-5
    )


def test_no_warning_of_a_scheduler_that_runs_ahead(recwarn):
    loop("ours", "auto")
    assert not [str(w.message) for w in recwarn if "lr_scheduler" in str(w.message) or "optimizer.step" in str(w.message)]


# --- refusals


def prepared(**options: Any) -> tuple[Any, Any, Any]:
    """Return an Accelerator of ours with a model and its optimizer."""
    accelerator = make("ours", **options)
    model = runs.llama()
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def test_what_is_not_supported_is_refused():
    accelerator, model, _ = prepared()
    refused = partial(pytest.raises, ftkit.UserError)
    with refused(match="prepare the model before its optimizer"):
        accelerator.prepare(torch.optim.AdamW(runs.llama().parameters()))
    with refused(match="Adamax has no sharded form: use AdamW, SGD, Adagrad, RMSprop, AdamW8bit, Lion"):
        accelerator.prepare(torch.optim.Adamax(model.parameters()))
    with accelerator.accumulate(model), refused(match="if accelerator.sync_gradients"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with accelerator.accumulate(model), refused(match="pass model.parameters"):
        accelerator.clip_grad_norm_(model.lm_head.parameters(), 1.0)
    accelerator.backward(model(**{key: value[None] for key, value in full_rows(1)[0].items()}).loss)
    with refused(match=r"accelerator\.clip_grad_norm_"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)


class Locked:
    """An object whose state no restricted unpickler reads."""

    def state_dict(self) -> dict[str, Any]:
        return {"place": Path("somewhere")}


def test_a_state_that_could_not_be_loaded_fails_when_it_is_saved(tmp_path):
    accelerator, _, _ = prepared()
    accelerator.register_for_checkpointing(mock.Mock(state_dict=Locked().state_dict))
    with pytest.raises(ftkit.UserError, match=r"small\.pt: not read: a pickle that names pathlib"):
        accelerator.save_state(str(tmp_path / "state"))


def test_the_communicator_is_made_once_and_shards_nothing():
    accelerator, model = make("ours"), runs.llama()
    comm = accelerator.comm
    assert units_of(model) is None
    units = accelerator.shard(model, update="now")
    assert units.comm is accelerator.comm is comm
    assert accelerator.shard(model) is units
    assert accelerator.settings.strategy.update == "auto", "the decision is an argument; settings stay as they were given"


def test_an_optimizer_may_stand_before_its_model_and_begin_with_an_empty_group():
    accelerator, model = make("ours"), runs.llama()
    optimizer = torch.optim.AdamW([{"params": []}, {"params": model.parameters()}])
    optimizer, model = accelerator.prepare(optimizer, model)
    assert optimizer.optimizer.units is units_of(model)
    assert accelerator._models == [model]


def test_an_optimizer_may_be_made_from_a_model_of_load_model(tmp_path):
    runs.llama().save_pretrained(tmp_path)
    accelerator, model = make("ours"), ftkit.load_model(tmp_path)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert optimizer.optimizer.units is units_of(model)


def test_a_model_whose_weights_could_not_be_read_is_not_trained(tmp_path):
    runs.llama().save_pretrained(tmp_path)
    accelerator, model = make("ours"), ftkit.load_model(tmp_path)
    with mock.patch("ftkit.hf.sharding.load_weights", side_effect=OSError), pytest.raises(OSError):
        accelerator.prepare(model)
    with pytest.raises(ftkit.UserError, match="left it partly sharded"):
        accelerator.prepare(model)


def test_mixed_precision_is_the_engines():
    accelerator, model, optimizer = prepared(mixed_precision="bf16", gradient_accumulation_steps=1)
    assert model.dtype == torch.bfloat16
    batch = {key: value[None] for key, value in full_rows(1)[0].items()}
    with accelerator.autocast():
        assert not torch.is_autocast_enabled("cpu")
        accelerator.backward(model(**batch).loss)
    optimizer.step()
    assert {state.master.dtype for state in optimizer.optimizer.states.values()} == {torch.float32}


# --- no accelerate at all


def plain_loop(folder: str, ours: bool, settings: Any, save: str | None, resume: str | None) -> Log:
    """A loop in PyTorch alone; ours takes its share of the global batch."""
    log = Log()
    if ours:
        model = ftkit.load_model(folder)
        units = ftkit.shard(model, settings, accumulation_steps=2)
        model.train()
        optimizer = ftkit.ShardedAdamW(units, lr=1e-2, weight_decay=0.1)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = LambdaLR(optimizer, falling)
    first = 0
    if resume is not None:
        first = ftkit.load_checkpoint(resume, units, optimizer)["step"]
        scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": first, "_step_count": first + 1})
    share = 6 // runs.world_size()
    rows = full_rows(48)
    for step in range(first, 4):
        for micro in range(2):
            start = (2 * step + micro) * 6 + share * runs.rank()
            part = rows[start : start + share]
            loss = model(**{key: torch.stack([row[key] for row in part]) for key in part[0]}).loss / 2
            (optimizer.scale(loss) if ours else loss).backward()
            log.losses.append(float(loss.detach()) * 2)
        clip = optimizer.clip_grad_norm_ if ours else partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()))
        log.norms.append(float(clip(0.5)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        log.rates.append(scheduler.get_last_lr()[0])
        if save is not None and step == 1:
            ftkit.save_checkpoint(save, units, optimizer, extra={"step": 2})
    log.weights = units.state_dict() if ours else model.state_dict()
    return log


def mean_losses(logs: list[Log]) -> list[float]:
    """Return the losses of the global batch."""
    return [sum(losses) / len(logs) for losses in zip(*(log.losses for log in logs))]


@pytest.mark.parametrize("ranks, settings", [(2, {"stage": 3}), (3, {"stage": 2, "activations": "keep"})])
def test_a_loop_in_plain_pytorch(ranks, settings, worlds, tmp_path):
    runs.llama().save_pretrained(tmp_path / "model")
    folder, state = str(tmp_path / "model"), str(tmp_path / "state")
    theirs = worlds[1].run(plain_loop, folder, False, None, None, None)[0]
    whole = worlds[ranks].run(plain_loop, folder, True, settings, state, None)
    again = worlds[4 - ranks].run(plain_loop, folder, True, "auto", None, state)
    for logs, first in ((whole, 0), (again, 2)):
        assert mean_losses(logs) == pytest.approx(theirs.losses[2 * first :], rel=1e-5)
        assert logs[0].norms == pytest.approx(theirs.norms[first:], rel=1e-5)
        assert logs[0].rates == pytest.approx(theirs.rates[first:], rel=1e-9)
        assert_same_weights(logs[0].weights, theirs.weights)
