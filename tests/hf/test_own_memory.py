"""What fresh eyes did to a model before sharding: each is kept as in plain PyTorch, or refused by the parameter's name."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import ftkit
from ftkit.errors import UserError
from ftkit.hf.weights.own_memory import separate
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


def tied_by_data(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(torch.zeros_like(model.lm_head.weight))
    model.lm_head.weight.data = model.model.embed_tokens.weight.data


def a_part_of_another(model: Any) -> None:
    first, second = (layer.mlp.up_proj.weight for layer in model.model.layers)
    first.data = second.data.flip(0)
    second.data = first.data.view(-1)[:].view(24, 16)


def expanded(model: Any) -> None:
    model.model.norm.weight = nn.Parameter(torch.tensor([0.7]).expand(16))


def lazy(model: Any) -> None:
    model.lm_head = nn.LazyLinear(97)


def patched_block(model: Any) -> None:
    block = model.model.layers[0]
    block.forward = block.forward


def tied_blocks(model: Any) -> None:
    first, second = model.model.layers
    first.mlp.up_proj.weight = second.mlp.up_proj.weight


def indices(model: Any) -> None:
    model.model.norm.register_parameter("order", nn.Parameter(torch.arange(16), requires_grad=False))


def shared_part(model: Any) -> None:
    model.model.layers[0].mlp = model.model.layers[1].mlp


def sparse_parameter(model: Any) -> None:
    model.model.norm.register_parameter("mask", nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False))


def in_fp64(model: Any) -> None:
    model.model.norm.double()


def buffer_of_a_weight(model: Any) -> None:
    model.model.norm.register_buffer("old", model.model.norm.weight.detach())


def attribute_of_a_weight(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.parts = {"first": [mlp.up_proj.weight.data[4:, 2:]]}


def head_of_values(model: Any) -> None:
    head = nn.Module()
    head.register_buffer("weight", model.model.embed_tokens.weight.data)
    model.lm_head = head


def hook_of_several(model: Any) -> None:
    several = [model.model.layers[0].mlp.up_proj.weight, model.lm_head.weight]
    torch.autograd.graph.register_multi_grad_hook(several, lambda gradients: None)


def sparse(model: Any) -> None:
    model.model.embed_tokens.sparse = True


REFUSED: list[tuple[Callable[[Any], None], str]] = [
    (tied_by_data, "model.embed_tokens.weight and lm_head.weight share memory"),
    (a_part_of_another, "model.layers.1.mlp.up_proj.weight share memory"),
    (expanded, "model.norm.weight: several of its elements are the same memory"),
    (lazy, "lm_head.weight has no shape yet"),
    (patched_block, "the forward of block model.layers.0 is replaced"),
    (tied_blocks, "model.layers.0.mlp.up_proj.weight and model.layers.1.mlp.up_proj.weight are one parameter"),
    (indices, "model.norm.order has dtype torch.int64"),
    (shared_part, "mlp of block model.layers.1 is a part of model.layers.0"),
    (buffer_of_a_weight, "model.norm.old shares memory with the parameter model.norm.weight"),
    (attribute_of_a_weight, "model.layers.1.mlp.parts shares memory with the parameter model.layers.1.mlp.up_proj.weight"),
    (head_of_values, "lm_head.weight shares memory with the parameter model.embed_tokens.weight"),
    (hook_of_several, "model.embed_tokens.weight has a hook of register_multi_grad_hook"),
    (sparse, "model.embed_tokens has sparse=True"),
    (sparse_parameter, "model.norm.mask has the layout torch.sparse_coo"),
    (in_fp64, "model.norm.weight has dtype torch.float64"),
]


@pytest.mark.parametrize("change, told", REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_cannot_be_kept_is_refused_by_name(change, told, folder):
    model = ftkit.load_model(folder)
    change(model)
    with pytest.raises(UserError, match=told.replace(".", r"\.")):
        ftkit.shard(model, STAGE3)


def test_a_merged_adapter_would_train_nothing():
    model = adapted(tiny())
    model.merge_adapter()
    with pytest.raises(UserError, match=r"q_proj: the adapter default is merged .*unmerge_adapter"):
        ftkit.shard(model, STAGE3)


def test_an_adapter_inside_a_transformers_model_is_refused_before_the_first_step(tmp_path):
    model = tiny()
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    runs.fresh_state()
    arguments = {**runs.COMMON, "save_strategy": "steps", "max_steps": 1, "ftkit": STAGE3}
    trainer = ftkit.Trainer(model, ftkit.TrainingArguments(str(tmp_path), **arguments), train_dataset=runs.token_rows(4))
    with pytest.raises(UserError, match="get_peft_model"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.skipif(not hasattr(peft, "CartridgeConfig"), reason="an older PEFT")
def test_a_cartridge_is_refused_as_prefix_tuning_is():
    config = peft.CartridgeConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, num_frozen_tokens=1)
    with pytest.raises(UserError, match="a cartridge trains through the key/value cache"):
        ftkit.shard(get_peft_model(tiny(), config), STAGE3)


def test_prefix_tuning_inside_a_module_of_the_users_is_refused_before_the_first_step():
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UserError, match="prefix tuning trains through the key/value cache"):
        ftkit.shard(nn.Sequential(get_peft_model(tiny(), config)), STAGE3)


@pytest.mark.skipif(not hasattr(peft, "CPTConfig"), reason="an older PEFT")
def test_an_adapter_that_gives_its_weights_new_memory_is_refused_before_the_first_step():
    config = peft.CPTConfig(task_type="CAUSAL_LM", cpt_token_ids=[5, 6], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2])
    with pytest.raises(UserError, match=r"CPT replaces the \.data of its weights"):
        ftkit.shard(get_peft_model(tiny(), config), STAGE3)


def test_an_adapter_inside_a_module_of_the_users_is_not_merged_after_sharding():
    inner = adapted(tiny())
    ftkit.shard(nn.Sequential(inner), STAGE3)
    with pytest.raises(UserError, match="ftkit export ADAPTER OUT --merge-adapter"):
        inner.merge_adapter()


def test_an_optimizer_that_was_made_before_the_head_is_refused_with_the_way_out():
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    model.lm_head = nn.Linear(16, model.config.vocab_size, bias=False)
    with pytest.raises(UserError, match=r"does not belong to the sharded model.*Make it after the change"):
        ftkit.Accelerator(cpu=True, ftkit=STAGE3).prepare(model, optimizer)


# --- kept


def test_what_shares_no_memory_that_trains_stays():
    model = tiny()
    norm, head = model.model.norm, model.lm_head
    head.weight.requires_grad_(False)
    head.register_buffer("old", head.weight.detach())  # it never changes
    norm.known, norm.copied = [norm.weight], norm.weight.detach().clone()
    table = torch.randn(4, 6)
    norm.left, norm.right = nn.Parameter(table[:, :3]), table[:, 3:]  # no element in common
    nn.utils.spectral_norm(model.model.layers[0].mlp.up_proj)
    separate(model)
    norm.right = table[:, 2:]
    with pytest.raises(UserError, match=r"norm\.right shares memory"):
        separate(model)


def test_frozen_parameters_that_share_memory_get_copies():
    model = nn.Module()
    table = torch.randn(4, 6)
    model.left, model.right = nn.Parameter(table[:, :3]), nn.Parameter(table[:, 3:])  # no element in common
    model.one = nn.Parameter(torch.tensor(0.7).expand(5), requires_grad=False)
    model.whole = nn.Parameter(torch.randn(3, 3), requires_grad=False)
    model.again = nn.Parameter(model.whole.data, requires_grad=False)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    separate(model)
    assert model.left.data_ptr() == table.data_ptr()
    assert model.one.stride() == (1,)
    assert model.whole.data_ptr() != model.again.data_ptr()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    model.bad = nn.Parameter(table[1:3, 2:4])
    with pytest.raises(UserError, match="share memory"):
        separate(model)


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


def test_a_copy_of_a_model_on_meta_is_drawn_like_it():
    config = tiny().config
    units = ftkit.shard(copy.deepcopy(ftkit.load_model(None, config=config)), STAGE3)
    assert float(units.state_dict()["model.layers.0.mlp.up_proj.weight"].std()) > 0
    written = ftkit.load_model(None, config=config)
    with torch.no_grad():
        written.model.norm.weight.mul_(2)
    with pytest.raises(UserError, match=r"norm\.weight was written to"):
        ftkit.shard(copy.deepcopy(written), STAGE3)


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


def trained_with_hooks(tied: bool) -> tuple[str, list[str]]:
    """Compare a step at stage 3 with PyTorch's; return what a hook that cannot be called is answered, and what differs."""
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
    late = tiny()
    late.model.embed_tokens.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(UserError) as refusal:
        ftkit.shard(late, STAGE3)
    return str(refusal.value), [n for n, p in plain.named_parameters() if not torch.allclose(state[n], p, atol=1e-6)]


@pytest.mark.parametrize("tied", [False, True])
def test_hooks_on_gradients_are_called_at_stage_3(tied, world2):
    for told, wrong in world2.run(trained_with_hooks, tied):
        assert "model.embed_tokens.weight has a hook" in told
        assert not wrong


# --- buffers of a block that is computed twice


class Mean(nn.Module):
    """A norm with a running mean that it replaces, and a counter that it writes to."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("last", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean((0, 1))
            self.calls.data.add_(1)
            self.last = x.detach().amax()
        return self.gain * (x - self.mean)


def with_batch_norm(block: Any) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x.transpose(1, 2)).transpose(1, 2)

    block.post_attention_layernorm = Normed()


def with_a_mean(block: Any) -> None:
    block.input_layernorm = Mean(16)


def with_a_power_iteration(block: Any) -> None:
    nn.utils.parametrizations.spectral_norm(block.mlp.up_proj)


@pytest.mark.parametrize("first_in_eval", [False, True])
@pytest.mark.parametrize("change", [with_batch_norm, with_a_mean, with_a_power_iteration])
def test_a_recomputed_block_counts_its_batch_once(change, first_in_eval):
    ids = torch.randint(3, 90, (3, 2, 10), generator=torch.Generator().manual_seed(4))

    def steps(model: Any, backward: Callable[[Any], Any], step: Callable[[], Any], clear: Callable[[], Any]) -> list[float]:
        losses = []
        for rows in ids:
            loss = model(input_ids=rows, labels=rows).loss
            losses.append(float(loss.detach()))
            backward(loss)
            step()
            clear()
        return losses

    models = [tiny(), tiny()]
    for model in models:
        torch.manual_seed(8)
        change(model.model.layers[0])
    units = ftkit.shard(models[1], {**STAGE3, "kernels": "off"})
    for model in models:
        if first_in_eval:
            model.eval()(input_ids=ids[0], labels=ids[0]).loss.backward()
            model.zero_grad()
        model.train()
    theirs, ours = torch.optim.SGD(models[0].parameters(), lr=0.1), ftkit.ShardedSGD(units, lr=0.1)
    expected = steps(models[0], torch.Tensor.backward, theirs.step, theirs.zero_grad)
    found = steps(models[1], lambda loss: ours.scale(loss).backward(), ours.step, ours.zero_grad)
    assert found == pytest.approx(expected, rel=1e-5)
    buffers = dict(models[1].named_buffers())
    for name, buffer in models[0].named_buffers():
        assert torch.allclose(buffers[name].double(), buffer.double(), rtol=1e-4, atol=1e-5), name


# --- hooks inside of blocks


def warnings_of(model: Any, settings: Any, caplog: Any) -> list[str]:
    """Return what two steps warn of."""
    ids = torch.arange(3, 13)[None]
    optimizer = ftkit.ShardedSGD(ftkit.shard(model, settings), lr=0.1)
    caplog.clear()
    with torch.no_grad():
        model(input_ids=ids)
    assert not caplog.messages
    for _ in range(2):
        optimizer.scale(model(input_ids=ids, labels=ids).loss).backward()
        optimizer.step()
    return [message for message in caplog.messages if "hook" in message]


def keep(module: Any, args: Any, output: Any) -> None:
    module.kept = output


def test_a_hook_that_may_keep_what_has_no_gradient_is_told_once(caplog):
    model = tiny()
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(keep)
    (told,) = warnings_of(model, STAGE3, caplog)
    assert "model.layers.0.mlp has the forward hook keep (and 1 more)" in told
    assert "'activations': 'keep'" in told
    assert model.model.layers[0].mlp.kept is not None
    plain = tiny()
    plain.model.layers[0].mlp.register_forward_hook(keep)
    assert not warnings_of(plain, {"stage": 1, "activations": "keep", "affinity": False}, caplog)


def test_hooks_that_keep_gradients_are_not_told(caplog):
    model = tiny()
    model.model.layers[0].register_forward_hook(keep)  # what leaves a block
    model.model.norm.register_forward_hook(keep)
    model.model.layers[0].mlp.register_full_backward_hook(lambda module, given, made: None)
    nn.utils.spectral_norm(model.model.layers[0].mlp.up_proj)  # a hook of torch's
    assert not warnings_of(model, STAGE3, caplog)
