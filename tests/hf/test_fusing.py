"""Fused kernels: what is recognized in each family, training as before, and modules that do not agree."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ftkit.hf.kernels.fuse import fuse, rotated
from ftkit.hf.kernels.head import attach_head_loss, only_loss
from tests import fusible

CPU = torch.device("cpu")


def expected(name: str, dtype: torch.dtype) -> dict[str, int]:
    """Return what is fused in a family; in fp32 all castings are the same, and the first is taken."""
    found = dict(fusible.FAMILIES[name][1])
    for casting in ("OLMo-2's", "T5's") if dtype == torch.float32 else ():
        if number := found.pop(f"RMSNorm ({casting})", 0):
            found["RMSNorm (Llama's casting)"] = number
    return found


def fused(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, int]:
    """Replace what is recognized, and return how often."""
    done = {kind: len(names) for kind, names in fuse(model, dtype, CPU).done.items()}
    return done | ({"chunked loss": 1} if attach_head_loss(model, dtype, CPU) is None else {})


def train(model: nn.Module, name: str, steps: int, rows: int = 3, tokens: int = 9) -> list[float]:
    """Take steps of AdamW, and return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        inputs = fusible.batch(name, rows, tokens, step % 2)
        with only_loss(model, wanted=True):
            loss = model(**inputs, **({} if "t5" in name else {"num_items_in_batch": torch.tensor(20)})).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same_weights(ours: nn.Module, plain: nn.Module, atol: float) -> None:
    theirs = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        if name.endswith(("k_proj.bias", "query_key_value.bias", "c_attn.bias")):
            continue  # the keys' has no gradient but rounding, of which Adam makes whole steps
        torch.testing.assert_close(parameter, theirs[name], rtol=0, atol=atol, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize("name", fusible.families())
def test_families_train_as_before(name: str) -> None:
    plain = fusible.build(name)
    ours = copy.deepcopy(plain)
    assert fused(ours) == expected(name, torch.float32)
    theirs, own = train(plain, name, 20), train(ours, name, 20)
    assert theirs[-1] < theirs[0] - 0.3
    assert own == pytest.approx(theirs, abs=2e-4)
    assert_same_weights(ours, plain, 2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", fusible.families())
def test_families_in_16_bits(name: str, dtype: torch.dtype) -> None:
    """The same parts are found, and one pass gives the loss of the model as it was."""
    plain = fusible.build(name).to(dtype)
    ours = copy.deepcopy(plain)
    assert fused(ours, dtype) == expected(name, dtype)
    inputs = fusible.batch(name, 3, 9, 0)
    with torch.no_grad(), only_loss(ours, wanted=True):
        assert ours(**inputs).loss.item() == pytest.approx(plain(**inputs).loss.item(), abs=0.02)


def test_names_classes_and_weights_stay() -> None:
    model = fusible.build("llama")
    before, names = dict(model.named_parameters()), [type(m).__name__ for m in model.modules()]
    own = LlamaRMSNorm.forward
    fused(model)
    assert names == [type(module).__name__ for module in model.modules()]
    assert all(value is before[name] for name, value in model.named_parameters())
    norm = model.model.norm
    assert isinstance(norm, LlamaRMSNorm)
    assert type(norm) is not LlamaRMSNorm
    assert LlamaRMSNorm.forward is own, "other modules of its class keep their forward"


def test_a_model_on_meta_is_proved_too() -> None:
    with torch.device("meta"):
        model = fusible.FAMILIES["qwen3"][0]()
    assert fused(model) == fusible.FAMILIES["qwen3"][1]
    assert all(parameter.is_meta for parameter in model.parameters())


class OwnNorm(LlamaRMSNorm):
    """Looks like one that is known, and is not."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * 1.01


class OwnMlp(nn.Module):
    """Three layers of known names, with a twist."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.act_fn = ACT2FN["silu"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) + 0.01)


class PlainMlp(OwnMlp):
    """With GELU, and without the twist."""

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = ACT2FN["gelu"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DroppingMlp(OwnMlp):
    """Drops so rarely that no probe can see it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return nn.functional.dropout(self.down_proj(inner), 1e-9, self.training)


class BackwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1.02


class WrongBackwardNorm(LlamaRMSNorm):
    """The same values, other gradients."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return BackwardOnly.apply(super().forward(hidden_states))


@pytest.mark.parametrize("made", [lambda: OwnNorm(16), OwnMlp, DroppingMlp, lambda: WrongBackwardNorm(16)])
def test_what_does_not_agree_is_left_alone_and_reported(made: Any) -> None:
    model = nn.Sequential(made())
    own = type(model[0])
    report = fuse(model, torch.float32, CPU)
    assert type(model[0]) is own
    assert report.left == {"0": f"{own.__name__} does not compute what its attributes say"}
    assert report.summary().endswith(f"; not replaced: 0 ({report.left['0']})")


class MoreThanAHead(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        found = super().forward(*args, labels=labels, **kwargs)
        if labels is not None:
            found.loss = found.loss + 0.1 * found.logits.float().square().mean()
        return found


class InTrainingOnly(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        if self.training and found.loss is not None:
            found.loss = found.loss + 0.1 * found.logits.float().square().sum()
        return found


@pytest.mark.parametrize("kind", [MoreThanAHead, InTrainingOnly])
def test_a_loss_that_is_more_than_a_heads_keeps_its_logits(kind: Any) -> None:
    model = kind(fusible.build("llama").config)
    assert attach_head_loss(model, torch.float32, CPU) == "its loss depends on more than its head"
    assert attach_head_loss(nn.Linear(2, 2), torch.float32, CPU) == "not a model of transformers"
    assert attach_head_loss(fusible.build("t5"), torch.float32, CPU) == "its loss is not that of a causal language model"


def test_logits_are_there_unless_only_the_loss_is_wanted() -> None:
    model = fusible.build("gemma2")
    inputs = fusible.batch("gemma2", 2, 6, 0)
    before = model(**inputs)
    assert attach_head_loss(model, torch.float32, CPU) is None
    after = model(**inputs)
    assert torch.equal(after.logits, before.logits)
    assert after.loss == before.loss
    with only_loss(model, wanted=True):
        chunked = model(**inputs)
    assert chunked.logits.shape == (2, 6, 0)
    torch.testing.assert_close(chunked.loss, before.loss)
    assert model(input_ids=inputs["input_ids"]).logits.shape == before.logits.shape


class GatedNorm(LlamaRMSNorm):
    """Takes a gate beside its input."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(hidden_states if gate is None else hidden_states * gate)


def test_norms_that_take_more_than_their_input_are_left_alone() -> None:
    assert not fuse(nn.Sequential(GatedNorm(8)), torch.float32, CPU).done


def test_a_rotation_of_another_form_than_was_proved_is_the_models_own() -> None:
    called = []

    def own(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
        called.append(unsqueeze_dim)
        return q, k

    turn, q, angle = rotated(own), torch.ones(1, 2, 3, 4), torch.ones(1, 3, 4)
    turn(q, q, angle, angle, unsqueeze_dim=2)
    turn(q, q, angle, angle, 0)
    turn(q, q, angle[0], angle[0])
    assert called == [2, 0, 1]
    turn(q, q, angle, angle)
    assert called == [2, 0, 1]


def test_where_triton_does_not_run_that_is_said_and_nothing_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

    monkeypatch.setattr("ftkit.hf.kernels.fuse.gated", broken)
    report = fuse(fusible.build("llama"), torch.float32, CPU)
    assert not report.done
    assert report.left["all of it"].startswith("Triton does not run here: RuntimeError: Failed to find C compiler.")


@pytest.mark.parametrize("before", [False, True])
def test_an_mlp_whose_activation_has_a_hook_is_left_alone(before: bool) -> None:
    """In the second layer only: the proof of the first layer does not count for it."""
    model = fusible.build("llama")
    activation = model.model.layers[1].mlp.act_fn
    if before:
        activation.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    else:
        activation.register_forward_hook(lambda module, args, output: output * 0.5)
    inputs = fusible.batch("llama", 2, 6, 0)
    logits = model(**inputs).logits
    assert fuse(model, torch.float32, CPU).done["gated MLP (silu)"] == ["model.layers.0.mlp"]
    torch.testing.assert_close(model(**inputs).logits, logits)


def test_a_gated_mlp_with_lora_is_fused() -> None:
    config = peft.LoraConfig(r=2, target_modules=["down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(fusible.build("llama"), config)
    assert len(fuse(model, torch.float32, CPU).done["gated MLP (silu)"]) == fusible.LAYERS


def test_a_function_in_an_activation_is_a_part_of_its_proof() -> None:
    model = nn.Sequential(PlainMlp(), PlainMlp())
    model[1].act_fn.act = nn.functional.silu
    assert fuse(model, torch.float32, CPU).done == {"gated MLP (gelu)": ["0"], "gated MLP (silu)": ["1"]}
