"""Let ranks call one sharded model different numbers of times.

At stage 3 each forward gathers weights from all ranks, so all ranks must make the same forwards. Ranks that generate stop at
different lengths. In `in_step` the ranks agree before each outermost forward. A rank that has finished repeats the forwards
of the others with one token, until all ranks have finished. transformers' `synced_gpus` does the same, but continues with
the rank's own sequence, which may exceed the learned positions of the model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ftkit.engine.core.instance_class import specialise
from ftkit.engine.holding import gathered_bytes
from ftkit.hf.generate.holding import cache_bytes, holding
from ftkit.hf.sharded_model import ShardedTransformer

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a forward."""

DEFAULT_NEW_TOKENS = 20
"""Length of an answer in transformers if neither the call nor the model names one."""


def one_token(module: nn.Module, inputs: Inputs) -> Inputs:
    """Return the inputs of a forward that gathers the same weights for one token. An encoder keeps its inputs."""
    if not isinstance(module, PreTrainedModel) or not module.can_generate():
        return inputs
    token = torch.zeros((1, 1), dtype=torch.int64, device=module.device)
    encoded = inputs[1].get("encoder_outputs")
    if encoded is not None:
        first = BaseModelOutput(last_hidden_state=encoded[0][:1])
        return (), {"encoder_outputs": first, "decoder_input_ids": token, "use_cache": False}
    names = ["input_ids", "decoder_input_ids"] if module.config.is_encoder_decoder else ["input_ids"]
    return (), {**dict.fromkeys(names, token), "use_cache": False}


class _Forwards:
    """The outermost forwards of a model, and of each transformers model inside it, in step with the other ranks."""

    def __init__(self, units: ShardedTransformer) -> None:
        inner = [module for module in units.model.modules() if isinstance(module, PreTrainedModel)]
        self.models = list(dict.fromkeys([units.model, *inner]))  # a PeftModel is no PreTrainedModel
        self.units = units
        self.last: dict[int, Inputs] = {}

    def agree(self, number: int) -> int:
        """Exchange the numbers of the models that the ranks call next, from 1; 0 means finished. Return the common one."""
        numbers = self.units.comm.all_numbers(number, "the next forward of each rank")
        called = {other for other in numbers if other}
        if len(called) > 1:
            names = ", ".join(f"rank {r}: {type(self.models[n - 1]).__name__}" for r, n in enumerate(numbers) if n)
            raise RuntimeError(
                f"the ranks call different parts of the model next ({names}), and its weights are gathered block by block. "
                "Gather all weights first (ftkit.hf.generate.holding.holding), or call the same part on all ranks"
            )
        return called.pop() if called else 0

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.units.running.depth == 1:
            number = self.models.index(module) + 1
            self.last[number] = one_token(module, (args, kwargs))
            self.agree(number)

    def finish(self) -> None:
        while number := self.agree(0):
            args, kwargs = self.last[number]
            with torch.no_grad():
                self.models[number - 1](*args, **kwargs)


@contextmanager
def in_step(units: ShardedTransformer | None) -> Iterator[None]:
    """Let each rank call the model as often as it needs in the body. A collective: all ranks enter and leave together.

    Each rank must call the model at least once. Nothing is done if no weights must be gathered.

    Raises:
        RuntimeError: The ranks call different models inside the model at the same time. The same on all ranks.

    Cost: one exchange of an integer per forward, and the forwards of one token.
    """
    if units is None or units.in_step or units.transfer.whole is not None or not gathered_bytes(units):
        yield
        return
    forwards = _Forwards(units)
    handles = [module.register_forward_pre_hook(forwards.before, with_kwargs=True) for module in forwards.models]
    units.in_step = True
    try:
        yield
    finally:
        units.in_step = False
        for handle in handles:
            handle.remove()
    forwards.finish()


def let_generate(units: ShardedTransformer) -> None:
    """Let `generate` of a sharded model gather all weights if they fit, and keep the ranks in step if they do not.

    All ranks must call `generate` together, each with prompts of its own.
    """
    if not gathered_bytes(units):
        return
    for module in units.model.modules():
        if isinstance(module, PreTrainedModel) and module.can_generate():
            _specialise(module, units)


def _specialise(module: PreTrainedModel, units: ShardedTransformer) -> None:
    stock = type(module).generate  # type: ignore[attr-defined]  # of models that can generate

    @functools.wraps(stock)
    def generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if units.in_step:
            return stock(self, *args, **kwargs)
        with holding(units, "auto", _cache_of_call(self, args, kwargs)), in_step(units):
            return stock(self, *args, **kwargs)

    specialise(module, generate=generate)


def _cache_of_call(module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return an upper estimate of the key/value cache of one call of `generate`, bytes."""
    settings = kwargs.get("generation_config") or module.generation_config

    def setting(*names: str) -> int:
        return next((n for where in (kwargs.get, vars(settings).get) for name in names if (n := where(name))), 0)

    rows, tokens = next((value.shape[:2] for value in (*args, *kwargs.values()) if torch.is_tensor(value)), (1, 0))
    new = setting("max_new_tokens", "max_length") or DEFAULT_NEW_TOKENS
    return cache_bytes(module, rows * max(setting("num_beams", "num_return_sequences"), 1), tokens + new)
