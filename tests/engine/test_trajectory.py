"""The loss is the loss: whatever the settings, a run on the engine is the run in plain PyTorch.

Eight families of Hugging Face models, three world sizes, recomputed or kept graphs, freed or held weights, every stage,
accumulation, clipping, prefetch, parameter groups, freed buffers poisoned or not: every pair of values here, every
pair with every family where marked slow. fp32, on the same global batches: six steps here, ten in the slow rows. Losses,
gradient norms and all weights together agree to 1e-5, each tensor to 1e-4 under AdamW (which makes whole steps of small
gradients) and to 1e-5 under SGD.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine import trajectory
from tests.engine.families import FAMILIES
from tests.engine.trajectory import QUICK_STEPS, Row, check, plain
from tests.pairwise import pairwise

SETTINGS = {
    "family": tuple(FAMILIES),
    "world": (2, 3, 1),
    "stage": (3, 0, 1, 2),
    "activations": ("recompute", "keep", 1),
    "reshard_after_forward": (True, False),
    "prefetch": (True, False),
    "debug": (False, True),
    "accumulation": (1, 4),
    "clip": (True, False),
    "groups": (2, 1),
}
SHARDED = {**SETTINGS, "world": (2, 3), "stage": (3,)}
"""Where all settings matter: what holds weights is only asked at stage 3, and on several ranks."""
OTHERS = ("adagrad", "rmsprop", "ademamix", "stable_adamw")
TENSOR_LIMIT = {"sgd": 1e-5, **dict.fromkeys(("adamw", *OTHERS), 1e-4)}

ADAMW_ROWS = [Row(**row) for row in pairwise(SETTINGS)]
SGD_ROWS = [replace(row, optimizer="sgd") for row in ADAMW_ROWS[2::8]]
OTHER_ROWS = [replace(row, optimizer=name) for row, name in zip(ADAMW_ROWS[1::5], OTHERS * 2)]

SLOW_ROWS = [row for row in (Row(**row) for row in pairwise(SHARDED)) if row not in ADAMW_ROWS]
SLOW_ROWS += [
    Row(**settings, family=family, optimizer=optimizer)
    for family, optimizer in zip(FAMILIES, ("adamw", "sgd") * 4)
    for settings in pairwise({name: values for name, values in SETTINGS.items() if name != "family"})
]


@pytest.mark.parametrize("row", ADAMW_ROWS + SGD_ROWS + OTHER_ROWS, ids=str)
def test_every_pair_of_settings_trains_as_plain_pytorch(worlds, row):
    check(worlds, row, steps=QUICK_STEPS, tensor_limit=TENSOR_LIMIT[row.optimizer])


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW_ROWS, ids=str)
def test_every_pair_trains_as_plain_pytorch_in_every_family(worlds, row):
    check(worlds, row, tensor_limit=TENSOR_LIMIT[row.optimizer])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_clips_and_learns(family):
    record = plain(Row(family, groups=2))
    assert min(record.norms) > trajectory.MAX_NORM
    assert record.losses[-1] != record.losses[0]
