"""Measure the GPU memory that a model needs, without a GPU: its operations run on tensors without data.

All tensors are torch's fake tensors. Those of a GPU are on `meta`, because
fake CUDA tensors need a torch built for CUDA. Operations that take other memory on `meta` than on a GPU get the memory of
the GPU's kernels.

Cost: `graph_bytes` runs the model's forward up to and including one block, on fake tensors.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ftkit.hf.kernels.varlen import ATTENTION
from ftkit.plan.attention import Attention, backward_bytes

META = torch.device("meta")


class _Fakes(FakeTensorMode):
    """Answers False when code asks for the value of a fake bool tensor, as checks of fp16 outputs for infinity do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` on fake tensors."""
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:
            if args[0].dtype != torch.bool:
                raise
            return False


@contextmanager
def nothing_behind() -> Iterator[None]:
    """Run the body on torch's fake tensors, which have no memory, on any device."""
    with warnings.catch_warnings(), _Fakes(allow_non_fake_inputs=True):
        # The engine compares addresses to skip copies of a tensor onto itself. All fake tensors have the address 0.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        log = logging.getLogger(FakeTensorMode.__module__)
        log.disabled = True  # it logs each exception of an operation, with the traceback
        try:
            yield
        finally:
            log.disabled = False


def batch(model: nn.Module, rows: int, tokens: int, device: torch.device, *, packed: bool) -> dict[str, Any]:
    """Return a batch as the Trainer gives it to the model, with the number of tokens of the step.

    Args:
        model: The model.
        rows: Number of rows, one sequence each.
        tokens: Tokens per row.
        device: Device of the tensors.
        packed: Whether rows are packed samples for ftkit's own attention, one per row; else there is a padding mask.
    """
    config = getattr(model, "config", None)
    names = ["input_ids", "labels", "position_ids" if packed else "attention_mask"]
    names += ["decoder_input_ids"] if getattr(config, "is_encoder_decoder", False) else []
    inputs: dict[str, Any] = {name: torch.zeros(rows, tokens, dtype=torch.int64, device=device) for name in names}
    if packed:  # boundaries of one sample per row, on the host (data/packing.py)
        inputs["attention_mask"] = torch.tensor([[[[0, tokens]]]] * rows, dtype=torch.int32)
    return inputs | {"num_items_in_batch": rows * tokens, "use_cache": False}


# --- what autograd keeps


class _Measured(Exception):
    """The block was measured; the rest of the model's forward is not needed."""


def graph_bytes(model: nn.Module, block: nn.Module, tokens: int, wide: Any, dtype: torch.dtype | None) -> int:
    """Return the bytes that autograd keeps on a GPU of one block's forward, weights not counted.

    Args:
        model: The model, on any device. No value is read.
        block: A block of the model.
        tokens: Tokens of the one sequence.
        wide: Selects by name the parameters that stay fp32.
        dtype: Compute dtype; None takes each parameter's own.

    Raises:
        Exception: The model needs values to compute, and raises anything.
    """
    packed = getattr(getattr(model, "config", None), "_attn_implementation", None) == ATTENTION
    found: list[int] = []

    def measure(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = tree_map_only(Tensor, lambda each: each.detach().requires_grad_(each.requires_grad), (args, kwargs))
        found.append(_kept_bytes(module, *leaves))
        raise _Measured

    def empty(name: str, tensor: Tensor) -> Tensor:
        computes = dtype if dtype is not None and tensor.is_floating_point() and not wide(name) else tensor.dtype
        return torch.empty(tensor.shape, dtype=computes, device=META).requires_grad_(tensor.requires_grad)

    handle = block.register_forward_pre_hook(measure, with_kwargs=True)
    try:
        with nothing_behind(), CudaAttention(), suppress(_Measured):
            named = model.named_parameters(remove_duplicate=False)
            weights: dict[str, Tensor] = {name: empty(name, parameter) for name, parameter in named}
            weights |= {name: torch.empty_like(buffer, device=META) for name, buffer in model.named_buffers()}
            functional_call(model, weights, (), batch(model, 1, tokens, META, packed=packed), tie_weights=False)
    finally:
        handle.remove()
    return found[0]


def _kept_bytes(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes that autograd keeps of a block's forward.

    Tensors that all blocks share (masks, rotary tables) do not count. The block's input does: the engine keeps it.
    """
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    first: Any = next((each for each in tree_leaves(args) if isinstance(each, Tensor)), kwargs.get("hidden_states"))
    first.requires_grad_()  # as in all blocks but the first one of a model with frozen embeddings
    modes = {module: module.training for module in block.modules()}
    recomputes = vars(block).get("gradient_checkpointing")
    vars(block.train())["gradient_checkpointing"] = False  # the engine replaces torch's
    try:
        with saved_tensors_hooks(note, lambda tensor: tensor):
            result = block.forward(*args, **kwargs)  # its hooks have run
    finally:
        for module, training in modes.items():
            module.training = training
        vars(block).pop("gradient_checkpointing")
        if recomputes is not None:
            vars(block)["gradient_checkpointing"] = recomputes
    others = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each is not first]
    for tensor in [*block.parameters(), *block.buffers(), *others]:
        kept.pop(tensor.untyped_storage()._cdata, None)
    note(first)
    del result  # not before: a storage's address is its key
    return sum(kept.values())


# --- the GPU's kernels


class CudaAttention(TorchFunctionMode):
    """Makes `scaled_dot_product_attention` on meta the memory-efficient kernel that CUDA takes before sm_80.

    Head sizes that are no multiple of 8 have no such kernel: torch computes all scores there, as CUDA does. Grouped keys
    are repeated, as in ftkit's own attention.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, or the kernel instead."""
        on_meta = func is scaled_dot_product_attention and args[0].device.type == "meta"
        fits = on_meta and args[0].dim() == 4 and not args[0].shape[-1] % 8 and not args[2].shape[-1] % 8
        return (_memory_efficient if fits else func)(*args, **(kwargs or {}))


def _memory_efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # torch makes a bias of it
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    found: Tensor = kernel(query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)[0]
    return found


BACKWARDS = {
    torch.ops.aten._efficient_attention_backward.default: (2, 1),
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default: (1, 2),
}
"""The operations of the kernel's backward, with the dimensions of heads and tokens in their queries."""


class CudaAttentionBackward(TorchDispatchMode):
    """Gives that kernel's backward on meta its memory: three gradients, and the workspace of `ftkit.plan.attention`.

    torch 2.13's own version for fake tensors lacks an argument (`out`) and the workspace.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, or allocate the memory of its GPU kernel."""
        if func not in BACKWARDS or args[1].device.type != "meta":
            return func(*args, **(kwargs or {}))
        gradient, query, key, value, bias = args[:5]
        heads, tokens = BACKWARDS[func]
        attention = Attention(query.shape[heads], key.shape[heads], query.shape[3], value.shape[3])
        packed = func is torch.ops.aten._efficient_attention_backward.default  # rows of a fake run are one sample each
        size = backward_bytes(attention, query.shape[0], query.shape[tokens], query.itemsize, packed=packed)
        workspace = torch.empty(size, dtype=torch.uint8, device=gradient.device)
        made = [torch.empty_like(each) for each in (query, key, value)]
        del workspace
        return *made, torch.empty_like(bias) if bias is not None and args[10][3] else None  # asked for in `grad_input_mask`
