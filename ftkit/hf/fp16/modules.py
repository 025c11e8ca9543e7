"""fp32 modules: the modules of an fp16 model that compute in fp32.

    projection   a linear layer whose product and result are fp32
    part         an attention or MLP that computes in fp32 as a whole, its scores and products included
    stream       a block whose input is cast to fp32, so that its residual sums and all that follows are fp32

fp32 activations stay fp32 by type promotion until they reach a projection. A projection outside an fp32 module casts
its input down to its fp16 weights, so the tensor cores keep their work. Weights stay fp16 and are cast when used. Experts
with fused weights and routers still multiply in fp16.

Cost: fp32 arithmetic in these modules; blocks of a stream keep inputs of twice the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear
from transformers.pytorch_utils import Conv1D

from ftkit.engine.core.instance_class import specialise
from ftkit.engine.core.tensor_tree import put_tensors, take_tensors
from ftkit.errors import UserError
from ftkit.hf.kernels.head import head_loss

LIMIT = 2.0**14
"""Largest magnitude that stays in fp16: a quarter of its range, because activations grow and batches differ."""

PROJECTION, PART, STREAM = "projection", "part", "stream"


@dataclass
class Fp32Modules:
    """The fp32 modules of one model.

    Args:
        found: Module name to kind: PROJECTION, PART or STREAM.
        largest: Module name to the largest magnitude that this run saw there in fp16; inf for an overflow.
        finite: Whether every forward of the last search ended finite.
        overflowed: Name of the first module that overflowed in fp16 in the last search; None without one.
        wide: Modules that compute in fp32, as `apply` chose them.
    """

    found: dict[str, str] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    finite: bool = True
    overflowed: str | None = None
    wide: set[nn.Module] = field(default_factory=set)
    _inputs: dict[nn.Module, str] = field(default_factory=dict)
    _adapted: set[nn.Module] = field(default_factory=set)

    def apply(self, model: nn.Module, found: dict[str, str]) -> None:
        """Let exactly these modules (see `found`) of a model, the same in every call, compute in fp32.

        Each module gets one new forward, which looks up its casts here. So a later call can make a module fp16 again.

        Raises:
            UserError: The model has no module of that name.
        """
        modules = dict(model.named_modules())
        if missing := [name for name in found if name not in modules]:
            raise UserError(f"the checkpoint has an fp32 module {missing[0]!r:.200}; this model has no such part")
        self.found = found
        self._inputs = {modules[name]: kind for name, kind in found.items() if kind != PROJECTION}
        self.wide = {each for name, kind in found.items() if kind != STREAM for each in modules[name].modules()}
        loss = head_loss(model)
        for module in modules.values():
            if loss is not None and module is loss.head:
                loss.wide = module in self.wide  # a chunked loss computes with the head's weight itself
                continue
            if isinstance(module, BaseTunerLayer):  # PEFT would cast the input to the adapter's dtype
                module.cast_input_dtype_enabled = module not in self.wide  # type: ignore[attr-defined]  # set by its init
            casts = _has_matrices(module) or isinstance(module, (nn.LayerNorm, nn.Embedding))
            if (casts or module in self._inputs) and module not in self._adapted:
                specialise(module, forward=self._forward(module))
                self._adapted.add(module)

    def _forward(self, module: nn.Module) -> Callable[..., Any]:
        owner, plain, narrow = self, type(module).forward, _has_matrices(module)

        @wraps(plain)  # the engine reads the signature of a block's forward
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not args:  # called by keyword
                args = tuple(kwargs.pop(key) for key in ("input", "x") if key in kwargs)
            kind, wide = owner._inputs.get(self), self in owner.wide
            if kind is not None:
                args, kwargs = _cast_inputs(args, kwargs, first=kind == STREAM)
            if isinstance(self, nn.LayerNorm) and self.weight is not None and self.weight.dtype != (dtype := args[0].dtype):
                bias = None if self.bias is None else self.bias.to(dtype)
                return layer_norm(args[0], self.normalized_shape, self.weight.to(dtype), bias, self.eps)
            if wide and isinstance(self, nn.Embedding):
                return plain(self, *args).float()  # the position bias of T5's attention
            if wide and isinstance(self, (nn.Linear, Conv1D)):
                weight = self.weight.float() if isinstance(self, nn.Linear) else self.weight.float().T
                return linear(args[0].float(), weight, None if self.bias is None else self.bias.float())
            if narrow and args and args[0].dtype == torch.float32:
                args = (args[0].half(), *args[1:])
            return plain(self, *args, **kwargs)

        return forward

    def describe(self) -> str:
        """Return one line with every fp32 module, and the value that made it one if this run has seen it."""
        if not self.found:
            return f"none: no activation was found beyond {LIMIT:g}, and fp16 holds 65504"
        named = []
        for name, kind in self.found.items():
            largest = self.largest.get(name, 0.0)
            seen = " (overflowed)" if largest == math.inf else f" (reached {largest:.3g})" if largest else ""
            named.append(f"residual sums from {name} on{seen}" if kind == STREAM else f"{name}{seen}")
        return ", ".join(named)


def _has_matrices(module: nn.Module) -> bool:
    """Return whether a module multiplies with fp16 parameters of its own: linear layers, routers, experts."""
    own = [each for each in module._parameters.values() if each is not None and each.dim() > 1]
    return any(each.dtype == torch.float16 for each in own) and not isinstance(module, (nn.Embedding, BaseTunerLayer))


def _cast_inputs(args: Any, kwargs: Any, *, first: bool) -> Any:
    """Return arguments with their fp16 tensors in fp32: all, or only the first floating one, the hidden states."""
    found: list[Tensor] = []
    tree = take_tensors((args, kwargs), found)
    floating = [number for number, each in enumerate(found) if each.is_floating_point()]
    for number in floating[:1] if first else floating:
        found[number] = found[number].float()
    return put_tensors(tree, found)
