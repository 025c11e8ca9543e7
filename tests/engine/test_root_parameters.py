"""Reads of a root parameter share a gather and add to one gradient, and a gather may start before the read."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from ftkit.engine.core.root_parameters import RootParameter, Running
from ftkit.engine.optim.adamw import ShardedAdamW
from ftkit.spec.strategy import Strategy
from tests.engine import families
from tests.engine.trajectory import shard_model
from tests.worlds import World


class Counted(RootParameter):
    """Gathers from a tensor at hand."""

    def __init__(self, module: nn.Linear) -> None:
        transfer = SimpleNamespace(updates=0, whole=None)
        flat = SimpleNamespace(comm=SimpleNamespace(device=torch.device("cpu")))
        super().__init__(flat, None, module, "weight", Running(), transfer)
        self.value = torch.ones(3, 2, requires_grad=True)
        self.gathers = 0

    def _gather(self) -> torch.Tensor:
        self.gathers += 1
        return self.value * 1 if torch.is_grad_enabled() else self.value.detach()


def test_a_read_without_gradients_does_not_take_them_from_the_next() -> None:
    root = Counted(nn.Linear(2, 3))
    with root.once():
        with torch.no_grad():
            norm = root.read().norm()
        value = root.read().sum() * norm
        assert root.read() is root.read()
    value.backward()
    assert root.gathers == 2
    assert root.value.grad is not None


def test_what_nobody_reads_is_not_gathered() -> None:
    root = Counted(nn.Linear(2, 3))
    with root.once():
        pass
    assert root.gathers == 0
    assert root.read() is root.parameter, "the model does not run"


def gathers_of_calls() -> list[list[str]]:
    """Return the gathers and forwards of four calls, in order. The third does not read the head."""
    units = shard_model(families.build("llama"), Strategy.of())
    rows, found = families.batch("llama", 0), []
    for model in (units.model, units.model, units.model.model, units.model):
        units.transfer.trace.start()
        model(input_ids=rows["input_ids"])
        found.append([span.name for span in units.transfer.trace.stop()])
    return found


def test_gathers_start_where_the_last_call_read(world2: World) -> None:
    first, second, without_head, last = world2.run(gathers_of_calls)[0]
    embedding, head = "gather model.embed_tokens.weight", "gather lm_head.weight"
    assert first == ["gather 0", embedding, "gather 1", "forward 0", "gather 2", "forward 1", "forward 2", head]
    # Block 1 is still in its slot.
    assert second == [embedding, "gather 0", "forward 0", "gather 2", "forward 1", head, "forward 2"]
    assert without_head == second, "the previous call read the head"
    without_early_head = [embedding, "gather 0", "forward 0", "gather 2", "forward 1", "forward 2", head]
    assert last == without_early_head, "the previous call did not"


def weights_read_after_a_step() -> tuple[bool, bool]:
    """Read the head after a step. Return whether it equals the weights before the step, and those after it."""
    units = shard_model(families.build("llama"), Strategy.of())
    optimizer = ShardedAdamW(units, lr=1e-2)
    rows = families.batch("llama", 0)
    before = units.state_dict()["lm_head.weight"]
    families.token_loss(units.model, rows, families.label_tokens(rows)).backward()
    with torch.no_grad():
        units.model.model(input_ids=rows["input_ids"])  # starts a gather of the head that no read uses
    optimizer.step()
    with units.read_by_all(), torch.no_grad():
        found = units.model.lm_head.weight.clone()
    return torch.equal(found, before), torch.equal(found, units.state_dict()["lm_head.weight"])


def test_an_early_gather_is_not_used_after_an_update(world2: World) -> None:
    assert world2.run(weights_read_after_a_step) == [(False, True)] * 2
