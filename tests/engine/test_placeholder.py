"""`is_absent` recognises tensors without values for every shape with dimensions."""

from __future__ import annotations

import pytest
import torch

from ftkit.engine.core.placeholder import absent, is_absent


@pytest.mark.parametrize("shape", [(1,), (1, 1), (5, 1), (1, 5), (2, 3)])
def test_absent_values_are_recognised(shape):
    values = torch.zeros(shape)
    assert is_absent(absent(values, values.device, values.dtype))
    assert not is_absent(values)
