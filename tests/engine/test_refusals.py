"""Uses that raise an error: each message says what was found."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import nn

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.dtypes import DTYPES
from ftkit.engine.optim.adamw import ShardedAdamW
from ftkit.engine.optim.sgd import ShardedSGD
from ftkit.engine.shard import shard
from ftkit.errors import UserError
from ftkit.spec.strategy import Strategy
from tests.engine import families
from tests.engine.families import HIDDEN, VOCABULARY, token_loss
from tests.engine.nets import Block, Net
from tests.engine.trajectory import shard_model

ROWS = families.batch("llama", 0)
TOKENS = families.label_tokens(ROWS)

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def sharded(build=lambda: families.build("llama"), strategy=None, **settings):
    """Return a sharded model and its units."""
    torch.manual_seed(1)
    model = build()
    return model, shard_model(model, strategy or Strategy.of(), **settings)


def everywhere(world, case, *args):
    """Run `case` on every rank; it asserts by itself."""
    world.run(case, *args)


# --- use


def backward_twice(activations):
    model, units = sharded(strategy=Strategy.of(activations=activations))
    optimizer = ShardedSGD(units, None)
    loss = token_loss(model, ROWS, TOKENS)
    loss.backward(retain_graph=True)
    if activations == "keep":
        with pytest.raises(RuntimeError, match="kept its graph"):
            loss.backward()
    else:
        loss.backward()
        twice = optimizer.grad_norm()
        optimizer.zero_grad()
        token_loss(model, ROWS, TOKENS).backward()
        assert twice == pytest.approx(2 * optimizer.grad_norm(), rel=1e-5)


class ReadsBlock(Net):
    """Uses a weight of a block outside it."""

    def run_blocks(self, x, input_ids):
        return super().run_blocks(x, input_ids) + self.blocks[0].norm.weight


def weight_read_outside_its_block(stage):
    model, _ = sharded(ReadsBlock, Strategy.of(stage=stage))
    if stage == 3:
        with pytest.raises(UserError, match=r"blocks\.0\.norm\.weight is resharded"):
            token_loss(model, ROWS, TOKENS)
    else:
        loss = token_loss(model, ROWS, TOKENS)
        with pytest.raises(UserError, match=r"blocks\.0\.norm\.weight got a gradient outside.*weight_decay"):
            loss.backward()


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_second_backward_adds_up_or_is_refused(world2, activations):
    everywhere(world2, backward_twice, activations)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_weight_read_outside_its_block_is_loud(world2, stage):
    everywhere(world2, weight_read_outside_its_block, stage)


# --- changes after sharding


def resize(model):
    model.set_input_embeddings(nn.Embedding(VOCABULARY + 5, HIDDEN))


def unfreeze(model):
    model.model.layers[1].requires_grad_(True)


def change_after_sharding(change, stage):
    frozen = (_frozen,) if change is unfreeze else ()
    model, units = sharded(*frozen, strategy=Strategy.of(stage=stage))
    change(model)
    for use in (ShardedSGD, lambda units: units.state_dict()):
        with pytest.raises(UserError, match=r"changed after sharding|frozen when the model was sharded"):
            use(units)


def _frozen():
    model = families.build("llama")
    model.model.layers[1].requires_grad_(False)
    return model


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("change", [resize, unfreeze])
def test_a_model_changed_after_sharding_is_refused(world2, change, stage):
    everywhere(world2, change_after_sharding, change, stage)


def state_dicts(stage):
    reference = families.build("llama").state_dict()
    model, units = sharded(strategy=Strategy.of(stage=stage))
    if stage == 3:
        for module in (model, model.model.layers[1], model.lm_head):
            with pytest.raises(UserError, match=r"state_dict\(\) of a sharded model"):
                module.state_dict()
    else:
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in reference.items())
    ours = units.state_dict()
    assert ours.keys() == reference.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in reference.items())


@pytest.mark.parametrize("stage", [1, 3])
def test_state_dict_is_whole_or_refused(world2, stage):
    everywhere(world2, state_dicts, stage)


# --- absent weights


def absent_weights(dtype):
    model, units = sharded(strategy=Strategy.of(dtype=NAMES[dtype]))
    reference = dict(families.build("llama").named_parameters())
    small = {"model.norm.weight"}
    for name, parameter in model.named_parameters():
        assert parameter.shape == reference[name].shape
        assert parameter.dtype == dtype
        assert parameter.requires_grad
        if name in small:
            assert torch.equal(parameter, reference[name].to(dtype))
        else:
            with torch._C.DisableTorchFunctionSubclass():
                assert parameter.isnan().all()
                assert parameter.untyped_storage().nbytes() == dtype.itemsize
            with pytest.raises(UserError, match=f"{name} is resharded"), torch.no_grad():
                parameter.copy_(reference[name])  # a write that would be lost
    assert model.num_parameters() == sum(p.numel() for p in reference.values())
    with torch.no_grad():
        token_loss(model, ROWS, TOKENS)
    with pytest.raises(UserError, match=r"lm_head\.weight is resharded"):
        model.lm_head.weight.isnan()
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.up_proj\.weight is resharded"):
        model.model.layers[0].mlp.up_proj.weight.isnan()
    assert not any(flat.weights.tensor.isnan().any() for flat in units.flats)


def test_absent_weights_keep_shape_and_dtype_and_are_nan(world2):
    everywhere(world2, absent_weights, torch.bfloat16)


# --- what cannot be sharded


def _quantised():
    net = Net()
    net.head.weight = nn.Parameter(torch.zeros(VOCABULARY, HIDDEN, dtype=torch.int8), requires_grad=False)
    return net


class _Carries(Block):
    def __init__(self):
        super().__init__()
        self.table = nn.Linear(HIDDEN, VOCABULARY, bias=False)


def _shares_a_module_among_blocks():
    net = Net()
    net.blocks[2].up = net.blocks[0].up
    return net


def _shares_block_with_outside():
    net = Net(_Carries)
    net.blocks[1].table.weight = net.embed.weight
    return net


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (_quantised, r"head\.weight has dtype torch\.int8"),
        (_shares_a_module_among_blocks, r"up of block blocks\.2 is a part of blocks\.0"),
        (_shares_block_with_outside, r"embed\.weight and blocks\.1\.table\.weight are one parameter"),
    ],
)
def test_models_that_would_train_wrongly_are_refused(build, words):
    with pytest.raises(ValueError, match=words):
        sharded(build)


# --- the optimizer


def test_optimizer_state_does_not_pass_for_whole():
    _, units = sharded(Net)
    optimizer = ShardedAdamW(units)
    with pytest.raises(RuntimeError, match=r"use ftkit\.save_checkpoint\(\)"):
        optimizer.state_dict()
    with pytest.raises(RuntimeError, match=r"use ftkit\.load_checkpoint\(\)"):
        optimizer.load_state_dict({})


class _Normed(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)


def _alora():
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", alora_invocation_tokens=[1, 2])
    return peft.get_peft_model(families.build("llama"), config)


@pytest.mark.parametrize(("build", "words"), [(lambda: Net(_Normed), r"blocks\.0\.norm"), (_alora, "aLoRA")])
def test_blocks_that_recomputation_would_change_are_refused(build, words):
    with pytest.raises(UserError, match=f"{words}.*activations: keep"):
        sharded(build)
    sharded(build, Strategy.of(activations="keep"))


def clipped_by_torch(stage):
    model, units = sharded(strategy=Strategy.of(stage=stage))
    token_loss(model, ROWS, TOKENS).backward()
    with pytest.raises(UserError, match=r"clip_grad_norm_\(\) and grad_norm\(\) of the sharded optimizer"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    units.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_torchs_gradient_clipping_is_refused(world2, stage):
    everywhere(world2, clipped_by_torch, stage)


def test_a_model_without_blocks_is_sharded_all_the_same():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    units = shard(model, [], comm=Communicator(torch.device("cpu")), strategy=Strategy.of())
    optimizer = ShardedSGD(units, None, lr=0.1)
    before = model[0].weight.clone()
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
