"""The Trainer, the Accelerator and the plain functions: saved by some ranks on one tier, resumed by others on another.

Full fine-tuning and LoRA. The reference is always the run that nobody broke off, by transformers' Trainer, accelerate's
Accelerator or PyTorch alone, in one process. Checkpoints of the Trainer are of the middle of an epoch, of its last step and
of the next epoch's first; states of the Accelerator of the middle of the second epoch. The engine's own product of ranks,
stages, tiers and dtypes is `tests/engine/test_resume_everywhere.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import ftkit
from ftkit.engine.checkpoint.sealed import check_contents
from ftkit.errors import UserError
from tests.hf import runs
from tests.hf.runs import Run, assert_same_history, assert_same_weights, train
from tests.hf.test_accelerator import Counter, Log, falling, full_rows, make, mean_losses, plain_loop
from tests.hf.test_peft import adapted
from tests.hf.test_trainer import changed
from tests.worlds import Worlds

Made = Callable[..., Any]

WHOLE = Run(rows=54, batch=12, arguments={"gradient_accumulation_steps": 2, "num_train_epochs": 2})
"""Six steps: three an epoch, of which the last has one micro-batch, and that of six rows. 12 rows are shared by 1 to 4."""


def spoiled(model: nn.Module) -> nn.Module:
    """Return a model whose trained weights are others: who goes on with them instead of the checkpoint's is found out."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5)
    return model


def other_llama() -> nn.Module:
    """Return the small Llama with other weights."""
    return spoiled(runs.llama())


def other_adapted() -> nn.Module:
    """Return it with another adapter, on the same base: that is in no checkpoint of an adapter."""
    return spoiled(adapted())


MODELS: dict[str, Callable[[], nn.Module]] = {"full": runs.llama, "lora": adapted}
OTHERS: dict[str, Callable[[], nn.Module]] = {"full": other_llama, "lora": other_adapted}


def first_step(trainer: Any) -> int:
    """Return the step after which this call began."""
    return trainer._initial_global_step


def on(tier: str, folder: Path, stage: int = 3, **more: Any) -> dict[str, Any]:
    """Return the engine's settings with all that this stage lets leave the device on a tier."""
    kinds = (
        "state",
        "activation_offload",
        *(("gradients",) if stage >= 2 else ()),
        *(("parameters",) if stage == 3 else ()),
    )
    update = "now" if tier == "device" else "deferred"
    tiers = dict.fromkeys(kinds, tier) | ({"state_host_bytes": 0} if tier == "nvme" else {})
    return {"stage": stage, "activations": "recompute", "update": update, "nvme_dir": str(folder), **tiers, **more}


@dataclass(frozen=True)
class Side:
    """Who writes, or reads: ranks, tier, stage, and how micro-batches pass the model."""

    world: int
    tier: str = "device"
    stage: int = 3
    accumulate_in: str = "step"

    def __str__(self) -> str:
        return f"W{self.world}-{self.tier}-stage{self.stage}-{self.accumulate_in}"

    def settings(self, folder: Path) -> dict[str, Any]:
        """Return the engine's settings."""
        return on(self.tier, folder, self.stage, accumulate_in=self.accumulate_in)


DEVICE2, NVME4, HOST3, NVME1 = Side(2), Side(4, "nvme"), Side(3, "host", 2), Side(1, "nvme")
ROWS = [
    ("full", DEVICE2, NVME4, 2),
    ("full", NVME4, NVME1, 3),
    ("full", NVME4, Side(3, "device", 0), 4),
    ("full", NVME4, Side(2, "host", 3, "unit"), 5),
    ("lora", HOST3, Side(1, "device", 1), 2),
    ("lora", HOST3, Side(4, "nvme"), 3),
    ("lora", Side(1, "nvme", 3, "unit"), Side(2, "device", 2), 5),
    ("lora", HOST3, Side(2, "nvme", 1), 5),
]


@pytest.fixture(scope="module")
def trainers(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """`trainers(kind, side)` is the output folder of a Trainer that saved every step, and what it did; each runs once."""

    @cache
    def run(kind: str, side: Side) -> Any:
        folder = tmp_path_factory.mktemp("writer")
        saving = changed(replace(WHOLE, model=MODELS[kind]), save_strategy="steps", save_steps=1)
        outcome = worlds[side.world].run(train, "ours", str(folder), replace(saving, ftkit=side.settings(folder)))[0]
        return folder, outcome

    return run


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind, writer, reader, step", ROWS, ids=str)
def test_a_trainers_run_goes_on_elsewhere(kind, writer, reader, step, trainers, worlds, stock, tmp_path):
    run = replace(WHOLE, model=MODELS[kind])
    folder, before = trainers(kind, writer)
    uncounted = ["epoch"] if "unit" in (writer.accumulate_in, reader.accumulate_in) else []  # counted in batches by then
    assert_same_history(before, stock(run), leave_out=uncounted)
    check_contents(folder / f"checkpoint-{step}")
    resumed = replace(run, model=OTHERS[kind], resume=f"{folder}/checkpoint-{step}", after=first_step)
    resumed = replace(resumed, ftkit=reader.settings(tmp_path))
    outcomes = worlds[reader.world].run(train, "ours", str(tmp_path), resumed)
    for outcome in outcomes:
        assert outcome.after == step
        assert_same_history(outcome, stock(run), leave_out=["train_loss", *uncounted])  # that is of this call alone
    assert_same_weights(outcomes[0].weights, stock(run).weights)


# --- the Accelerator

MICRO_BATCHES = 6
"""Of an epoch; two are a step."""


def loop(kind: str, settings: Any, model: Callable[[], nn.Module], save: str | None, resume: str | None) -> Log:
    """A user's loop of two epochs, which saves after the first step of the second, or goes on from there."""
    accelerator = make(kind, settings)
    set_seed(4)
    model, log, done = model(), Log(), Counter()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trained[::2]}, {"params": trained[1::2], "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
    scheduler = LambdaLR(optimizer, falling)
    loader = DataLoader(full_rows(12 * MICRO_BATCHES), batch_size=12, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.register_for_checkpointing(done)
    if resume is not None:
        accelerator.load_state(resume)
    model.train()
    for epoch in range(done.count // MICRO_BATCHES, 2):
        loader.set_epoch(epoch)
        skipped = done.count - epoch * MICRO_BATCHES
        for batch in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
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
            done.count += 1
            if save is not None and done.count == MICRO_BATCHES + 2:
                accelerator.save_state(save)
    log.count = done.count
    log.weights = accelerator.get_state_dict(model)
    return log


def assert_goes_on(ours: Log, theirs: Log, part: float) -> None:
    """Compare a log with the last `part` of another."""
    for name in ("losses", "norms", "rates"):
        expected = getattr(theirs, name)
        assert getattr(ours, name) == pytest.approx(expected[len(expected) - round(len(expected) * part) :], rel=1e-5), name
    assert ours.count == theirs.count
    assert_same_weights(ours.weights, theirs.weights)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "kind, writer, reader",
    [
        ("full", Side(3, "nvme"), Side(2, "device", 2)),
        ("full", Side(1, "host"), Side(2, "nvme")),
        ("lora", Side(2, "device"), Side(4, "nvme", 1)),
        ("lora", Side(3, "nvme"), Side(1, "host", 3)),
    ],
    ids=str,
)
def test_an_accelerators_loop_goes_on_elsewhere(kind, writer, reader, worlds, tmp_path):
    theirs = worlds[1].run(loop, "stock", None, MODELS[kind], None, None)[0]
    assert len(theirs.losses) == 2 * MICRO_BATCHES
    state = str(tmp_path / "state")
    for log in worlds[writer.world].run(loop, "ours", writer.settings(tmp_path), MODELS[kind], state, None):
        assert_goes_on(log, theirs, 1)
    for log in worlds[reader.world].run(loop, "ours", reader.settings(tmp_path), OTHERS[kind], None, state):
        assert_goes_on(log, theirs, 1 / 3)


# --- no Trainer and no Accelerator


PLAIN_ROWS = [(Side(3, "nvme"), Side(2, "host")), (Side(2, "host", 2), Side(1, "nvme"))]


@pytest.mark.quick(1)
@pytest.mark.parametrize("writer, reader", PLAIN_ROWS, ids=str)
def test_a_plain_loop_goes_on_elsewhere(writer, reader, worlds, tmp_path):
    runs.llama().save_pretrained(tmp_path / "model")
    folder, state = str(tmp_path / "model"), str(tmp_path / "state")
    theirs = worlds[1].run(plain_loop, folder, False, None, None, None)[0]
    whole = worlds[writer.world].run(plain_loop, folder, True, writer.settings(tmp_path), state, None)
    again = worlds[reader.world].run(plain_loop, folder, True, reader.settings(tmp_path), None, state)
    for logs, first in ((whole, 0), (again, 2)):
        assert mean_losses(logs) == pytest.approx(theirs.losses[2 * first :], rel=1e-5)
        assert logs[0].norms == pytest.approx(theirs.norms[first:], rel=1e-5)
        assert logs[0].rates == pytest.approx(theirs.rates[first:], rel=1e-9)
        assert_same_weights(logs[0].weights, theirs.weights)


# --- parameter groups


def groups(model: nn.Module, turned: bool) -> list[dict[str, Any]]:
    norms = [p for n, p in model.named_parameters() if "norm" in n]
    others = [p for n, p in model.named_parameters() if "norm" not in n]
    found = [{"params": norms, "lr": 1e-3}, {"params": others, "lr": 1e-2}]
    return found[::-1] if turned else found


def test_groups_in_another_order_are_refused_at_resume(tmp_path):
    model = runs.llama(num_hidden_layers=2)
    units = ftkit.shard(model, {"stage": 3, "affinity": False})
    optimizer = ftkit.ShardedAdamW(units, groups(model, turned=False))
    ftkit.save_checkpoint(tmp_path / "saved", units, optimizer)
    other = runs.llama(num_hidden_layers=2)
    others = ftkit.shard(other, {"stage": 3, "affinity": False})
    same = ftkit.ShardedAdamW(others, groups(other, turned=False))
    ftkit.load_checkpoint(tmp_path / "saved", others, same)
    turned = ftkit.ShardedAdamW(others, groups(other, turned=True))
    with pytest.raises(UserError, match="was in parameter group 1, and is in group 0"):
        ftkit.load_checkpoint(tmp_path / "saved", others, turned)
