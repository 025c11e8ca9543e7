"""A trace has the spans of a step in order, on the streams of the plan, and is empty without a recording."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from ftkit.engine.optim.adamw import ShardedAdamW
from ftkit.engine.streams import Streams
from ftkit.engine.trace import Span
from ftkit.plan.speed import STREAMS
from ftkit.spec.strategy import Strategy
from tests.engine import families
from tests.engine.trajectory import shard_model
from tests.worlds import World

ROUNDS = 2


def traced(stage: int, activations: str, recorded: int) -> tuple[list[Span], list[float], int, bool]:
    """Case: train three steps of two micro-batches; return one's spans, the losses, blocks, whether it records on."""
    model = families.build("llama")
    units = shard_model(model, Strategy.of(stage=stage, activations=activations))
    optimizer = ShardedAdamW(units)
    trace, found, losses = units.transfer.trace, [], []
    for step in range(3):
        if step == recorded:
            trace.start()
        for micro in range(ROUNDS):
            chance = torch.Generator().manual_seed(ROUNDS * step + micro)
            rows = torch.randint(3, families.VOCABULARY, (2, 8), generator=chance)
            loss = units.model(input_ids=rows, labels=rows, use_cache=False).loss
            losses.append(loss.item())
            loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == recorded:
            found = trace.stop()
    return found, losses, len(units.units), bool(trace.stop()) or trace.recording


def test_a_trace_is_what_the_engine_did_in_order(world2: World) -> None:
    found, losses, count, left = world2.run(traced, 3, "recompute", 0)[0]
    assert not left
    assert {span.stream for span in found} <= STREAMS.keys()
    updates = [span.name for span in found if span.name.startswith("update ")]
    assert len(updates) == len(set(updates)) > count
    assert found[-1].name.startswith("update ") or found[-1].stream == "collectives"
    for span, after in itertools.pairwise(found):
        assert 0 <= span.start_s <= span.end_s <= after.start_s, "in plain order on a CPU, none within another"
    none, untraced, _, _ = world2.run(traced, 3, "recompute", -1)[0]
    assert none == []
    assert untraced == losses


@pytest.mark.parametrize("stage", [0, 2])
def test_blocks_are_traced_whatever_the_way(world2: World, stage: int) -> None:
    found, _, count, _ = world2.run(traced, stage, "keep", 2)[0]
    names = [span.name for span in found]
    forward = [f"forward {number}" for number in range(count)]
    backward = [f"backward {number}" for number in reversed(range(count))]
    assert [name for name in names if name.startswith(("forward", "backward"))] == (forward + backward) * ROUNDS
    assert "norm" in names


def test_nothing_is_recorded_unless_somebody_asks() -> None:
    trace = Streams(torch.device("cpu")).trace
    with trace.span("compute", "before"):
        trace.start()
    with trace.span("compute", "outer"):
        time.sleep(0.002)
        with trace.span("compute", "inner"):
            time.sleep(0.002)
    open_at_the_end = trace.span("compute", "late")
    with open_at_the_end:
        outer, inner = trace.stop()
    assert (outer.name, inner.name) == ("outer", "inner")
    assert outer.start_s < inner.start_s < inner.end_s <= outer.end_s
    assert inner.end_s - inner.start_s >= 0.002
    with trace.span("compute", "after"):
        pass
    assert trace.stop() == []


def test_pieces_of_one_update_are_one_span() -> None:
    trace = Streams(torch.device("cpu")).trace
    trace.start()
    for name in ("update a", "update a", "update b", "gather 0", "gather 0"):
        with trace.span("x", name):
            pass
    assert [span.name for span in trace.stop()] == ["update a", "update b", "gather 0", "gather 0"]
