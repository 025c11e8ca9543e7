"""Faults of what keeps ranks from waiting in vain."""

from __future__ import annotations

from tests.mutants.fault import fault as _fault

_STILL = "tests/engine/test_standstill.py::"

FAULTS = (
    _fault(
        "numbers and names of collectives are not compared over shared memory",
        "ftkit/engine/comm/shared_stage.py",
        "                comm.differs()\n",
        "                pass\n",
        _STILL + "test_the_blocks_that_ranks_went_to_are_named",
    ),
    _fault(
        "the norm's collective does not compare the ranks' courses",
        "ftkit/engine/comm/communicator.py",
        "            if any(self.world_size * s != f * f for f, s in zip(first, square)):\n",
        "            if any(s != s for s in square):\n",
        _STILL + "test_courses_are_compared_with_the_norm",
    ),
    _fault(
        "a rank that is behind is taken for one that went elsewhere",
        "ftkit/engine/comm/standstill.py",
        "    together = all(stand.waits and stand.still_s >= patience.stuck for stand in stands)\n",
        "    together = all(stand.still_s >= patience.stuck for stand in stands)\n",
        _STILL + "test_who_computes_or_sleeps_is_behind",
    ),
    _fault(
        "a rank that died after others waited gives no verdict",
        "ftkit/engine/comm/standstill.py",
        "        if not stand.ended and seconds > allowed:\n",
        "        if not stand.ended and seconds > 1e9:\n",
        _STILL + "test_who_gives_no_sign_of_life_is_lost",
    ),
    _fault(
        "a rank that ended in order is waited for",
        "ftkit/engine/comm/standstill.py",
        "        if stand.ended and (stand.entered < furthest or (stand.exit and vain)):\n",
        "        if stand.ended and stand.entered < 0:\n",
        _STILL + "test_who_ended_with_less_is_lost",
    ),
    _fault(
        "a stopped rank stays, and its launcher waits for it",
        "ftkit/engine/comm/watchdog.py",
        "                    os.kill(stand.pid, signal.SIGCONT)\n",
        "                    pass\n",
        _STILL + "test_a_stopped_rank_is_named_with_its_place",
    ),
    _fault(
        "a rank that fell is waited for in others' collectives",
        "ftkit/engine/comm/standstill.py",
        "        if stand.ended and (stand.entered < furthest or (stand.exit and vain)):\n",
        "        if stand.ended and stand.entered < furthest:\n",
        _STILL + "test_who_left_its_process_is_told_with_its_error",
    ),
    _fault(
        "the thread outlives its model",
        "ftkit/engine/comm/communicator.py",
        "            weakref.finalize(self, self._watchdog.stop)\n",
        "",
        "tests/test_lifetime.py::test_a_model_that_is_let_go_takes_all_its_memory_along",
    ),
)
