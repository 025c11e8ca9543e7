"""All weights gathered at once: forwards compute the same, and training is not affected."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ftkit.engine.core.placeholder import Placeholder
from ftkit.engine.holding import gathered_bytes, hold
from ftkit.engine.model import ShardedModel
from ftkit.engine.optim.sgd import ShardedSGD
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


def units_of(model: nn.Module) -> ShardedModel:
    return type(model)._ftkit


def after_gathered_forwards(model: nn.Module, rows: dict[str, Tensor], tokens: int) -> Tensor:
    """Return the loss after forwards in evaluation mode without gradients: block by block, and with all weights gathered."""
    units, model = units_of(model), model.eval()
    with torch.no_grad():
        streamed = model(**inputs(rows)).logits
        with hold(units), hold(units):
            for _ in range(1 + units.comm.rank):  # other ranks are not needed
                assert torch.equal(model(**inputs(rows)).logits, streamed)
        assert torch.equal(model(**inputs(rows)).logits, streamed)
    return token_loss(model.train(), rows, tokens)


def trajectories(row: Row) -> list[bool]:
    """Return whether losses, norms and weights equal those of training without such forwards, bit by bit."""
    with_, without = (run_sharded(row, loss_of=loss, steps=STEPS) for loss in (after_gathered_forwards, token_loss))
    same = [torch.equal(with_.weights[name], tensor) for name, tensor in without.weights.items()]
    return [with_.losses == without.losses, with_.norms == without.norms, all(same)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("row", QUICK, ids=str)
def test_training_is_not_affected(worlds, row):
    assert worlds[row.world].run(trajectories, row) == [[True] * 3] * row.world


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW, ids=str)
def test_training_is_not_affected_in_more_settings(worlds, row):
    assert worlds[row.world].run(trajectories, row) == [[True] * 3] * row.world


def between_forward_and_backward(strategy: Strategy) -> list[float]:
    """Return gradient norms with a forward on gathered weights between forward and backward, and without."""
    norms = []
    rows = families.batch("llama", 0)
    for between in (True, False):
        model = families.build("llama")
        units = shard_model(model, strategy)
        loss = token_loss(model, rows, families.label_tokens(rows))
        if between:
            with torch.no_grad(), hold(units):
                model(**inputs(rows))
        loss.backward()
        norms.append(ShardedSGD(units, lr=0.1).grad_norm())
    return norms


@pytest.mark.parametrize(
    "strategy", [Strategy.of(debug=True), Strategy.of(activations="keep", reshard_after_forward=False, debug=True)], ids=str
)
def test_backward_after_gathered_weights_were_released(world2, strategy):
    for with_, without in world2.run(between_forward_and_backward, strategy):
        assert with_ == without > 0


def released_weights() -> tuple[int, int, list[bool]]:
    """Return `gathered_bytes`, the bytes allocated, and whether all are freed and NaN afterwards."""
    model = families.build("qwen3")
    units = shard_model(model, Strategy.of(debug=True))
    with hold(units):
        assert units.transfer.whole is not None
        roots = list(units.transfer.whole.roots.values())
        blocks = [next(unit.module.parameters()).detach() for unit in units.units]
        numel = sum(flat.layout.padded_numel for flat in units.flats if not flat.resident)
        taken = sum(each.untyped_storage().nbytes() for each in (*blocks, *roots))
    assert len(roots) == 1, "a tied weight is gathered once"
    released = [isinstance(parameter, Placeholder) for unit in units.units for parameter in unit.module.parameters()]
    poisoned = [bool(each.isnan().all()) for each in (*blocks, *roots)]
    return gathered_bytes(units), taken, [*released, *poisoned, taken == 4 * numel, units.transfer.whole is None]


def test_weights_are_released_afterwards(world2):
    for announced, taken, checks in world2.run(released_weights):
        assert announced == taken > 0
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
    ("how", "words"),
    [
        ("forward", "all weights are gathered for generation"),
        ("backward", "all weights are gathered for generation"),
        ("step", "updated while they are gathered"),
    ],
)
def test_training_on_gathered_weights_is_refused(world2, how, words):
    assert all(words in text for text in world2.run(misused, how))
