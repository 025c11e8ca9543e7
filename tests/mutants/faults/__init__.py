"""The faults, as data: what is broken, where, and the tests that must notice. One module an area; each defines `FAULTS`.

Each is a mistake that somebody could make on a bad day and that a plain run would not show: it trains, only not as it
should. The text that is replaced must be found exactly once in its file, so that a fault cannot quietly stop being
planted. Its tests are the quickest that notice; each of them must be green without the fault.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from tests.mutants.fault import Fault


def collect() -> tuple[Fault, ...]:
    """Return the faults of all modules of this package, modules in alphabetical order."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(fault for name in names for fault in import_module(f"{__name__}.{name}").FAULTS)
