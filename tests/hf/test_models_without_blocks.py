"""Models without blocks train replicated; blocks of any `nn.Module` may be named; what needs blocks is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils import ModelOutput

import ftkit
from ftkit.hf.blocks import find_blocks
from tests.hf.runs import fresh_state, llama, rank, token_rows, world_size

STEPS = 4
ROWS = 12
"""Rows of a global batch; divided by 1, 2 and 3."""
EPSILON = 1e-4
"""Of AdamW: the gradient of a bias of keys is rounding, which must not be scaled up."""


class Regression(nn.Module):
    """Two scalars: every parameter is 0-d."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(-1.0))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        y = x[:, 0] * self.a + self.b
        return nn.functional.mse_loss(y, labels), y


class Vectors(nn.Module):
    """No parameter has two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.randn(6)), nn.LayerNorm(6)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = (self.norm(x) * self.weight).sum(-1)
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


class Mlp(nn.Module):
    """Two layers with a large first one, a frozen bias, and a head tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(6, 80), nn.Linear(80, 6), nn.Linear(6, 1)
        self.down.weight = nn.Parameter(self.down.weight)
        self.up.bias.requires_grad_(False)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        y = self.out(self.down(torch.tanh(self.up(x)))).squeeze(-1)
        return ModelOutput(loss=nn.functional.mse_loss(y, labels), logits=y)


class Recurrent(nn.Module):
    """An LSTM, which keeps a list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(2, 12, num_layers=2, batch_first=True), nn.Linear(12, 1)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        y = self.out(self.rnn(x.view(len(x), 3, 2))[0][:, -1]).squeeze(-1)
        return nn.functional.mse_loss(y, labels), y


class Convolution(nn.Module):
    """A small net of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 3), nn.Flatten(), nn.Linear(8, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(x.unsqueeze(1)).squeeze(-1), labels)}


class Layers(nn.Module):
    """A stack of `nn.TransformerEncoderLayer`, which nobody marked; `_no_split_modules` may name it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embed, self.stack, self.out = nn.Linear(2, 8), nn.TransformerEncoder(layer, 3), nn.Linear(8, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.out(self.stack(self.embed(x.view(len(x), 3, 2))).mean(1)).squeeze(-1)
        return {"loss": nn.functional.mse_loss(y, labels)}


class NamedLayers(Layers):
    """The same with its blocks named, on a plain module."""

    _no_split_modules = ["TransformerEncoderLayer"]


class Wrapper(nn.Module):
    """A plain module around a Hugging Face model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = llama(), nn.Parameter(torch.tensor(1.5))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        answer = self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        return answer.loss * self.scale, answer.logits


NETS = {net.__name__: net for net in (Regression, Vectors, Mlp, Recurrent, Convolution, Layers, NamedLayers)}


def loss_of(answer: Any) -> Tensor:
    return answer["loss"] if isinstance(answer, dict) else answer[0]


def built(name: str) -> nn.Module:
    torch.manual_seed(3)
    return NETS[name]()


def batches() -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(4)
    return [(torch.randn(ROWS, 6, generator=random), torch.randn(ROWS, generator=random)) for _ in range(STEPS)]


def plain(name: str) -> dict[str, Any]:
    """Train in plain PyTorch on whole batches."""
    model = built(name)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05, eps=EPSILON)
    losses = []
    for x, labels in batches():
        loss = loss_of(model(x, labels))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "state": {n: t.detach() for n, t in model.state_dict().items()}}


def sharded(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train on this world's ranks, each with its part of the rows."""
    fresh_state()
    model = built(name)
    units = ftkit.shard(model, settings, device=torch.device("cpu"))
    optimizer = ftkit.ShardedAdamW(units, lr=0.05, eps=EPSILON)
    part = ROWS // world_size()
    own = slice(rank() * part, (rank() + 1) * part)
    losses = []
    for x, labels in batches():
        loss = loss_of(model(x[own], labels[own]))
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(units.comm.all(loss.item())) / world_size())
    model.eval()
    with torch.no_grad():
        model(*batches()[0])
    return {"losses": losses, "state": units.state_dict(), "stage": units.strategy.stage, "units": len(units.units)}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("world", [1, 2])
def test_a_model_without_blocks_trains_replicated(worlds, name, world):
    wanted = plain(name)
    for stage in ("auto",) if name != "Mlp" else ("auto", 0, 2):
        got = worlds[world].run(sharded, name, {"stage": stage})[0]
        if name == "NamedLayers":
            assert got["units"] == 3
        else:
            assert (got["units"], got["stage"]) == (0, {"auto": 1}.get(stage, stage))
        assert got["losses"] == pytest.approx(wanted["losses"], abs=1e-5)
        for key, tensor in wanted["state"].items():
            torch.testing.assert_close(got["state"][key], tensor, atol=1e-5, rtol=1e-5)


def test_named_blocks_of_a_plain_module_are_sharded(worlds):
    wanted = plain("NamedLayers")
    got = worlds[2].run(sharded, "NamedLayers", {"stage": 3, "activations": "recompute"})[0]
    assert (got["units"], got["stage"]) == (3, 3)
    assert got["losses"] == pytest.approx(wanted["losses"], abs=1e-5)


def test_the_notice_says_what_is_replicated(caplog):
    with caplog.at_level(logging.WARNING):
        ftkit.shard(built("Mlp"), device=torch.device("cpu"))
    said = [record.message for record in caplog.records if "has no blocks" in record.message]
    assert len(said) == 1
    assert "every rank keeps all weights" in said[0]
    assert "_no_split_modules" in said[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stage": 3}, "stage=3 works block by block, and Mlp has no blocks"),
        ({"parameters": "host"}, "parameters='host' works block by block"),
        ({"gradients": "host"}, "gradients='host' works block by block"),
    ],
)
def test_settings_that_need_blocks_are_refused(settings, words):
    with pytest.raises(ftkit.UserError, match=words) as refusal:
        ftkit.shard(built("Mlp"), settings, device=torch.device("cpu"))
    assert "_no_split_modules" in str(refusal.value)


@pytest.mark.parametrize("name", ["Mlp", "NamedLayers"])
def test_a_model_that_trains_nothing_is_evaluated_and_its_training_refused(tmp_path, name):
    fresh_state()
    model = built(name).requires_grad_(False)
    rows = [{"x": x, "labels": y} for x, y in zip(*batches()[0])]
    with torch.no_grad():
        wanted = loss_of(model(*batches()[0])).item()
    arguments = ftkit.TrainingArguments(f"{tmp_path}", use_cpu=True, report_to="none", disable_tqdm=True)
    trainer = ftkit.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(ftkit.UserError, match="asks for gradients, so nothing can be trained"):
        trainer.train()


def test_a_wrapper_shows_the_blocks_of_its_model():
    assert [name for name, _ in find_blocks(Wrapper())] == [f"inner.model.layers.{n}" for n in range(3)]


def train_and_evaluate(package: Any, folder: str, name: str) -> dict[str, Any]:
    """Train, evaluate, predict and save with a Trainer."""
    fresh_state()
    model = Wrapper() if name == "Wrapper" else built(name)
    if name == "Wrapper":
        rows: list[dict[str, Any]] = token_rows(12)
    else:
        rows = [{"x": x, "labels": y} for x, y in zip(*batches()[0])]
    arguments = package.TrainingArguments(
        folder, use_cpu=True, report_to="none", per_device_train_batch_size=4, max_steps=3, learning_rate=0.05,
        logging_steps=1, save_steps=2, disable_tqdm=True, per_device_eval_batch_size=4,
    )  # fmt: skip
    trainer = package.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    trainer.save_model(f"{folder}/model")
    history = [line[key] for line in trainer.state.log_history for key in ("loss", "grad_norm", "eval_loss") if key in line]
    return {"before": before, "history": history, "after": trainer.evaluate()["eval_loss"]}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["Regression", "Mlp", "Recurrent", "Wrapper"])
def test_the_trainer_takes_a_plain_module(tmp_path, name):
    wanted = train_and_evaluate(transformers, f"{tmp_path}/stock", name)
    got = train_and_evaluate(ftkit, f"{tmp_path}/ours", name)
    assert got["before"] == pytest.approx(wanted["before"], abs=1e-5)
    assert got["history"] == pytest.approx(wanted["history"], abs=1e-4)
    assert got["after"] == pytest.approx(wanted["after"], abs=1e-5)
    stock, ours = (load_file(tmp_path / kind / "model" / "model.safetensors") for kind in ("stock", "ours"))
    assert set(stock) == set(ours)
    for key, tensor in stock.items():
        torch.testing.assert_close(ours[key], tensor, atol=1e-4, rtol=1e-4)


def test_an_adapter_on_a_family_whose_list_names_more_than_it_has():
    """transformers' lists may; PEFT's wrappers hand out that of the base."""
    sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    config = transformers.BartConfig(vocab_size=50, max_position_embeddings=16, **sizes)
    model = get_peft_model(transformers.BartForCausalLM(config), LoraConfig(target_modules=["q_proj"]))
    assert [name for name, _ in find_blocks(model)] == ["base_model.model.model.decoder.layers.0"]
