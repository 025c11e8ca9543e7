"""Faults of what keeps ranks from waiting in vain."""

from __future__ import annotations

from tests.mutants.fault import fault as _fault

FAULTS = (
    _fault(
        "the norm's collective does not compare the ranks' courses",
        "ftkit/engine/comm/communicator.py",
        "            if any(self.world_size * s != f * f for f, s in zip(first, square)):\n",
        "            if any(s != s for s in square):\n",
        "tests/engine/test_comm.py::test_the_norm_compares_the_order_of_collectives",
    ),
    _fault(
        "the thread outlives its model",
        "ftkit/engine/comm/communicator.py",
        "            weakref.finalize(self, self._watchdog.stop)\n",
        "",
        "tests/test_lifetime.py::test_a_model_that_is_let_go_takes_all_its_memory_along",
    ),
)
