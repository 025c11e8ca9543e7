"""The search for modules that overflow in fp16 on a run's own batches, and compute in fp32 from then on.

fp16 ends at 65504. Models trained in bf16 have a few larger activations: the output of one MLP, a residual stream with
one huge feature, attention scores. The model runs once on a few batches before the first step. If a magnitude in a block
exceeds `LIMIT` on any rank, the smallest fp32 module that may help is made and the block runs again, until none exceeds it:

1. A projection that computes the result of the module around it becomes a projection.
2. Any other step of an attention or MLP makes that whole module a part.
3. A block, or a module around steps, becomes a stream, or a part if that is not enough.

fp32 modules that do not help are removed. A model without such magnitudes stays unchanged.

Cost: per batch one forward without gradients, with host waits in most modules and one collective per region; per fp32
module tried, one more run of the region.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ftkit.engine.core.tensor_tree import take_tensors
from ftkit.hf.adapters import base_of
from ftkit.hf.fp16.modules import LIMIT, PART, PROJECTION, STREAM, Fp32Modules
from ftkit.hf.kernels.head import head_loss, only_loss
from ftkit.hf.sharded_model import ShardedTransformer

logger = logging.getLogger(__name__)

BATCHES = 4
"""Batches that are searched before the first step."""

PROJECTIONS = (nn.Linear, Conv1D, BaseTunerLayer)


def find_fp32_modules(units: ShardedTransformer, batches: Iterable[Mapping[str, Any]]) -> Fp32Modules:
    """Make fp32 modules of all that overflows in the forward of these batches, and keep those that the model has.

    Args:
        units: The sharded model, compute dtype fp16.
        batches: Keyword arguments of the model's forward, on its device. Each rank gives its own, all the same number.

    Returns:
        All fp32 modules of the model. `finite` says whether the forward is finite with them. A collective.
    """
    model, modules = units.model, units.fp32_modules
    training, modules.finite, modules.overflowed = model.training, True, None
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                with _Hooks(units):
                    finite = _is_finite(units, batch)
                modules.finite = (finite or _with_fp32_head(units, batch)) and modules.finite
    finally:
        model.train(training)
    return modules


def widens_inputs(units: ShardedTransformer) -> bool:
    """Return whether blocks get fp32 inputs: an fp32 module is in a block, or before one."""
    blocks = tuple(f"{unit.name}." for unit in units.units)
    return any(f"{name}.".startswith(blocks) for name in units.fp32_modules.found)


def taken_by(model: nn.Module) -> Collection[str]:
    """Return the names of the arguments of a model's forward; of a PEFT model, those of its base."""
    return inspect.signature(base_of(model).forward).parameters.keys()


def _with_fp32_head(units: ShardedTransformer, batch: Mapping[str, Any]) -> bool:
    """Compute a chunked loss in fp32, which makes no logits for a hook; return whether it is finite then."""
    modules, loss = units.fp32_modules, head_loss(units.model)
    if loss is None or loss.wide:
        return False
    before = modules.found
    name = next(name for name, module in units.model.named_modules() if module is loss.head)
    modules.apply(units.model, {**before, name: PROJECTION})
    if not _is_finite(units, batch):
        modules.apply(units.model, before)
        return False
    modules.largest[name] = math.inf
    return True


def _is_finite(units: ShardedTransformer, batch: Mapping[str, Any]) -> bool:
    """Run the model on a batch; return whether its result is finite on all ranks."""
    given = dict(batch)
    if "use_cache" in taken_by(units.model):
        given["use_cache"] = False  # a block that runs again must not find its own keys in a cache
    with only_loss(units.model, wanted="labels" in batch):
        out = units.model(**given)
    labels = batch.get("labels")
    if isinstance(out, dict) and torch.is_tensor(labels) and labels.dim() > 1 and bool((labels[..., 1:] == -100).all()):
        out = {key: value for key, value in out.items() if key != "loss"}  # 0 / 0
    return not units.comm.any(_largest(out, torch.float16, torch.float32) == math.inf)


Excess = tuple[float, list[tuple[str, str]]]
"""The largest magnitude in the result of a module, and the fp32 modules that may help."""
Excesses = dict[str, Excess]


class _Hooks:
    """Hooks that make fp32 modules while a model runs.

    A region is a block, or an outermost module without blocks. All ranks call regions alike, but not the modules in them:
    calls of experts depend on a rank's tokens. So ranks decide together when a region returns.
    """

    def __init__(self, units: ShardedTransformer) -> None:
        self.model, self.comm, self.modules = units.model, units.comm, units.fp32_modules
        self.blocks = {unit.module for unit in units.units}
        self.names = {module: name for name, module in units.model.named_modules()}
        self.parents: dict[nn.Module, nn.Module] = {}
        self.last: set[nn.Module] = set()  # projections whose result is the result of the module around them
        self.results: dict[nn.Module, list[Tensor]] = {}  # of projections, until the module around them returns
        self.excesses: list[tuple[str, float]] = []  # (module, magnitude) in the region
        self.handles: list[Any] = []

    def __enter__(self) -> _Hooks:
        self._hook_regions(self.model)
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _hook_regions(self, module: nn.Module) -> None:
        for child in module.children():
            if child in self.blocks or not any(inner in self.blocks for inner in child.modules()):
                self._hook_calls(child, None)
                self.handles.append(child.register_forward_hook(self._after_region, with_kwargs=True))
            else:
                self._hook_regions(child)

    def _hook_calls(self, module: nn.Module, parent: nn.Module | None) -> None:
        self.handles.append(module.register_forward_hook(self._after_call, with_kwargs=True))
        if parent is not None:  # inside a block
            self.parents[module] = parent
        is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict))  # which nothing calls
        inner = module if not is_list and (parent is not None or module in self.blocks) else parent
        for child in module.children() if not isinstance(module, PROJECTIONS) else ():  # an adapter's layers belong to it
            self._hook_calls(child, inner)

    def _after_call(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record an excess that began in a module: its input is finite."""
        found = _tensors(output)
        for child in module.children():
            if any(one is other for one in self.results.pop(child, []) for other in found):
                self.last.add(child)
        if isinstance(module, PROJECTIONS):
            self.results[module] = found
        narrows = isinstance(module, PROJECTIONS) and module not in self.modules.wide
        largest = max(_largest(output, torch.float16), _largest(args[:1], torch.float32) if narrows else 0.0)
        if isinstance(module, nn.Embedding):  # it returns its weights; rotary tables would get the dtype of a wider result
            return
        if largest > LIMIT or _largest(output, torch.float32) == math.inf:
            given = {key: value for key, value in kwargs.items() if "mask" not in key}  # masks may contain infinities
            if _largest((args, given), torch.float16, torch.float32) < math.inf:
                self.excesses.append((self.names[module], largest))

    def _take_excesses(self) -> Excesses:
        """Return the modules of all ranks with an excess in the region that has just run. A collective."""
        taken, self.excesses = self.excesses, []
        own = [(name, largest, self._options(name)) for name, largest in taken]
        found: Excesses = {}
        for name, largest, options in (each for rank in self.comm.all(own) for each in rank):
            known = found.get(name, (0.0, options))
            found[name] = max(largest, known[0]), known[1]
        return found

    def _options(self, name: str) -> list[tuple[str, str]]:
        """Return the (name, kind) of fp32 modules that may help a module that this rank has called, smallest first."""
        module = self.model.get_submodule(name)
        around = self.parents.get(module)
        is_step = isinstance(module, PROJECTIONS) or not any(module.children())
        if is_step and around is not None and around not in self.blocks and module not in self.last:
            return [(self.names[around], PART)]
        return [(name, PROJECTION)] if isinstance(module, PROJECTIONS) else [(name, STREAM), (name, PART)]

    def _after_region(self, region: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Make fp32 modules and run the region again until no magnitude exceeds the limit; return its result."""
        excesses = self._take_excesses()
        overflows = (name for name, (largest, _) in excesses.items() if largest == math.inf)
        self.modules.overflowed = self.modules.overflowed or next(overflows, None)
        tried: set[tuple[str, str]] = set()
        while options := [(name, each) for name, (_, own) in excesses.items() for each in own if each not in tried]:
            exceeding, (name, kind) = options[0]
            tried.add((name, kind))
            before = self.modules.found
            self.modules.apply(self.model, {**before, name: kind})
            left, result = self._again(region, args, kwargs, excesses)
            if exceeding in left:
                self.modules.apply(self.model, before)
            else:
                self.modules.largest[name] = excesses[exceeding][0]
                excesses, output = left, result
        return output

    def _again(self, region: nn.Module, args: Any, kwargs: Any, excesses: Excesses) -> tuple[Excesses, Any]:
        """Run a region again; return its excesses and its result. If it cannot run, return the former excesses."""
        try:
            output = region.forward(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # an operation takes no two dtypes, on all ranks alike
            logger.debug("%s with other fp32 modules: %s", self.names[region], error)
            self.excesses, self.results = [], {}
            return excesses, None
        self._after_call(region, args, kwargs, output)
        return self._take_excesses(), output


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    take_tensors(tree, found)
    return found


def _largest(tree: Any, *dtypes: torch.dtype) -> float:
    """Return the largest magnitude in tensors of these dtypes: inf if one is not finite, 0 without any."""
    found = [each.abs().max().float() for each in _tensors(tree) if each.dtype in dtypes and each.numel()]
    return float(torch.nan_to_num(torch.stack(found), nan=math.inf, posinf=math.inf).max()) if found else 0.0
