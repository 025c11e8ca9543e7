"""Weights of a sharded model read from anywhere: the true value, or an error with the way out; never a NaN.

A loss of the user's that reads a head or an embedding is compared with the stock Trainer on one rank. Everything else that a
callback, a penalty or a utility may do to a resharded parameter is tried on it and must raise, or must need no values.
"""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from functools import partial

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import prune

import ftkit
from tests.hf import runs
from tests.hf.runs import Run, assert_same_history, assert_same_weights, train

ARGUMENTS = {"max_steps": 3}


# --- in a loss: the values of one rank


def summed(logits, labels, items):
    """Return the sum over label tokens, over the number in the global batch."""
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), shifted, reduction="sum") / items


class HeadOutside:
    """Applies the head outside the model, as TRL's chunked losses do."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        hidden = self.model.model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
        loss = summed(hidden @ self.model.lm_head.weight.T, inputs["labels"], num_items_in_batch)
        return loss * self.accelerator.num_processes


class EmbeddingPenalty:
    """Adds a penalty on the embedding to the Trainer's loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss + 0.05 * self.model.get_input_embeddings().weight.square().sum()


class HeadAsTeacher:
    """Reads the head without gradients, twice, as a teacher's is read."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        hidden = self.model.model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
        with torch.no_grad():
            weight = self.model.get_output_embeddings().weight.detach() * 0.5 + self.model.lm_head.weight * 0.5
        return summed(hidden @ weight.T, inputs["labels"], num_items_in_batch) * self.accelerator.num_processes


class TiedBoth:
    """Multiplies the head by the embedding: a tied weight that is read twice in one loss, and once by the model."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss + 0.01 * (self.model.lm_head.weight * self.model.model.embed_tokens.weight).sum()


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "mixin, model, stage",
    [
        (HeadOutside, runs.llama, 3),
        (EmbeddingPenalty, runs.llama, 3),
        (HeadAsTeacher, runs.llama, 3),
        (TiedBoth, runs.tied_llama, 3),
        (HeadOutside, runs.llama, 2),
    ],
)
def test_a_loss_that_reads_a_root_parameter_is_that_of_one_rank(mixin, model, stage, worlds, tmp_path):
    run = Run(model=model, arguments=ARGUMENTS, mixin=mixin, ftkit={"stage": stage})
    stock = worlds[1].run(train, "stock", str(tmp_path / "stock"), run)[0]
    ours = worlds[2].run(train, "ours", str(tmp_path / "ours"), run)[0]
    assert_same_history(ours, stock)
    assert_same_weights(ours.weights, stock.weights)


# --- elsewhere: an error with the way out


class ReadsBlock:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss + 0.1 * sum(parameter.pow(2).sum() for parameter in self.model.parameters())


class Callback(transformers.TrainerCallback):
    """Logs the norm of the weights after a step."""

    def __init__(self, read):
        self.read = read

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.read(model)


def block_norm(model):
    return model.model.layers[0].mlp.up_proj.weight.data.float().norm()


def refused(run, text):
    with pytest.raises(ftkit.UserError, match=text):
        train("ours", tempfile.mkdtemp(), run)


def test_a_loss_that_reads_a_block_raises(worlds):
    text = r"(embed_tokens|up_proj)\.weight is resharded.*gathered_parameters"
    worlds[2].run(refused, Run(arguments=ARGUMENTS, mixin=ReadsBlock, ftkit={"stage": 3}), text)


class BlockPenalty:
    """Adds a penalty on a block's weight."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss + 0.1 * self.model.model.layers[0].mlp.up_proj.weight.square().sum()


class HookPenalty:
    """Lets a hook compute a penalty on a block's weight, while that is there."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        penalties = []
        hook = self.model.model.layers[0].mlp.up_proj.register_forward_hook(
            lambda module, args, result: penalties.append(module.weight.square().sum())
        )
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        hook.remove()
        return loss + 0.1 * penalties[0]


@pytest.mark.parametrize(
    "mixin, ranks, settings",
    [
        (BlockPenalty, 2, {"stage": 2}),
        (HookPenalty, 2, {"stage": 3, "activations": "keep"}),
    ],
)
def test_a_penalty_on_a_block_that_cannot_be_trained_raises(mixin, ranks, settings, worlds):
    text = r"up_proj\.weight got a gradient outside the backward of its block model\.layers\.0 .*weight_decay.*'stage': 1"
    worlds[ranks].run(refused, Run(arguments=ARGUMENTS, mixin=mixin, ftkit=settings), text)


def test_a_penalty_on_a_block_trains_at_stage_1(worlds, tmp_path):
    run = Run(arguments=ARGUMENTS, mixin=BlockPenalty, ftkit={"stage": 1, "activations": "keep"})
    stock = worlds[1].run(train, "stock", str(tmp_path / "stock"), run)[0]
    ours = worlds[2].run(train, "ours", str(tmp_path / "ours"), run)[0]
    assert_same_history(ours, stock)
    assert_same_weights(ours.weights, stock.weights)


def shifted(place):
    """A Llama whose first block has a parameter that a hook adds to what the block, or a module inside it, gives."""
    model = runs.llama()
    block = model.model.layers[0]
    block.shift = nn.Parameter(torch.full((32,), 0.1))
    block.get_submodule(place).register_forward_hook(lambda module, args, result: result + block.shift)
    return model


@pytest.mark.parametrize("place, settings", [("mlp", {"stage": 3}), ("", {"stage": 1})])
def test_a_hook_inside_a_block_reads_its_parameters(place, settings, worlds, tmp_path):
    run = Run(model=partial(shifted, place), arguments=ARGUMENTS, ftkit=settings)
    stock = worlds[1].run(train, "stock", str(tmp_path / "stock"), run)[0]
    ours = worlds[2].run(train, "ours", str(tmp_path / "ours"), run)[0]
    assert_same_history(ours, stock)
    assert_same_weights(ours.weights, stock.weights)


def test_a_callback_that_reads_weights_raises(worlds):
    run = Run(arguments=ARGUMENTS, options={"callbacks": [Callback(block_norm)]}, ftkit={"stage": 3})
    worlds[2].run(refused, run, r"weight is resharded.*gathered_parameters")


VALUES = {
    "norm": lambda p: p.norm(),
    "arithmetic": lambda p: 2 * p,
    "comparison": lambda p: bool((p > 0).any()),
    "data": lambda p: p.data.float().mean(),
    "detach": lambda p: p.detach().clone(),
    "clone": lambda p: p.clone(),
    "cpu copy": lambda p: p.detach().to(torch.float64),
    "numpy": lambda p: p.detach().numpy(),
    "list": lambda p: p.tolist(),
    "index": lambda p: p[0],
    "transpose": lambda p: p.T,
    "stack": lambda p: torch.stack([p, p]),
    "foreach": lambda p: torch._foreach_norm([p, p]),
    "linear": lambda p: nn.functional.linear(torch.ones(1, p.shape[1]), p),
    "isnan": lambda p: torch.isnan(p).any(),
    "state": lambda p: nn.utils.parameters_to_vector([p]),
    "pickle": lambda p: pickle.dumps(p),
    "save": lambda p: torch.save(p, io.BytesIO()),
    "deepcopy": lambda p: copy.deepcopy(p),
    "half": lambda p: p.half(),
    "storage": lambda p: p.untyped_storage(),
    "add_": lambda p: p.data.add_(1),
    "copy_": lambda p: p.copy_(torch.zeros(p.shape)),
    "init": lambda p: nn.init.zeros_(p),
    "data =": lambda p: setattr(p, "data", torch.zeros(p.shape)),
    "into another": lambda p: torch.zeros(p.shape).copy_(p),
    "ema": lambda p: torch.zeros(p.shape).lerp_(p.detach(), 0.1),
    "view": lambda p: p.view(-1),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "a hook that reads .grad": lambda p: p.register_post_accumulate_grad_hook(lambda p: p.grad.norm()),
}

METADATA = {
    "data's metadata": lambda p: (
        (p.data.device, p.data.dtype, p.data.is_meta, p.data.requires_grad) == (p.device, p.dtype, False, False)
    ),
    "data into itself": lambda p: setattr(p, "data", p.data) is None and p.data.to("cpu").shape == p.shape,
    "like data": lambda p: torch.zeros_like(p.data).device == p.data.new_zeros(2).device == p.device,
    "shape": lambda p: p.shape[0] * p.size(1) == p.numel() == p.nelement(),
    "dtype": lambda p: p.dtype == torch.float32 and p.element_size() == 4 and p.is_floating_point(),
    "device": lambda p: p.device.type == "cpu" and not p.is_meta and not p.is_cuda and p.get_device() == -1,
    "leaf": lambda p: p.is_leaf and p.grad_fn is None and p.grad is None and p.requires_grad,
    "parameter": lambda p: isinstance(p, nn.Parameter) and p.data.shape == p.shape,
    "like": lambda p: torch.zeros_like(p).sum() == 0 and p.new_zeros(3).shape == (3,),
    "text": lambda p: "resharded" in repr(p) and "resharded" in f"{p}",
    "hash": lambda p: p in {p} and len(p) == p.shape[0],
    "freeze": lambda p: p.requires_grad_(False).requires_grad_(True) is p,
    "cast to itself": lambda p: p.to("cpu") is p and p.float() is p and p.to(torch.float32, non_blocking=True) is p,
    "optimizer": lambda p: torch.optim.AdamW([p]) is not None,
}


def tried(build, stage):
    model = build()
    ftkit.shard(model, {"stage": stage, "kernels": "off"})
    silent, wrong = [], []
    for home in ("lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"):
        parameter = model.get_parameter(home)
        for name, use in VALUES.items():
            try:
                use(parameter)
            except ftkit.UserError as error:
                silent += [] if home in str(error) else [f"{name} without the name"]
            else:
                silent.append(name)
        wrong += [name for name, use in METADATA.items() if not use(parameter)]
    assert model.to("cpu") is model.float()
    assert model.num_parameters() == build().num_parameters()
    assert model.get_memory_footprint() == build().get_memory_footprint()
    for use in (lambda: model.half(), lambda: model.to(torch.bfloat16), lambda: model.state_dict()):
        with pytest.raises(ftkit.UserError):
            use()
    with torch.no_grad():
        assert model(torch.ones(1, 4, dtype=torch.long)).logits.isfinite().all()
    return silent, wrong


def test_values_of_a_resharded_parameter_raise_and_metadata_do_not(worlds):
    for silent, wrong in worlds[2].run(tried, runs.llama, 3):
        assert (silent, wrong) == ([], [])


# --- the way out


def gathered_values(build, stage):
    model, reference = build(), dict(build().named_parameters())
    units = ftkit.shard(model, {"stage": stage, "kernels": "off"})
    with ftkit.gathered_parameters(model):
        if units.comm.rank == 0:  # the others need not read
            assert all(torch.equal(parameter, reference[name]) for name, parameter in model.named_parameters())
            assert torch.equal(model.lm_head.weight, reference.get("lm_head.weight", reference["model.embed_tokens.weight"]))
            assert model(torch.ones(1, 4, dtype=torch.long)).logits.isfinite().all()
    optimizer = ftkit.ShardedAdamW(units, lr=0.1)
    rows = torch.arange(8).view(2, 4)
    model(rows, labels=rows).loss.backward()
    optimizer.step()
    with ftkit.gathered_parameters(model):
        values = {name: parameter.clone() for name, parameter in model.named_parameters()}
    whole = units.state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in values.items())
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
        parameter = model.get_parameter(name)
        for factor in (2, 0.5):  # a resident weight keeps the edit; the second factor undoes it
            with pytest.raises(ftkit.UserError, match="was edited"), ftkit.gathered_parameters(model):
                parameter.mul_(factor)
    assert all(torch.equal(value, whole[name]) for name, value in units.state_dict().items())
    with pytest.raises(ftkit.UserError, match="not sharded"), ftkit.gathered_parameters(build()):
        pass


@pytest.mark.parametrize("build, stage", [(runs.llama, 1), (runs.tied_llama, 3)])
def test_gathered_parameters_have_their_values(build, stage, worlds):
    worlds[2].run(gathered_values, build, stage)


def edits_under_a_deferred_update(stage):
    """An update may be under way when the body is entered: what it writes is no edit."""
    model = runs.llama()
    units = ftkit.shard(model, {"stage": stage, "kernels": "off", "update": "deferred", "dtype": "bf16"})
    optimizer = ftkit.ShardedAdamW(units, lr=0.1)
    rows = torch.arange(8).view(2, 4)
    for _ in range(3):
        optimizer.zero_grad()
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        with ftkit.gathered_parameters(model):
            model.model.norm.weight.norm()
    with pytest.raises(ftkit.UserError, match=r"norm\.weight was edited"), ftkit.gathered_parameters(model):
        model.model.norm.weight.mul_(2)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_edit_within_gathered_parameters_raises_and_an_update_does_not(stage, worlds):
    worlds[2].run(edits_under_a_deferred_update, stage)


def loop_with_root_parameters(ranks):
    """Return the gradient norm of a loss that reads the head outside the model, in a plain loop."""
    model = runs.llama()
    units = ftkit.shard(model, {"stage": 3, "kernels": "off", "parameters": "host"})
    optimizer = ftkit.ShardedSGD(units, lr=0.1)
    rows = torch.arange(24).view(4, 6).chunk(ranks)[units.comm.rank]
    with ftkit.root_parameters(model):
        hidden = model.model(rows).last_hidden_state
        (hidden @ model.lm_head.weight.T).square().mean().backward()
    return optimizer.grad_norm()


def test_root_parameters_train_in_a_plain_loop(worlds):
    model = runs.llama()
    hidden = model.model(torch.arange(24).view(4, 6)).last_hidden_state
    (hidden @ model.lm_head.weight.T).square().mean().backward()
    true = float(torch.stack([p.grad.norm() for p in model.parameters()]).norm())
    assert [*worlds[1].run(loop_with_root_parameters, 1), *worlds[2].run(loop_with_root_parameters, 2)] == pytest.approx(
        [true] * 3, rel=1e-5
    )


class Prunes(transformers.TrainerCallback):
    """Prunes a layer after the first step: its weight is made of another parameter and a mask then."""

    def __init__(self, name):
        self.name = name

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            prune.l1_unstructured(model.get_submodule(self.name), "weight", 0.3)


def prunes(folder, name, stage):
    run = Run(arguments=ARGUMENTS, options={"callbacks": [Prunes(name)]}, ftkit={"stage": stage})
    trainer = runs.make_trainer("ours", folder, run)
    if stage == 3:
        with pytest.raises(ftkit.UserError, match=rf"{name}\.weight is resharded"):
            trainer.train()
        return
    trainer.train()
    writers = (lambda: trainer.save_model(f"{folder}/model"), trainer.units.state_dict)
    writers += (lambda: ftkit.save_checkpoint(f"{folder}/checkpoint", trainer.units),)
    for write in writers:
        with pytest.raises(ftkit.UserError, match=rf"changed after sharding .*{name}\.weight_orig"):
            write()


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("name, stage", [(UP, 3), (UP, 1)])
def test_a_layer_that_is_pruned_after_sharding_is_not_saved_as_it_was(name, stage, worlds, tmp_path):
    worlds[2].run(prunes, str(tmp_path), name, stage)


# --- after an update that is deferred


class AtTheEnd(transformers.TrainerCallback):
    """Keeps what it reads when training ends."""

    def on_train_end(self, args, state, control, model=None, **kwargs):
        self.seen = {name: p.detach().clone() for name, p in model.named_parameters()}


class ReadsBefore:
    """Adds a penalty that it computes before the model's forward."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        penalty = 0.1 * self.model.model.layers[2].mlp.up_proj.weight.square().sum()
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch) + penalty


def read_at_the_end(folder, settings):
    """Return whether whole weights are those of the last update, and what is saved of them on each rank."""
    callback = AtTheEnd()
    run = Run(arguments=ARGUMENTS, options={"callbacks": [callback]}, ftkit=settings)
    trainer = runs.make_trainer("ours", folder, run)
    trainer.train()
    assert trainer.units.strategy.deferred
    true = trainer.units.state_dict()
    assert all(torch.equal(value, true[name]) for name, value in callback.seen.items())
    assert all(torch.equal(value, true[name]) for name, value in trainer.model.state_dict().items())


def test_weights_are_those_of_the_last_update_when_training_ends(worlds, tmp_path):
    worlds[2].run(read_at_the_end, str(tmp_path), {"stage": 1, "update": "deferred"})


def state_between(ranks):
    """Read the state of a model between a deferred update and the next forward."""
    model = runs.llama()
    units = ftkit.shard(model, {"stage": 1, "kernels": "off", "update": "deferred"})
    optimizer = ftkit.ShardedAdamW(units, lr=0.1)
    rows = torch.arange(8).view(2, 4)
    model(rows, labels=rows).loss.backward()
    optimizer.step()
    if ranks > 1:
        with pytest.raises(ftkit.UserError, match=r"updates are deferred.*gathered_parameters"):
            model.state_dict()
        with ftkit.gathered_parameters(model):
            found = {name: value.clone() for name, value in model.state_dict().items()}
    else:
        found = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(torch.equal(value, found[name]) for name, value in units.state_dict().items())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_dict_between_a_deferred_update_and_a_forward_is_whole_or_refused(ranks, worlds):
    worlds[ranks].run(state_between, ranks)


def test_a_loss_that_reads_weights_before_the_forward_reads_those_of_its_step(worlds, tmp_path):
    (tmp_path / "nvme").mkdir()
    settings = {"stage": 1, "activations": "keep", "state": "nvme", "nvme_dir": str(tmp_path / "nvme")}
    run = Run(arguments=ARGUMENTS, mixin=ReadsBefore, ftkit=settings)
    stock = worlds[1].run(train, "stock", str(tmp_path / "stock"), run)[0]
    ours = worlds[2].run(train, "ours", str(tmp_path / "ours"), run)[0]
    assert_same_history(ours, stock)
    assert_same_weights(ours.weights, stock.weights)
