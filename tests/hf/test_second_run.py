"""Blocks and embeddings whose output is detached have the gradients of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import ftkit
from tests.hf import runs

STAGE3 = {"stage": 3, "activations": "recompute", "affinity": False}
IDS = torch.randint(3, 90, (3, 4, 10), generator=torch.Generator().manual_seed(4))


def tiny() -> Any:
    return runs.llama(num_hidden_layers=2, hidden_size=16, intermediate_size=24)


def loss_of(model: Any, rows: Tensor) -> Tensor:
    return model(input_ids=rows, labels=rows, use_cache=False).loss


def compare(change: Callable[[Any], Any], **settings: Any) -> None:
    """Train three steps in PyTorch and on the engine, and compare losses, norms and weights."""
    found = []
    for engine in (False, True):
        torch.manual_seed(8)
        model = change(tiny()).train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        units = ftkit.shard(model, {**STAGE3, **settings}) if engine else None
        optimizer = ftkit.ShardedSGD(units, lr=0.1) if engine else torch.optim.SGD(trained, lr=0.1)
        seen = []
        torch.manual_seed(9)
        for rows in IDS:
            loss = loss_of(model, rows)
            (optimizer.scale(loss) if engine else loss).backward()
            norm = (
                optimizer.grad_norm()
                if engine
                else torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
            )
            seen += [float(loss.detach()), float(norm)]
            optimizer.step()
            optimizer.zero_grad()
        found.append((seen, units.state_dict() if engine else dict(model.named_parameters())))
    (expected, weights), (ours, own) = found
    assert ours == pytest.approx(expected, rel=2e-5)
    wrong = [name for name, value in weights.items() if not torch.allclose(own[name], value, rtol=1e-4, atol=1e-5)]
    assert not wrong


class Cuts(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        return super().forward(hidden_states.detach(), **kwargs)


def first_cuts(model: Any) -> Any:
    model.model.layers[0].__class__ = Cuts
    model.model.layers[0].register_forward_hook(lambda module, args, out: out.mul_(0.9))
    model.model.embed_tokens.weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_block_that_detaches_its_argument(tier):
    compare(first_cuts, parameters=tier, gradients=tier)


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
