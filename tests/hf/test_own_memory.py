"""Parts of one tensor, copies of loaded models, hooks on gradients: as in plain PyTorch, or refused by name."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import ftkit
from ftkit.errors import UserError
from tests.hf import runs

STAGE3 = {"stage": 3, "activations": "recompute", "affinity": False}


def tiny(**changes: Any) -> Any:
    """Return a Llama of two narrow blocks."""
    return runs.llama(**{"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, **changes})


def adapted(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny(tie_word_embeddings=True).save_pretrained(path)
    return str(path)


# --- refused, by name


def tied_blocks(model: Any) -> None:
    first, second = model.model.layers
    first.mlp.up_proj.weight = second.mlp.up_proj.weight


def test_weights_tied_across_blocks_are_refused_by_name(folder):
    model = ftkit.load_model(folder)
    tied_blocks(model)
    names = "model.layers.0.mlp.up_proj.weight and model.layers.1.mlp.up_proj.weight"
    with pytest.raises(UserError, match=f"{names} are one parameter"):
        ftkit.shard(model, STAGE3)


# --- kept


def test_frozen_parameters_and_parts_of_one_tensor_are_no_ties():
    model = tiny()
    table, norm = torch.randn(97, 48), model.model.norm
    model.model.embed_tokens.weight.data, model.lm_head.weight.data = table[:, :16], table[:, 16:32]
    norm.again = nn.Parameter(norm.weight.data, requires_grad=False)
    theirs = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    state = ftkit.shard(model, STAGE3).state_dict()
    assert theirs.keys() >= {"model.norm.again", "lm_head.weight"}
    assert all(torch.equal(state[name], value) for name, value in theirs.items())


def by_pickle(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle], ids=["deepcopy", "pickle"])
def test_a_loaded_model_can_be_copied(copied, folder):
    model = ftkit.load_model(folder)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    theirs = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    other = copied(model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.zero_()  # of the one that was copied
    units = ftkit.shard(other, STAGE3)
    state = units.state_dict()
    assert theirs
    assert all(torch.equal(state[name], value) for name, value in theirs.items())


def test_frozen_weights_in_fp64_compute_as_they_are():
    model, ids = tiny().double().requires_grad_(False), torch.arange(3, 13)[None]
    expected = float(model(input_ids=ids, labels=ids).loss)
    ftkit.shard(model, STAGE3, evaluation=True)
    assert float(model(input_ids=ids, labels=ids).loss) == pytest.approx(expected, rel=1e-12)


def hooked(model: Any) -> Any:
    """Let only the first rows of the embedding learn, and the head slowly."""
    rows = (torch.arange(97) < 50).unsqueeze(1)
    model.model.embed_tokens.weight.register_hook(lambda gradient: gradient * rows)
    model.lm_head.weight.register_hook(lambda gradient: gradient * 0.5)
    model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: gradient * 0)
    return model


def trained_with_hooks(tied: bool) -> list[str]:
    """Compare a step at stage 3 with PyTorch's; return the parameters that differ."""
    ids = torch.randint(3, 90, (2, 10), generator=torch.Generator().manual_seed(4))
    plain, ours = (hooked(tiny(tie_word_embeddings=tied)) for _ in range(2))
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(input_ids=ids, labels=ids).loss.backward()
    theirs.step()
    units = ftkit.shard(ours, STAGE3)
    optimizer = ftkit.ShardedSGD(units, lr=0.1)
    rows = ids[runs.rank() : runs.rank() + 1]
    optimizer.scale(ours(input_ids=rows, labels=rows).loss).backward()
    optimizer.step()
    state = units.state_dict()
    return [n for n, p in plain.named_parameters() if not torch.allclose(state[n], p, atol=1e-6)]


@pytest.mark.parametrize("tied", [False, True])
def test_hooks_on_gradients_are_called_at_stage_3(tied, world2):
    assert world2.run(trained_with_hooks, tied) == [[], []]
