"""What goes when a model goes: its shards, its shared memory, its threads. A notebook makes many, one after another."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.memory.tiers import Tiers
from ftkit.engine.model import ShardedModel
from ftkit.spec.strategy import Strategy
from tests.engine.trajectory import Row, run_sharded
from tests.jobs import job, recipe
from tests.worlds import Worlds

ROWS = [
    Row("llama", world=2),
    Row("llama", world=2, stage=1, groups=2),
    Row("llama", world=2, stage=2, activations="keep", gradients="host", state="host"),
    Row("llama", world=2, activations="keep", reshard_after_forward=False, accumulation=2),
    Row(
        "llama",
        world=2,
        parameters="nvme",
        gradients="nvme",
        state="nvme",
        activation_offload="nvme",
        deferred=True,
        debug=True,
    ),
    Row("gpt2", world=2, activation_offload="host", parts=2),
    Row("t5", world=2),
]


def left_over() -> dict[str, int]:
    """Return what of the engine this process still holds, once garbage was collected."""
    gc.collect()
    found = [type(each).__name__ for each in gc.get_objects() if type(each) in (Communicator, FlatParameter, ShardedModel)]
    found += ["shared memory" for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:ftkit" in line]
    found += [thread.name for thread in threading.enumerate() if thread.name.startswith("ftkit")]
    return {name: found.count(name) for name in set(found)}


def trained(row: Row) -> dict[str, int]:
    """Train on the engine and let everything go; return what is left on this rank."""
    run_sharded(row, steps=2)
    return left_over()


def job_done(text: str) -> dict[str, int]:
    """Run a recipe and let everything go; return what is left on this rank."""
    job(text, (), None)
    return left_over()


@pytest.mark.quick(4)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_model_that_is_let_go_takes_all_its_memory_along(row: Row, worlds: Worlds):
    before = worlds[row.world].run(left_over)  # of other tests that ran in this world
    assert worlds[row.world].run(trained, row) == before


def test_a_job_that_is_done_takes_all_its_memory_along(home: Path, worlds: Worlds, tmp_path: Path):
    before = worlds[2].run(left_over)
    assert worlds[2].run(job_done, recipe(home, str(tmp_path / "run"))) == before


def test_what_is_counted_is_there_while_a_model_is(worlds: Worlds):
    assert worlds[2].run(_counted) == [{"Communicator": 1, "shared memory": 1, "ftkit-control_0": 1}] * 2


def _counted() -> dict[str, int]:
    before = left_over()
    comm = Communicator(torch.device("cpu"))
    reference, worker = weakref.ref(comm), Tiers(comm.device, Strategy.of()).worker("ftkit-control")
    worker.submit(int).result()
    now = left_over()
    worker.shutdown()
    assert reference() is comm
    return {name: count - before.get(name, 0) for name, count in now.items() if count != before.get(name, 0)}
