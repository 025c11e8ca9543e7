"""Whole models on interpreted kernels: eight steps of each family, compared with the original model."""

from __future__ import annotations

import copy

import pytest
import torch

from ftkit.hf.kernels.fuse import fuse
from ftkit.hf.kernels.head import attach_head_loss
from ftkit.kernels.launch import INTERPRETED
from tests import fusible
from tests.hf.test_fusing import assert_same_weights, train

CPU = torch.device("cpu")


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", fusible.families())
def test_fused_and_plain_models_train_alike(name: str) -> None:
    assert INTERPRETED
    plain = fusible.build(name)
    ours = copy.deepcopy(plain)
    assert fuse(ours, torch.float32, CPU).done
    attach_head_loss(ours, torch.float32, CPU)
    theirs, own = train(plain, name, 8, rows=2, tokens=5), train(ours, name, 8, rows=2, tokens=5)
    assert theirs[-1] < theirs[0] - 0.05
    assert own == pytest.approx(theirs, abs=2e-4)
    assert_same_weights(ours, plain, 2e-3)
