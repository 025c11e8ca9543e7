"""The sharded model of a Hugging Face model: the engine's, with the plan and the changes that were made to the model.

`shard(model_class=ShardedTransformer)` makes it. The engine does not use the additional fields.
"""

from __future__ import annotations

from typing import Any

from ftkit.engine.memory.affinity import Affinity
from ftkit.engine.model import ShardedModel
from ftkit.hf.fp16.modules import Fp32Modules
from ftkit.hf.kernels.fuse import Fused
from ftkit.plan.plan import Plan


class ShardedTransformer(ShardedModel):
    """A sharded Hugging Face model. See `ShardedModel` for what the engine keeps.

    Attributes: plan (how its memory is used; None where it was sharded without one), fused (submodules that run fused
    kernels), fp32_modules (modules that compute in fp32), affinity (the cores that were taken for it), holding (whether a
    generation has decided whether to gather all weights).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plan: Plan | None = None
        self.fused = Fused()
        self.fp32_modules = Fp32Modules()
        self.affinity: Affinity | None = None
        self.holding = False
