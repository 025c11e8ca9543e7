"""The head and its loss without whole logits: what evaluations and checks get in their place."""

from __future__ import annotations

import copy
from unittest import mock

import peft
import pytest
import torch

import ftkit
from ftkit.hf.adapters import adds_to_loss
from ftkit.hf.fp16.search import find_fp32_modules
from ftkit.hf.generate.evaluation import loss_sum, row_statistics
from ftkit.hf.kernels import head
from ftkit.hf.kernels.head import attach_head_loss, head_loss, only_loss, proven_head_loss, usable_loss
from tests.engine import families

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_each_token_gives_is_what_its_logits_give(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * 5 * families.VOCABULARY)  # five tokens at a time
    model = families.build(family).eval()
    chance = torch.Generator().manual_seed(0)
    rows = torch.randint(3, families.VOCABULARY, (3, 8), generator=chance)
    labels = rows.clone()
    labels[0, :3] = labels[2] = -100
    labels[1, 5] = model(input_ids=rows).logits[1, 4].argmax()  # one hit at least
    with torch.no_grad():
        expected = row_statistics(model(input_ids=rows).logits, labels, shifted=True)
    assert attach_head_loss(model, torch.float32, CPU) is None
    found = head_loss(model)
    assert found is not None
    with torch.no_grad(), found.each_token() as tokens:
        made = model(input_ids=rows, labels=labels, num_items_in_batch=torch.tensor(4.0))
    assert made.logits.shape[-1] == 0, "no logits"
    assert torch.allclose(tokens[-1].rows, expected, atol=1e-5)
    assert tokens[-1].rows[1, 2] >= 1
    assert made.loss.item() == pytest.approx(expected[:, 0].sum().item() / 4, rel=1e-5)
    assert found.tokens is None


def adapted(config):
    torch.manual_seed(3)
    model = peft.get_peft_model(families.build("llama"), config).eval()
    return model, attach_head_loss(model, torch.float32, CPU)


LORA = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}


@pytest.mark.parametrize("config", [peft.LoraConfig(**LORA), peft.AdaLoraConfig(**LORA, total_step=10)])
def test_a_penalty_of_an_adapter_is_no_loss_of_tokens(config):
    model, problem = adapted(config)
    assert problem is None
    assert adds_to_loss(model) == (config.peft_type == "ADALORA")
    rows = torch.randint(3, families.VOCABULARY, (2, 8))
    with torch.no_grad():
        expected = row_statistics(model(input_ids=rows).logits, rows, shifted=True)[:, :2].double().sum(0)
        assert torch.allclose(loss_sum(model, {"input_ids": rows, "labels": rows}), expected)


@pytest.mark.skipif(not hasattr(peft, "ShadowConfig"), reason="this PEFT has no shadows")
def test_an_adapter_that_calls_the_head_itself_gets_logits():
    model, problem = adapted(peft.ShadowConfig(task_type="CAUSAL_LM"))
    assert "by its adapter" in problem
    rows = torch.randint(3, families.VOCABULARY, (2, 8))
    with only_loss(model, wanted=True):
        assert model(input_ids=rows, labels=rows).loss.isfinite()


def test_a_proof_needs_no_weights_and_attaches_nothing() -> None:
    model = families.build("llama").to("meta")
    loss = model.loss_function
    assert not isinstance(proven_head_loss(model, torch.float16, CPU), str)
    assert model.loss_function is loss


def test_an_overflow_is_looked_for_without_logits() -> None:
    units = ftkit.shard(families.build("llama"), {"dtype": "fp16"}, device=CPU)
    rows = torch.randint(3, families.VOCABULARY, (2, 8))
    with mock.patch.object(head, "linear_cross_entropy", wraps=head.linear_cross_entropy) as chunked:
        assert find_fp32_modules(units, [{"input_ids": rows, "labels": rows}]).finite
    assert chunked.call_count > 0, "hooks of ftkit's own do not count as readers of logits"


def halved(model):
    return model.lm_head.register_forward_hook(lambda module, args, output: output * 0.5)


def no_gradient(model):
    return model.lm_head.register_full_backward_hook(lambda module, given, made: (given[0] * 0,))


def penalised(model):
    def hook(module, args, output):
        output.loss = output.loss + 1e-3 * output.logits.pow(2).sum()

    return model.register_forward_hook(hook)


@pytest.mark.parametrize("hook", [halved, no_gradient, penalised])
def test_a_users_hook_around_the_head_gets_logits_before_the_proof_and_after(hook):
    rows = torch.randint(3, families.VOCABULARY, (2, 8))
    late = families.build("llama").eval()
    plain = copy.deepcopy(late)
    assert attach_head_loss(late, torch.float32, CPU) is None
    for each in (late, plain):
        handle = hook(each)
        with only_loss(each, wanted=True):
            made = each(input_ids=rows, labels=rows)
        made.loss.backward()
        assert made.logits.shape[-1] == families.VOCABULARY
        assert usable_loss(each) is None
        if each is late:
            loss, gradient = made.loss, late.model.norm.weight.grad
    assert loss == made.loss
    assert torch.equal(gradient, plain.model.norm.weight.grad)
    assert "hook" in str(attach_head_loss(plain, torch.float32, CPU))
    handle.remove()
    assert attach_head_loss(plain, torch.float32, CPU) is None


def test_a_head_whose_forward_is_replaced_later_makes_logits():
    model = families.build("llama").eval()
    assert attach_head_loss(model, torch.float32, CPU) is None
    own = model.lm_head.forward
    model.lm_head.forward = lambda hidden: own(hidden) * 0.5
    assert usable_loss(model) is None
