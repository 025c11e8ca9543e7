"""The resharded parameter: a placeholder that answers questions about shape and dtype and refuses to be computed with.

While a flat parameter is not gathered, a rank has a part of its values only. The `nn.Parameter` objects of the model keep
their identity, their true shape, dtype and device, and one element of NaN behind them. A NaN alone is not loud enough: a
norm of it is NaN in somebody's log, and a Trainer that filters NaN logs 0.0. So a resharded parameter has another class,
whose `__torch_function__` lets metadata pass and raises `UserError` for every computation, copy, edit and save.

The class is exchanged when weights are gathered and when they go (`nn.Parameter` itself is exchanged in this manner by
`UninitializedParameter`). A gathered parameter is a plain `nn.Parameter`, so that computing with it costs nothing extra.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ftkit.errors import UserError

METADATA = frozenset(
    {
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "names", "name", "itemsize", "nbytes",
        "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "output_nr", "retains_grad", "_base", "_cdata",
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "dim_order",
        "requires_grad_", "register_hook", "get_device", "data_ptr", "has_names",
        "__len__", "__hash__", "result_type", "_has_compatible_shallow_copy_type", "is_tensor",
        "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
        "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided",
    }
)  # fmt: skip
"""Names of properties, methods and functions that read no values. Those that begin with `is_` belong to them too."""
VALUES = frozenset({"is_nonzero", "is_set_to", "is_shared", "is_coalesced"})
"""Names that begin with `is_` and read values or storages."""
OF_THE_PARAMETER = frozenset(
    {
        "device", "get_device", "data_ptr", "result_type", "_has_compatible_shallow_copy_type",
        "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
        "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided",
    }
)  # fmt: skip
"""Names to which a cut answers as its parameter does, and those that begin with `is_` but for these:"""
OF_THE_CUT = frozenset({"is_leaf", "is_inference"})
CASTS = {
    "half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64,
    "cpu": torch.device("cpu"),
}  # fmt: skip


class Guard(Tensor):
    """What a resharded parameter and the tensors cut from it (`.data`, `.detach()`) have in common.

    A cut lies on meta, so that `other.data = parameter.data`, which no class can see, is torch's own error and not a NaN.
    """

    ftkit_name: str = "a parameter"
    ftkit_parameter: Tensor | None = None  # of a cut: what it was cut from
    ftkit_has_gradient: Callable[[], bool] | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer for metadata; raise for anything else.

        Raises:
            UserError: naming the parameter, the operation, and how to read true values.
        """
        kwargs = kwargs or {}
        kind = getattr(func, "__name__", "")
        accessed = kind in ("__get__", "__set__", "__delete__")
        name = func.__self__.__name__ if accessed else kind
        with torch._C.DisableTorchFunctionSubclass():
            if name == "grad" and accessed:
                return _grad(func, kind, args)
            if name in ("data", "detach", "detach_"):
                return _cut(kind, args[0], args[1:])
            if name == "register_post_accumulate_grad_hook":
                raise UserError(
                    f"{args[0].ftkit_name}: the engine takes a gradient as soon as autograd has finished it, so that a "
                    "hook would find .grad None. register_hook gives a hook this rank's gradient; the norm over all ranks "
                    "is the optimizer's grad_norm()"
                )
            if name == "new_tensor" and _first(args[1:], kwargs) is not None:
                raise _refusal(name, _first(args[1:], kwargs))
            if name in METADATA or (name.startswith("is_") and name not in VALUES):
                if name in OF_THE_PARAMETER or (name.startswith("is_") and name not in OF_THE_CUT):
                    args = tuple(map(_uncut, args))
                return func(*args, **kwargs)
            if name in ("__repr__", "__format__", "__str__"):
                return _shown(args[0])
            if name in CASTS or name in ("to", "cuda", "type"):
                return _cast(func, name, args, kwargs)
        raise _refusal(name, _first(args, kwargs))

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]  # torch gives contents
        with torch._C.DisableTorchFunctionSubclass():
            return _shown(self)

    def as_subclass(self, cls: Any) -> Any:
        """Raise: a plain tensor of the placeholder would give NaN."""
        raise _refusal("as_subclass", self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal("pickle", self)

    def __deepcopy__(self, memo: Any) -> Any:
        raise _refusal("deepcopy", self)


class Resharded(Guard, nn.Parameter):
    """A plain `nn.Parameter` while it is resharded."""


@functools.cache
def resharded_class(plain: type) -> type:
    """Return the class of a resharded parameter whose class is `plain` while it is gathered."""
    return Resharded if plain is nn.Parameter else type(plain.__name__, (Guard, plain), {})


def plain_class(parameter: Tensor) -> type:
    """Return the class that a parameter has while it is gathered."""
    kind = type(parameter)
    if not issubclass(kind, Guard):
        return kind
    return nn.Parameter if kind is Resharded else kind.__bases__[1]


def guard(parameter: Tensor, name: str) -> None:
    """Note the name by which a parameter of a sharded model will refuse."""
    parameter.ftkit_name = name  # type: ignore[attr-defined]  # tensors take attributes


def note_gradient(parameter: Tensor, has_gradient: Callable[[], bool]) -> None:
    """Let `parameter.grad` raise while `has_gradient` says that its gradient is in shards."""
    parameter.ftkit_has_gradient = has_gradient  # type: ignore[attr-defined]  # tensors take attributes


def on_gradient(parameter: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Register the engine's own hook for a finished gradient, also on a resharded parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.register_post_accumulate_grad_hook(hook)


def _cut(kind: str, parameter: Tensor, given: tuple[Any, ...]) -> Any:
    """Return `parameter.data` or `parameter.detach()`, which refuse as it does; take back what a cast left as it was."""
    if kind == "__set__":
        if _same_placeholder(parameter, given[0]):
            return None
        raise _refusal("an assignment to .data", parameter)
    own = _uncut(parameter)
    cut = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device="meta").as_subclass(Guard)
    cut.ftkit_name, cut.ftkit_parameter = own.ftkit_name, own
    return cut


def _uncut(value: Any) -> Any:
    """Return the parameter that a cut was cut from, and anything else as it is."""
    return value.ftkit_parameter if isinstance(value, Guard) and value.ftkit_parameter is not None else value


def _same_placeholder(parameter: Tensor, other: Any) -> bool:
    return _uncut(other) is _uncut(parameter) and other.shape == parameter.shape


def _grad(func: Any, kind: str, args: tuple[Any, ...]) -> Any:
    """Read or clear `parameter.grad`: always None here, which a foreign optimizer or a norm would take for no gradient."""
    parameter = _first(args, {})
    if kind == "__set__" and args[1] is not None:
        raise UserError(
            f"{parameter.ftkit_name}: .grad of a resharded parameter cannot be set; gradients are added up in shards"
        )
    has_gradient = parameter.ftkit_has_gradient
    if kind == "__get__" and has_gradient is not None and has_gradient():
        raise UserError(
            f"{parameter.ftkit_name}: its gradient was reduced into shards, and .grad would be None: an optimizer of torch "
            "or torch.nn.utils.clip_grad_norm_ would do nothing. Use ftkit.ShardedAdamW and its clip_grad_norm_ and "
            "grad_norm() (a Trainer's optimizer is one: trainer.sharded_optimizer), or accelerator.prepare(optimizer) and "
            "accelerator.clip_grad_norm_"
        )
    return func(*args)


def _cast(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the parameter for a cast or a move to where it is already.

    Raises:
        UserError: for any other.
    """
    parameter = args[0]
    if name == "type" and len(args) == 1 and not kwargs:
        return func(*args)
    wanted: list[Any] = [CASTS.get(name)]
    if name == "to":
        others = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, Tensor)]
        parsed = torch._C._nn._parse_to(*args[1:], **{k: v for k, v in kwargs.items() if k != "copy"}) if not others else ()
        wanted = [*parsed[:2]] if parsed else [others[0].device, others[0].dtype]
        if kwargs.get("copy"):
            raise _refusal("to(copy=True)", parameter)
    elif name == "cuda":
        wanted = [torch.device("cuda", *(a for a in args[1:2] if isinstance(a, int)))]
    elif name == "type":
        wanted = [args[1] if len(args) > 1 else kwargs.get("dtype")]
    if all(each is None or _is_already(parameter, each) for each in wanted):
        return parameter
    raise _refusal(name, parameter)


def _is_already(parameter: Tensor, wanted: Any) -> bool:
    if isinstance(wanted, torch.device):
        known = _uncut(parameter).device
        return known.type == wanted.type and (known.type == "cpu" or wanted.index in (None, known.index))
    return bool(parameter.dtype == wanted)


def _first(args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the first resharded tensor among the arguments of a function, which may be lists of tensors."""

    def found(values: Iterable[Any]) -> Any:
        for value in values:
            if isinstance(value, Guard):
                return value
            if isinstance(value, (list, tuple)) and (inner := found(value)) is not None:
                return inner
        return None

    return found((*args, *kwargs.values()))


def _shown(parameter: Any) -> str:
    known = f"shape {tuple(parameter.shape)}, {parameter.dtype}, {_uncut(parameter).device}"
    return f"<resharded {parameter.ftkit_name}: {known}; its values are in shards>"


def _refusal(name: str, parameter: Any) -> UserError:
    called = getattr(parameter, "ftkit_name", "a parameter")
    edits = name.endswith("_") and not name.startswith("__")
    advice = (
        "Edit weights before ftkit.shard() or before training begins"
        if edits
        else "Read it on all ranks together: `with ftkit.gathered_parameters(model):` gives every parameter its value, "
        "without gradients. In a loss that needs gradients read `.weight` of an embedding or a head in a Trainer's "
        "compute_loss, or within `ftkit.root_parameters(model)`; for a penalty on weights set weight_decay. A module or "
        "a hook on a module inside a block has its value if it is a parameter of that block. A hook on the block itself is "
        "outside it: put it on a module inside, or set ftkit={'stage': 1}. With ftkit={'stage': 2} weights are whole for "
        "whoever takes no gradient of them. To save, use trainer.save_model() or ftkit.save_model()"
    )
    return UserError(f"{called} is resharded: this rank has a part of its values only, and {name} would need all. {advice}")
