"""What is done to a model of `load_model` before it is sharded is in the sharded model, or sharding refuses it by name.

The reference is `from_pretrained`, the same change with the same random numbers, and two steps of AdamW in plain PyTorch.
Each change is a function of a model, which goes through both; losses and whole weights must agree on one rank and on two.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import ftkit
from tests.hf import runs

STEPS = 2
SETTINGS = {"stage": 3, "dtype": "fp32"}


def lora(**changes: Any) -> LoraConfig:
    fields = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**fields, **changes})


def adds(config: Any) -> Callable[[Any], nn.Module]:
    """Return the change that adds an adapter."""
    return Adds(config)


class Adds:
    """A change that ranks can unpickle."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __call__(self, model: Any) -> nn.Module:
        return get_peft_model(model, copy.deepcopy(self.config))


KEYS = {"target_modules": ["q_proj", "v_proj"]}
ADAPTERS = {
    "lora gaussian": lora(init_lora_weights="gaussian"),
    "lora not zero": lora(init_lora_weights=False),
    "lora pissa": lora(init_lora_weights="pissa"),
    "lora olora": lora(init_lora_weights="olora"),
    "dora": lora(use_dora=True, init_lora_weights=False),
    "rslora with bias": lora(use_rslora=True, init_lora_weights=False, bias="lora_only"),
    "tokens": lora(trainable_token_indices=[3, 5]),
    "tied head trained whole": lora(modules_to_save=["lm_head"]),
    "tied embedding trained whole": lora(modules_to_save=["embed_tokens"]),
    "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "lokr": peft.LoKrConfig(r=2, init_weights=False, **KEYS),
    "vera": peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"], d_initial=0.3),
    "randlora": peft.RandLoraConfig(r=4, target_modules=["q_proj", "o_proj"]),
    "parameters": lora(target_modules=[], target_parameters=["q_proj.weight", "up_proj.weight"], init_lora_weights=False),
    "vblora": peft.VBLoRAConfig(r=2, num_vectors=8, vector_length=8, topk=2, **KEYS),
}


# --- changes by hand


def new_head(model: Any) -> nn.Module:
    """A head of values of the user's own, not tied."""
    model.lm_head = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
    return model


def wider_head(model: Any) -> nn.Module:
    """A head of another width."""
    torch.manual_seed(3)
    model.lm_head = nn.Linear(model.config.hidden_size, 130)
    model.config.vocab_size = model.vocab_size = 130
    return model


def untied(model: Any) -> nn.Module:
    """A tie broken by hand."""
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    return model


def first_deleted(model: Any) -> nn.Module:
    """The first layer is gone: every other one has another name."""
    model.model.layers = model.model.layers[1:]
    return model


def turned(model: Any) -> nn.Module:
    """Layers in another order."""
    model.model.layers = nn.ModuleList(reversed(list(model.model.layers)))
    return model


def doubled(model: Any) -> nn.Module:
    """A copy of a layer above it."""
    layers = list(model.model.layers)
    model.model.layers = nn.ModuleList([*layers, copy.deepcopy(layers[1])])
    return model


def written_in_place(model: Any) -> nn.Module:
    """Values written by every route that PyTorch has for it."""
    layers = model.model.layers
    nn.init.normal_(layers[0].mlp.up_proj.weight, std=0.1)
    layers[0].self_attn.q_proj.weight.data.mul_(0.5)
    with torch.no_grad():
        layers[1].self_attn.k_proj.weight[0] = 0.3
        model.model.norm.weight.copy_(torch.linspace(0.5, 1.5, len(model.model.norm.weight)))
    layers[1].mlp.gate_proj.weight.data = torch.randn_like(layers[1].mlp.gate_proj.weight) / 10
    layers[2].mlp.down_proj.weight.detach().numpy()[0] = 0.25
    return model


def more_tokens(model: Any) -> nn.Module:
    """Embeddings resized, new rows around the mean of the old."""
    model.resize_token_embeddings(runs.VOCABULARY + 5)
    return model


def frozen(model: Any) -> nn.Module:
    """All but one layer frozen."""
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    return model


def weight_norm(model: Any) -> nn.Module:
    """A weight that is computed of two others."""
    parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    return model


def two_adapters(model: Any) -> nn.Module:
    """Two adapters, the second one active."""
    model = get_peft_model(model, lora(init_lora_weights=False))
    model.add_adapter("second", lora(init_lora_weights=False, target_modules=["up_proj"]))
    model.set_adapter("second")
    return model


def merged(model: Any) -> nn.Module:
    """An adapter merged into the base, another one trained."""
    model = get_peft_model(model, lora(init_lora_weights=False)).merge_and_unload()
    return get_peft_model(model, lora(init_lora_weights=False))


CHANGES = {
    **{name: adds(config) for name, config in ADAPTERS.items()},
    **{
        change.__name__: change
        for change in (
            new_head,
            wider_head,
            untied,
            first_deleted,
            turned,
            doubled,
            written_in_place,
            more_tokens,
            frozen,
            weight_norm,
            two_adapters,
            merged,
        )
    },
}
QUICK = ["lora pissa", "lora olora", "dora", "tied head trained whole", "wider_head", "turned", "written_in_place"]
QUICK += ["two_adapters", "merged"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    """A folder of the small Llama with its head tied."""
    path = tmp_path_factory.mktemp("model")
    runs.tied_llama().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def biased(tmp_path_factory: Any) -> str:
    """A folder of the small Llama with biases beside the weights of attention."""
    path = tmp_path_factory.mktemp("biased")
    runs.llama(attention_bias=True, mlp_bias=True).save_pretrained(path)
    return str(path)


def batches() -> list[Tensor]:
    """Return the rows of two steps, 4 of them each."""
    return list(torch.randint(3, 90, (STEPS, 4, 10), generator=torch.Generator().manual_seed(4)))


def trained(model: nn.Module, share: slice, step: Callable[[Tensor], None], clear: Callable[[], None]) -> list[float]:
    """Train and return the losses of `share` of each batch."""
    losses = []
    for ids in batches():
        rows = ids[share]
        loss = model(input_ids=rows, labels=rows).loss
        losses.append(float(loss.detach()))
        step(loss)
        clear()
    return losses


def in_pytorch(model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    """Train a model in plain PyTorch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)

    def step(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()

    losses = trained(model.train(), slice(None), step, optimizer.zero_grad)
    return losses, {name: tensor.detach() for name, tensor in model.named_parameters()}


def on_the_engine(folder: str, change: Callable[[Any], nn.Module], seed: int, options: dict[str, Any]) -> Any:
    """A case for a world: load, change, shard, train."""
    torch.manual_seed(seed)
    model = change(ftkit.load_model(folder, **options))
    units = ftkit.shard(model, SETTINGS)
    optimizer = ftkit.ShardedAdamW(units, lr=1e-2, weight_decay=0.1)
    first = 4 // runs.world_size() * runs.rank()

    def step(loss: Tensor) -> None:
        optimizer.scale(loss).backward()
        optimizer.step()

    losses = trained(model.train(), slice(first, first + 4 // runs.world_size()), step, optimizer.zero_grad)
    return losses, units.state_dict()


def assert_same(ours: list[Any], theirs: tuple[list[float], dict[str, Tensor]]) -> None:
    """Compare losses, means over ranks, and weights."""
    means = [sum(losses) / len(losses) for losses in zip(*(losses for losses, _ in ours))]
    assert means == pytest.approx(theirs[0], rel=2e-5)
    weights = ours[0][1]
    assert set(theirs[1]) <= set(weights)
    wrong = {}
    for name, tensor in theirs[1].items():
        own = weights[name]
        if not torch.allclose(own, tensor, rtol=1e-3, atol=2e-4):
            wrong[name] = float((own - tensor).abs().max())
    assert not wrong


def reference(folder: str, change: Callable[[Any], nn.Module]) -> Any:
    """Load, change and train with transformers and PyTorch alone."""
    torch.manual_seed(11)
    return in_pytorch(change(transformers.AutoModelForCausalLM.from_pretrained(folder).eval()))


@pytest.mark.quick(4)
@pytest.mark.parametrize("change", QUICK)
def test_what_is_done_before_sharding_is_kept(change, folder, worlds):
    ours = worlds[2].run(on_the_engine, folder, CHANGES[change], 11, {})
    assert_same(ours, reference(folder, CHANGES[change]))


def test_parameters_that_are_registered_in_another_order_during_a_forward(biased, worlds):
    ours = worlds[2].run(on_the_engine, biased, CHANGES["parameters"], 11, {})
    assert_same(ours, reference(biased, CHANGES["parameters"]))


@pytest.mark.slow
@pytest.mark.parametrize("change", sorted(CHANGES.keys() - QUICK))
def test_everything_that_is_done_before_sharding_is_kept(change, folder, worlds):
    ours = worlds[2].run(on_the_engine, folder, CHANGES[change], 11, {})
    assert_same(ours, reference(folder, CHANGES[change]))


def drawn_by_each(folder: str, stage: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Give a model a layer and a head, drawn from other random numbers on each rank; return them and what is sharded."""
    model = ftkit.load_model(folder)
    torch.manual_seed(70 + runs.rank())
    layer, head = model.model.layers[1].mlp.down_proj, model.lm_head
    model.model.layers[1].mlp.down_proj = nn.Linear(layer.in_features, layer.out_features, bias=False)
    model.lm_head = nn.Linear(head.in_features, head.out_features, bias=False)
    names = ["model.layers.1.mlp.down_proj.weight", "lm_head.weight"]
    own = [model.get_parameter(name).detach().clone() for name in names]
    units = ftkit.shard(model, {"stage": stage, "dtype": "fp32"})
    kept = units.state_dict()
    return own, [kept[name] for name in names], model(input_ids=torch.arange(6).view(1, 6)).logits.detach()


@pytest.mark.parametrize("stage", [0, 3])
def test_of_values_that_ranks_drew_differently_rank_0s_count(stage, folder, worlds):
    (drawn, kept, first), (other, kept_there, second) = worlds[2].run(drawn_by_each, folder, stage)
    assert not any(torch.equal(one, two) for one, two in zip(drawn, other))
    assert all(torch.equal(one, two) for one, two in zip(kept + kept_there, drawn + drawn))
    assert torch.equal(first, second)
