"""What a Trainer's subclass, or a script, does past the doors that the engine knows: it has its effect, or is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ftkit
from ftkit.errors import UserError
from tests.hf import runs


def made(folder: Path, kind: Any = ftkit.Trainer, steps: int = 2, **more: Any) -> Any:
    """Return a Trainer of a small model that saves each step."""
    runs.fresh_state()
    arguments = ftkit.TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        save_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        ftkit={"stage": 3, "affinity": False},
        **more,
    )
    return kind(runs.llama(num_hidden_layers=2), arguments, train_dataset=runs.token_rows(12))


class NewOptimizer(ftkit.Trainer):
    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        """Begin with a new optimizer, as in stock."""


class ZeroHead(ftkit.Trainer):
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        nn.init.zeros_(self.model.model.norm.weight)


@pytest.mark.parametrize(
    "kind, words",
    [
        (NewOptimizer, r"the weights of \S*checkpoint-1 were not read: _load_optimizer_and_scheduler"),
        (ZeroHead, "ZeroHead overrides _load_from_checkpoint"),
    ],
    ids=["a new optimizer", "another load"],
)
def test_weights_of_a_checkpoint_that_an_override_would_lose_are_refused(kind, words, tmp_path):
    made(tmp_path).train()
    with pytest.raises(UserError, match=words):
        made(tmp_path, kind).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_checkpoint_that_is_loaded_by_hand_is_evaluated(tmp_path):
    trainer = made(tmp_path)
    trainer.train()
    expected = trainer.evaluate(runs.token_rows(4, seed=5))["eval_loss"]
    fresh = made(tmp_path)
    before = fresh.evaluate(runs.token_rows(4, seed=5))["eval_loss"]
    fresh._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
    after = fresh.evaluate(runs.token_rows(4, seed=5))["eval_loss"]
    assert after == pytest.approx(expected, rel=1e-6)
    assert abs(before - expected) > 1e-4


class NoOptimizerSaved(ftkit.Trainer):
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save disk, as in stock."""


def test_a_checkpoint_without_weights_is_not_left_behind(tmp_path, caplog):
    with caplog.at_level(logging.ERROR):
        made(tmp_path, NoOptimizerSaved).train()
    assert "nothing wrote its weights" in caplog.text
    assert not list(tmp_path.glob("checkpoint-*"))


class OwnCheckpoint(ftkit.Trainer):
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = str(Path(self.args.output_dir, f"checkpoint-{self.state.global_step}"))
        self.save_model(folder, _internal_call=True)
        self._save_optimizer_and_scheduler(folder)
        self._save_rng_state(folder)
        self.state.save_to_json(str(Path(folder, "trainer_state.json")))


def test_a_checkpoint_that_a_trainer_puts_together_is_whole(tmp_path):
    made(tmp_path, OwnCheckpoint).train()
    assert not list(tmp_path.rglob("*writing*"))
    for step in (1, 2):
        ftkit.engine.checkpoint.checkpoint.check_checkpoint(tmp_path / f"checkpoint-{step}" / "ftkit")


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


def test_state_that_is_written_past_the_shards_is_refused():
    model = runs.llama(num_hidden_layers=2)
    optimizer = ftkit.ShardedAdamW(ftkit.shard(model, {"stage": 3, "affinity": False}))
    parameter = next(model.parameters())
    for write in (
        lambda: optimizer.state[parameter]["exp_avg"].zero_(),
        lambda: optimizer.state.__setitem__(parameter, {}),
        lambda: optimizer.state.clear(),
        lambda: optimizer.state.update({parameter: {}}),
        lambda: optimizer.state.setdefault(parameter, {}),
    ):
        with pytest.raises(UserError, match=r"optimizer\.state of a sharded model"):
            write()


def test_frozen_weights_that_lose_precision_are_told(caplog):
    model = runs.llama(num_hidden_layers=2)
    model.model.requires_grad_(False)
    with caplog.at_level(logging.WARNING):
        ftkit.shard(model, {"stage": 3, "dtype": "bf16", "affinity": False})
    assert "frozen weights (model." in caplog.text
    assert "are held in bfloat16" in caplog.text
    caplog.clear()
    model = runs.llama(num_hidden_layers=2)
    model.model.requires_grad_(False)
    ftkit.shard(model, {"stage": 3, "affinity": False})
    assert "frozen weights" not in caplog.text


class Hiding(nn.Module):
    """Lists a part of its parameters."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return (pair for pair in super().named_parameters(*args, **kwargs) if "layers.1" not in pair[0])

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


def test_parameters_that_a_model_hides_are_refused():
    with pytest.raises(UserError, match=r"inner\.model\.layers\.1\.\S+ is a parameter that named_parameters\(\)"):
        ftkit.shard(Hiding(runs.llama(num_hidden_layers=2)), {"stage": 3, "affinity": False})


class Scaled(nn.Linear):
    """A head that reads an attribute of its weight."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) * getattr(self.weight, "scale", 1.0)


class Special(nn.Parameter):
    """A parameter of a class of its own."""


def head_losses(special: bool) -> list[float]:
    runs.fresh_state()
    model = runs.llama(num_hidden_layers=2)
    head = Scaled(model.lm_head.in_features, model.lm_head.out_features, bias=False)
    nn.init.normal_(head.weight, std=0.3)
    if special:
        head.weight = Special(head.weight.detach())
    model.lm_head = head
    head.weight.scale = 0.5
    units = ftkit.shard(model, {"stage": 3, "affinity": False})
    rows = torch.stack([row["input_ids"] for row in runs.token_rows(2)])
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    with torch.no_grad():
        again = model(input_ids=rows, labels=rows).loss
    units.zero_grad()
    return [float(loss), float(again)]


def refused_head() -> str:
    with pytest.raises(UserError) as refused:
        head_losses(special=True)
    return str(refused.value)


def test_attributes_of_a_heads_weight_are_on_what_is_read(world1, world2):
    alone, together = world1.run(head_losses, False)[0], world2.run(head_losses, False)[0]
    assert together == pytest.approx(alone, rel=1e-5)
    assert alone[0] == pytest.approx(alone[1], rel=1e-6)


def test_a_head_of_another_class_of_parameters_is_refused_where_it_is_gathered(world2):
    assert "lm_head.weight is a Special, a subclass of nn.Parameter" in world2.run(refused_head)[0]


def clamps() -> str:
    """Write to all weights of a block in its forward; each rank finds it in its own part."""
    model = runs.llama(num_hidden_layers=2)
    block = model.model.layers[1]

    def clamp(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.clamp_(-0.01, 0.01)

    block.mlp.register_forward_pre_hook(clamp)
    ftkit.shard(model, {"stage": 3, "affinity": False})
    rows = torch.stack([row["input_ids"] for row in runs.token_rows(2)])
    with pytest.raises(UserError) as refused, torch.no_grad():
        model(input_ids=rows, labels=rows)
    return str(refused.value)


def test_a_weight_that_is_written_while_its_block_computes_is_refused(world2):
    for told in world2.run(clamps):
        assert "was written in place while its block model.layers.1 computed" in told


class Normalised(nn.Linear):
    """A head that writes its weight in forward."""

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.weight.div_(2.0)
        return super().forward(x)


def halves() -> str:
    model = runs.llama(num_hidden_layers=2)
    model.lm_head = Normalised(model.lm_head.in_features, model.lm_head.out_features, bias=False)
    ftkit.shard(model, {"stage": 3, "affinity": False})
    rows = torch.stack([row["input_ids"] for row in runs.token_rows(2)])
    with pytest.raises(UserError) as refused:
        model(input_ids=rows, labels=rows)
    return str(refused.value)


def test_a_head_that_is_written_in_its_forward_is_refused(world2):
    for told in world2.run(halves):
        assert told.startswith("lm_head.weight was written in place while its module computed")
