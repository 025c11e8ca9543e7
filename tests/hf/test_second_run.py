"""A recomputed block draws the random numbers of its forward; its gradients are those of plain PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import ftkit
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


class Pythons(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (0.0 if random.random() < 0.5 else 2.0)


class Numpys(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * float(np.random.rand())


def around(kind: type[Around]) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        for layer in model.model.layers:
            layer.mlp = kind(layer.mlp)
        return model

    return change


@pytest.mark.parametrize("kind", [Pythons, Numpys])
def test_random_numbers_are_those_of_forward(kind):
    compare(around(kind))


ADAPTED = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def test_alora_learns_behind_its_invocation():
    compare(
        lambda model: get_peft_model(model, LoraConfig(**ADAPTED, init_lora_weights=False, alora_invocation_tokens=[7, 8]))
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


# --- what a forward leaves in attributes, for a loss


def test_adapters_in_blocks_wait_for_no_call_of_the_model(monkeypatch):
    """With late updates, modules outside blocks wait for theirs wherever they are called; blocks do so by themselves."""
    model = get_peft_model(tiny(), LoraConfig(target_modules="all-linear", r=2)).train()
    units = ftkit.shard(model, {**STAGE3, "update": "deferred"})
    optimizer = ftkit.ShardedSGD(units, lr=0.1)
    loss = optimizer.scale(loss_of(model, IDS[0]))
    monkeypatch.setattr(units, "be_ready_outside", lambda: pytest.fail("a module in a block asks for what is outside"))
    loss.backward()
