"""Models computed with tensors that hold nothing: what of a GPU's memory can be known without one.

Tensors of a device are on `meta`, because fake CUDA tensors need a torch that was built for CUDA; operations whose memory
differs there are given that of the GPU's kernels. Tensors of host memory are torch's fake ones, which cost some 100
microseconds an operation, where those on `meta` cost ten.

`graph_bytes` says what autograd keeps of a block from forward to backward, measured and not estimated. What it costs: the
model's forward as far as the block, under a second.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers.cache_utils import Cache, EncoderDecoderCache

from ftkit.hf.models.varlen import ATTENTION
from ftkit.plan.attention import Attention, backward_bytes


@contextmanager
def nothing_behind(device: torch.device) -> Iterator[None]:
    """Let the tensors that the body makes hold nothing.

    Args:
        device: the compute device: meta, where only host memory needs fake tensors; or the CPU, where all tensors are fake.
    """
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with warnings.catch_warnings(), fakes if device.type == "cpu" else HostFakes(fakes):
        # The engine compares addresses to spare a copy onto itself; of such tensors they are all 0.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


class HostFakes(TorchDispatchMode):
    """Lets operations on host memory be done by fake tensors, and those on `meta` by torch as they are.

    Small constants that are made on the CPU, and never moved there, stay what they are. Whether something is true of what
    holds nothing is answered with no: transformers asks a mask whether all of it is text, and rows of a batch differ.
    """

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.fakes = fakes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, with fake tensors where host memory is read, written or made."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            return False
        makes = "device" in kwargs and kwargs["device"] is not None and torch.device(kwargs["device"]).type == "cpu"
        if not (makes and (func in EMPTY or _on_meta(args))) and not any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)
        with self.fakes:
            result = func(*args, **kwargs)
        # What is written in place is the caller's own tensor, and not the fake one that stood for it meanwhile.
        return args[0] if func._schema.name.endswith("_") else result


EMPTY = frozenset({torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default})
"""What makes memory of any size without filling it."""


def _on_meta(args: tuple[Any, ...]) -> bool:
    return any(isinstance(each, Tensor) and each.device.type == "meta" for each in args)


def batch(model: nn.Module, rows: int, tokens: int, device: torch.device, *, packed: bool) -> dict[str, Any]:
    """Return what the Trainer gives the model: a whole sequence to each row, and the number of tokens of the step.

    Args:
        model: the model that gets the batch.
        rows: number of rows.
        tokens: tokens of a row.
        device: where the tensors are made.
        packed: whether rows are packed samples, as ftkit's own attention takes them, one sample a row; else the batch has a
            padding mask.
    """

    def numbers() -> Tensor:
        return torch.zeros(rows, tokens, dtype=torch.int64, device=device)

    inputs: dict[str, Any] = {"input_ids": numbers(), "labels": numbers(), "num_items_in_batch": rows * tokens}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = numbers()
    if packed:  # boundaries of one sample a row, on the host (data/packing.py)
        ends = torch.tensor([[[[0, tokens]]]] * rows, dtype=torch.int32)
        return inputs | {"position_ids": numbers(), "attention_mask": ends}
    return inputs | {"attention_mask": numbers()}


# --- what autograd keeps


class _Reached(Exception):
    """The block was called; `args` are its arguments."""


def graph_bytes(model: nn.Module, block: nn.Module, tokens: int, wide: Any, dtype: torch.dtype | None) -> int:
    """Return the bytes that autograd keeps on a GPU of one block's forward of one sequence, weights not counted.

    What all blocks share (masks, rotary tables) is not the block's; its own input is: the engine holds it to the backward.

    Args:
        model: the model, on any device; it is not changed, and no value of it is read.
        block: a block of the model.
        tokens: tokens of the sequence.
        wide: says by a parameter's name whether it stays fp32.
        dtype: compute dtype; None: each parameter's own.

    Raises:
        Exception: whatever a model raises that cannot be computed without values.
    """
    meta = torch.device("meta")
    packed = getattr(getattr(model, "config", None), "_attn_implementation", None) == ATTENTION
    training = {module: module.training for module in model.modules()}
    checkpointed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    kept: dict[int, int] = {}

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Reached(args, kwargs)

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    def stand_in(name: str, tensor: Tensor) -> Tensor:
        as_computed = dtype if dtype is not None and tensor.is_floating_point() and not wide(name) else tensor.dtype
        return torch.empty(tensor.shape, dtype=as_computed, device=meta).requires_grad_(tensor.requires_grad)

    with nothing_behind(meta), CudaAttention(grouped=True):
        named = [*model.named_parameters(remove_duplicate=False)]
        weights: dict[str, Tensor] = {name: stand_in(name, parameter) for name, parameter in named}
        weights |= {name: torch.empty_like(buffer, device=meta) for name, buffer in model.named_buffers()}
        place = next(name for name, module in model.named_modules() if module is block)
        handle = block.register_forward_pre_hook(stop, with_kwargs=True)
        for module in checkpointed:  # the engine clears it too: a block that torch computes again keeps nothing to measure
            module.gradient_checkpointing = False  # type: ignore[assignment]  # transformers has it on modules
        try:
            model.train()
            try:
                functional_call(model, weights, (), batch(model, 1, tokens, meta, packed=packed), tie_weights=False)
                raise RuntimeError(f"{place} was not called")
            except _Reached as reached:
                args, kwargs = reached.args
            handle.remove()
            inputs, others = tree_map(_leaf, (args, kwargs))
            first = next((t for t in tree_leaves(inputs) if isinstance(t, Tensor)), others.get("hidden_states"))
            first.requires_grad_()  # the first block's does not where embeddings are frozen; those of all others do
            own = {name.removeprefix(f"{place}."): t for name, t in weights.items() if name.startswith(f"{place}.")}
            with saved_tensors_hooks(note, lambda tensor: tensor):
                result = functional_call(block, own, inputs, others)
            shared = [*own.values(), *(t for t in tree_leaves((inputs, others)) if isinstance(t, Tensor) and t is not first)]
            for tensor in shared:
                kept.pop(tensor.untyped_storage()._cdata, None)
            kept[first.untyped_storage()._cdata] = first.untyped_storage().nbytes()
            del result
        finally:
            handle.remove()
            for module, was in training.items():
                module.training = was
            for module in checkpointed:
                module.gradient_checkpointing = True  # type: ignore[assignment]  # as above
    return sum(kept.values())


def _leaf(value: Any) -> Any:
    """Return an argument as a block gets it from the engine in training: tensors cut from their graph, no caches."""
    if isinstance(value, (Cache, EncoderDecoderCache)):
        return None
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


# --- the GPU's kernels


class CudaAttention(TorchFunctionMode):
    """Lets `scaled_dot_product_attention` on meta be the kernel that CUDA before sm_80 takes: the memory-efficient one.

    Its result has beside it a log-sum-exp in fp32 for each head and row, rows padded to a multiple of 32, as torch itself
    states it (`_scaled_dot_product_efficient_attention` in torch/_meta_registrations.py; the kernel: Rabe and Staats,
    arXiv:2112.05682). Grouped keys and head sizes that are no multiple of 8 have no such kernel: there the scores are made
    whole, as CUDA does.

    Args:
        grouped: take the kernel for grouped keys all the same, repeated, as ftkit's own attention does for packed samples.
    """

    def __init__(self, *, grouped: bool = False) -> None:
        super().__init__()
        self.grouped = grouped

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, or the kernel in its place."""
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and args[0].device.type == "meta":
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        groups = query.shape[1] // key.shape[1] if enable_gqa else 1
        if groups > 1 and self.grouped:
            key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
            groups = 1
        if groups > 1 or query.dim() != 4 or query.shape[-1] % 8 or value.shape[-1] % 8:
            with torch._C.DisableTorchFunction():
                return scaled_dot_product_attention(
                    query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
        bias = attn_mask
        if bias is not None and bias.dtype == torch.bool:  # torch makes a bias of it
            bias = torch.where(bias, 0.0, float("-inf")).to(query.dtype)
        if bias is not None:
            bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        found: Tensor = kernel(query, key, value, bias, grad, dropout_p, is_causal, scale=scale)[0]
        return found


class CudaAttentionBackward(TorchDispatchMode):
    """The memory of the memory-efficient kernel's backward: three gradients, and what `ftkit.plan.attention` counts.

    torch's own form of it for fake tensors lacks an argument of the operation (2.13: `out`), and the workspace.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, or make what it makes."""
        if func not in BACKWARDS or args[1].device.type != "meta":
            return func(*args, **(kwargs or {}))
        gradient, query, key, value, bias = args[:5]
        heads, tokens = BACKWARDS[func]
        attention = Attention(query.shape[heads], key.shape[heads], query.shape[3], value.shape[3])
        dtype = "fp32" if query.dtype == torch.float32 else "fp16"
        packed = func is torch.ops.aten._efficient_attention_backward.default  # rows of a fake run hold one sample
        size = backward_bytes(attention, query.shape[0], query.shape[tokens], dtype, sm=70, packed=packed)
        workspace = torch.empty(size, dtype=torch.uint8, device=gradient.device)
        made = [torch.empty_like(each) if each is not None else None for each in (query, key, value, bias)]
        del workspace
        return tuple(made)


BACKWARDS = {
    torch.ops.aten._efficient_attention_backward.default: (2, 1),
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default: (1, 2),
}
"""The operations of the kernel's backward, with the dimensions of heads and tokens in their queries."""
