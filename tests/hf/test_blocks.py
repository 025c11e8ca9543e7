"""What blocks exchange past their arguments and results: caches, shared keys and values, tensors recorded inside them.

A model may make a cache in training as it does by default; the engine's blocks must not fill it twice: a block that is
recomputed would write its keys into the same cache a second time, and attend to both. What would get no gradient is refused.
"""

from __future__ import annotations

from collections.abc import Callable
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


# --- tensors that pass beside arguments and results


def gemma() -> torch.nn.Module:
    """Return a small Gemma 3n, whose last two blocks take keys and values from earlier ones."""
    torch.manual_seed(3)
    config = transformers.Gemma3nTextConfig(
        vocab_size=families.VOCABULARY,
        vocab_size_per_layer_input=families.VOCABULARY,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
    )
    return transformers.Gemma3nForCausalLM(config)


def mixtral() -> torch.nn.Module:
    """Return a small Mixtral."""
    torch.manual_seed(3)
    config = transformers.MixtralConfig(
        vocab_size=runs.VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        router_aux_loss_coef=0.5,
        attn_implementation="eager",
    )
    return transformers.MixtralForCausalLM(config)


RECOMPUTED = {"stage": 0, "activations": "recompute"}
KEPT = {"stage": 1, "activations": "keep"}
CUT = [  # (ranks, settings) under which blocks are not run by plain autograd
    (2, RECOMPUTED),
    (2, {"stage": 3, "activations": "keep"}),
]
WHOLE = [(2, KEPT), (1, {"stage": 3, "activations": "keep"})]


def routed() -> torch.nn.Module:
    """Return the Mixtral with its router loss on, as its configuration asks."""
    model = mixtral()
    model.config.output_router_logits = True
    return model


def norm_of(make: Callable[[], torch.nn.Module], settings: dict | None) -> float:
    """Return the gradient norm of one batch, in plain PyTorch or on the engine."""
    ids = torch.randint(3, families.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    model = make().train()
    units = ftkit.shard(model, settings) if settings else None
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    if units is not None:
        return ftkit.ShardedAdamW(units).grad_norm()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()


def refused(make: Callable[[], torch.nn.Module], settings: dict, words: str) -> None:
    """A case for a world: a model that is refused with these words."""
    with pytest.raises(ftkit.UserError, match=words):
        ftkit.shard(make().train(), settings)


@pytest.mark.parametrize("ranks, settings", CUT)
@pytest.mark.parametrize("make, words", [(gemma, "num_kv_shared_layers=2"), (routed, "output_router_logits")])
def test_what_passes_beside_results_is_refused_where_it_would_get_no_gradient(make, words, ranks, settings, worlds):
    worlds[ranks].run(refused, make, settings, words + r".* set ftkit=\{'stage': 1, 'activations': 'keep'\}")


@pytest.mark.parametrize("ranks, settings", WHOLE)
@pytest.mark.parametrize("make", [gemma, routed])
def test_what_passes_beside_results_trains_by_plain_autograd(make, ranks, settings, worlds):
    for ours in worlds[ranks].run(norm_of, make, settings):
        assert ours == pytest.approx(norm_of(make, None), rel=1e-5)


def test_a_router_loss_trains_as_in_the_stock_trainer(world1, stock, tmp_path):
    run = runs.Run(model=routed, arguments={"num_train_epochs": 2}, ftkit=KEPT)
    ours = world1.run(runs.train, "ours", str(tmp_path), run)[0]
    assert len(ours.column("loss")) >= 10
    runs.assert_same_history(ours, stock(run))
    runs.assert_same_weights(ours.weights, stock(run).weights)
