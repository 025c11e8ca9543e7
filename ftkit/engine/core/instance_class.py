"""The seam: a module gets methods of ours by a generated subclass of its own class, under the same name.

Registries, configurations and `isinstance` go by names and bases, so nothing else notices; the class of other modules, and
the instance's parameters, hooks and attributes, stay as they are. FSDP2 does the same.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def specialise(module: nn.Module, **members: Any) -> None:
    """Give `module` a subclass of its class with `members`: methods, properties, class attributes."""
    original = type(module)
    names = {key: getattr(original, key) for key in ("__module__", "__qualname__", "__doc__")}
    make: Any = type(original)
    module.__class__ = make(original.__name__, (original,), {**names, **members})
