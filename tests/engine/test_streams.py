"""The order of all accesses to memory, as CUDA's streams would allow them, and what threads do on a device.

The rows of `test_trajectory` and `test_tiers` run on recording streams (recorder.py): no access without an order, and the
same trajectory as plain PyTorch. So does a life with evaluation, checkpoints, gathered weights and unused gathers.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ftkit.engine import streams as engine_streams
from ftkit.engine.checkpoint.loading import load_checkpoint
from ftkit.engine.checkpoint.saving import Saving
from ftkit.engine.holding import gathered
from ftkit.engine.memory import tiers as tiers_module
from ftkit.engine.memory.tiers import Tiers
from ftkit.engine.model import ShardedModel
from ftkit.engine.optim import updater
from ftkit.engine.streams import CudaStreams, Streams
from tests.engine import families
from tests.engine.recorder import RecordingCommunicator, RecordingStreams
from tests.engine.test_tiers import EVERYTHING, KINDS, LOWER_STAGES
from tests.engine.test_tiers import ROWS as TIER_ROWS
from tests.engine.test_trajectory import ADAMW_ROWS, SGD_ROWS
from tests.engine.trajectory import (
    OURS,
    Record,
    Row,
    differences,
    groups_of,
    plain,
    run_sharded,
    same_on_all_ranks,
    shard_model,
)
from tests.worlds import PATIENCE

STEPS = 3
PIECE_NUMEL = 4096
DEVICE = torch.device("cuda", 3)
ROWS = [r for r in TIER_ROWS + LOWER_STAGES + EVERYTHING + ADAMW_ROWS + SGD_ROWS if not r.strategy.problem(cpu=False)]


def recording(row: Row) -> tuple[RecordingStreams, dict[str, Any]]:
    """Return recording streams, and the arguments of `shard` with which a model uses them."""
    streams, strategy = RecordingStreams(), row.strategy
    comm = RecordingCommunicator(streams)
    folder = tempfile.mkdtemp(prefix="ftkit-nvme-") if strategy.uses_nvme else None
    tiers = Tiers.open(comm, strategy, folder, streams)
    return streams, {"comm": comm, "tiers": tiers, "host_loops": streams.loops}


@contextmanager
def small_pieces(row: Row) -> Iterator[None]:
    """Update small pieces, so that a step has more of them than there are slots. Scales of 8-bit moments fill pages."""
    numel = PIECE_NUMEL * (32 if row.optimizer == "adamw_8bit" else 1)
    with mock.patch.object(updater, "PIECE_NUMEL", numel), mock.patch.object(tiers_module, "PIECE_NUMEL", numel):
        yield


def recorded(row: Row) -> Record:
    """Case: the run on recording streams."""
    streams, settings = recording(row)
    with streams.recording(), small_pieces(row):
        return run_sharded(row, steps=STEPS, **settings)


@pytest.mark.quick(6)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_access_has_an_order(worlds, row):
    records = worlds[row.world].run(recorded, row)
    assert same_on_all_ranks(records)
    assert differences(records[0], plain(row.plain, STEPS)) == []


def life(row: Row, folder: str) -> tuple[list[float], list[float]]:
    """Case: losses of a training with all that may happen between steps; and of the same without it."""
    streams, settings = recording(row)
    with streams.recording(), small_pieces(row):
        found = _train(row, folder, **settings)
    return found, _train(row, None)


def interrupted(units: ShardedModel, block: int, rows: dict[str, Tensor], *, backward: bool = False) -> None:
    """Run a forward or a backward that ends with an error in a block. What has come for later is not used."""
    inner = next(module for module in units.units[block].module.modules() if isinstance(module, torch.nn.Linear))
    register = inner.register_full_backward_pre_hook if backward else inner.register_forward_pre_hook
    handle = register(mock.Mock(side_effect=InterruptedError))
    with suppress(InterruptedError):
        families.token_loss(units.model, rows, 1).backward()
        raise AssertionError("nothing was interrupted")
    handle.remove()


def _train(row: Row, folder: str | None, **settings: Any) -> list[float]:
    units = shard_model(families.build(row.family), row.strategy, **settings)
    optimizer = OURS[row.optimizer](units, groups_of(units.model, row))
    losses, saving = [], None
    for step in range(5):
        rows = families.batch(row.family, step)
        if folder is not None:
            with torch.no_grad():
                families.token_loss(units.model, rows, 1)
            if step == 1:
                families.token_loss(units.model, rows, 1)  # a forward whose backward never runs
                for block, backward in ((1, False), (-1, False), (1, True)):
                    optimizer.zero_grad()
                    interrupted(units, block, rows, backward=backward)
                optimizer.zero_grad()
                with units.last_backward():
                    families.token_loss(units.model, rows, 1).backward()
                optimizer.zero_grad()  # the step is left out
                saving = Saving(f"{folder}/during", units, optimizer)
            if step == 2:
                units.freshen()
                with gathered(units):
                    families.token_loss(units.model, rows, 1)
            if step == 3:
                optimizer.settle()
                load_checkpoint(f"{folder}/again", units, optimizer)
                Saving(f"{folder}/loaded", units, optimizer).wait()
        loss = families.token_loss(units.model, rows, families.label_tokens(rows))
        loss.backward()
        if folder is not None and step == 2:
            interrupted(units, 1, rows)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(units.comm.sum(loss.detach().clone()).item())
        if folder is not None and step == 2:
            assert saving is not None
            saving.wait()
            Saving(f"{folder}/again", units, optimizer).wait()
    units.state_dict()
    units.tiers.close()
    return losses


PLACES: list[dict[str, Any]] = [dict.fromkeys(KINDS, tier) for tier in ("device", "host", "nvme")]
LIVES = [
    *(Row("llama", **places) for places in PLACES),
    *(Row("llama", 2, deferred=True, **places) for places in PLACES),
    *(Row("llama", 2, stage, deferred=True, state=state) for stage, state in ((0, "device"), (1, "device"), (2, "host"))),
    Row("llama", 2, reshard_after_forward=False, deferred=True, state="host"),
    Row("llama", activation_offload="host"),
]


SPLIT = (("master", "split"), ("dtype", "bf16"))
SMALLER_STATES = [Row("llama", 2, deferred=True, optimizer="adamw_8bit", changes=SPLIT, **places) for places in PLACES[1:]]


@pytest.mark.quick(2)
@pytest.mark.parametrize("row", LIVES, ids=str)
def test_a_life_has_an_order(worlds, row, tmp_path):
    for found, expected in worlds[row.world].run(life, row, str(tmp_path)):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("row", SMALLER_STATES, ids=str)
def test_so_has_a_life_with_smaller_states(worlds, row, tmp_path):
    for found, expected in worlds[row.world].run(life, row, str(tmp_path)):
        assert found == pytest.approx(expected, rel=1e-5)


# --- the checker


def on_two_streams(streams: RecordingStreams, first: Callable[[], Any], second: Callable[[], Any], ordered: bool) -> None:
    with streams.up.run():
        first()
    if ordered:
        streams.up.mark().wait()
    second()


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("kind", ["read after write", "write after read", "write after write"])
def test_the_checker_finds_accesses_without_an_order(kind, ordered):
    streams = RecordingStreams()
    tensor, other = torch.zeros(8), torch.zeros(8)
    actions = {"read": lambda: other.add(tensor), "write": lambda: tensor.add_(1)}
    second, _, first = kind.split()

    def run() -> None:
        with streams.recording():
            on_two_streams(streams, actions[first], actions[second], ordered)

    if ordered:
        run()
    else:
        with pytest.raises(AssertionError, match=kind):
            run()


def test_parts_of_a_tensor_are_told_apart():
    streams, tensor = RecordingStreams(), torch.zeros(8)
    with streams.recording():
        on_two_streams(streams, lambda: tensor[:4].add_(1), lambda: tensor[4:].add_(1), ordered=False)


@pytest.mark.parametrize("kept", [True, False])
def test_the_checker_finds_memory_that_is_freed_too_early(kept):
    streams = RecordingStreams()

    def run() -> None:
        with streams.recording():
            tensor = torch.zeros(8).mul(1)
            with streams.up.run(streams.now()):
                tensor.add(1)
                if kept:
                    streams.up.keep(tensor)
            del tensor

    if kept:
        run()
    else:
        with pytest.raises(AssertionError, match="freed while up uses it"):
            run()


def test_the_checker_knows_threads():
    tensor = torch.zeros(8)

    def run(wait: Callable[[RecordingStreams, Any], object]) -> None:
        streams = RecordingStreams()
        worker, signal = streams.worker("works"), streams.signal()

        def work() -> None:
            with streams.down.run():
                tensor.add_(1)
            streams.down.mark().synchronize()
            signal.set()

        with streams.recording():
            future = worker.submit(work)
            futures.wait([future])  # nobody records it
            wait(signal, future)
            tensor.add_(1)

    run(lambda signal, future: signal.wait())
    run(lambda signal, future: future.result())
    with pytest.raises(AssertionError, match="write after write"):
        run(lambda signal, future: None)


def test_an_event_belongs_to_its_own_device(monkeypatch):
    """Also in a thread whose current device is another one: `torch.cuda.Event.wait` would wait there."""
    stream = mock.Mock(device=DEVICE)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream if device == DEVICE else None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: "event")
    streams = CudaStreams(DEVICE)
    for event in (streams.now(), streams.up.mark()):
        event.wait()
        stream.wait_event.assert_called_once_with(stream.record_event.return_value)
        stream.wait_event.reset_mock()


# --- threads on a device


@pytest.fixture
def devices(monkeypatch) -> list[tuple[str, torch.device]]:
    """Which thread made which device the current one."""
    found: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.append((threading.current_thread().name, device)))
    monkeypatch.setattr(engine_streams, "_CudaSideStream", lambda *arguments: None)
    return found


def test_workers_of_tiers_begin_on_the_ranks_device(devices):
    worker = Tiers(DEVICE, Row("llama").strategy).worker("moves")
    before = worker.submit(lambda: list(devices)).result(30 * PATIENCE)
    worker.shutdown()
    assert [device for _, device in before] == [DEVICE]
    assert before[0][0].startswith("moves")


def test_a_thread_begins_on_its_device(devices):
    seen: list[list[tuple[str, torch.device]]] = []
    thread = CudaStreams(DEVICE).thread(lambda: seen.append(list(devices)), "saves")
    thread.start()
    thread.join(30 * PATIENCE)
    assert seen == [[("saves", DEVICE)]]


def test_on_a_cpu_no_device_is_asked_for(devices):
    worker = Streams(torch.device("cpu")).worker("moves")
    worker.submit(int).result(30 * PATIENCE)
    worker.shutdown()
    assert devices == []
