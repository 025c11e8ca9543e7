"""All weights held for a while: forwards find what they would have gathered, and training does not notice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ftkit.engine.core.holding import gathered_bytes, hold
from ftkit.engine.core.shard import Units
from ftkit.engine.optim.optimizer import ShardedSGD
from ftkit.spec.strategy import Strategy
from tests.engine import families
from tests.engine.families import token_loss
from tests.engine.trajectory import Row, run_sharded, shard_model

STEPS = 3
QUICK = [
    Row("llama", world=2, debug=True, deferred=True, state="host"),
    Row("t5", world=2, parameters="nvme", gradients="host", state="nvme", deferred=True, late=True),
]
SLOW = [
    Row("gemma3", world=3, reshard_after_forward=False, activations="keep", debug=True, accumulation=2),
    Row("qwen3", world=2, stage=2, accumulation=2),
    Row("llama", world=1, parameters="nvme", gradients="nvme", state="nvme", activation_offload="nvme", debug=True),
    Row("gpt2", world=3, parameters="host", gradients="host", state="host", parts=2, accumulation=1, debug=True),
]


def inputs(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in rows.items() if name != "labels"}


def units_of(model: nn.Module) -> Units:
    return type(model)._ftkit


def with_held_forwards(model: nn.Module, rows: dict[str, Tensor], tokens: int) -> Tensor:
    """The loss, after forwards without gradients: streamed and held, as many as a rank likes, in evaluation."""
    units, model = units_of(model), model.eval()
    with torch.no_grad():
        streamed = model(**inputs(rows)).logits
        with hold(units), hold(units):
            for _ in range(1 + units.comm.rank):  # held weights wait for nobody
                assert torch.equal(model(**inputs(rows)).logits, streamed)
        assert torch.equal(model(**inputs(rows)).logits, streamed)
    return token_loss(model.train(), rows, tokens)


def trajectories(row: Row) -> list[bool]:
    """Whether training with held forwards in between is training without them, bit by bit: losses, norms, weights."""
    with_, without = (run_sharded(row, loss_of=loss, steps=STEPS) for loss in (with_held_forwards, token_loss))
    same = [torch.equal(with_.weights[name], tensor) for name, tensor in without.weights.items()]
    return [with_.losses == without.losses, with_.norms == without.norms, all(same)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("row", QUICK, ids=str)
def test_training_goes_on_as_if_nothing_was_held(worlds, row):
    assert worlds[row.world].run(trajectories, row) == [[True] * 3] * row.world


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW, ids=str)
def test_training_goes_on_as_if_nothing_was_held_in_more_settings(worlds, row):
    assert worlds[row.world].run(trajectories, row) == [[True] * 3] * row.world


def between_forward_and_backward(strategy: Strategy) -> list[float]:
    """Gradient norms of a batch whose backward comes after held forwards, and of the same without them."""
    norms = []
    rows = families.batch("llama", 0)
    for looks in (True, False):
        model = families.build("llama")
        units = shard_model(model, strategy)
        loss = token_loss(model, rows, families.label_tokens(rows))
        if looks:
            with torch.no_grad(), hold(units):
                model(**inputs(rows))
        loss.backward()
        norms.append(ShardedSGD(units, lr=0.1).grad_norm())
    return norms


@pytest.mark.parametrize(
    "strategy", [Strategy.of(debug=True), Strategy.of(activations="keep", reshard_after_forward=False, debug=True)], ids=str
)
def test_a_backward_may_wait_until_weights_are_given_back(world2, strategy):
    for with_, without in world2.run(between_forward_and_backward, strategy):
        assert with_ == without > 0


def given_back() -> tuple[int, int, list[bool]]:
    """Bytes said and bytes that came, and whether what was held is gone and poisoned afterwards."""
    model = families.build("qwen3")
    units = shard_model(model, Strategy.of(debug=True))
    with hold(units):
        slots = [unit.weights._whole.buffer for unit in units.units]
        whole = units.root_parameters[0].whole
        assert len({each.whole.data_ptr() for each in units.root_parameters}) == 1  # a tied weight is held once
        numel = sum(flat.layout.padded_numel for flat in units.flats if not flat.resident)
    lines = [(slot.view(torch.float32), unit.weights.gathered[0].layout.numel) for slot, unit in zip(slots, units.units)]
    poisoned = [bool(values[:length].isnan().all()) for values, length in lines]
    gone = [not unit.weights.is_whole for unit in units.units] + [each.whole is None for each in units.root_parameters]
    return gathered_bytes(units), 4 * numel, [*poisoned, bool(whole.isnan().all()), *gone, units.held_since is None]


def test_what_was_held_is_given_back(world2):
    for said, came, checks in world2.run(given_back):
        assert said == came > 0
        assert all(checks)


def misused(how: str) -> str:
    model = families.build("llama")
    units = shard_model(model, Strategy.of())
    optimizer = ShardedSGD(units, lr=0.1)
    rows = families.batch("llama", 0)
    loss = token_loss(model, rows, families.label_tokens(rows))
    try:
        with hold(units):
            if how == "forward":
                model(**inputs(rows))
            if how == "backward":
                loss.backward()
            if how == "step":
                optimizer.step()
                with torch.no_grad():
                    model(**inputs(rows))
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("how", "told"),
    [("forward", "held for generation"), ("backward", "held for generation"), ("step", "while they are held")],
)
def test_training_on_held_weights_is_refused(world2, how, told):
    assert all(told in text for text in world2.run(misused, how))
