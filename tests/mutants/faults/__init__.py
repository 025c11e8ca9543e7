"""The faults, as data: the broken text, its file, and the tests that must turn red. One module per area defines `FAULTS`.

Each fault is a mistake that a plain run would not show. Its text must occur exactly once in its file. Its tests are the
quickest that notice it; without the fault they must be green.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from tests.mutants.fault import Fault


def collect() -> tuple[Fault, ...]:
    """Return the faults of all modules of this package, modules in alphabetical order."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(fault for name in names for fault in import_module(f"{__name__}.{name}").FAULTS)
