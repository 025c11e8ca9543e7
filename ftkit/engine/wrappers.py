"""Wrappers of others around a sharded model: refused when they are made, or at the model's next call.

DistributedDataParallel would reduce gradients that were reduced already, DataParallel would copy weights that are not there,
and a compiled graph would remember the addresses of weights that come and go. Each of them asks something of the module that
nobody else asks; the generated subclass of a sharded model (seam.py) answers that question with an error.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from ftkit.errors import UserError


def refusing_members() -> dict[str, Any]:
    """Return the members of a sharded model's class that keep wrappers of others away from it."""

    def ddp(module: nn.Module) -> Any:
        raise _refusal(module, "DistributedDataParallel (or another accelerator's prepare())", "it reduces gradients itself")

    def replicate(module: nn.Module) -> Any:
        raise _refusal(module, "DataParallel", "start one process a GPU instead")

    def ignore(module: nn.Module, names: Any) -> None:
        """Take names of buffers that DDP should ignore: there is no DDP."""

    return {
        "_ddp_params_and_buffers_to_ignore": property(ddp, ignore),
        "_replicate_for_data_parallel": replicate,
    }


def refuse_compiled(module: nn.Module) -> None:
    """Raise where a call of a sharded model is compiled, by `torch.compile(model)` or `model.compile()`.

    Raises:
        UserError: naming the model.
    """
    frames = sys.modules.get("torch._C._dynamo.eval_frame") if "torch._dynamo" in sys.modules else None
    compiling = frames is not None and callable(frames.get_eval_frame_callback())
    if compiling or module._compiled_call_impl is not None:
        raise _refusal(module, "torch.compile", "gathered weights come and go, and a graph would remember their addresses")


def _refusal(module: nn.Module, wrapper: str, reason: str) -> UserError:
    return UserError(
        f"{type(module).__name__} is sharded by ftkit and cannot be wrapped by {wrapper}: {reason}. Call the model as it "
        "is, or train without ftkit's engine (ftkit=None)"
    )
