"""Key/value caches: a model may make one in training as it does by default; the engine's blocks must not fill it twice.

A block that is recomputed would write its keys into the same cache a second time, and attend to both.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers

import ftkit
from tests.engine import families
from tests.hf import runs

MODELS = {"llama": runs.llama, "t5": partial(families.build, "t5")}


def gradient_norms(name: str, activations: str) -> tuple[float, float]:
    """Return the gradient norm of one batch, in plain PyTorch and on the engine, with the cache a model makes by itself."""
    ids = torch.randint(3, families.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    plain = MODELS[name]().train()
    plain.config.use_cache = True
    plain(input_ids=ids, labels=ids).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()
    model = MODELS[name]().train()
    model.config.use_cache = True
    units = ftkit.shard(model, {"stage": 3, "activations": activations, "debug": True})
    model(input_ids=ids, labels=ids).loss.backward()
    return norm, ftkit.ShardedAdamW(units).grad_norm()


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("name", MODELS)
def test_a_cache_made_in_training_is_left_out(world2, name, activations):
    for plain, ours in world2.run(gradient_norms, name, activations):
        assert ours == pytest.approx(plain, rel=1e-5)


def dtypes_of(name: str) -> set[str]:
    model = runs.t5()
    ftkit.shard(model, {"stage": 3, "dtype": name})
    loss = model(input_ids=torch.ones(1, 4, dtype=torch.int64), labels=torch.ones(1, 4, dtype=torch.int64)).loss
    loss.backward()
    names = ((name.split(".")[-2], p.dtype) for name, p in model.named_parameters())
    return {f"{module}: {dtype}" for module, dtype in names if module in ("wo", "q")}


def test_what_a_family_keeps_in_fp32_stays_so_in_fp16(world2):
    assert world2.run(dtypes_of, "fp16")[0] == {"wo: torch.float32", "q: torch.float16"}
    assert world2.run(dtypes_of, "bf16")[0] == {"wo: torch.bfloat16", "q: torch.bfloat16"}


def begin_apart(stage: int) -> dict[str, torch.Tensor]:
    """Build a model from each rank's own random numbers; return what this rank then has."""
    torch.manual_seed(runs.rank())
    model = transformers.LlamaForCausalLM(runs.llama().config)
    torch.manual_seed(runs.rank())
    model = transformers.LlamaForCausalLM(model.config)
    ftkit.shard(model, {"stage": stage, "dtype": "bf16"})
    ids = torch.ones(1, 4, dtype=torch.int64)
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ranks_that_built_other_weights_begin_with_the_same(world2, stage):
    first, second = world2.run(begin_apart, stage)
    assert torch.equal(first, second)


def on_a_filled_cache() -> None:
    model = runs.llama().train()
    ids = torch.ones(1, 4, dtype=torch.int64)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    ftkit.shard(model, {"stage": 3})
    with pytest.raises(RuntimeError, match="filled key/value cache while gradients are on"):
        model(input_ids=ids, past_key_values=cache, use_cache=True)


def test_training_on_a_prompts_cache_is_refused(world2):
    world2.run(on_a_filled_cache)
