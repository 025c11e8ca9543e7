"""Placeholders: the parameters of a sharded model while their values are in shards.

The `nn.Parameter` objects of the model stay where they are. While a parameter is resharded, its shape, dtype and device
are still true, its storage is a single NaN, and its class is a subclass that answers for metadata and raises for every
computation. A NaN alone would not be noticed: a Trainer that filters NaN logs a loss of 0. While the parameter is
gathered it is a plain `nn.Parameter`, so that computing with it costs nothing extra.

The engine also collects gradients, so `.grad` is None after backward. Code that would take this for "no gradient"
(`torch.nn.utils.clip_grad_norm_`, an optimizer of torch) gets an error instead: see `GradGuard`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from ftkit.errors import UserError

METADATA = frozenset(
    {
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "names", "name", "itemsize", "nbytes",
        "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "output_nr", "retains_grad", "_base", "_cdata",
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "dim_order",
        "requires_grad_", "register_hook", "get_device", "data_ptr", "has_names", "__len__", "__hash__", "result_type",
        "_has_compatible_shallow_copy_type", "grad",
        "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
        "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided",
    }
)  # fmt: skip
"""Names of properties, methods and functions that read no values. Names that begin with `is_` do not either, except:"""
VALUES = frozenset({"is_nonzero", "is_set_to", "is_shared", "is_coalesced"})
_GRAD: Any = Tensor.grad


class GradGuard:
    """Makes `.grad` of a parameter raise while the engine has its gradient. Added to the class of trained parameters."""

    ftkit_collected: ClassVar[Callable[[Any], bool]]

    @property
    def grad(self) -> Any:
        """The gradient while autograd has it, else None.

        Raises:
            UserError: The engine has it.
        """
        with torch._C.DisableTorchFunctionSubclass():
            own = _GRAD.__get__(self)
        if own is None and self.ftkit_collected():
            raise UserError(_COLLECTED)
        return own

    @grad.setter
    def grad(self, value: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self, value)


_COLLECTED = (
    "the gradient of a sharded model's parameter is in ftkit's engine; .grad would be None, and torch.nn.utils."
    "clip_grad_norm_ or an optimizer of torch would do nothing. Use clip_grad_norm_() and grad_norm() of the sharded "
    "optimizer (trainer.sharded_optimizer), or accelerator.clip_grad_norm_()"
)


class Placeholder(Tensor):
    """Answers for metadata and raises for everything else. Added to a parameter's class while it is resharded."""

    ftkit_name: str = "a parameter"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer for metadata.

        Raises:
            UserError: For any other operation; names the parameter and how to read its value.
        """
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        accessed = name in ("__get__", "__set__", "__delete__")
        if accessed:
            name = func.__self__.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name in METADATA or (name.startswith("is_") and name not in VALUES):
                return func(*args, **kwargs)
            if name in ("data", "detach"):
                return _detached(args[0], args[1:])
            if name in ("__repr__", "__format__", "__str__"):
                return _shown(args[0])
            if name in ("to", "float", "half", "bfloat16", "cpu", "cuda") and _changes_nothing(func, args, kwargs):
                return args[0]
        raise _refusal(name, _first((*args, *kwargs.values())))

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]  # torch gives contents
        with torch._C.DisableTorchFunctionSubclass():
            return _shown(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal("pickle", self)

    def __deepcopy__(self, memo: Any) -> Any:
        raise _refusal("deepcopy", self)


@cache
def placeholder_class(plain: type) -> type:
    """Return the class of a resharded parameter whose class is `plain` while it is gathered."""
    return type(plain.__name__, (Placeholder, plain), {})


def guarded_class(plain: type, collected: Callable[[Any], bool]) -> type:
    """Return a subclass of `plain` whose `.grad` raises for a parameter that `collected` returns true for."""
    return type(plain.__name__, (GradGuard, plain), {"__module__": plain.__module__, "ftkit_collected": collected})


def absent(parameter: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a tensor of a parameter's shape without values: one NaN, expanded with a stride of 0 in every dimension."""
    return torch.full((), math.nan, dtype=dtype, device=device).as_strided(parameter.shape, (0,) * parameter.dim())


def is_absent(parameter: Tensor) -> bool:
    """Return whether a tensor of one or more dimensions has no values: it is on meta, or was made by `absent`."""
    return parameter.is_meta or (parameter.dim() > 0 and parameter.numel() > 0 and not any(parameter.stride()))


def on_gradient(parameter: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Register the engine's hook for a finished gradient, also on a placeholder."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.register_post_accumulate_grad_hook(hook)


def _detached(parameter: Any, given: tuple[Any, ...]) -> Any:
    """Return `parameter.data` or `parameter.detach()`, a placeholder like the parameter; take back only its own."""
    if given:
        if isinstance(given[0], Placeholder) and given[0].shape == parameter.shape:
            return None
        raise _refusal("an assignment to .data", parameter)
    detached = Tensor.detach(parameter).as_subclass(Placeholder)
    detached.ftkit_name = parameter.ftkit_name
    return detached


def _changes_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a cast or move of the parameter would return it as it is. Tries it on the one element behind it."""
    element = Tensor.as_strided(args[0], (), ())
    return bool(func(element, *args[1:], **kwargs) is element)


def _first(values: Iterable[Any]) -> Any:
    """Return the first placeholder among an operation's arguments, also inside lists of tensors."""
    for value in values:
        if isinstance(value, Placeholder):
            return value
        if isinstance(value, (list, tuple)) and (inner := _first(value)) is not None:
            return inner
    return None


def _shown(parameter: Any) -> str:
    return f"<resharded {parameter.ftkit_name}: shape {tuple(parameter.shape)}, {parameter.dtype}, {parameter.device}>"


def _refusal(operation: str, parameter: Any) -> UserError:
    return UserError(
        f"{getattr(parameter, 'ftkit_name', 'a parameter')} is resharded: this rank has a shard of its values, and "
        f"{operation} needs all. To read values, use `with ftkit.gathered_parameters(model):` on all ranks; to use an "
        "embedding or a head in a loss, `with ftkit.root_parameters(model):`; to save, trainer.save_model() or "
        "ftkit.save_model(). Edit weights before ftkit.shard(). With ftkit={'stage': 2} every rank has all weights"
    )
