"""The trajectory is the same on every tier, and for any timing of transfers.

Parameters, gradients, optimizer state and activations on the device, in host memory or on NVMe; updates at once or under
the next forward; batches divided inside blocks or outside; transfers that come artificially late; freed buffers poisoned.
Every pair of values here, every three where marked slow, each against plain PyTorch as in `test_trajectory`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ftkit.engine.memory.tiers import Tiers
from ftkit.spec.strategy import Strategy
from tests.engine.trajectory import QUICK_STEPS, Row, check
from tests.pairwise import covering, pairwise

TIERS = ("device", "host", "nvme")
KINDS = ("parameters", "gradients", "state", "activation_offload")
SETTINGS: dict[str, tuple[Any, ...]] = {
    "family": ("llama", "gpt2", "qwen3", "bert"),
    "world": (2, 1, 3),
    "parameters": TIERS,
    "gradients": TIERS,
    "state": (*TIERS, "both"),
    "activation_offload": TIERS,
    "deferred": (False, True),
    "parts": (1, 2),
    "late": (False, True),
    "accumulation": (1, 2),
    "prefetch": (True, False),
    "activations": ("recompute", "keep", 1),
}


def row_of(settings: dict[str, Any]) -> Row:
    """Return the run of a combination: freed buffers are always poisoned, two groups, clipped."""
    return Row(**settings, debug=True, groups=2)


ROWS = [row_of(settings) for settings in pairwise(SETTINGS)]
SLOW_ROWS = [row_of(settings) for settings in covering(SETTINGS, 3)]
LOWER_STAGES = [
    Row("llama", 2, stage, groups=2, state=state, gradients=gradients, deferred=True, debug=True, late=True)
    for stage, state, gradients in ((0, "host", "device"), (1, "nvme", "device"), (2, "nvme", "nvme"), (2, "host", "host"))
]

EVERYTHING = [  # at once: where faults of order show
    Row("llama", 2, accumulation=2, groups=2, debug=True, deferred=True, late=True, **dict.fromkeys(KINDS, "nvme")),
    Row("llama", 2, parts=2, groups=2, debug=True, deferred=True, late=True, **dict.fromkeys(KINDS, "host")),
    Row("llama", 2, groups=2, deferred=True, late=True, **dict.fromkeys(KINDS, "nvme")),  # slots keep what was in them
    Row("t5", 2, groups=2, debug=True, deferred=True, late=True, **dict.fromkeys(KINDS, "nvme")),
]


def test_lines_of_a_state_on_nvme_stay_in_host_memory_while_they_fit():
    cpu = torch.device("cpu")
    both = Tiers(cpu, Strategy.of(state="nvme", state_host_bytes=100), object())
    assert both.state_tiers([40, 60, 1, 5]) == ["host", "host", "nvme", "nvme"]
    assert both.state_tiers([40, 61, 5]) == ["host", "nvme", "host"], "one that comes later takes what is left"
    assert Tiers(cpu, Strategy.of(state="nvme"), object()).state_tiers([1]) == ["nvme"]
    assert Tiers(cpu, Strategy.of(state="host", state_host_bytes=100)).state_tiers([400]) == ["host"]


@pytest.mark.parametrize("row", ROWS + LOWER_STAGES + EVERYTHING, ids=str)
def test_every_pair_of_places_trains_as_plain_pytorch(worlds, row):
    check(worlds, row, steps=QUICK_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW_ROWS, ids=str)
def test_every_three_places_train_as_plain_pytorch(worlds, row):
    check(worlds, row)
