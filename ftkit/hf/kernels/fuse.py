"""Replace submodules of a model by fused kernels, each after a proof on a probe.

    norms          RMSNorm with the casting of the model, LayerNorm
    activations    GELU in its forms, SiLU, ReLU
    gated MLPs     gate, up and down projections (Llama), gate and up in one layer (Phi-3), T5's
    rotary         the function with which an attention rotates queries and keys

A submodule is recognized by what it has (an eps and one weight; linear layers and an activation), not by its class. The
proof compares values and gradients on a probe with random weights, in the dtypes of the run. A module that does not agree is
left alone and reported. So is a module with hooks or with a `forward` of the instance. A replaced instance gets a subclass
of its own class (`engine/core/instance_class.py`), so names, adapters and weights stay. On a CPU the kernels run as plain
PyTorch.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Generator, Tensor, nn

from ftkit.engine.core.instance_class import specialise
from ftkit.hf.kernels.probes import FAILURES, READING_HOOKS, agreement, difference, probe_of, results, same_in_training
from ftkit.kernels.activation import ACTIVATIONS, activation
from ftkit.kernels.gated import gated
from ftkit.kernels.launch import FLOATS, LARGEST_ROW
from ftkit.kernels.layer_norm import layer_norm
from ftkit.kernels.rms_norm import rms_norm
from ftkit.kernels.rotary import rotary

ROTATION = "apply_rotary_pos_emb"
"""Name under which attentions of transformers call the function that rotates queries and keys."""
EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
CASTINGS = (("Llama's casting", "llama", 0.0), ("Gemma's", "gemma", 1.0), ("OLMo-2's", "gemma", 0.0), ("T5's", "t5", 0.0))
ACTIVATION_MODULES = ("torch.nn.modules.activation", "transformers.activations")
ANY_MODULE = frozenset(vars(nn.Module()))
"""Names of the attributes that every module has."""
PLAIN = (int, float, str, bool, tuple, type(None), torch.dtype)
WIDTH, INNER = 8, 12
"""Sizes of a probe's linear layers."""


@dataclass
class Fused:
    """Report of what was replaced in a model.

    Args:
        done: Kind of replacement to the names of its submodules.
        left: Name of a submodule that was left alone to the reason.
    """

    done: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def note(self, kind: str, name: str) -> None:
        """Note a replacement."""
        self.done.setdefault(kind, []).append(name)

    def summary(self) -> str:
        """Return one sentence with the number of each kind, and each reason once with the first name."""
        found = ", ".join(f"{len(names)} {kind}" for kind, names in self.done.items()) or "nothing"
        left = []
        for reason, number in Counter(self.left.values()).items():
            first = next(name for name, why in self.left.items() if why == reason)
            left.append(first + (f" and {number - 1} more" if number > 1 else "") + f" ({reason})")
        return found + (f"; not replaced: {', '.join(left)}" if left else "")


@dataclass(frozen=True)
class Candidate:
    """A replacement that may fit a submodule.

    Args:
        kind: Name for the report.
        forward: Forward of the replaced submodule.
        x: Input of the probe, fp32.
        linears: Linear layers of the probe by name (see `probe_of`).
        mixed: Whether the input may be fp32 while the weights are not.
        replaced: Name of the child that the forward does not call.
        expected: Whether to report a submodule that does not agree.
    """

    kind: str
    forward: Callable[..., Tensor]
    x: Tensor
    linears: dict[str, tuple[int, int]] | None = None
    mixed: bool = False
    replaced: str | None = None
    expected: bool = True


def fuse(model: nn.Module, dtype: torch.dtype, device: torch.device) -> Fused:
    """Replace what is recognized and proved in `model`, in place.

    Args:
        model: The model, on any device, meta included.
        dtype: Compute dtype.
        device: Compute device.

    Returns:
        The report.

    Cost: a proof per distinct submodule: milliseconds on a CPU; on a GPU also the compilation of its kernels.
    """
    found, proved, inside = Fused(), {}, set()
    if dtype not in FLOATS:
        return Fused(left={"all of it": f"no kernel computes in {str(dtype).removeprefix('torch.')}"})
    if (problem := unusable(device)) is not None:
        return Fused(left={"all of it": problem})
    for name, module in model.named_modules():
        candidates = [] if id(module) in inside else list(_candidates(module))
        if not candidates:
            continue
        child = candidates[0].replaced and module.get_submodule(candidates[0].replaced)
        if _is_changed(module) or (child and _is_changed(child)):
            found.left[name] = f"{type(module).__name__} or its activation has hooks or a forward of the instance"
            continue
        key = _key(module, candidates[0].linears or ())
        if key not in proved:
            proved[key] = _best(module, candidates, dtype, device)
        best = proved[key]
        if best is not None:
            specialise(module, forward=best.forward)
            found.note(best.kind, name)
            inside.add(id(child))
        elif candidates[0].expected:
            found.left[name] = f"{type(module).__name__} does not compute what its attributes say"
    _fuse_rotations(model, dtype, device, found)
    return found


def unusable(device: torch.device) -> str | None:
    """Return why Triton cannot run on `device`, such as a missing C compiler or an unsupported GPU; None if it can."""
    try:
        activation(torch.zeros(1, device=device), "relu")
    except Exception as error:  # of a compiler, a driver or a GPU
        return "Triton does not run here: " + " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return None


def _is_changed(module: nn.Module) -> bool:
    return "forward" in vars(module) or any(vars(module)[name] for name in ("_forward_pre_hooks", *READING_HOOKS))


def _key(module: nn.Module, linears: Collection[str] = ()) -> Hashable:
    """Return what submodules have in common if one proof is enough for them.

    Args:
        module: The submodule.
        linears: Children that are narrow linear layers in the probe.
    """
    own = [(name, value) for name, value in vars(module).items() if name not in ANY_MODULE and name != "layer_idx"]
    settings = tuple((name, repr(value) if isinstance(value, PLAIN) else id(value)) for name, value in own)
    shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters(recurse=False))
    children = tuple(
        (name, getattr(child, "bias", None) is not None if name in linears else _key(child))
        for name, child in module.named_children()
    )
    return type(module), settings, shapes, children


def _best(module: nn.Module, candidates: list[Candidate], dtype: torch.dtype, device: torch.device) -> Candidate | None:
    """Return the candidate that agrees best; None if none does."""
    scores: list[tuple[float, int]] = []
    for place, candidate in enumerate(candidates):
        dtypes = {(dtype, dtype), (torch.float32, torch.float32)}  # fp32 separates formulas, 16 bits separate castings
        if candidate.mixed:
            dtypes.add((torch.float32, dtype))
        differences = [_proved(module, candidate, *pair, device) for pair in sorted(dtypes, key=str)]
        if None not in differences:
            scores.append((sum(differences), place))  # type: ignore[arg-type]  # none is None
    return candidates[min(scores)[1]] if scores else None


def _proved(
    module: nn.Module, candidate: Candidate, given: torch.dtype, dtype: torch.dtype, device: torch.device
) -> float | None:
    """Return the difference from the module for inputs of `given` and weights of `dtype`; None if they disagree."""
    leaves = {"x": candidate.x}
    try:
        original = probe_of(module, Generator().manual_seed(0), candidate.linears)
        replaced = copy.deepcopy(original)
        specialise(replaced, forward=candidate.forward)
        if not same_in_training(original, replaced, leaves):
            return None
        return agreement(original, replaced, leaves, dtype, device, given=given)
    except FAILURES:
        return None


def _candidates(module: nn.Module) -> Iterator[Candidate]:
    if len(inspect.signature(type(module).forward).parameters) != 2:  # self and one input
        return
    if module._parameters:
        yield from _norms(module)
    elif module._modules:
        yield from _gated(module)
    elif type(module).__module__ in ACTIVATION_MODULES:
        x = 3 * _input(64)
        x[0] *= 3  # an activation that is clipped at 10 is not the plain one
        for kind in ACTIVATIONS:
            yield Candidate(kind, _activation(kind), x, expected=False)


def _input(width: int) -> Tensor:
    return torch.randn(3, 5, width, generator=Generator().manual_seed(1))


def _norms(module: nn.Module) -> Iterator[Candidate]:
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    eps_name = next((name for name in EPS_NAMES if isinstance(getattr(module, name, None), float)), None)
    known = set(module._parameters) <= {"weight", "bias"} and not module._modules and not module._buffers
    if not known or weight is None or weight.dim() != 1 or eps_name is None or not 0 < len(weight) <= LARGEST_ROW:
        return
    if isinstance(module, nn.LayerNorm):
        yield Candidate("LayerNorm", _layer_norm(eps_name), _input(len(weight)))
    elif bias is None and "norm" in type(module).__name__.lower():
        for name, casting, offset in CASTINGS:
            yield Candidate(f"RMSNorm ({name})", _rms_norm(eps_name, casting, offset), _input(len(weight)), mixed=True)


def _layer_norm(eps_name: str) -> Callable[..., Tensor]:
    def forward(self: nn.Module, input: Tensor) -> Tensor:
        return layer_norm(input, self.weight, self.bias, getattr(self, eps_name))[0]

    return forward


def _rms_norm(eps_name: str, casting: Any, offset: float) -> Callable[..., Tensor]:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, getattr(self, eps_name), offset=offset, casting=casting)[0]

    return forward


def _activation(kind: Any) -> Callable[..., Tensor]:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return activation(x, kind)

    return forward


def _gated(module: nn.Module) -> Iterator[Candidate]:
    children = set(module._modules)
    act = next((name for name in ("act_fn", "activation_fn", "act") if name in children), "")
    inner, outer = (INNER, WIDTH), (WIDTH, INNER)
    if children == {"gate_proj", "up_proj", "down_proj", act}:
        make, linears = _gated_apart, {"gate_proj": inner, "up_proj": inner, "down_proj": outer}
    elif children == {"gate_up_proj", "down_proj", act}:
        make, linears = _gated_together, {"gate_up_proj": (2 * INNER, WIDTH), "down_proj": outer}
    elif children == {"wi_0", "wi_1", "wo", "dropout", act}:
        make, linears = _gated_t5, {"wi_0": inner, "wi_1": inner, "wo": outer}
    else:
        return
    for kind in ACTIVATIONS:
        yield Candidate(f"gated MLP ({kind})", make(kind), _input(WIDTH), linears, replaced=act)


def _gated_apart(kind: Any) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), kind))

    return forward


def _gated_together(kind: Any) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(gated(gate, up, kind))

    return forward


def _gated_t5(kind: Any) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        inner = self.dropout(gated(self.wi_0(x), self.wi_1(x), kind))
        dtype = self.wo.weight.dtype  # transformers keeps this one in fp32
        return self.wo(inner.to(dtype) if inner.dtype.itemsize < dtype.itemsize else inner)

    return forward


def _fuse_rotations(model: nn.Module, dtype: torch.dtype, device: torch.device, found: Fused) -> None:
    """Replace the rotation in every attention that calls it by its name.

    transformers has a public seam for this function, the decorator `use_kernel_forward_from_hub`. It does nothing without
    the package `kernels`, is missing in Phi-3 and others, and applies to all models of the process. A forward with one
    global name bound to another function applies to one module.
    """
    proved: dict[Hashable, bool] = {}
    for name, module in model.named_modules():
        forward = type(module).forward
        if not isinstance(forward, FunctionType) or ROTATION not in forward.__code__.co_names or "forward" in vars(module):
            continue
        original: Any = forward.__globals__.get(ROTATION)
        width = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
        if (original, width) not in proved:
            proved[original, width] = isinstance(width, int) and width % 2 == 0 and _rotates(original, width, dtype, device)
        if proved[original, width]:
            specialise(module, forward=_rebound(forward, ROTATION, rotated(original)))
            found.note("rotary", name)
        else:
            found.left[name] = f"{type(module).__name__} has another form of rotation"


def rotated(original: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a replacement for `original` that leaves calls of a form that was not proved to it.

    Args:
        original: A model's `apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)`. Heads are in dimension `unsqueeze_dim`.
    """

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
        place = named.get("unsqueeze_dim", others[0] if others else 1)
        more = len(others) > 1 or named.keys() - {"unsqueeze_dim"}
        if more or place not in (1, 2) or {q.dim(), k.dim()} != {4} or cos.dim() != 3:
            found: tuple[Tensor, Tensor] = original(q, k, cos, sin, *others, **named)
            return found
        if place == 1:
            return rotary(q, k, cos, sin)
        first, second = rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return first.transpose(1, 2), second.transpose(1, 2)

    return apply


def _rebound(function: FunctionType, name: str, value: Any) -> FunctionType:
    """Return the same function with one of its global names bound to another value."""
    namespace = {**function.__globals__, name: value}
    bound = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    bound.__kwdefaults__, bound.__doc__, bound.__module__ = function.__kwdefaults__, function.__doc__, function.__module__
    bound.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # functions may carry one
    return bound


def _rotates(original: Callable[..., Any], width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `rotated(original)` agrees with `original` for whole heads and, if the family can, for half of them."""
    generator = Generator().manual_seed(0)
    agrees = []
    for turning in {width, width // 4 * 2}:
        leaves = {name: torch.randn(2, heads, 5, width, generator=generator) for name, heads in (("q", 3), ("k", 2))}
        angles = torch.randn(2, 5, turning, generator=generator) * 3
        cast = {name: leaf.to(device, dtype) for name, leaf in leaves.items()}
        turns = [angle.to(device, dtype) for angle in (angles.cos(), angles.sin())]

        def run(function: Callable[..., Any], given: dict[str, Tensor], turns: list[Tensor]) -> dict[str, Tensor]:
            return results(lambda q, k: tuple(function(q, k, *turns)), given, {})

        try:
            theirs = run(original, cast, turns)
            exact = run(original, {name: leaf.double() for name, leaf in cast.items()}, [turn.double() for turn in turns])
        except FAILURES:
            if turning == width:
                return False
            continue  # this family rotates whole heads only
        agrees.append(difference(run(rotated(original), cast, turns), theirs, exact) is not None)
    return all(agrees)
