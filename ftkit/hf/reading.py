"""Reading the weights of a sharded model: for a user's callback, penalty or loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ftkit.engine.holding import gathered
from ftkit.engine.model import ShardedModel
from ftkit.errors import UserError
from ftkit.hf.sharding import units_of


@contextmanager
def gathered_parameters(model: nn.Module) -> Iterator[None]:
    """Give every parameter of a sharded model its value in the body, without gradients: for norms, averages, copies.

    A collective: all ranks enter and leave it, also those that do nothing with the values (a callback that writes on rank 0
    tests for rank 0 inside). The shards do not receive edits.

    Raises:
        UserError: The model is not sharded; at the end, a value was edited.

    Cost: the bytes of all weights in the compute dtype on every rank's device; one all-gather per flat parameter.
    """
    with gathered(_units(model)):
        yield


@contextmanager
def root_parameters(model: nn.Module) -> Iterator[None]:
    """Give embeddings and heads their values in the body, with gradients, outside the model's own calls.

    `model.lm_head.weight`, read as an attribute of its module, is gathered at each read; its gradient is reduced in
    backward. A Trainer does so in `training_step` and `prediction_step`. Each read is a collective: all ranks make the
    same reads.

    Raises:
        UserError: The model is not sharded.

    Cost: per read, the bytes of the parameter on every rank and one all-gather; one reduce-scatter in backward.
    """
    with _units(model).read_by_all():
        yield


@contextmanager
def read_by_all(owner: Any) -> Iterator[None]:
    """Give root parameters their values in the body, for each sharded model that is an attribute of `owner`."""
    with ExitStack() as stack:
        for model in dict.fromkeys(value for value in vars(owner).values() if isinstance(value, nn.Module)):
            units = units_of(model)
            if units is not None:
                stack.enter_context(units.read_by_all())
        yield


def _units(model: nn.Module) -> ShardedModel:
    units = units_of(model)
    if units is None:
        raise UserError(f"{type(model).__name__} is not sharded: its parameters have their values as they are")
    return units
