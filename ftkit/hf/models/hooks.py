"""Whose hooks are on a module: those of the libraries are known, any other may read or change what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

LIBRARIES = frozenset({"ftkit", "torch", "transformers", "peft", "accelerate"})
AFTER = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps the hooks that see what it returns, or gradients of it."""
EVERY = (*AFTER, "_forward_pre_hooks")


def hooks_on(
    module: nn.Module, kinds: tuple[str, ...] = AFTER, libraries: frozenset[str] = LIBRARIES
) -> list[Callable[..., Any]]:
    """Return the hooks of these kinds that belong to no library: of a user, or of something that ftkit does not know."""
    found = [hook for kind in kinds for hook in vars(module).get(kind, {}).values()]
    return [hook for hook in found if home_of(hook).partition(".")[0] not in libraries]


def has_hooks(module: nn.Module) -> bool:
    """Return whether any hook, anybody's, is on the calls of a module."""
    return any(vars(module).get(kind) for kind in EVERY)


def has_global_hooks() -> bool:
    """Return whether hooks are on the calls of all modules (torch's register_module_forward_hook and its like)."""
    return any(vars(torch_module).get(f"_global{kind}") for kind in EVERY)


def home_of(function: Any) -> str:
    """Return the name of the module in which the code of a function, or of a callable object's class, was written.

    What `functools.wraps` copies from the function that is wrapped does not count. Of a user's function in a library's
    decorator (`torch.no_grad()`) it is the user's, and of a library's in a user's likewise.
    """
    homes = [_written_in(each) for each in _unwrapped(function)]
    return next((home for home in homes if home.partition(".")[0] not in LIBRARIES), homes[0])


def _unwrapped(function: Any) -> Iterator[Any]:
    """Yield a function, and those that it wraps, from the outside in."""
    while function is not None:
        while isinstance(function, partial):
            function = function.func
        function = getattr(function, "__func__", function)  # of a bound method
        yield function
        function = vars(function).get("__wrapped__") if isinstance(function, FunctionType) else None


def _written_in(function: Any) -> str:
    if isinstance(function, FunctionType):
        return str(function.__globals__.get("__name__"))
    return str(getattr(function, "__module__", None) or type(function).__module__)


def name_of(function: Any) -> str:
    """Return how to call a function in a message."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)
