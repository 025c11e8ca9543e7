"""Training through a key/value cache is refused; what never looks at one goes on without a word."""

from __future__ import annotations

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

import ftkit
from tests.hf import runs
from tests.hf.runs import Run, assert_same_history, train

PROMPT, ANSWER = torch.arange(3, 15).view(2, 6), torch.arange(20, 28).view(2, 4)


def refused(build, settings, text, first, second):
    """Call the model twice; the second call must raise."""
    model = build()
    ftkit.shard(model, {"kernels": "off", **settings})
    with torch.set_grad_enabled(first):
        cache = model(PROMPT, use_cache=True).past_key_values
    with torch.set_grad_enabled(second), pytest.raises(ftkit.UserError, match=text):
        model(ANSWER, past_key_values=cache)


def peft_llama():
    return get_peft_model(runs.llama(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


@pytest.mark.parametrize(
    "build, settings, ranks",
    [
        (runs.llama, {"stage": 3}, 2),
        (runs.llama, {"stage": 1, "activations": "keep"}, 1),
        (peft_llama, {"stage": 2}, 1),
        (runs.tied_llama, {"stage": 3, "activations": "keep"}, 1),
    ],
)
def test_training_on_a_cache_is_refused(build, settings, ranks, worlds):
    world = worlds[ranks]
    world.run(refused, build, settings, "this key/value cache is empty", True, True)
    world.run(refused, build, settings, "this key/value cache is empty", True, False)
    world.run(refused, build, settings, "training through a cache is not supported", False, True)


def fresh_cache():
    model = runs.llama()
    ftkit.shard(model, {"kernels": "off", "stage": 3})
    with pytest.raises(ftkit.UserError, match="training through a cache"):
        model(PROMPT, past_key_values=transformers.DynamicCache(config=model.config))
    with torch.no_grad():
        cache = model(PROMPT, use_cache=True).past_key_values
        whole = model(torch.cat([PROMPT, ANSWER], 1)).logits[:, -4:]
        assert torch.allclose(model(ANSWER, past_key_values=cache).logits, whole, atol=1e-5)


def test_a_cache_without_gradients_is_honoured(worlds):
    worlds[2].run(fresh_cache)


def test_a_trainer_with_use_cache_goes_on(worlds, tmp_path):
    assert runs.llama().config.use_cache
    run = Run(arguments={"max_steps": 2}, ftkit={"stage": 3})
    stock = worlds[1].run(train, "stock", str(tmp_path / "stock"), run)[0]
    assert_same_history(worlds[2].run(train, "ours", str(tmp_path / "ours"), run)[0], stock)
