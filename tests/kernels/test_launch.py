"""Kernels launch on the GPU of their tensors, whichever GPU is the current one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import KernelInterface

from ftkit.kernels import launch
from ftkit.kernels.adamw import AdamW, adamw_
from ftkit.kernels.adamw_8bit import lion_8bit_
from ftkit.kernels.cross_entropy import cross_entropy
from ftkit.kernels.gated import gated
from ftkit.kernels.linear_cross_entropy import linear_cross_entropy
from ftkit.kernels.rms_norm import rms_norm
from ftkit.kernels.rotary import rotary
from ftkit.kernels.squared_norm import squared_norm


def labels(x: Tensor) -> Tensor:
    return torch.zeros(len(x), dtype=torch.int64, device=x.device)


def heads(x: Tensor) -> Tensor:
    return x.view(1, 2, 3, 4)


def lion(x: Tensor) -> None:
    master, codes = x.detach().new_zeros(128), torch.zeros(128, dtype=torch.uint8)
    numbers = {"factor": 1.0, "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0}
    lion_8bit_(master, master.clone(), codes, master.new_zeros(1), None, None, **numbers)


CALLS: dict[str, tuple[Callable[[Tensor], Any], int, int]] = {
    "rms_norm": (lambda x: rms_norm(x, x[0], 1e-5), 1, 1),
    "rotary": (lambda x: rotary(heads(x), heads(x), x.view(2, 3, 4)[:1], x.view(2, 3, 4)[:1]), 2, 2),
    "gated": (lambda x: gated(x, x), 1, 1),
    "cross_entropy": (lambda x: cross_entropy(x * 1, labels(x)), 1, 1),
    "linear_cross_entropy": (lambda x: linear_cross_entropy(x, x, labels(x), chunk_bytes=6 * 3 * x.itemsize), 2, 2),
    "adamw_": (lambda x: adamw_(*x.detach().view(4, 6).clone(), None, AdamW(lr=0.1)), 1, 0),
    "lion_8bit_": (lion, 1, 0),
    "squared_norm": (lambda x: squared_norm(x.detach().view(-1)), 1, 0),
}
"""Calls with a tensor (6, 4), and how many kernels each launches forward and backward."""


class Recorder:
    """Kernel that records the current GPU of each launch."""

    def __init__(self) -> None:
        self.current = [torch.device("cuda:0")]
        self.launched: list[torch.device] = []

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **constants: self.launched.append(self.current[-1])

    @contextmanager
    def device(self, of: torch.device) -> Iterator[None]:
        self.current.append(of)
        yield
        self.current.pop()


def test_a_launch_makes_the_gpu_of_its_tensor_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two fake GPUs, as no real one may be here."""
    kernel = Recorder()
    monkeypatch.setattr("torch.cuda.device", kernel.device)
    with FakeTensorMode():
        for device in ("cuda:1", "cuda:0", "cpu"):
            launch.launch(kernel, (1,), torch.empty(4, device=device), warps=1)
    assert kernel.launched == [torch.device(device) for device in ("cuda:1", "cuda:0", "cuda:0")]
    assert kernel.current == [torch.device("cuda:0")]


@pytest.mark.parametrize("name", CALLS)
def test_public_functions_launch_on_the_gpu_of_their_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel starts inside the guard of its first tensor."""
    call, forward, backward = CALLS[name]
    inside, launched, plain = [], [], KernelInterface.__getitem__

    @contextmanager
    def guard(x: Tensor) -> Iterator[None]:
        inside.append(x)
        yield
        inside.pop()

    def chosen(kernel: Any, grid: Any) -> Callable[..., Any]:
        def run(x: Tensor, *others: Any, **constants: Any) -> Any:
            launched.append(len(inside) == 1 and inside[0] is x)
            return plain(kernel, grid)(x, *others, **constants)

        return run

    monkeypatch.setattr(launch, "device_guard", guard)
    monkeypatch.setattr(KernelInterface, "__getitem__", chosen)
    found = call(torch.randn(6, 4, requires_grad=True))
    assert launched == [True] * forward
    if backward:
        sum(each.sum() for each in (found if isinstance(found, tuple) else (found,))).backward()
    assert launched == [True] * (forward + backward)
