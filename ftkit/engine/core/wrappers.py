"""Wrappers of others around a model: refused when they are made, at the model's next call, or when what is sharded has one.

DistributedDataParallel would reduce gradients that were reduced already, DataParallel would copy weights that are not there,
and a compiled graph would remember the addresses of weights that come and go. Each of them asks something of the module that
nobody else asks; the generated subclass of a sharded model (instance_class.py) answers that question with an error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
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


def refuse_wrapped(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], *, gathers: bool) -> None:
    """Raise where a model that is to be sharded, or a part of it with blocks inside, has a wrapper of others around it.

    Args:
        model: model to be sharded.
        blocks: (name, module) of its blocks.
        gathers: whether blocks' weights come and go. Where they stay, a compiled block computes as any other.

    Raises:
        UserError: naming the wrapper, and what to give instead.
    """
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    own = {id(block) for _, block in blocks}
    for name, module in model.named_modules():
        if not (module is model or any(id(inner) in own for inner in module.modules())):
            continue
        told = name or type(module).__name__
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise UserError(
                f"{told} is wrapped by {type(module).__name__}, and the engine shares the work among the ranks itself: give "
                "the model that is inside (model.module)"
            )
        is_compiled = isinstance(module, compiled) or module._compiled_call_impl is not None
        if is_compiled and (gathers or id(getattr(module, "_orig_mod", module)) not in own):
            raise UserError(
                f"{told} cannot be wrapped by torch.compile before it is sharded: gathered weights come and go, and a graph "
                "would remember their addresses. Leave torch.compile and .compile() off for the model and its blocks; a "
                "module inside a block may be compiled"
            )


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
