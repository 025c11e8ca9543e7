"""8-bit moments and split master weights: the code against its definition, and the loops of the host against plain PyTorch.

All comparisons are of bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ftkit.engine.kernels.host_loops import RANGE_NUMEL, HostLoops
from ftkit.engine.optim import coding
from ftkit.spec.state_forms import GROUP_NUMEL

NARROW = [torch.bfloat16, torch.float16]
ADAMW = {"factor": 0.37, "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
LION = {"factor": 0.37, "lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@pytest.fixture(scope="module")
def loops() -> HostLoops:
    return HostLoops(2)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    assert a.dtype == b.dtype
    dtype = BITS[a.element_size()]
    return torch.equal(a.view(dtype), b.view(dtype))


def near(numbers: Tensor) -> Tensor:
    """Return numbers and their neighbours, up to three steps away."""
    patterns = numbers.view(torch.int32)[:, None] + torch.arange(-3, 4)
    return patterns.clamp(min=0).int().view(-1).view(torch.float32)


def in_groups(values: Tensor, top: float = 1.0) -> Tensor:
    """Return values in groups that each begin with `top`, filled with zeros."""
    rows = -(-values.numel() // (GROUP_NUMEL - 1))
    groups = torch.zeros(rows, GROUP_NUMEL)
    groups[:, 0] = top
    groups[:, 1:] = torch.cat([values, torch.zeros(rows * (GROUP_NUMEL - 1) - values.numel())]).view(rows, -1)
    return groups.view(-1)


def decades(n: int, seed: int) -> Tensor:
    """Return numbers of both signs whose groups, and whose elements in a group, differ by many decades."""
    chance = torch.Generator().manual_seed(seed)
    groups = 10 ** torch.empty(n // GROUP_NUMEL, 1).uniform_(-25, 5, generator=chance)
    sizes = 10 ** torch.empty(n // GROUP_NUMEL, GROUP_NUMEL).uniform_(-10, 0, generator=chance)
    return (groups * sizes * torch.randn(n // GROUP_NUMEL, GROUP_NUMEL, generator=chance)).view(-1)


def hard(n: int, seed: int) -> Tensor:
    """Return `decades` with groups of zeros, of subnormals, and of one large number."""
    values = decades(n, seed).view(-1, GROUP_NUMEL)
    values[1] = 0
    values[2] = torch.linspace(-(2.0**-127), 2.0**-127, GROUP_NUMEL)
    values[3] = 2.0**-97 * values[3] / values[3].abs().max()  # the smallest scales
    values[4] = 2.0**-98 * values[4] / values[4].abs().max()
    values[8:10] = 2.0**-99 * values[8:10] / values[8:10].abs().max()
    values[5, 7] = 1e30
    values[6] = 0
    values[6, 100] = -3e38
    values[7] = -0.0
    return values.view(-1)


# --- the code


@pytest.mark.parametrize("signed", [True, False])
def test_values_and_limits_are_those_of_the_formula(signed: bool) -> None:
    values, limits = coding._table(signed, torch.device("cpu"))
    last, below = (128, 7) if signed else (256, 8)
    n = np.arange(2, last + 1)
    q = np.floor(np.log2(n)).astype(int)
    bits = 0x3F800000 - (below - q) * 2**25 + (n - 2**q) * 2 ** (25 - q)
    assert values[0] == 0
    assert same(values[1:], torch.from_numpy(bits.astype(np.int32)).view(torch.float32))
    middles = (values[1:] + values[:-1]) / 2
    assert same(limits[3:], middles[3:])
    assert [limit / values[1] for limit in limits[:3]] == [1 / 4, 2, 8]
    assert [value / values[1] for value in values[1:4]] == [1, 4, 16]


@pytest.mark.parametrize("signed", [True, False])
def test_every_limit_rounds_up_and_every_value_is_its_own(loops: HostLoops, signed: bool) -> None:
    values, limits = coding._table(signed, torch.device("cpu"))
    chance = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    ratios = torch.cat([near(values).clamp(max=1), near(limits), chance, chance**8, chance**20])
    x = in_groups(ratios)
    expected = in_groups(torch.bucketize(ratios, limits, right=True).float(), top=len(limits)).to(torch.uint8)
    for signs in (1, -1) if signed else (1,):
        codes, scales = loops.encode(x * signs, signed=signed)
        assert same(codes, expected + (128 * (expected > 0).to(torch.uint8) if signs < 0 else 0))
        assert same(scales, torch.ones_like(scales))
        assert same(coding.encode(x * signs, signed=signed)[0], codes)
        decoded = loops.decode(codes, scales, signed=signed)
        assert same(decoded, coding.decode(codes, scales, signed=signed))
        assert same(decoded, signs * values[expected.long()] + 0.0)


@pytest.mark.parametrize("signed", [True, False])
def test_encoding_what_was_decoded_changes_nothing(loops: HostLoops, signed: bool) -> None:
    """All codes with scales of all exponents, from the smallest to the largest, and random fractions."""
    chance = torch.Generator().manual_seed(0)
    exponents = torch.arange(-98, 128).repeat(8)
    scales = torch.ldexp(torch.empty(len(exponents)).uniform_(1, 2, generator=chance), exponents)
    scales[:2] = torch.tensor([2.0**-98, 3.4028234663852886e38])
    scales = scales.repeat_interleave(4)
    codes = torch.arange(256, dtype=torch.uint8)
    rows = []
    for each in codes.view(4, 64):  # groups of a largest code, 64 others, and zeros
        top = torch.tensor([127 if signed else 255], dtype=torch.uint8)
        rows.append(torch.cat([top, each[each != 128] if signed else each]).sort().values)
        rows[-1] = torch.cat([rows[-1], torch.zeros(GROUP_NUMEL - len(rows[-1]), dtype=torch.uint8)])
    whole = torch.stack(rows).repeat(len(exponents), 1).view(-1)
    for arithmetic in (loops, coding):
        decoded = arithmetic.decode(whole, scales, signed=signed)
        again, same_scales = arithmetic.encode(decoded, signed=signed)
        assert same(again, whole)
        assert same(same_scales, scales)


@pytest.mark.parametrize("signed", [True, False])
def test_groups_of_all_magnitudes_and_small_ones_become_zero(loops: HostLoops, signed: bool) -> None:
    x = hard(64 * GROUP_NUMEL, 3)
    x = x if signed else x.abs()
    codes, scales = loops.encode(x, signed=signed)
    for mine, plain in zip((codes, scales), coding.encode(x, signed=signed)):
        assert same(mine, plain)
    tops = x.view(-1, GROUP_NUMEL).abs().amax(1)
    assert same(scales, torch.where(tops < 2.0**-98, 0, tops))
    assert (scales == 0).sum() >= 5
    assert (codes.view(-1, GROUP_NUMEL)[scales == 0] == 0).all()
    if signed:
        assert not (codes == 128).any()


# --- the split master weight


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_split_of_random_and_of_edge_masters(loops: HostLoops, dtype: torch.dtype) -> None:
    every = torch.arange(2**15).to(torch.int16).view(dtype)
    finite = every[every.isfinite()].float()
    middles = ((finite[1:].double() + finite[:-1].double()) / 2).float()
    sizes = torch.cat([near(finite), near(middles), decades(1 << 16, 0).abs(), torch.rand(1 << 16) * 2.0**-13])
    for p in (sizes, -sizes):
        weights, residuals = [], []
        for arithmetic in (loops, coding):
            weights.append(torch.empty_like(p, dtype=dtype))
            residuals.append(torch.empty_like(p, dtype=torch.int16))
            arithmetic.split(p, weights[-1], residuals[-1])
        kept = weights[1].isfinite()
        assert same(weights[0], weights[1])
        assert same(residuals[0][kept], residuals[1][kept])
        weight, residual, p = weights[0][kept], residuals[0][kept], p[kept]
        back = loops.join(weight, residual)
        assert same(back, coding.join(weight, residual))
        exact = p.abs() >= (2.0**-17 if dtype == torch.float16 else 0)
        assert same(back[exact], p[exact])
        assert ((back.double() - p.double()).abs()[~exact] <= 2.0**-41).all()
        again = torch.empty_like(weight), torch.empty_like(residual)
        loops.split(back, *again)
        assert same(again[0], weight)
        assert same(again[1], residual)


def pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return all finite weights, each with up to 64 residuals, the extremes among them, that `split` can produce."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    chosen = torch.cat([torch.tensor([0, 1, -1, 8, -8, 32767, 32760, -32768]), torch.arange(-28672, 28672, 1024)])
    weight = every[every.isfinite()].repeat_interleave(64)
    residual = chosen.repeat(len(weight) // 64)
    size = weight.abs().view(torch.int16).int()
    possible = (size > 0) | (residual >= 0)
    if dtype == torch.float16:
        steps = size * 2**16 + residual  # of 2^-40, up to 2^-13
        power = (size & 0x3FF == 0) & (size > 0x400) & (residual < 0)  # a number below it is half as far away
        unit = torch.where(power, 4, 8)  # of the last place of fp32 numbers
        for exponent, smaller in ((26, 4), (25, 2), (24, 1)):
            unit = torch.where(steps < 2**exponent, smaller, unit)
        possible &= (residual % unit == 0) & (~power | (residual >= -(2**14)))
    return weight[possible], residual[possible].to(torch.int16)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_weight_with_residuals_comes_back(loops: HostLoops, dtype: torch.dtype) -> None:
    weight, residual = pairs(dtype)
    assert len(weight) > 2_000_000
    p = loops.join(weight, residual)
    assert same(p, coding.join(weight, residual))
    for arithmetic in (loops, coding):
        again = torch.empty_like(weight), torch.empty_like(residual)
        arithmetic.split(p, *again)
        assert same(again[0], weight)
        assert same(again[1], residual)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_masters_that_are_not_finite_give_weights_that_are_not(loops: HostLoops, dtype: torch.dtype) -> None:
    nan = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7FFF7FFF], dtype=torch.int32).view(torch.float32)
    p = torch.cat([nan, torch.tensor([torch.inf, -torch.inf, 3e38 if dtype == torch.float16 else 3.4e38, -3.4e38])])
    for arithmetic in (loops, coding):
        weight = torch.zeros_like(p, dtype=dtype)
        arithmetic.split(p, weight, torch.zeros_like(p, dtype=torch.int16))
        assert weight[:4].isnan().all()
        assert not weight.isfinite().any()


# --- the updates


KINDS = ["none", "float32", "bfloat16", "float16", "split bfloat16", "split float16"]


def state(rule: str, kind: str, n: int) -> dict[str, Any]:
    """Return the tensors of an update, by name, in the middle of a training."""
    master, m = decades(n, 1).clamp(-1e3, 1e3), hard(n, 2).clamp(-1e18, 1e18)
    s = m.abs() * torch.rand(n, generator=torch.Generator().manual_seed(3)) * 4
    split = kind.startswith("split")
    weight = None if kind == "none" else master.to(getattr(torch, kind.removeprefix("split ")))
    residual = torch.zeros(n, dtype=torch.int16) if split else None
    if split:
        coding.split(master, weight, residual)
    found = {"master": None if split else master}
    found["m"], found["m_scales"] = coding.encode(m, signed=True)
    if rule == "adamw_8bit":
        found["s"], found["s_scales"] = coding.encode(s, signed=False)
    return {**found, "weight": weight, "residual": residual}


def gradients(n: int, dtype: torch.dtype, step: int) -> Tensor:
    """Return gradients in which elements, and groups, are zero, and others have all magnitudes of the dtype."""
    found = hard(n, 10 + step).clamp(-1e15, 1e15) if dtype != torch.float16 else decades(n, 10 + step).clamp(-6e4, 6e4)
    found.view(-1, GROUP_NUMEL)[::5] = 0
    found[::7] = 0
    return found.to(dtype)


def update(arithmetic: Any, rule: str, tensors: dict[str, Any], gradient: Tensor, step: int, **changes: Any) -> None:
    numbers = {**ADAMW, "step": step} if rule == "adamw_8bit" else LION
    getattr(arithmetic, rule)(gradient=gradient, **tensors, **{**numbers, **changes})


def check(mine: dict[str, Any], plain: dict[str, Any]) -> None:
    for name, tensor in plain.items():
        assert tensor is None or same(mine[name], tensor), name


@pytest.mark.quick(13)
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["adamw_8bit", "lion_8bit"])
def test_loops_give_the_bits_of_plain_pytorch(loops: HostLoops, rule: str, kind: str, dtype: torch.dtype) -> None:
    n = 64 * GROUP_NUMEL
    mine, plain = state(rule, kind, n), state(rule, kind, n)
    for step in range(1, 6):
        gradient = gradients(n, dtype, step)
        changes = {"factor": 2.0**-16} if dtype == torch.float16 else {}
        before = {name: None if tensor is None else tensor.clone() for name, tensor in plain.items()}
        update(loops, rule, mine, gradient, step, **changes)
        update(coding, rule, plain, gradient, step, **changes)
        check(mine, plain)
        for name, tensor in plain.items():
            assert tensor is None or not same(tensor, before[name]), f"{name} is not updated"
            assert tensor is None or not tensor.is_floating_point() or tensor.isfinite().all(), f"{name} is not finite"


@pytest.mark.parametrize("kind", ["bfloat16", "split float16"])
def test_the_number_of_threads_changes_no_bit(kind: str) -> None:
    n = 3 * RANGE_NUMEL + 5 * GROUP_NUMEL
    gradient = gradients(n, torch.bfloat16, 1)
    for rule in ("adamw_8bit", "lion_8bit"):
        plain = state(rule, kind, n)
        update(coding, rule, plain, gradient, 2)
        for threads in (1, 2, 3):
            mine = state(rule, kind, n)
            update(HostLoops(threads), rule, mine, gradient, 2)
            check(mine, plain)
    values = hard(n, 5)
    for threads in (1, 3):
        for mine, expected in zip(HostLoops(threads).encode(values, signed=True), coding.encode(values, signed=True)):
            assert same(mine, expected)
