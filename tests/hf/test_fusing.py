"""Exchanges: what is recognised in each family, that it trains as before, and that what does not agree is left alone."""

from __future__ import annotations

import copy
import functools
from types import FunctionType
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from ftkit.hf.models.fusing import fuse, is_fused, rotated
from ftkit.hf.models.head import attach_head_loss, only_loss
from ftkit.hf.models.hooks import home_of
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
    """Exchange what is known, and return how often."""
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
    fused(model)
    assert names == [type(module).__name__ for module in model.modules()]
    assert all(value is before[name] for name, value in model.named_parameters())
    norm = model.model.norm
    assert is_fused(norm)
    assert isinstance(norm, LlamaRMSNorm)
    assert not is_fused(LlamaRMSNorm(4)), "others of its class stay as they are"


def test_a_model_on_meta_is_proved_too() -> None:
    with torch.device("meta"):
        model = fusible.FAMILIES["qwen3"][0]()
    assert fused(model) == fusible.FAMILIES["qwen3"][1]
    assert all(parameter.is_meta for parameter in model.parameters())


def of_a_family(kind: Any) -> Any:
    """Let a class pass for one of transformers: code of the user's own is not looked at further."""
    own = kind.forward
    names = {**own.__globals__, "__name__": "transformers.models.own"}
    kind.forward = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    kind.forward.__kwdefaults__ = own.__kwdefaults__
    return kind


@of_a_family
class OwnNorm(LlamaRMSNorm):
    """Looks like one that is known, and is not."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * 1.01


@of_a_family
class OwnMlp(nn.Module):
    """Three layers of known names, with a twist."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.act_fn = ACT2FN["silu"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) + 0.01)


@of_a_family
class DroppingMlp(OwnMlp):
    """What it is only in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return nn.functional.dropout(self.down_proj(inner), 0.5, self.training)


class BackwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1.02


@of_a_family
class WrongBackwardNorm(LlamaRMSNorm):
    """The same values, other gradients."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return BackwardOnly.apply(super().forward(hidden_states))


@pytest.mark.parametrize("made", [lambda: OwnNorm(16), OwnMlp, DroppingMlp, lambda: WrongBackwardNorm(16)])
def test_what_does_not_agree_is_left_alone_and_told(made: Any) -> None:
    model = nn.Sequential(made())
    own = type(model[0])
    report = fuse(model, torch.float32, CPU)
    assert type(model[0]) is own
    assert report.left == {"0": f"{own.__name__} does not compute what its attributes say"}
    assert report.told().endswith("left as they are: 0 (" + report.left["0"] + ")")


def test_a_forward_that_somebody_replaced_is_left_alone() -> None:
    norm = LlamaRMSNorm(8)
    norm.forward = lambda x: x
    assert not fuse(nn.Sequential(norm), torch.float32, CPU).done


@of_a_family
class MoreThanAHead(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        found = super().forward(*args, labels=labels, **kwargs)
        if labels is not None:
            found.loss = found.loss + 0.1 * found.logits.float().square().mean()
        return found


def test_a_loss_that_is_more_than_a_heads_keeps_its_logits() -> None:
    model = MoreThanAHead(fusible.build("llama").config)
    assert attach_head_loss(model, torch.float32, CPU) == "its loss is more than a head's"
    assert attach_head_loss(nn.Linear(2, 2), torch.float32, CPU) == "no model of transformers"
    assert attach_head_loss(fusible.build("t5"), torch.float32, CPU) == "its loss is not that of a causal language model"


class InTrainingOnly(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        if self.training:
            found.loss = found.loss + 0.1 * found.logits.float().square().sum()
        return found


class OwnAdapter(peft.PeftModelForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def own_adapter() -> nn.Module:
    return OwnAdapter(fusible.build("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


@pytest.mark.parametrize("made", [lambda: InTrainingOnly(fusible.build("llama").config), own_adapter])
def test_a_forward_of_the_users_own_keeps_its_logits(made: Any) -> None:
    assert "the user's own" in str(attach_head_loss(made(), torch.float32, CPU))


def test_what_wraps_copies_does_not_make_code_a_familys(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((LlamaMLP, "forward"), (LlamaRMSNorm, "forward"), (modeling_llama, "apply_rotary_pos_emb")):
        own = getattr(owner, name)

        @functools.wraps(own)
        def patched(*args: Any, own: Any = own, **kwargs: Any) -> Any:
            return own(*args, **kwargs)

        monkeypatch.setattr(owner, name, patched)
    model = fusible.build("llama")
    left = fuse(model, torch.float32, CPU).left
    assert {"LlamaMLP", "LlamaRMSNorm", "LlamaAttention"} == {reason.split()[0] for reason in left.values()}


class OtherNorm(Gemma2RMSNorm):
    """A known forward, which calls a method of the user's own."""

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return super()._norm(x) if x.shape[-2] < 100 else x


def test_a_method_that_a_known_forward_calls_is_looked_at() -> None:
    assert fuse(nn.Sequential(Gemma2RMSNorm(8)), torch.float32, CPU).done
    assert "the user's own" in fuse(nn.Sequential(OtherNorm(8)), torch.float32, CPU).left["0"]


def test_nothing_is_exchanged_below_hooks_on_all_modules() -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
    try:
        model = fusible.build("llama")
        assert not fuse(model, torch.float32, CPU).done
        assert "hook" in str(attach_head_loss(model, torch.float32, CPU))
    finally:
        handle.remove()


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


def test_a_model_whose_forward_is_replaced_keeps_its_logits() -> None:
    model = fusible.build("llama")
    model.forward = model.forward
    assert attach_head_loss(model, torch.float32, CPU) == "its forward is replaced on the instance"


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
    turn(q, q, angle, angle, unsqueeze_dim=0)
    turn(q, q, angle[0], angle[0])
    assert called == [0, 1]
    turn(q, q, angle, angle)
    turn(q.transpose(1, 2), q.transpose(1, 2), angle, angle, 2)
    assert called == [0, 1]


def test_where_triton_does_not_run_that_is_said_and_nothing_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

    monkeypatch.setattr("ftkit.hf.models.fusing.activation", broken)
    report = fuse(fusible.build("llama"), torch.float32, CPU)
    assert not report.done
    assert report.left["all of it"].startswith("Triton does not run here: RuntimeError: Failed to find C compiler.")


def hooked(mlp: Any) -> None:
    mlp.act_fn.register_forward_hook(lambda module, args, output: output * 0.5)


def replaced(mlp: Any) -> None:
    mlp.act_fn.forward = torch.relu


def computed_weight(mlp: Any) -> None:
    parametrizations.spectral_norm(mlp.down_proj)


LEFT = {
    hooked: "LlamaMLP's act_fn has hooks",
    replaced: "the forward of LlamaMLP's act_fn is replaced on the instance",
    computed_weight: "LlamaMLP's down_proj has no weight, or computes it at each read",
}


@pytest.mark.parametrize("change", LEFT)
def test_what_a_proof_does_not_see_is_left_alone_and_told(change: Any) -> None:
    """Of the second layer only: the first one's proof does not count for it."""
    model = fusible.build("llama")
    change(model.model.layers[1].mlp)
    model.eval()  # a power iteration stands still
    inputs = fusible.batch("llama", 2, 6, 0)
    before = model(**inputs).logits
    report = fuse(model, torch.float32, CPU)
    assert report.left.pop("model.layers.1.mlp") == LEFT[change]
    assert report.left.keys() <= {"model.layers.1.mlp.act_fn"}
    assert is_fused(model.model.layers[0].mlp)
    assert not is_fused(model.model.layers[1].mlp)
    torch.testing.assert_close(model(**inputs).logits, before)


def test_a_layer_of_peft_below_a_gated_mlp_is_no_hindrance() -> None:
    config = peft.LoraConfig(r=2, target_modules=["down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(fusible.build("llama"), config)
    assert fuse(model, torch.float32, CPU).done["gated MLP (silu)"]


def test_an_activation_that_is_changed_after_the_exchange_is_called() -> None:
    model = fusible.build("llama")
    assert fuse(model, torch.float32, CPU).done
    inputs, called = fusible.batch("llama", 2, 6, 0), []
    before = model(**inputs).logits
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, args, output: called.append(output))
    torch.testing.assert_close(model(**inputs).logits, before)
    assert len(called) == 1
    model.model.layers[1].mlp.act_fn = nn.ReLU()
    assert not torch.allclose(model(**inputs).logits, before)


def test_a_function_in_a_module_of_the_family_is_proved_for_itself() -> None:
    first, second = ACT2FN["gelu"], ACT2FN["gelu"]
    second.act = nn.functional.silu
    report = fuse(nn.Sequential(first, second), torch.float32, CPU)
    assert list(report.done.values()) == [["0"], ["1"]]


def test_a_users_hook_in_a_librarys_decorator_is_the_users() -> None:
    @torch.no_grad()
    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None: ...

    @functools.wraps(LlamaMLP.forward)
    def around(self: Any, *args: Any) -> Any:
        return LlamaMLP.forward(self, *args)

    assert home_of(hook) == home_of(around) == __name__
    assert home_of(torch.no_grad()(LlamaMLP.forward)).startswith("torch.")
    assert home_of(functools.partial(hook)) == __name__
