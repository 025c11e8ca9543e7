"""The engine issues a step's operations in the order and on the streams of the plan's events.

The engine's operations are the spans of its trace. On a CPU they run in the order of issue, so one list shows the order on
each stream and across streams.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ftkit.engine.optim.adamw import ShardedAdamW
from ftkit.plan.shape import Flat, Shape
from ftkit.spec.strategy import Strategy
from tests.engine import families
from tests.engine.trajectory import shard_model
from tests.plan.made import script
from tests.worlds import World

ROUNDS = 2
COMPARED = ("fetch", "gather", "forward", "recompute", "backward", "reduce", "finish")
"""First words of the names that are compared.

Other operations are not compared. The engine has no spans for the loss, copies into the gradient slot (`collect`), sums, and
the wait for an update. A CPU does not make the copies of `offload`. The engine names `refresh`, `norm` and `update` by flat
parameter, and issues them at another time if nothing overlaps with them.
"""
ROOTS = {"model.embed_tokens.weight": "embedding", "lm_head.weight": "head"}
NVME = {"parameters": "nvme", "gradients": "nvme", "state": "nvme"}
HOST = {"parameters": "host", "gradients": "host", "state": "host", "update": "deferred"}


def compared(world: int) -> tuple[str, ...]:
    """Return the first words of the names that are compared. One rank has nothing to reduce."""
    return COMPARED if world > 1 else tuple(word for word in COMPARED if word not in ("reduce", "finish"))


def issued(strategy: Strategy) -> tuple[list[tuple[str, str]], int]:
    """Case: train two steps; return (stream, name) of the second one's operations, and the number of blocks.

    In the first step the engine learns after which block each root parameter is read.
    """
    model = families.build("llama")
    units = shard_model(model, strategy)
    optimizer = ShardedAdamW(units)
    trace = units.transfer.trace
    for step in range(2):
        if step == 1:
            trace.start()
        for micro in range(ROUNDS):
            chance = torch.Generator().manual_seed(ROUNDS * step + micro)
            rows = torch.randint(3, families.VOCABULARY, (2, 8), generator=chance)
            loss = units.model(input_ids=rows, labels=rows, use_cache=False).loss
            with units.last_backward() if micro == ROUNDS - 1 else nullcontext():
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = []
    for span in trace.stop():
        what, _, of = span.name.partition(" ")
        if what in compared(units.comm.world_size):
            found.append((span.stream, f"{what} {ROOTS.get(of, of)}"))
    units.tiers.close()
    return found, len(units.units)


def planned(strategy: Strategy, blocks: int, world: int) -> list[tuple[str, str]]:
    """Return (stream, name) of the operations of the second step in the plan."""
    flat = (Flat(4096, 4, trained=True),)
    shape = Shape((flat,) * blocks, flat * 2, flat, 32, 97, 100, 100, 8, 4, world)
    first, both = (script(shape, strategy, steps).events for steps in (1, 2))
    events = both[len(first) :]
    return [(event.stream, event.name) for event in events if event.name.partition(" ")[0] in compared(world)]


@pytest.mark.parametrize(
    ("world", "choices"),
    [
        pytest.param(2, {}, id="stage 3"),
        pytest.param(2, {"reshard_after_forward": False}, id="weights kept"),
        pytest.param(2, {"activations": "keep"}, id="activations kept"),
        pytest.param(2, {"activations": 1}, id="one block kept"),
        pytest.param(2, HOST, id="host, deferred"),
        pytest.param(1, HOST, id="one rank, host, deferred"),
        pytest.param(2, NVME, id="nvme"),
        pytest.param(2, {**NVME, "update": "deferred"}, id="nvme, deferred"),
        pytest.param(2, {"stage": 2}, id="stage 2"),
        pytest.param(2, {"stage": 1}, id="stage 1"),
        pytest.param(2, {"stage": 0}, id="stage 0"),
    ],
)
def test_the_engine_issues_what_the_plan_simulates(worlds: dict[int, World], world: int, choices: dict[str, Any]) -> None:
    strategy = Strategy.of(**choices, accumulation=ROUNDS)
    found, blocks = worlds[world].run(issued, strategy)[0]
    assert found == planned(strategy, blocks, world)


def calls_of_blocks(activations: str | int) -> list[int]:
    """Case: train one step; return how often each block computed its MLP."""
    model = families.build("llama")
    units = shard_model(model, Strategy.of(activations=activations))
    calls = [0] * len(units.units)
    for number, unit in enumerate(units.units):

        def count(module: Any, args: Any, number: int = number) -> None:
            calls[number] += 1

        unit.module.mlp.register_forward_pre_hook(count)
    rows = torch.randint(3, families.VOCABULARY, (2, 8))
    units.model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
    return calls


@pytest.mark.parametrize(("activations", "last"), [("recompute", 2), ("keep", 1), (1, 1)])
def test_blocks_whose_graphs_are_kept_compute_once(world2: World, activations: str | int, last: int) -> None:
    first = 1 if activations == "keep" else 2
    for calls in world2.run(calls_of_blocks, activations):
        assert calls == [*[first] * (len(calls) - 1), last]
