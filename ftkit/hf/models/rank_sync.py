"""Ranks with uneven numbers of forwards of one sharded model, kept in step.

Where weights come block by block, every forward of one rank is a forward of all: each gives its shards. Ranks whose prompts
end at different lengths, or that were given fewer batches, would leave the others waiting, or worse, mix the weights of
different blocks. So in `in_step` every outermost call of the model, or of a model inside it, first meets the other ranks;
and a rank that has done its own goes on meeting them, and calls the same with the least input that gathers the same
weights, until all have done theirs. (transformers' `synced_gpus` lets such a rank go on with its own cache instead, past
the last position that the model has.)

What it refuses: ranks that call different models inside the model at the same time. What it costs: one exchange of a small
integer a call, and the spare calls; nothing where all weights are at hand.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ftkit.engine.core.instance_class import specialise
from ftkit.engine.holding import gathered_bytes
from ftkit.hf.models.sharded_model import ShardedTransformer
from ftkit.hf.models.weight_holding import cache_bytes, held

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call."""

Spare = Callable[[nn.Module, Inputs], Inputs]
"""From a model and the arguments of its last call to those of a call that gathers the same weights."""


def repeat(module: nn.Module, inputs: Inputs) -> Inputs:
    """Call it once more as it was called."""
    return inputs


def one_token(module: nn.Module, inputs: Inputs) -> Inputs:
    """Call a model that generates for one token without a cache; another one (an encoder) as it was called."""
    if not getattr(module, "can_generate", lambda: False)():
        return inputs
    kwargs = inputs[1]
    encoded = kwargs.get("encoder_outputs")
    device = next(module.parameters()).device
    token = torch.zeros((1, 1), dtype=torch.int64, device=device)
    if encoded is not None:
        first = BaseModelOutput(last_hidden_state=encoded[0][:1])
        return (), {"encoder_outputs": first, "decoder_input_ids": token, "use_cache": False}
    config: Any = module.config
    more = {"decoder_input_ids": token} if config.is_encoder_decoder else {}
    return (), {"input_ids": token, **more, "use_cache": False}


class Meeting:
    """The meetings of this rank with the others, before each outermost call.

    Args:
        units: the sharded model.
        spare: makes the arguments of a spare call from those of the last call; see `Spare`.
        stand_in: keyword arguments of a spare call on a rank that has not called the model itself.
    """

    def __init__(self, units: ShardedTransformer, spare: Spare, stand_in: dict[str, Any] | None) -> None:
        self.units = units
        self.spare = spare
        models = [module for module in units.model.modules() if isinstance(module, PreTrainedModel)]
        self.models = list(dict.fromkeys([units.model, *models]))  # PEFT's model is none of transformers
        self.last: dict[int, Inputs] = {}
        self.stand_in = stand_in
        self.done = False

    def tell(self, number: int) -> int:
        """Say which model this rank calls next, counted from 1, or 0 for none; return which one all call, or 0.

        Raises:
            RuntimeError: if the ranks would call different ones; the same on all ranks.
        """
        told = self.units.comm.all_numbers(number, "the next call of each rank")
        called = {other for other in told if other}
        if len(called) > 1:
            names = ", ".join(f"rank {r}: {type(self.models[n - 1]).__name__}" for r, n in enumerate(told) if n)
            raise RuntimeError(
                f"the ranks differ in which part of the model they call next ({names}), and its weights come block by "
                "block: hold them (ftkit.hf.models.weight_holding.held), or let all ranks do the same"
            )
        return called.pop() if called else 0

    def before(self, number: int, module: nn.Module, inputs: Inputs) -> None:
        """Meet the others before an outermost call."""
        if self.units.running.depth == 1 and not self.done:
            self.last[number] = self.spare(module, inputs)
            self.tell(number)

    def finish(self) -> None:
        """Take part in what the others still call."""
        self.done = True
        while number := self.tell(0):
            args, kwargs = self.last.get(number, ((), self.stand_in))
            if kwargs is None:
                name = type(self.models[number - 1]).__name__
                raise RuntimeError(f"this rank never called {name}, which others still call")
            with torch.no_grad():
                self.models[number - 1](*args, **kwargs)


@contextmanager
def in_step(units: ShardedTransformer, spare: Spare = repeat, stand_in: dict[str, Any] | None = None) -> Iterator[None]:
    """Let each rank call the model as often as it likes in the body. A collective: all ranks enter and leave together.

    Args:
        units: the sharded model. Nothing is done where none of its weights have to be gathered, or ranks are in step
            already.
        spare: makes the arguments of the calls that a rank makes after its own; see `Spare`.
        stand_in: keyword arguments of such a call on a rank that has called nothing itself.

    Raises:
        RuntimeError: see `Meeting.tell`.
    """
    if units.transfer.whole is not None or units.in_step:
        yield
        return
    units.freshen()  # by all ranks here: a rank that calls nothing would not take part in it later
    if units.comm.world_size == 1 or not gathered_bytes(units):
        yield
        return
    meeting = Meeting(units, spare, stand_in)
    units.in_step = True

    def hook(number: int) -> Callable[..., None]:
        return lambda module, args, kwargs: meeting.before(number, module, (args, kwargs))

    handles = [
        module.register_forward_pre_hook(hook(number), with_kwargs=True) for number, module in enumerate(meeting.models, 1)
    ]
    try:
        yield
        meeting.finish()
    finally:
        units.in_step = False
        for handle in handles:
            handle.remove()


def let_generate(units: ShardedTransformer) -> None:
    """Let a sharded model's `generate`, which is transformers', hold all weights where they fit; else keep ranks in step.

    All ranks must call it together, each with its own prompts; a rank that has none calls it with any.
    """
    if not gathered_bytes(units):
        return
    for module in units.model.modules():
        if isinstance(module, PreTrainedModel) and module.can_generate():
            _specialise(module, units)


def _specialise(module: PreTrainedModel, units: ShardedTransformer) -> None:
    stock = type(module).generate  # type: ignore[attr-defined]  # of models that can

    def generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("synced_gpus", None)  # asked of the mark that sharded models bear; this keeps them in step itself
        if units.in_step:  # whoever keeps ranks in step has decided about holding, too
            return stock(self, *args, **kwargs, synced_gpus=False)
        beside = _cache_of_call(self, inspect.signature(stock).bind_partial(self, *args, **kwargs))
        with held(units, beside_bytes=beside), in_step(units, one_token):
            return stock(self, *args, **kwargs, synced_gpus=False)

    generate.__doc__ = stock.__doc__
    generate.__signature__ = inspect.signature(stock)  # type: ignore[attr-defined]  # functions may carry one
    specialise(module, generate=generate)


DEFAULT_NEW_TOKENS = 20
"""Length of an answer where neither a call nor the model's settings name one: transformers' own."""


def _cache_of_call(module: PreTrainedModel, call: inspect.BoundArguments) -> int:
    """Return the bytes of the key/value cache of one call of `generate` at its longest, by its arguments and settings."""
    given = {**call.arguments, **call.arguments.get("kwargs", {})}
    settings = given.get("generation_config") or module.generation_config

    def said(name: str) -> Any:
        value = given.get(name)
        return getattr(settings, name, None) if value is None else value

    names = ("inputs", "input_ids", "inputs_embeds", module.main_input_name)
    inputs = next((given[name] for name in names if torch.is_tensor(given.get(name))), None)
    if said("use_cache") is False:
        return 0
    rows, tokens = (inputs.shape[0], inputs.shape[1]) if inputs is not None and inputs.dim() > 1 else (1, 0)
    new = said("max_new_tokens")
    longest = tokens + new if new is not None else max(said("max_length") or tokens + DEFAULT_NEW_TOKENS, tokens)
    return cache_bytes(module, rows * max(said("num_beams") or 1, said("num_return_sequences") or 1), longest)
