"""fp32 modules: what overflows in fp16, found by a look at the model's own batches, and computed in fp32 from then on.

fp16 ends at 65504. Models that were born in bf16 have a few activations beyond it: the output of one MLP, a residual stream
that carries a huge feature through all blocks, scores of an attention. Before the first step the model is run on some of
the run's own batches. Where anything comes within `LIMIT`, the smallest part that can be mended is mended on the spot, and
the forward goes on from there:

    a projection   its product and what it returns are fp32: head, output projections, linear layers of a block itself
    a part         all of an attention or MLP is computed in fp32, its scores and products included
    a stream       a block's, or part's, input is widened: its sums are fp32, and so is all that they flow into

Nothing is cast back: fp32 flows on by the rules of PyTorch's own arithmetic until a projection takes it, and a projection
outside an fp32 module casts its input down to its weights, where tensor cores are. What comes to a projection in fp32 and
does not fit makes it an fp32 module too. Weights stay in fp16 and are widened while they are used.

A model in which nothing comes near the limit is left as it is. All ranks decide together. What it costs: a forward without
gradients for each batch looked at, two for one that needs fp32 modules; then twice the bytes for inputs of blocks on a
widened stream, and fp32 arithmetic on these modules.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear
from transformers.pytorch_utils import Conv1D

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.instance_class import specialise
from ftkit.engine.core.tensor_tree import put_tensors, take_tensors
from ftkit.errors import UserError
from ftkit.hf.models.fp32_modules import LIMIT, Fp32Modules
from ftkit.hf.models.head import head_loss, only_loss
from ftkit.hf.models.sharded_model import ShardedTransformer

logger = logging.getLogger(__name__)

BATCHES = 4
"""Of the run's own, that are looked at before the first step."""

PROJECTIONS = (nn.Linear, Conv1D, BaseTunerLayer)


def find_fp32_modules(units: ShardedTransformer, batches: Iterable[Mapping[str, Any]]) -> Fp32Modules:
    """Make fp32 modules of what overflows in a sharded fp16 model's forward on these batches, beside those that it has.

    Args:
        units: the sharded model, which computes in fp16.
        batches: inputs of the model's forward, on its device. Each rank gives its own, and all ranks give equally many.

    Returns:
        All fp32 modules of the model; `finite` says whether they are enough.

    Cost: see the module. A collective.
    """
    model, upcast = units.model, units.fp32_modules
    training, finite = model.training, True
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                with _Looking(model, units.comm) as looking:
                    ends_finite = looking.run(batch)
                if looking.exceeded():
                    ends_finite = _mend(units, upcast, looking, batch) or ends_finite
                if not ends_finite:
                    ends_finite = _with_wide_head(units, upcast, batch)
                finite = finite and ends_finite
    finally:
        model.train(training)
    upcast.finite, upcast.looked = finite, True
    return upcast


def _mend(units: ShardedTransformer, upcast: Fp32Modules, looking: _Looking, batch: Mapping[str, Any]) -> bool:
    """Make the fp32 modules that a batch needs; return whether its forward is finite then.

    None is made where they do not fit together: a model may have operations, unknown here, that take no two dtypes.
    """
    before = _remember(units.model, units.model, upcast)
    receive(units.model)
    with _Mending(units, upcast, looking) as mending:
        try:
            return mending.run(batch)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of all ranks alike
            logger.warning("fp16: fp32 modules do not fit this model: %s", str(error).splitlines()[0])
    _take_back(units.model, upcast, before)
    return False


def _remember(model: nn.Module, module: nn.Module, upcast: Fp32Modules) -> tuple[Any, ...]:
    """Return what `_take_back` needs to undo fp32 modules in `module`."""
    loss = head_loss(model)
    classes = [(inner, inner.__class__) for inner in module.modules()]
    return classes, dict(upcast.found), dict(upcast.largest), loss is not None and loss.wide


def _take_back(model: nn.Module, upcast: Fp32Modules, before: tuple[Any, ...]) -> None:
    classes, upcast.found, upcast.largest, wide = before
    for module, kind in classes:
        module.__class__ = kind
    loss = head_loss(model)
    if loss is not None:
        loss.wide = wide


def restore_fp32_modules(units: ShardedTransformer, upcast: Fp32Modules) -> None:
    """Give a model the fp32 modules of the run that it continues, beside those that it has.

    Raises:
        UserError: if it has no module of such a name.
    """
    own, modules = units.fp32_modules, dict(units.model.named_modules())
    own.looked = True  # by that run
    for name, kind in upcast.found.items():
        if name not in modules:
            raise UserError(f"the checkpoint has an fp32 module {name!r:.200}; this model has no such part")
        if own.found.get(name) != kind:
            receive(units.model)
            widen(units.model, modules[name], kind)
            own.found[name] = kind
            own.largest[name] = upcast.largest.get(name, math.inf)


def widens_inputs(units: ShardedTransformer) -> bool:
    """Return whether inputs of blocks are fp32: an fp32 module lies in a block, or before one."""
    blocks = [f"{unit.name}." for unit in units.units]
    return any(f"{name}.".startswith(tuple(blocks)) for name in units.fp32_modules.found)


def _with_wide_head(units: ShardedTransformer, upcast: Fp32Modules, batch: Mapping[str, Any]) -> bool:
    """Compute a chunked loss in fp32 if it is that which is not finite; return whether it is finite then."""
    loss = head_loss(units.model)
    if loss is None or loss.wide:
        return False
    loss.wide = True
    with _Hooked(units.model, units.comm) as hooked:
        finite = hooked.run(batch)
    loss.wide = finite
    if finite:
        name = next(name for name, module in units.model.named_modules() if module is loss.head)
        upcast.found[name], upcast.largest[name] = "projection", math.inf
    return finite


# --- what an fp32 module is


def receive(model: nn.Module) -> None:
    """Let projections and LayerNorms take fp32 where their weights are narrower; does nothing the second time."""
    head = _chunked_head(model)
    for module in model.modules():
        if getattr(type(module), "_receives", False) or module is head:
            continue
        if isinstance(module, nn.LayerNorm):
            specialise(module, forward=_receiving_norm(type(module).forward), _receives=True)
        elif _has_matrices(module):
            specialise(module, forward=_receiving(type(module).forward), _receives=True)


def _has_matrices(module: nn.Module) -> bool:
    """Return whether a module multiplies with fp16 parameters of its own: linear layers, but routers and experts too."""
    own = [each for each in module._parameters.values() if each is not None and each.dim() > 1]
    return any(each.dtype == torch.float16 for each in own) and not isinstance(module, (nn.Embedding, BaseTunerLayer))


def widen(model: nn.Module, module: nn.Module, kind: str) -> None:
    """Let a module compute in fp32; the model was prepared by `receive`."""
    if kind != "stream":
        for inner in module.modules():
            _widen(model, inner)
            if kind == "part" and isinstance(inner, nn.Embedding):
                specialise(inner, forward=_returning_wide(type(inner).forward))  # T5's bias of positions
    if kind != "projection":
        specialise(module, forward=_widening(type(module).forward, all_of_it=kind == "part"))


def is_wide(model: nn.Module, module: nn.Module) -> bool:
    """Return whether a projection computes in fp32."""
    if isinstance(module, BaseTunerLayer):
        return any(is_wide(model, inner) for inner in module.modules() if isinstance(inner, (nn.Linear, Conv1D)))
    loss = head_loss(model)
    return loss.wide if loss is not None and module is loss.head else bool(getattr(type(module), "_wide", False))


def _widen(model: nn.Module, module: nn.Module) -> None:
    """Let a linear layer compute in fp32 and return it; does nothing for others, and the second time."""
    loss = head_loss(model)
    if loss is not None and module is loss.head:
        loss.wide = True  # it is told, and not specialised: how it computes is not its own affair (head.py)
    elif isinstance(module, BaseTunerLayer):
        module.cast_input_dtype_enabled = False  # type: ignore[assignment]  # else an adapter in fp16 narrows what comes to it
    elif isinstance(module, (nn.Linear, Conv1D)) and not is_wide(model, module):
        specialise(module, forward=_wide_linear if isinstance(module, nn.Linear) else _wide_conv1d, _wide=True)


def _chunked_head(model: nn.Module) -> nn.Module | None:
    loss = head_loss(model)
    return None if loss is None else loss.head


def _wide_linear(self: nn.Linear, input: Tensor) -> Tensor:
    return linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float())


def _wide_conv1d(self: Any, x: Tensor) -> Tensor:
    out = torch.addmm(self.bias.float(), x.float().reshape(-1, x.shape[-1]), self.weight.float())
    return out.view(*x.shape[:-1], self.nf)


def _receiving(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(plain)
    def forward(self: nn.Module, input: Tensor, *others: Any, **named: Any) -> Tensor:
        return plain(self, input.half() if input.dtype == torch.float32 else input, *others, **named)

    return forward


def _returning_wide(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(plain)
    def forward(self: nn.Module, input: Tensor) -> Tensor:
        return plain(self, input).float()

    return forward


def _receiving_norm(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(plain)
    def forward(self: nn.LayerNorm, input: Tensor) -> Tensor:
        if self.weight is None or input.dtype == self.weight.dtype:
            return plain(self, input)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return layer_norm(input, self.normalized_shape, self.weight.to(input.dtype), bias, self.eps)

    return forward


def _widening(plain: Callable[..., Any], *, all_of_it: bool) -> Callable[..., Any]:
    """Return a forward whose input is widened: its hidden states, which come first, or all that is fp16."""

    @wraps(plain)  # what a block is called with is looked up in its signature
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found: list[Tensor] = []
        tree = take_tensors((args, kwargs), found)
        floating = [number for number, each in enumerate(found) if each.is_floating_point()]
        for number in floating if all_of_it else floating[:1]:
            if found[number].dtype == torch.float16:
                found[number] = found[number].float()
        args, kwargs = put_tensors(tree, found)
        return plain(self, *args, **kwargs)

    return forward


# --- how they are found


class _Hooked:
    """Runs a model with hooks on what is inside, and takes them away."""

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self.model, self.comm = model, comm
        self.handles: list[Any] = []

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self.handles:
            handle.remove()

    def run(self, batch: Mapping[str, Any]) -> bool:
        """Run the model; return whether all that comes out is finite, on all ranks."""
        given = dict(batch)
        if "use_cache" in taken_by(self.model):
            given["use_cache"] = False  # what is computed twice must not find itself there
        with only_loss(self.model, wanted="labels" in batch):
            out = self.model(**given)
        if isinstance(out, dict) and not _counts(batch.get("labels")):
            out = {key: value for key, value in out.items() if key != "loss"}  # 0 / 0
        return not self.comm.any(_largest(out, torch.float16, torch.float32) == math.inf)


class _Looking(_Hooked):
    """Looks whether anything in a forward exceeds the limit, and which projections come last in what they are part of."""

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        super().__init__(model, comm)
        self.last_of: set[int] = set()  # ids of projections whose result is the result of the module around them
        self.calls: Counter[int] = Counter()  # of each module, by id
        self._worst: list[Tensor] = []
        self._made: dict[int, list[Tensor]] = {}  # what projections have returned, until the module around them has
        self.handles = [module.register_forward_hook(self._look) for module in model.modules()]

    def exceeded(self) -> bool:
        """Return whether anything did, on any rank."""
        own = bool(self._worst) and not bool((torch.stack(self._worst) <= LIMIT).all())  # NaN is not
        return self.comm.any(own)

    def called_alike(self) -> set[int]:
        """Return ids of the modules that every rank has called as often. A collective.

        Experts are called where tokens go: what is asked in their hooks would not meet on the ranks.
        """
        modules = list(self.model.modules())
        told = self.comm.all([self.calls[id(module)] for module in modules])
        return {id(module) for module, *counts in zip(modules, *told) if len(set(counts)) == 1}

    def _look(self, module: nn.Module, args: Any, output: Any) -> None:
        self.calls[id(module)] += 1
        found = _tensors(output)
        self._worst += [each.abs().max().float() for each in found if each.dtype == torch.float16 and each.numel()]
        for child in module.children():
            results = self._made.pop(id(child), [])
            if isinstance(child, PROJECTIONS) and any(one is other for one in results for other in found):
                self.last_of.add(id(child))
        if isinstance(module, PROJECTIONS):
            self._made[id(module)] = found


class _Mending(_Hooked):
    """Runs a model, and makes an fp32 module of each part in which a value exceeds the limit as it comes to it.

    What a hook decides, it decides on all ranks alike: a block that is run again is gathered again.
    """

    def __init__(self, units: ShardedTransformer, upcast: Fp32Modules, looking: _Looking) -> None:
        super().__init__(units.model, units.comm)
        self.upcast, self.last_of, self.called_alike = upcast, looking.last_of, looking.called_alike()
        self.blocks = {id(unit.module) for unit in units.units}
        self.names = {id(module): name for name, module in units.model.named_modules()}
        self.parents: dict[int, nn.Module] = {}
        self.doubtful: dict[int, float] = {}  # ids of parts inside which the limit was exceeded, until they are mended
        self.hopeless: set[int] = set()  # ids of what is not finite, whatever is computed in fp32
        self.quiet = False  # while a part is run again
        self._enter(units.model, None)

    def _enter(self, module: nn.Module, parent: nn.Module | None) -> None:
        """Hook what may become an fp32 module below `module`, or itself; note who calls whom."""
        if parent is not None:
            self.parents[id(module)] = parent
        holds_blocks = any(id(inner) in self.blocks for inner in module.modules() if inner is not module)
        called = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if called and not holds_blocks and parent is not None and id(module) in self.called_alike:
            self.handles.append(module.register_forward_pre_hook(self._before))
            self.handles.append(module.register_forward_hook(self._after, with_kwargs=True))
        if isinstance(module, PROJECTIONS):
            return  # with all that an adapter has inside
        for child in module.children():
            self._enter(child, module if called else parent)

    def _before(self, module: nn.Module, args: Any) -> None:
        """Widen a projection to which fp32 comes that fp16 does not hold."""
        if self.quiet or not isinstance(module, PROJECTIONS) or is_wide(self.model, module) or self._doubted(module):
            return
        if args and torch.is_tensor(args[0]) and args[0].dtype == torch.float32:
            largest = _largest(args[0], torch.float32)
            if self.comm.any(LIMIT < largest < math.inf):
                self._make(module, "projection", largest)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Return what a module returns, from an fp32 module if it must be one; None where it stays as it is."""
        doubt = self.doubtful.pop(id(module), None)
        if doubt is not None:
            return self._mended(module, args, kwargs, doubt, ("part",))
        if self.quiet or self._doubted(module) or id(module) in self.hopeless:
            return None
        largest = _largest(output, torch.float16)
        given = {key: value for key, value in kwargs.items() if "mask" not in key}  # masks may hold infinities
        own = largest > LIMIT and _largest((args, given), torch.float16, torch.float32) < math.inf
        if not self.comm.any(own):
            return None
        if self._is_inner(module) and id(module) not in self.last_of:  # what is computed beside it must be fp32 too
            self.doubtful[id(self.parents[id(module)])] = largest
            return None
        kinds = ("projection",) if isinstance(module, PROJECTIONS) else ("stream", "part")
        return self._mended(module, args, kwargs, largest, kinds)

    def _is_inner(self, module: nn.Module) -> bool:
        """Return whether a module is a step of a part of a block: what it returns is first of all for that part."""
        if not isinstance(module, PROJECTIONS) and any(True for _ in module.children()):
            return False
        parent = self.parents[id(module)]
        return id(parent) not in self.blocks and self._inside(parent, self.blocks)

    def _mended(self, module: nn.Module, args: Any, kwargs: Any, largest: float, kinds: Sequence[str]) -> Any:
        """Return what a module returns as an fp32 module of the first of `kinds` that is enough; None if none is."""
        for kind in kinds:
            before = _remember(self.model, module, self.upcast)
            self._make(module, kind, largest)
            self.quiet = id(module) not in self.blocks  # in a block, what is inside may become an fp32 module of its own
            try:
                output = module.forward(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # two dtypes in one operation, on all ranks alike
                logger.debug("%s as an fp32 module: %s", self.names[id(module)], error)
            else:
                if not self._exceeds(output):
                    return output
            finally:
                self.quiet = False
            _take_back(self.model, self.upcast, before)
        self.hopeless.add(id(module))
        return None

    def _make(self, module: nn.Module, kind: str, largest: float) -> None:
        name = self.names[id(module)]
        widen(self.model, module, kind)
        self.upcast.found[name] = kind
        self.upcast.largest[name] = max(self.comm.all(largest))

    def _exceeds(self, output: Any) -> bool:
        own = _largest(output, torch.float16) > LIMIT or _largest(output, torch.float32) == math.inf
        return self.comm.any(own)

    def _doubted(self, module: nn.Module) -> bool:
        around = self.parents.get(id(module))
        return around is not None and self._inside(around, self.doubtful.keys())

    def _inside(self, module: nn.Module, those: Collection[int]) -> bool:
        """Return whether a module is one of `those` (ids), or inside of one."""
        around: nn.Module | None = module
        while around is not None and id(around) not in those:
            around = self.parents.get(id(around))
        return around is not None


def taken_by(model: nn.Module) -> Collection[str]:
    """Return the names of what a model's forward takes: of a PEFT model, what its base takes."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return inspect.signature(base.forward).parameters.keys()


def _counts(labels: Any) -> bool:
    """Return whether a loss of these labels is one: of a causal model the first of a row is none."""
    if not torch.is_tensor(labels) or labels.is_floating_point() or labels.dim() < 2:
        return True
    return bool((labels[..., 1:] != -100).any())


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    take_tensors(tree, found)
    return found


def _largest(tree: Any, *dtypes: torch.dtype) -> float:
    """Return the largest magnitude in the tensors of these dtypes; inf where something is not finite, 0 without any."""
    found = [each.abs().max().float() for each in _tensors(tree) if each.dtype in dtypes and each.numel()]
    return float(torch.nan_to_num(torch.stack(found), nan=math.inf, posinf=math.inf).max()) if found else 0.0
