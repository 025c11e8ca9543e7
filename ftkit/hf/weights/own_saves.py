"""The `save_pretrained` of a sharded model and of models inside it (a backbone): it writes no values that are not finite.

At stages 0 to 2 whole weights are at hand and that method works as always; it looks at no values itself.
Where weights are in shards it refuses, or is given a `state_dict`. What it costs: one pass over what was trained.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

from ftkit.engine.checkpoint.finite import refuse_not_finite
from ftkit.engine.core.buffers import persistent_buffers
from ftkit.engine.core.instance_class import specialise
from ftkit.engine.core.placeholder import Placeholder
from ftkit.engine.model import ShardedModel


def look_before_saving(model: nn.Module, units: ShardedModel) -> None:
    """Let each `save_pretrained` of a model and of the models inside it raise UserError for values that are not finite."""
    for each in model.modules():
        _look_before_saving(each, units)


def _look_before_saving(model: nn.Module, units: ShardedModel) -> None:
    own: Any = getattr(type(model), "save_pretrained", None)
    if own is None:
        return

    @functools.wraps(own)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(own).bind(self, *args, **kwargs).arguments
        state, buffers = given.get("state_dict", kwargs.get("state_dict")), persistent_buffers(self)
        if state is None:
            units.be_current()
            trained = {name: p for name, p in self.named_parameters() if p.requires_grad and not isinstance(p, Placeholder)}
            state = {**trained, **buffers}
        for name, tensor in state.items():
            if not isinstance(tensor, Placeholder) and name not in buffers:  # masks may be infinite
                refuse_not_finite(name, tensor.detach().reshape(-1))
        return own(self, *args, **kwargs)

    specialise(model, save_pretrained=save_pretrained)
