"""Reads of a root parameter share a gather, and get its gradient whoever read first."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from ftkit.engine.core.root_parameters import RootParameter, Running


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
