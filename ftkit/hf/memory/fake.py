"""Measure the GPU memory that a model needs, without a GPU: its operations run on tensors without data.

Device tensors are on `meta`, because fake CUDA tensors need a torch built for CUDA. Operations that take other memory on
`meta` than on a GPU get the memory of the GPU's kernels. Host tensors are torch's fake tensors, which cost about 100
microseconds per operation; those on `meta` cost ten.

Cost: `graph_bytes` runs the model's forward up to one block, in under a second.
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

from ftkit.hf.kernels.varlen import ATTENTION
from ftkit.plan.attention import Attention, backward_bytes

EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)
"""Operations that allocate memory of any size without a value."""

META = torch.device("meta")


@contextmanager
def nothing_behind(device: torch.device) -> Iterator[None]:
    """Make all tensors in the body without memory.

    Args:
        device: Compute device. On meta only host tensors become fake ones, on the CPU all tensors.
    """
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with warnings.catch_warnings(), fakes if device.type == "cpu" else HostFakes(fakes):
        # The engine compares addresses, so that it need not copy a tensor onto itself. Of these tensors all are 0.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


class HostFakes(TorchDispatchMode):
    """Runs operations on host memory with fake tensors, and others as they are.

    Small constants that are made on the CPU stay real. A question for the truth of a tensor is answered with no:
    transformers asks whether a whole mask is text, and rows of a batch differ.
    """

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.fakes = fakes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, with fake tensors if it reads, writes or makes host memory."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            return False
        on_meta = any(isinstance(each, Tensor) and each.is_meta for each in args)
        on_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
        if not (on_host and (func in EMPTY or on_meta)) and not any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)
        with self.fakes:
            result = func(*args, **kwargs)
        # An operation in place returns the caller's tensor, not the fake one that replaced it.
        return args[0] if func._schema.name.endswith("_") else result


def batch(model: nn.Module, rows: int, tokens: int, device: torch.device, *, packed: bool) -> dict[str, Any]:
    """Return a batch as the Trainer gives it to the model, with the number of tokens of the step.

    Args:
        model: The model.
        rows: Number of rows, one sequence each.
        tokens: Tokens per row.
        device: Device of the tensors.
        packed: Whether rows are packed samples for ftkit's own attention, one per row; else there is a padding mask.
    """

    def numbers() -> Tensor:
        return torch.zeros(rows, tokens, dtype=torch.int64, device=device)

    inputs: dict[str, Any] = {"input_ids": numbers(), "labels": numbers(), "num_items_in_batch": rows * tokens}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = numbers()
    if packed:  # boundaries of one sample per row, on the host (data/packing.py)
        ends = torch.tensor([[[[0, tokens]]]] * rows, dtype=torch.int32)
        return inputs | {"position_ids": numbers(), "attention_mask": ends}
    return inputs | {"attention_mask": numbers()}


# --- what autograd keeps


class _Reached(Exception):
    """The block was called; `args` are its arguments."""


def graph_bytes(model: nn.Module, block: nn.Module, tokens: int, wide: Any, dtype: torch.dtype | None) -> int:
    """Return the bytes that autograd keeps on a GPU of one block's forward, weights not counted.

    Tensors that all blocks share (masks, rotary tables) do not count. The block's input does: the engine keeps it.

    Args:
        model: The model, on any device. No value is read, and it is not changed.
        block: A block of the model.
        tokens: Tokens of the one sequence.
        wide: Selects by name the parameters that stay fp32.
        dtype: Compute dtype; None takes each parameter's own.

    Raises:
        Exception: The model needs values to compute, and raises anything.
    """
    packed = getattr(getattr(model, "config", None), "_attn_implementation", None) == ATTENTION
    place = next(name for name, module in model.named_modules() if module is block)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    def empty(name: str, tensor: Tensor) -> Tensor:
        computes = dtype if dtype is not None and tensor.is_floating_point() and not wide(name) else tensor.dtype
        return torch.empty(tensor.shape, dtype=computes, device=META).requires_grad_(tensor.requires_grad)

    with nothing_behind(META), CudaAttention(grouped=True), _in_training(model):
        named = model.named_parameters(remove_duplicate=False)
        weights: dict[str, Tensor] = {name: empty(name, parameter) for name, parameter in named}
        weights |= {name: torch.empty_like(buffer, device=META) for name, buffer in model.named_buffers()}
        args, kwargs = _arguments_of(block, model, weights, batch(model, 1, tokens, META, packed=packed))
        first = next((each for each in tree_leaves(args) if isinstance(each, Tensor)), kwargs.get("hidden_states"))
        first.requires_grad_()  # as in all blocks but the first one of a model with frozen embeddings
        own = {name.removeprefix(f"{place}."): each for name, each in weights.items() if name.startswith(f"{place}.")}
        with saved_tensors_hooks(note, lambda tensor: tensor):
            result = functional_call(block, own, args, kwargs)
        others = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each is not first]
        for tensor in [*own.values(), *others]:
            kept.pop(tensor.untyped_storage()._cdata, None)
        note(first)
        del result  # not before: a storage's address is its key
    return sum(kept.values())


def _arguments_of(block: nn.Module, model: nn.Module, weights: dict[str, Tensor], inputs: Any) -> Any:
    """Return the (args, kwargs) that a block gets in training: tensors without their graph, no caches."""

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Reached(args, kwargs)

    def leaf(value: Any) -> Any:
        if isinstance(value, (Cache, EncoderDecoderCache)):
            return None
        return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    handle = block.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        functional_call(model, weights, (), inputs, tie_weights=False)
    except _Reached as reached:
        return tree_map(leaf, reached.args)
    finally:
        handle.remove()
    raise RuntimeError(f"{type(block).__name__} was not called")


@contextmanager
def _in_training(model: nn.Module) -> Iterator[None]:
    """Put a model in training mode in the body, without torch's checkpointing: the engine replaces it."""
    modes = ("training", "gradient_checkpointing")
    before = {module: {key: value for key, value in vars(module).items() if key in modes} for module in model.modules()}
    for module, values in before.items():
        vars(module).update({key: key == "training" for key in values})
    try:
        yield
    finally:
        for module, values in before.items():
            vars(module).update(values)


# --- the GPU's kernels


class CudaAttention(TorchFunctionMode):
    """Makes `scaled_dot_product_attention` on meta the memory-efficient kernel that CUDA takes before sm_80.

    It also returns a log-sum-exp, fp32, per head and row, with rows padded to a multiple of 32. Grouped keys and head sizes
    that are no multiple of 8 have no such kernel: torch computes all scores there, as CUDA does.

    Source: `_scaled_dot_product_efficient_attention` in torch/_meta_registrations.py; arXiv:2112.05682.

    Args:
        grouped: Take the kernel for grouped keys too, with repeated keys, as ftkit's own attention does.
    """

    def __init__(self, *, grouped: bool = False) -> None:
        super().__init__()
        self.grouped = grouped

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, or the kernel instead."""
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and args[0].is_meta:
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
        **named: Any,
    ) -> Tensor:
        groups = query.shape[1] // key.shape[1] if named.get("enable_gqa") else 1
        if groups > 1 and self.grouped:
            key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
            groups = 1
        if groups > 1 or query.dim() != 4 or query.shape[-1] % 8 or value.shape[-1] % 8:
            with torch._C.DisableTorchFunction():
                return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **named)
        bias = attn_mask
        if bias is not None and bias.dtype == torch.bool:  # torch makes a bias of it
            bias = torch.where(bias, 0.0, float("-inf")).to(query.dtype)
        if bias is not None:
            bias = bias.expand(*query.shape[:3], key.shape[2])
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        found: Tensor = kernel(query, key, value, bias, grad, dropout_p, is_causal, scale=named.get("scale"))[0]
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
        """Call `func`, or allocate what it would."""
        if func not in BACKWARDS or not args[1].is_meta:
            return func(*args, **(kwargs or {}))
        gradient, query, key, value, bias = args[:5]
        heads, tokens = BACKWARDS[func]
        attention = Attention(query.shape[heads], key.shape[heads], query.shape[3], value.shape[3])
        dtype = "fp32" if query.dtype == torch.float32 else "fp16"
        packed = func is torch.ops.aten._efficient_attention_backward.default  # rows of a fake run are one sample each
        size = backward_bytes(attention, query.shape[0], query.shape[tokens], dtype, sm=70, packed=packed)
        workspace = torch.empty(size, dtype=torch.uint8, device=gradient.device)
        made = [torch.empty_like(each) if each is not None else None for each in (query, key, value, bias)]
        del workspace
        return tuple(made)
