"""The engine asks for gathers, computations and reductions in the order that the plan in seconds simulates."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from ftkit.engine.core.block_weights import BlockWeights
from ftkit.engine.core.transfer import Transfer
from ftkit.engine.optim.adamw import ShardedAdamW
from ftkit.plan.schedule import script
from ftkit.plan.shape import Line, Shape
from ftkit.spec.strategy import Strategy
from tests.engine import families
from tests.engine.trajectory import shard_model
from tests.worlds import World

STEPS, ROUNDS = 2, 2


def asked_for(stage: int, reshard: bool) -> tuple[list[str], int]:
    """Case: train two steps of two micro-batches; return what the engine did, in order, and its number of blocks."""
    model = families.build("llama")
    units = shard_model(model, Strategy.of(stage=stage, reshard_after_forward=reshard))
    optimizer = ShardedAdamW(units)
    did: list[str] = []
    gather, reduce, enter = Transfer.gather, Transfer.reduce, BlockWeights.enter

    def gathers(self: Transfer, slot: Any, flats: Any, number: int) -> None:
        before = slot.content
        gather(self, slot, flats, number)
        if slot.content != before:
            did.append(f"gather {number}")

    def reduces(self: Transfer, flats: Any, places: Any, number: int) -> None:
        did.append(f"reduce backward {number}")
        reduce(self, flats, places, number)

    def enters(self: BlockWeights, *, graph: bool, neighbour: BlockWeights | None = None, **more: Any) -> None:
        enter(self, graph=graph, neighbour=neighbour, **more)
        did.append(f"{'forward' if graph else 'backward'} {self.number}")

    with (
        mock.patch.object(Transfer, "gather", gathers),
        mock.patch.object(Transfer, "reduce", reduces),
        mock.patch.object(BlockWeights, "enter", enters),
    ):
        for step in range(STEPS):
            for micro in range(ROUNDS):
                chance = torch.Generator().manual_seed(ROUNDS * step + micro)
                rows = torch.randint(3, families.VOCABULARY, (2, 8), generator=chance)
                units.model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return did, len(units.units)


@pytest.mark.parametrize(("stage", "reshard"), [(3, True), (3, False), (2, True)])
def test_the_engine_does_what_is_simulated(world2: World, stage: int, reshard: bool) -> None:
    did, count = world2.run(asked_for, stage, reshard)[0]
    line = (Line(4096, 4, trained=True),)
    shape = Shape((line,) * count, line, line, 32, 97, 100, 100, 8, 4, 2)
    events = script(shape, Strategy.of(stage=stage, reshard_after_forward=reshard, accumulation=ROUNDS), STEPS).events
    kinds = ("gather", "forward", "backward", "reduce backward")
    planned = [event.name for event in events if event.name.startswith(kinds) and event.name.split()[-1].isdigit()]
    assert did == planned


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
