"""A recomputed block finds in backward what its forward found, or says that it cannot: as in plain PyTorch, or by name."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PolyConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import ftkit
from ftkit.errors import UserError
from tests.hf import runs

STAGE3 = {"stage": 3, "activations": "recompute", "affinity": False}
IDS = torch.randint(3, 90, (3, 4, 10), generator=torch.Generator().manual_seed(4))
IDS[:, :, 4:6] = torch.tensor([7, 8])


def tiny() -> Any:
    return runs.llama(num_hidden_layers=2, hidden_size=16, intermediate_size=24)


def loss_of(model: Any, rows: Tensor) -> Tensor:
    return model(input_ids=rows, labels=rows, use_cache=False).loss


def compare(change: Callable[[Any], Any], loss: Callable[[Any, Tensor], Tensor] = loss_of, **settings: Any) -> None:
    """Train three steps in PyTorch and on the engine, and compare losses, norms and weights."""
    found = []
    for engine in (False, True):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(8)
        model = change(tiny()).train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        units = ftkit.shard(model, {**STAGE3, **settings}) if engine else None
        optimizer = ftkit.ShardedSGD(units, lr=0.1) if engine else torch.optim.SGD(trained, lr=0.1)
        seen = []
        torch.manual_seed(9)
        for rows in IDS:
            made = loss(model, rows)
            (optimizer.scale(made) if engine else made).backward()
            norm = (
                optimizer.grad_norm()
                if engine
                else torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
            )
            seen += [float(made.detach()), float(norm)]
            optimizer.step()
            optimizer.zero_grad()
        found.append((seen, units.state_dict() if engine else dict(model.named_parameters())))
    (expected, weights), (ours, own) = found
    assert ours == pytest.approx(expected, rel=2e-5)
    wrong = [name for name, value in weights.items() if not torch.allclose(own[name], value, rtol=1e-4, atol=1e-5)]
    assert not wrong


class Around(nn.Module):
    """An MLP with something around it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls, self.seen, self.mean = 0, [], torch.zeros(())
        self.chance = torch.Generator().manual_seed(3)


class Pythons(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (0.0 if random.random() < 0.5 else 2.0)


class Numpys(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * float(np.random.rand())


class OwnChance(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (torch.rand(10, 1, generator=self.chance) > 0.5)


class Counts(Around):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) * (1 + 0.2 * self.calls)


class Lists(Around):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return self.inner(x) * (1 + 0.1 * len(self.seen))


class Means(Around):
    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().abs().mean()
        return self.inner(x) * (1 + self.mean)


def around(kind: type[Around]) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        for layer in model.model.layers:
            layer.mlp = kind(layer.mlp)
        return model

    return change


@pytest.mark.parametrize("kind", [Pythons, Numpys, OwnChance, Counts, Lists, Means])
def test_random_numbers_and_attributes_are_those_of_forward(kind):
    compare(around(kind))


def hooks_for_a_forward(model: Any, rows: Tensor) -> Tensor:
    """Put hooks and values on for one forward, and take them off before backward."""
    layers = model.model.layers
    handles = [layer.mlp.register_forward_hook(lambda module, args, out: out * 0.3) for layer in layers]
    scaling = layers[0].self_attn.scaling
    layers[0].self_attn.scaling = 1.0
    try:
        return loss_of(model, rows)
    finally:
        layers[0].self_attn.scaling = scaling
        for handle in handles:
            handle.remove()


def test_hooks_and_attributes_of_one_forward_are_there_in_backward():
    compare(lambda model: model, hooks_for_a_forward)


ADAPTED = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def test_alora_learns_behind_its_invocation():
    compare(
        lambda model: get_peft_model(model, LoraConfig(**ADAPTED, init_lora_weights=False, alora_invocation_tokens=[7, 8]))
    )


def test_poly_knows_its_tasks_in_backward():
    config = PolyConfig(**ADAPTED, n_tasks=2, n_skills=2, init_weights=False)
    tasks = torch.tensor([0, 1, 0, 1])
    compare(
        lambda model: get_peft_model(model, config),
        lambda model, rows: model(input_ids=rows, labels=rows, use_cache=False, task_ids=tasks).loss,
    )


class SomeDropped(Around):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.inner(x))


def eval_before_backward(model: Any, rows: Tensor) -> Tensor:
    model.train().model.layers[1].mlp.dropout.eval()
    made = loss_of(model, rows)
    model.eval()
    return made


def test_a_part_in_eval_stays_so_when_all_is_in_eval_before_backward():
    compare(around(SomeDropped), eval_before_backward)


def normed(model: Any) -> Any:
    parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    return model


def test_a_cache_of_parametrized_weights_has_their_gradients():
    model = normed(tiny()).train()
    plain = normed(tiny()).train()
    plain.load_state_dict(model.state_dict())
    units = ftkit.shard(model, STAGE3)
    optimizer = ftkit.ShardedSGD(units, lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    with parametrize.cached():
        loss_of(plain, IDS[0]).backward()
    with parametrize.cached():
        optimizer.scale(loss_of(model, IDS[0])).backward()
    theirs.step()
    optimizer.step()
    own = units.state_dict()
    assert all(torch.allclose(own[name], value, atol=1e-6) for name, value in plain.named_parameters())


class Cuts(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        return super().forward(hidden_states.detach(), **kwargs)


class HandsThrough(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        return hidden_states


def first_as(kind: type) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        model.model.layers[0].__class__ = kind
        model.model.layers[0].register_forward_hook(lambda module, args, out: out.mul_(0.9))
        model.model.embed_tokens.weight.requires_grad_(kind is HandsThrough)
        return model

    return change


@pytest.mark.parametrize("kind", [Cuts, HandsThrough])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_block_that_cuts_off_its_argument_or_hands_it_through(kind, tier):
    compare(first_as(kind), parameters=tier, gradients=tier)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_an_embedding_that_is_cut_off_gets_no_update(tier):
    model = tiny()
    model.model.layers[0].__class__ = Cuts
    before = model.model.embed_tokens.weight.detach().clone()
    units = ftkit.shard(model, {**STAGE3, "parameters": tier, "gradients": tier})
    optimizer = ftkit.ShardedAdamW(units, lr=0.1, weight_decay=0.5)
    optimizer.scale(loss_of(model.train(), IDS[0])).backward()
    optimizer.step()
    assert torch.equal(units.state_dict()["model.embed_tokens.weight"], before)


def half(model: Any) -> Any:
    class Half(Around):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.functional_call(self.inner, {"weight": self.inner.weight * 0.5}, (x,))

    model.lm_head = Half(model.lm_head)
    return model


def test_functional_call_of_a_head_whose_weights_are_elsewhere():
    compare(half, parameters="host", gradients="host")


def clamped(model: Any) -> Any:
    model.lm_head.weight = model.model.embed_tokens.weight
    model.lm_head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return model


def test_a_hook_on_a_tied_weight_is_given_the_whole_gradient():
    compare(clamped, parameters="host", gradients="host")


# --- refused, by name


SWITCH = {"on": True}


class Switched(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (0.3 if SWITCH["on"] else 1.0)


def switched_off(model: Any, rows: Tensor) -> Tensor:
    SWITCH["on"] = True
    made = loss_of(model, rows)
    SWITCH["on"] = False
    return made


class Writes(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        return super().forward(hidden_states.mul_(0.5), **kwargs)


def writes(model: Any) -> Any:
    model.model.layers[1].__class__ = Writes
    return model


class Film(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.film


def frozen_with_film(model: Any) -> Any:
    around(Film)(model.requires_grad_(False))
    model.film = nn.Linear(4, 16)
    model.lm_head.requires_grad_(True)
    return model


def filmed(model: Any, rows: Tensor) -> Tensor:
    for layer in model.model.layers:
        layer.mlp.film = model.film(torch.ones(4))
    return loss_of(model, rows)


@pytest.mark.parametrize(
    ("change", "loss", "words"),
    [
        (around(Switched), switched_off, r"model\.layers\.1 gives other results in backward"),
        (writes, loss_of, r"model\.layers\.1 writes to a tensor that it is given"),
        (frozen_with_film, filmed, r"model\.layers\.0 is frozen.*asks for gradients"),
    ],
)
def test_what_cannot_be_computed_again_is_refused(change, loss, words):
    model = change(tiny()).train()
    ftkit.shard(model, STAGE3)
    with pytest.raises(UserError, match=words):
        loss(model, IDS[0]).backward()


@dataclass
class State:
    hidden: Tensor


class Stated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, state: State) -> State:
        return State(self.layer(state.hidden))


class StatedNet(nn.Module):
    _no_split_modules = ["Stated"]

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList([Stated(), Stated()])

    def forward(self, x: Tensor) -> Tensor:
        state = State(self.first(x))
        for block in self.blocks:
            state = block(state)
        return state.hidden.sum()


@pytest.mark.parametrize("frozen", [False, True])
def test_tensors_in_objects_between_blocks_are_refused(frozen):
    model = StatedNet()
    model.first.requires_grad_(not frozen)
    ftkit.shard(model, STAGE3)
    with pytest.raises(UserError, match=r"blocks\.0 (returns|is given) an object with a tensor of shape \(2, 8\)"):
        model(torch.ones(2, 8))


# --- what a forward leaves in attributes, for a loss


class Leaves(Around):
    """Leaves a penalty on what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        self.leave(out.square().mean(), x)
        return out

    def leave(self, penalty: Tensor, x: Tensor) -> None:
        self.penalty = penalty


class LeavesInList(Leaves):
    def leave(self, penalty: Tensor, x: Tensor) -> None:
        self.seen.append(penalty)


class LeavesInSharedList(LeavesInList):
    """The model empties the list that its modules share."""


class LeavesInTuple(Leaves):
    def leave(self, penalty: Tensor, x: Tensor) -> None:
        self.penalty = {"first": (penalty * 0.5, x.detach().mean()), "second": [penalty * 0.5]}


class LeavesInBuffer(Leaves):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.register_buffer("penalty", torch.zeros(()), persistent=False)


class LeavesRandom(Leaves):
    def leave(self, penalty: Tensor, x: Tensor) -> None:
        self.penalty = penalty * random.random() + nn.functional.dropout(x, 0.5, True).square().mean()


class LeavesResult(Leaves):
    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.inner(x)
        return self.penalty


def with_penalties(model: Any, rows: Tensor) -> Tensor:
    mlps = [layer.mlp for layer in model.model.layers]
    for mlp in mlps:
        mlp.seen.clear()
    loss = loss_of(model, rows)
    for mlp in mlps:
        left = mlp.seen if isinstance(mlp, LeavesInList) else [mlp.penalty]
        left = [*mlp.penalty["first"], *mlp.penalty["second"]] if isinstance(mlp, LeavesInTuple) else left
        loss = loss + sum(each.square().mean() * 2.0 for each in left)
    return loss


def leaving(kind: type[Around]) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        shared: list[Tensor] = []
        for layer in around(kind)(model).model.layers:
            if kind is LeavesInSharedList:
                layer.seen = layer.mlp.seen = shared
        return model

    return change


LEAVING = [Leaves, LeavesInList, LeavesInSharedList, LeavesInTuple, LeavesInBuffer, LeavesRandom, LeavesResult]


@pytest.mark.parametrize("kind", LEAVING)
def test_a_loss_on_what_a_block_leaves_in_an_attribute_trains_it(kind):
    compare(leaving(kind), with_penalties, parameters="host", gradients="host")


@pytest.mark.parametrize("kind", [Leaves, LeavesInSharedList, LeavesResult])
def test_a_loss_on_what_a_block_that_keeps_its_graph_leaves_trains_it(kind):
    compare(leaving(kind), with_penalties, activations="keep", parameters="host")


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("kind", [Leaves, LeavesResult])
def test_what_a_block_leaves_does_not_hold_the_steps_before(kind, activations):
    torch.manual_seed(8)
    model = leaving(kind)(tiny()).train()
    optimizer = ftkit.ShardedSGD(ftkit.shard(model, {**STAGE3, "activations": activations}), lr=0.1)
    left = []
    for rows in IDS:
        optimizer.scale(with_penalties(model, rows)).backward()
        left.append(weakref.ref(model.model.layers[0].mlp.penalty))
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    assert [each() is None for each in left] == [True] * (len(IDS) - 1) + [False]


class Adds(Leaves):
    """Adds its penalty to what the blocks before it have left."""

    def leave(self, penalty: Tensor, x: Tensor) -> None:
        self.store.penalty = self.store.penalty + penalty


class AddsFromList(Leaves):
    def leave(self, penalty: Tensor, x: Tensor) -> None:
        self.store.seen.append(self.store.seen[-1] * 2 + penalty)


class AddsToValues(Leaves):
    """Leaves only its values, made from those of the blocks before it."""

    def leave(self, penalty: Tensor, x: Tensor) -> None:
        self.store.penalty = penalty + self.store.penalty.detach() * 0.5


def in_one_store(kind: type[Leaves]) -> Callable[[Any], Any]:
    """Return a change that gives all blocks' modules one store."""

    def change(model: Any) -> Any:
        model, store = leaving(kind)(model), nn.Module()
        for layer in model.model.layers:
            layer.mlp.store = store
        return model

    return change


def with_the_stores_penalty(model: Any, rows: Tensor) -> Tensor:
    store = model.model.layers[0].mlp.store
    store.penalty, store.seen = torch.zeros(()), [torch.zeros(())]
    loss = loss_of(model, rows)
    return loss + store.penalty + store.seen[-1]


def reading_outside(model: Any) -> Any:
    """Let the MLPs of all blocks add a tensor with a graph that the root has."""

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        model.outside = torch.tanh(model.model.embed_tokens(kwargs["input_ids"])).mean(1, keepdim=True)

    model.register_forward_pre_hook(note, with_kwargs=True)
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, result: result + model.outside)
    return model


def test_blocks_that_read_one_tensor_with_a_graph_from_outside_are_refused():
    with pytest.raises(UserError, match="read a tensor with a graph that is not one of their arguments"):
        compare(reading_outside, loss_of)


@pytest.mark.parametrize("kind", [Adds, AddsFromList])
def test_a_block_that_reads_what_another_left_with_a_graph_is_refused(kind):
    with pytest.raises(UserError, match=r"a block reads a tensor with a graph in Module\.(penalty|seen), which another"):
        compare(in_one_store(kind), with_the_stores_penalty)


def test_a_block_may_read_the_values_of_what_another_left():
    compare(in_one_store(AddsToValues), with_the_stores_penalty)


def left_and_read(rank_rows: int) -> list[float]:
    """Train on two ranks with a penalty; return the losses."""
    torch.manual_seed(8)
    model = leaving(Leaves)(tiny()).train()
    units = ftkit.shard(model, STAGE3)
    optimizer = ftkit.ShardedSGD(units, lr=0.1)
    losses = []
    for rows in IDS:
        loss = with_penalties(model, rows)
        optimizer.scale(loss).backward()
        losses += [float(loss.detach()), float(optimizer.grad_norm())]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_penalty_trains_on_two_ranks_as_on_one(worlds):
    expected = left_and_read(0)
    for found in worlds[2].run(left_and_read, 0):
        assert found == pytest.approx(expected, rel=2e-5)


class LeavesLate(Leaves):
    def leave(self, penalty: Tensor, x: Tensor) -> None:
        self.calls += 1
        self.penalty = penalty if self.calls > 1 else penalty.detach()


def test_a_tensor_that_is_left_on_the_graph_only_later_is_refused():
    with pytest.raises(UserError, match=r"model\.layers\.\d leaves a tensor with a gradient in its attribute penalty"):
        compare(leaving(LeavesLate), with_penalties)


def test_what_is_left_for_somebody_to_look_at_costs_no_gradient():
    """Nobody reads it: the block's backward is that of its results."""
    compare(leaving(Leaves))
    compare(leaving(LeavesResult), activations="keep")


def test_a_batch_that_is_divided_in_a_block_leaves_no_penalty():
    units = ftkit.shard(leaving(Leaves)(tiny()).train(), STAGE3)
    for unit in units.units:
        unit.parts, unit.split = 2, lambda module, args, kwargs: [True] + [False] * 3
    with pytest.raises(UserError, match=r"attribute penalty, and its batch is divided inside the block"):
        with_penalties(units.model, IDS[0])


def renewed(model: Any, rows: Tensor) -> Tensor:
    """Give modules a generator of their own before the third forward."""
    for number, layer in enumerate(model.model.layers):
        layer.mlp.calls += 1
        if layer.mlp.calls == 3:
            layer.mlp.chance = torch.Generator().manual_seed(number)
    return loss_of(model, rows)


def test_a_generator_that_is_exchanged_between_forwards_draws_the_same_twice():
    compare(around(OwnChance), renewed)


def test_adapters_in_blocks_wait_for_no_call_of_the_model(monkeypatch):
    """With late updates, modules outside blocks wait for theirs wherever they are called; blocks do so by themselves."""
    model = get_peft_model(tiny(), LoraConfig(target_modules="all-linear", r=2)).train()
    units = ftkit.shard(model, {**STAGE3, "update": "deferred"})
    optimizer = ftkit.ShardedSGD(units, lr=0.1)
    loss = optimizer.scale(loss_of(model, IDS[0]))
    monkeypatch.setattr(units, "be_ready_outside", lambda: pytest.fail("a module in a block asks for what is outside"))
    loss.backward()
