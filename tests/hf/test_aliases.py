"""An alias of a trained weight is refused wherever the model holds it, and told where only a script does."""

from __future__ import annotations

import collections
import functools
import gc
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ftkit
from ftkit.errors import UserError
from tests.hf import runs

STAGE3 = {"stage": 3, "activations": "recompute", "affinity": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    path = tmp_path_factory.mktemp("model")
    narrow().save_pretrained(path)
    return str(path)


def narrow() -> Any:
    return runs.llama(num_hidden_layers=2, hidden_size=16, intermediate_size=24)


def weight(model: Any) -> torch.Tensor:
    return model.lm_head.weight.detach()


def reads(model: Any, get: Callable[[], torch.Tensor]) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda module, given, result: result + get().mean())


def closure(model: Any) -> None:
    old = weight(model)
    reads(model, lambda: old)


def default(model: Any) -> None:
    old = weight(model)

    def hook(module: Any, given: Any, result: Any, old: Any = old) -> Any:
        return result + old.mean()

    model.model.norm.register_forward_hook(hook)


def partial_hook(model: Any) -> None:
    hook = functools.partial(lambda old, module, given, result: result + old.mean(), weight(model))
    model.model.norm.register_forward_hook(hook)


def replaced_forward(model: Any) -> None:
    old, forward = weight(model), model.model.norm.forward
    model.model.norm.forward = lambda given: forward(given) + old.mean()


def method(model: Any) -> None:
    class Adds:
        def __init__(self, old: Any) -> None:
            self.old = old

        def __call__(self, module: Any, given: Any, result: Any) -> Any:
            return result + self.old.mean()

    model.model.norm.register_forward_hook(Adds(weight(model)).__call__)


def in_objects(model: Any) -> None:
    model.kept = types.SimpleNamespace(inner=types.SimpleNamespace(row=weight(model)[2]))


def slots(model: Any) -> None:
    class Slots:
        __slots__ = ("old",)

    model.kept = Slots()
    model.kept.old = weight(model)


def in_deque(model: Any) -> None:
    model.kept = collections.deque([weight(model)])


def deep(model: Any) -> None:
    model.kept = [[[[[[{"old": weight(model)}]]]]]]


def on_another_parameter(model: Any) -> None:
    model.model.norm.weight.twin = weight(model)


def in_the_configuration(model: Any) -> None:
    model.config.reference = weight(model)


def unregistered_module(model: Any) -> None:
    other = nn.Linear(16, 97, bias=False)
    other.weight = nn.Parameter(model.lm_head.weight.data)
    object.__setattr__(model, "other", other)


def array(model: Any) -> None:
    old = weight(model).numpy()
    reads(model, lambda: torch.from_numpy(old))


def made_of_an_array(model: Any) -> None:
    values = torch.randn(97, 16).numpy()
    model.lm_head.weight = nn.Parameter(torch.from_numpy(values))
    model.values = values


def rows(model: Any) -> None:
    old = weight(model)[3:5]
    reads(model, lambda: old)


def hook_on_the_gradient(model: Any) -> None:
    old = weight(model)
    model.lm_head.weight.register_hook(lambda gradient: gradient + old)


def generator(model: Any) -> None:
    def means() -> Any:
        old = weight(model)
        while True:
            yield old.mean()

    running = means()
    next(running)
    reads(model, lambda: next(running))


OLD: Any = None


def global_variable(model: Any) -> None:
    global OLD
    OLD = weight(model)
    reads(model, lambda: OLD)


HELD = [
    closure,
    default,
    partial_hook,
    replaced_forward,
    method,
    in_objects,
    slots,
    in_deque,
    deep,
    on_another_parameter,
    in_the_configuration,
    unregistered_module,
    array,
    made_of_an_array,
    rows,
    hook_on_the_gradient,
    generator,
    global_variable,
]


@pytest.mark.parametrize("hold", HELD)
def test_an_alias_that_the_model_holds_is_refused(hold, folder):
    model = ftkit.load_model(folder)
    hold(model)
    with pytest.raises(UserError, match=r"shares memory with the parameter lm_head\.weight, which trains"):
        ftkit.shard(model, STAGE3)


def test_an_alias_of_a_model_in_memory_is_refused():
    model = narrow()
    closure(model)
    with pytest.raises(UserError, match=r"a hook of model\.layers\.1\.mlp shares memory with the parameter lm_head\.weight"):
        ftkit.shard(model, STAGE3)


def test_an_alias_that_only_a_script_holds_is_told(caplog):
    model = narrow()
    state = model.state_dict()
    ftkit.shard(model, STAGE3)
    assert "lm_head.weight (a tensor of shape (97, 16)) outside of the model shares memory with" in caplog.text
    del state


def test_copies_and_parameters_themselves_are_no_aliases(caplog):
    model = narrow()
    copy, itself, own = weight(model).clone(), model.lm_head.weight, model.model.norm
    model.model.norm.kept = [copy, itself]
    reads(model, lambda: copy)
    object.__setattr__(model, "other", own)
    ring: list[Any] = [weight(model)]
    ring.append(ring)  # garbage that only the collector finds
    gc.disable()
    try:
        del ring
        ftkit.shard(model, STAGE3)
    finally:
        gc.enable()
    assert "shares memory" not in caplog.text


def test_frozen_weights_may_have_aliases(caplog):
    model = narrow()
    model.lm_head.weight.requires_grad_(False)
    closure(model)
    ftkit.shard(model, STAGE3)
    assert "shares memory" not in caplog.text
