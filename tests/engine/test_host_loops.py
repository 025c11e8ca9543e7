"""AdamW on the host alone: against torch's fused AdamW, against float64, and bit by bit where bits are promised.

Gradients are made in the dtype that is tested; torch gets them widened and multiplied beforehand, in fp32, as the compiled
pass does it. Conversions are tested over every 16-bit pattern, by steps that can only pass a number through.
"""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ftkit.engine.kernels import host_loops
from ftkit.engine.kernels.host_loops import RANGE_NUMEL, HostLoops
from ftkit.engine.kernels.numba_loops import BLOCK_NUMEL
from tests.worlds import PATIENCE

NARROW = [torch.bfloat16, torch.float16]
DTYPES = [*NARROW, torch.float32]
USUAL = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
FACTOR = 0.37
ULP = 2.0**-23
"""The last place of an fp32 number in [1, 2)."""


@pytest.fixture(scope="module")
def one() -> HostLoops:
    return HostLoops(1)


@dataclass
class State:
    """What a step updates."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    weight: Tensor | None = None

    @classmethod
    def make(cls, n: int, weight: torch.dtype | None = None, seed: int = 0) -> State:
        master = torch.randn(n, generator=torch.Generator().manual_seed(seed))
        out = None if weight is None else torch.full((n,), 7.0, dtype=weight)
        return cls(master, torch.zeros(n), torch.zeros(n), out)

    def double(self) -> State:
        return State(self.master.double(), self.exp_avg.double(), self.exp_avg_sq.double())

    def clone(self) -> State:
        weight = None if self.weight is None else self.weight.clone()
        return State(self.master.clone(), self.exp_avg.clone(), self.exp_avg_sq.clone(), weight)

    def tensors(self) -> list[Tensor]:
        every = [self.master, self.exp_avg, self.exp_avg_sq]
        return every if self.weight is None else [*every, self.weight]


def gradient(n: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 + seed)).mul(0.1).to(dtype)


def ours(adam: HostLoops, s: State, grad: Tensor, step: int = 1, factor: float = FACTOR, **changes: Any) -> None:
    adam.adamw(s.master, grad, s.exp_avg, s.exp_avg_sq, s.weight, factor=factor, step=step, **{**USUAL, **changes})


def torchs(s: State, grad: Tensor, step: int = 1, factor: float = FACTOR, **changes: Any) -> None:
    numbers = {**USUAL, **changes}
    count = torch.tensor(float(step - 1))
    widened = grad.float() * factor
    lists = [[s.master], [widened], [s.exp_avg], [s.exp_avg_sq], [], [count]]
    adamw(*lists, fused=True, amsgrad=False, maximize=False, **numbers)


def exact(s: State, grad: Tensor, step: int, factor: float = FACTOR, **changes: Any) -> None:
    """The paper's formula in float64, but for the gradient, whose product with `factor` is fp32's."""
    h = SimpleNamespace(**{**USUAL, **changes})
    g = (grad.float() * factor).double()
    s.exp_avg.mul_(h.beta1).add_(g, alpha=1 - h.beta1)
    s.exp_avg_sq.mul_(h.beta2).addcmul_(g, g, value=1 - h.beta2)
    denominator = (s.exp_avg_sq / (1 - h.beta2**step)).sqrt() + h.eps
    s.master.mul_(1 - h.lr * h.weight_decay).addcdiv_(s.exp_avg, denominator, value=-h.lr / (1 - h.beta1**step))


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether all numbers are the same bits, and a NaN stands where a NaN stands."""
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(bits(a)[~nan], bits(b)[~nan])


# --- the arithmetic


@pytest.mark.parametrize("weight", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("changes", [{}, {"beta1": 0.3, "weight_decay": 0.0, "eps": 1e-3}], ids=["usual", "low-beta1"])
def test_twenty_steps_are_torchs_and_the_papers(one: HostLoops, dtype: torch.dtype, weight: Any, changes: dict) -> None:
    n, steps = 4097, 20
    mine = State.make(n, weight)
    theirs, paper = mine.clone(), mine.clone().double()
    for step in range(1, steps + 1):
        grad = gradient(n, dtype, step)
        before = grad.clone()
        ours(one, mine, grad, step, **changes)
        torchs(theirs, grad, step, **changes)
        exact(paper, grad, step, **changes)
        assert torch.equal(grad, before)
        if weight is not None:
            assert same_bits(mine.weight, mine.master.to(weight))
    for a, b, c in zip(mine.tensors(), theirs.tensors()[:3], paper.tensors()):
        size = c.abs() + (USUAL["lr"] if c is paper.master else c.abs().mean())  # a sum that cancels keeps its terms' error
        assert ((a - b).abs() <= 8 * ULP * size).all()
        assert ((a.double() - c).abs() <= 1.5 * steps * ULP * size).all()


@pytest.mark.parametrize("weight", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.1), (0.9, 0.1)])
def test_twenty_steps_of_sgd_are_torchs(
    one: HostLoops, dtype: torch.dtype, weight: Any, momentum: float, decay: float
) -> None:
    n, rate = 4097, 0.05
    master = torch.randn(n, generator=torch.Generator().manual_seed(7))
    theirs = torch.nn.Parameter(master.clone())
    stock = torch.optim.SGD([theirs], lr=rate, momentum=momentum, weight_decay=decay, foreach=False)
    buffer = torch.zeros(n) if momentum else None
    out = None if weight is None else torch.zeros(n, dtype=weight)
    for step in range(20):
        grad = gradient(n, dtype, step)
        before = grad.clone()
        one.sgd(master, grad, buffer, out, factor=FACTOR, lr=rate, momentum=momentum, weight_decay=decay)
        theirs.grad = grad.float() * FACTOR
        stock.step()
        assert torch.equal(grad, before)
        if out is not None:
            assert same_bits(out, master.to(weight))
    torch.testing.assert_close(master, theirs.detach(), rtol=4 * ULP, atol=ULP)


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 4097, 1_000_003])
def test_any_size_at_any_offset_writes_its_own_range_only(one: HostLoops, n: int, offset: int) -> None:
    for dtype in NARROW:
        whole = State.make(n + 16, dtype)
        cut = slice(offset, offset + n)
        part = State(*(t[cut] for t in whole.tensors()))
        around = whole.clone()
        alone = State(*(t.clone() for t in part.tensors()))
        grad = gradient(n + 16, dtype)
        ours(one, part, grad[cut])
        torchs(alone, grad[cut].clone())
        alone.weight = alone.master.to(dtype)
        for after, before, expected in zip(whole.tensors(), around.tensors(), alone.tensors()):
            assert torch.equal(after[:offset], before[:offset])
            assert torch.equal(after[offset + n :], before[offset + n :])
            tolerance = 4 * ULP if after.dtype == torch.float32 else 2.0**-7
            torch.testing.assert_close(after[cut], expected, rtol=tolerance, atol=tolerance * USUAL["lr"])
        assert same_bits(part.weight, part.master.to(dtype))


def test_denormals_keep_their_value(one: HostLoops) -> None:
    for dtype, tiny in {torch.bfloat16: 2.0**-130, torch.float16: 2.0**-22, torch.float32: 2.0**-140}.items():
        grad = (torch.arange(-512, 512) * tiny).to(dtype)
        assert (grad != 0).sum() > 900
        mine = State.make(1024, dtype)
        mine.master.mul_(tiny)
        theirs = mine.clone()
        changes = {"factor": 1.0, "lr": 0.0, "beta1": 0.0}
        ours(one, mine, grad, **changes)
        torchs(theirs, grad, **changes)
        assert torch.equal(mine.exp_avg, grad.float())
        assert torch.equal(mine.master, theirs.master)
        assert same_bits(mine.weight, mine.master.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inf_and_nan_spoil_what_they_spoil_in_torch(one: HostLoops, dtype: torch.dtype) -> None:
    grad = gradient(64, dtype)
    grad[[3, 20, 40]] = torch.tensor([math.inf, -math.inf, math.nan], dtype=dtype)
    mine = State.make(64, dtype)
    theirs = mine.clone()
    for step in (1, 2):
        ours(one, mine, grad, step)
        torchs(theirs, grad, step)
        for a, b in zip(mine.tensors()[:3], theirs.tensors()):
            assert torch.equal(a.isnan(), b.isnan())
            assert torch.equal(a.isinf(), b.isinf())
            torch.testing.assert_close(a, b, rtol=4 * ULP, atol=1e-9, equal_nan=True)
        assert same_bits(mine.weight, mine.master.to(dtype))
    assert mine.master.isnan().sum() == 3


# --- the conversions


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_16_bit_gradient_is_read_as_torch_reads_it(one: HostLoops, dtype: torch.dtype) -> None:
    """With beta1 0 the first moment becomes the gradient itself."""
    grad = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    s = State.make(2**16)
    ours(one, s, grad, factor=1.0, beta1=0.0)
    finite = grad.isfinite()
    assert torch.equal(bits(s.exp_avg)[finite], bits(grad.float())[finite])
    assert s.exp_avg[~finite].isnan().all()  # inf - inf, in torch as here


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_weight_is_rounded_as_torch_rounds_it(one: HostLoops, dtype: torch.dtype) -> None:
    """With lr 0 the master passes through: all 16-bit numbers, their midpoints, and their fp32 neighbours."""
    patterns = torch.arange(-(2**15), 2**15)
    exactly = patterns.to(torch.int16).view(dtype).float()
    following = (patterns + 1).to(torch.int16).view(dtype).float()
    middle = ((exactly.double() + following.double()) / 2).float()
    lattice = torch.arange(0, 2**32, 65537, dtype=torch.int64).to(torch.int32).view(torch.float32)
    upper = torch.arange(0, 2**16, dtype=torch.int64) << 16
    ties = torch.cat([(upper | low).to(torch.int32) for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(torch.float32)
    masters = [exactly, middle, lattice, ties]
    masters += [torch.nextafter(m, torch.tensor(end)) for m in (exactly, middle) for end in (-math.inf, math.inf)]
    master = torch.cat(masters)
    s = State(master.clone(), torch.zeros_like(master), torch.zeros_like(master), torch.zeros_like(master, dtype=dtype))
    ours(one, s, torch.ones_like(master), lr=0.0, factor=1.0)
    assert same_bits(s.master, master)
    assert same_bits(s.weight, master.to(dtype))
    assert s.weight.isnan().any()
    assert s.weight.isinf().any()


# --- threads


def test_the_number_of_threads_changes_no_bit() -> None:
    n = 1_000_003
    for dtype in NARROW:
        start, grad = State.make(n, dtype), gradient(n, dtype)
        results = []
        for threads in (1, 2, 3):
            adam, s = HostLoops(threads), start.clone()
            ours(adam, s, grad)
            results.append((adam.square_sum(grad), s))
        for total, s in results[1:]:
            assert total == results[0][0]
            assert all(same_bits(a, b) for a, b in zip(s.tensors(), results[0][1].tensors()))
        assert not same_bits(results[0][1].master, start.master)


@pytest.mark.parametrize("n", [0, 1, RANGE_NUMEL, RANGE_NUMEL + 1, 10 * RANGE_NUMEL - 1])
def test_ranges_cover_everything_once_on_as_many_threads_as_asked(n: int) -> None:
    for threads in (1, 2, 3, 7):
        adam, seen, names = HostLoops(threads), np.zeros(n, dtype=int), set()

        def work(start: int, stop: int) -> None:
            seen[start:stop] += 1  # noqa: B023  (called before the loop goes on)
            names.add(threading.current_thread().name)  # noqa: B023  (as above)
            assert stop > start

        adam._share(work, n, RANGE_NUMEL)
        assert (seen == 1).all()
        assert len(names) <= threads
        assert (len(names) > 1) == (threads > 1 and n > RANGE_NUMEL)


def test_the_loops_let_the_interpreter_go(one: HostLoops) -> None:
    """Python switches threads by itself only after the time limit: this one goes on only if a loop lets it."""
    s, grad = State.make(4_000_000), gradient(4_000_000, torch.bfloat16)
    ours(one, s, grad)
    arrays = [host_loops.carried(t) for t in (s.master, grad, s.exp_avg, s.exp_avg_sq)]
    numbers = tuple(map(np.float32, (1.0, 1.0, 0.1, 0.9, 0.1, 1.0, 1e-8, 1e-3)))
    started, stop, limit, stopped = threading.Event(), threading.Event(), 30 * PATIENCE, []

    def update() -> None:
        deadline = time.monotonic() + limit
        started.set()
        while not stop.is_set() and time.monotonic() < deadline:
            one._loops.adamw(*arrays, None, numbers)
        stopped.append(stop.is_set())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(10 * limit)
    thread = threading.Thread(target=update)
    try:
        thread.start()
        started.wait(limit)
        stop.set()
        thread.join(2 * limit)
    finally:
        sys.setswitchinterval(interval)
    assert stopped == [True]


# --- the sum of squares


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 17, BLOCK_NUMEL - 1, BLOCK_NUMEL, BLOCK_NUMEL + 1, 1_000_003])
def test_the_sum_of_squares_is_float64s(one: HostLoops, dtype: torch.dtype, n: int) -> None:
    values = gradient(n + 3, dtype)[3:]
    expected = math.fsum(values.double().square().tolist())
    assert one.square_sum(values) == pytest.approx(expected, rel=1e-14)


def test_the_sum_of_squares_neither_overflows_nor_hides_an_overflow(one: HostLoops) -> None:
    assert one.square_sum(torch.full((1000,), 1e30)) == pytest.approx(1000 * float(np.float32(1e30)) ** 2)
    assert one.square_sum(torch.full((1000,), 1e-30)) == pytest.approx(1000 * float(np.float32(1e-30)) ** 2)
    for dtype in DTYPES:
        values = torch.ones(3 * BLOCK_NUMEL, dtype=dtype)
        values[BLOCK_NUMEL + 7] = -math.inf
        assert one.square_sum(values) == math.inf
        values[5] = math.nan
        assert math.isnan(one.square_sum(values))


# --- adding up


@pytest.mark.parametrize("other", DTYPES, ids=str)
@pytest.mark.parametrize("into", DTYPES, ids=str)
def test_adding_is_fp32s_and_rounds_once_more(one: HostLoops, into: torch.dtype, other: torch.dtype) -> None:
    n = 4097
    target, source = gradient(n + 5, into, 1)[5:], gradient(n, other, 2)
    source[[1, 2]] = torch.tensor([math.inf, math.nan], dtype=other)
    before, kept = target.clone(), source.clone()
    for scale in (1.0, -0.25):  # products with powers of two are exact, so one rounding to fp32 is left
        expected = (target.double() + scale * source.double()).float().to(into)
        one.add_(target, source, scale)
        assert same_bits(target, expected)
    assert same_bits(source, kept)
    assert not torch.equal(target, before)


# --- imports


def test_importing_it_does_not_import_numba() -> None:
    code = "import sys, ftkit.engine.kernels.host_loops; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60 * PATIENCE).returncode == 0
