"""Into the models without patching: submodules of known mathematics get a forward that runs fused kernels.

    norms          RMSNorm in the casting that the model uses, LayerNorm
    activations    GELU in its forms, SiLU, ReLU
    gated MLPs     Llama's (gate, up, down), Phi-3's (both in one), T5's
    rotary         the function that an attention calls, exchanged in that attention's own forward

A submodule is recognised by what it has (an eps and one weight; two linear layers and an activation), not by its class, and
each exchange is proved at that moment on a probe with random weights and input, forward and backward, in the dtypes that
will be used. What does not agree is left alone, and told. So is what the proof does not see: hooks, a `forward` of an
instance, attributes that are more than a number or a name, and code of the user's own, which may do otherwise tomorrow. The
instance gets a subclass of its own class (`engine/core/instance_class.py`), so names, adapters and weights stay where they
are; on a CPU the same submodules run the kernels' PyTorch references.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PretrainedConfig

from ftkit.engine.core.instance_class import specialise
from ftkit.hf.models.hooks import EVERY, has_global_hooks, has_hooks, home_of, hooks_on
from ftkit.hf.models.probe_copies import Chance, agreement, difference, probe_of, results, same_in_training
from ftkit.kernels.activation import ACTIVATIONS, activation
from ftkit.kernels.gated import gated
from ftkit.kernels.launch import FLOATS, LARGEST_ROW
from ftkit.kernels.layer_norm import layer_norm
from ftkit.kernels.rms_norm import rms_norm
from ftkit.kernels.rotary import rotary

ROTATION = "apply_rotary_pos_emb"
"""The name under which transformers' attentions call the function that turns queries and keys."""
EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
CASTINGS = (("Llama's casting", "llama", 0.0), ("Gemma's", "gemma", 1.0), ("OLMo-2's", "gemma", 0.0), ("T5's", "t5", 0.0))
GATED = (("gate_proj", "up_proj", "down_proj", "act_fn"), ("wi_0", "wi_1", "wo", "act"))
GATED_TOGETHER = (("gate_up_proj", "down_proj", "activation_fn"), ("gate_up_proj", "down_proj", "act_fn"))
ACTIVATION_MODULES = ("transformers.activations", "torch.nn.modules.activation")
FAMILIES = ("torch", "transformers", "transformers_modules")
"""Packages whose code stays what it was proved to be; the last is that of models which bring their own."""
PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
ANY_MODULE = frozenset(vars(nn.Module()))
"""Names of what every module has."""
WIDTH, INNER = 8, 12
"""Of a probe's linear layers."""


@dataclass
class Fused:
    """What was exchanged in a model, and what was left alone.

    Args:
        done: kind of exchange to the names of the submodules that got it.
        left: name of a submodule to why it was not exchanged.
    """

    done: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def note(self, kind: str, name: str) -> None:
        """Note an exchange."""
        self.done.setdefault(kind, []).append(name)

    def as_dict(self) -> dict[str, Any]:
        """Return the names by kind, and the reasons by name, for JSON."""
        return {"done": self.done, "left": self.left}

    def told(self) -> str:
        """Return one line: each kind and how often; what was left alone and why, each reason once."""
        found = ", ".join(f"{len(names)} {kind}" for kind, names in self.done.items()) or "nothing"
        reasons = Counter(self.left.values())
        first = {reason: next(name for name, why in self.left.items() if why == reason) for reason in reasons}
        more = {reason: f" and {number - 1} more" if number > 1 else "" for reason, number in reasons.items()}
        left = ", ".join(f"{first[reason]}{more[reason]} ({reason})" for reason in reasons)
        return found + (f"; left as they are: {left}" if left else "")


@dataclass(frozen=True)
class Candidate:
    """An exchange that may fit a submodule.

    Args:
        kind: name of the exchange, for the report.
        members: members of the subclass that the submodule gets.
        leaves: arguments of the probe's forward, fp32.
        linears: linear layers of the probe, by the child's name (see `probe_of`).
        mixed: whether the input may be fp32 where the weights are not.
        replaced: names of the children that are not called any more.
        weighed: name of the child whose weight the new forward asks for its dtype.
        expected: whether the user is told where the exchange does not fit.
    """

    kind: str
    members: dict[str, Any]
    leaves: dict[str, Tensor]
    linears: dict[str, tuple[int, int]] | None = None
    mixed: bool = False
    replaced: tuple[str, ...] = ()
    weighed: str | None = None
    expected: bool = True


def fuse(model: nn.Module, dtype: torch.dtype, device: torch.device) -> Fused:
    """Exchange what is known in `model`, in place.

    Args:
        model: the model, on any device, meta too.
        dtype: compute dtype.
        device: compute device.

    Cost: a proof for each distinct submodule: milliseconds on a CPU, on a GPU the compilation of its kernels.
    """
    found, proved, inside = Fused(), {}, set()
    if dtype not in FLOATS:
        return Fused(left={"all of it": f"no kernel computes in {str(dtype).removeprefix('torch.')}"})
    if (problem := unusable(device)) is not None:
        return Fused(left={"all of it": problem})
    if has_global_hooks():
        return Fused(left={"all of it": "torch's global hooks are on every module"})
    for name, module in model.named_modules():
        if "forward" in vars(module) or id(module) in inside:
            continue  # somebody's own; or what a fused MLP does itself
        candidates = _candidates(module)
        if not candidates:
            continue
        if (reason := _unseen(module, candidates[0].replaced, candidates[0].weighed)) is not None:
            found.left[name] = reason
            continue
        key = _key(module)
        if key not in proved:
            proved[key] = _best(module, candidates, dtype, device)
        best = proved[key]
        if best is not None:
            specialise(module, **best.members)
            found.note(best.kind, name)
            inside |= {id(module._modules[child]) for child in best.replaced}
        elif candidates[0].expected:
            found.left[name] = f"{type(module).__name__} does not compute what its attributes say"
    _fuse_rotations(model, dtype, device, found)
    return found


def unusable(device: torch.device) -> str | None:
    """Return why Triton cannot run where it would have to: no C compiler for its launcher, no kernels for the card."""
    try:
        activation(torch.zeros(1, device=device), "relu")
    except Exception as error:  # of a compiler, a driver, a card: whatever it is, it is told
        return "Triton does not run here: " + " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return None


def is_fused(module: nn.Module) -> bool:
    """Return whether a module's forward is one of ours."""
    return bool(getattr(type(module), "_fused", False))


def _key(module: nn.Module) -> Hashable:
    """Return what distinguishes submodules whose proof is not the same: class, settings and shapes, children's too."""
    settings = tuple((name, _seen(value)) for name, value in vars(module).items() if name != "layer_idx" and _is_seen(value))
    shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters(recurse=False))
    return type(module), settings, shapes, tuple((name, _key(child)) for name, child in module.named_children())


def _seen(value: Any) -> Hashable:
    """Return what tells a setting from another: its value, or the function or configuration that it is."""
    if isinstance(value, partial):
        return _seen(value.func), value.args, tuple(sorted(value.keywords.items()))
    return id(value) if isinstance(value, PretrainedConfig) else getattr(value, "__func__", value)


def _is_seen(value: Any) -> bool:
    """Return whether an attribute of a module is a part of its `_key`."""
    if isinstance(value, tuple):
        return all(isinstance(each, PLAIN) or (isinstance(each, tuple) and _is_seen(each)) for each in value)
    if isinstance(value, partial):
        return _is_known(value) and _is_seen((*value.args, *value.keywords.values()))
    if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType)):
        return _is_known(value)
    return isinstance(value, (*PLAIN, PretrainedConfig))


def _is_known(function: Any) -> bool:
    """Return whether a function is code of a family, and not a user's."""
    return home_of(function).partition(".")[0] in (*FAMILIES, "math")


def _unseen(module: nn.Module, replaced: tuple[str, ...], weighed: str | None) -> str | None:
    """Return why a proof for a module would not say all that it does, or would not stay true; None where it would."""
    kind = type(module).__name__
    parts = [(module, kind)]
    parts += [(inner, f"{kind}'s {child}") for child in replaced for inner in module.get_submodule(child).modules()]
    for each, told in parts:
        if has_hooks(each):
            return f"{told} has hooks"
        if "forward" in vars(each):
            return f"the forward of {told} is replaced on the instance"
        if not all(map(_is_known, _methods(type(each)))):
            return f"{told} computes by code of the user's own"
        if replaced and (each._buffers or each._parameters):
            return f"{told} has weights or buffers of its own"
        odd = [name for name, value in vars(each).items() if name not in ANY_MODULE and not _is_seen(value)]
        if odd:
            return f"{told} has the attribute {odd[0]}, which may change what it computes"
    if weighed is not None and not _has_weight(module._modules[weighed]):
        return f"{kind}'s {weighed} has no weight, or computes it at each read"
    return None


def _has_weight(module: nn.Module | None) -> bool:
    """Return whether a module's weight is a parameter of its own, or of the module that PEFT's layer adapts.

    To read another one may draw random numbers or move a power iteration on.
    """
    base = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    return base is not None and base._parameters.get("weight") is not None


def _methods(kind: type) -> Iterator[Any]:
    """Yield the functions of a module's class that its forward may call: those of its bases, too, but for torch's Module."""
    for each in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name, member in vars(each).items():
            function = getattr(member, "fget", member)  # of a property
            if isinstance(getattr(function, "__func__", function), FunctionType) and name != "__init__":
                yield function


def _candidates(module: nn.Module) -> list[Candidate]:
    return list(_norms(module)) or list(_activations(module)) or list(_gated(module))


def _best(module: nn.Module, candidates: list[Candidate], dtype: torch.dtype, device: torch.device) -> Candidate | None:
    """Return the candidate that agrees best; None if none does, or the module cannot be run alone."""
    scores: list[tuple[float, int]] = []
    for place, candidate in enumerate(candidates):
        dtypes = {(dtype, dtype), (torch.float32, torch.float32)}  # fp32 tells formulas apart, 16 bits castings
        if candidate.mixed:
            dtypes.add((torch.float32, dtype))
        differences = [_proved(module, candidate, *pair, device) for pair in sorted(dtypes, key=str)]
        if None not in differences:
            scores.append((sum(differences), place))  # type: ignore[arg-type]  # none is None
    return candidates[min(scores)[1]] if scores else None


def _proved(
    module: nn.Module, candidate: Candidate, given: torch.dtype, dtype: torch.dtype, device: torch.device
) -> float | None:
    """Return how near an exchange is to the module for inputs of `given` and weights of `dtype`; None if it is not."""
    chance = Chance().manual_seed(0)
    try:
        original = probe_of(module, chance, candidate.linears)
        exchanged = copy.deepcopy(original)
    except Exception:  # whatever a part of somebody's own makes of a copy
        return None
    specialise(exchanged, **candidate.members)
    try:
        if candidate.linears is not None and not same_in_training(original, exchanged, candidate.leaves):
            return None
        return agreement(original, exchanged, candidate.leaves, dtype, device, given=given)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return None  # the module wants other arguments: it is not what it looks like


def _input(module: nn.Module, *shape: int) -> dict[str, Tensor]:
    """Return random input under the name of the forward's first argument."""
    return {_arguments(module)[0]: torch.randn(shape, generator=Chance().manual_seed(1))}


def _arguments(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]


# --- norms


def _norms(module: nn.Module) -> Iterator[Candidate]:
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    eps_name = next((name for name in EPS_NAMES if isinstance(getattr(module, name, None), float)), None)
    known = set(module._parameters) <= {"weight", "bias"} and not module._modules and not module._buffers
    if not known or weight is None or weight.dim() != 1 or eps_name is None or not 0 < len(weight) <= LARGEST_ROW:
        return
    if len(_arguments(module)) != 1:
        return  # a gate beside the input
    leaves = _input(module, 3, 5, len(weight))
    if isinstance(module, nn.LayerNorm):
        yield Candidate("LayerNorm", {"forward": _layer_norm(eps_name), "_fused": True}, leaves)
    elif bias is None and "norm" in type(module).__name__.lower():
        for told, casting, offset in CASTINGS:
            members = {"forward": _rms_norm(eps_name, casting, offset), "_fused": True}
            yield Candidate(f"RMSNorm ({told})", members, leaves, mixed=True)


def _layer_norm(eps_name: str) -> Callable[..., Tensor]:
    def forward(self: nn.Module, input: Tensor) -> Tensor:
        return layer_norm(input, self.weight, self.bias, getattr(self, eps_name))[0]

    return forward


def _rms_norm(eps_name: str, casting: Any, offset: float) -> Callable[..., Tensor]:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, getattr(self, eps_name), offset=offset, casting=casting)[0]

    return forward


# --- activations and gated MLPs


def _activations(module: nn.Module) -> Iterator[Candidate]:
    if type(module).__module__ not in ACTIVATION_MODULES or module._parameters or module._modules:
        return
    if len(_arguments(module)) != 1:
        return
    for kind in ACTIVATIONS:
        members = {"forward": _activation(kind), "_fused": True}
        yield Candidate(kind, members, {name: 3 * value for name, value in _input(module, 3, 5, 64).items()}, expected=False)


def _activation(kind: Any) -> Callable[..., Tensor]:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return activation(x, kind)

    return forward


def _gated(module: nn.Module) -> Iterator[Candidate]:
    children = module._modules
    if len(_arguments(module)) != 1:
        return
    for gate, up, down, act in GATED:
        if {gate, up, down, act} == children.keys() - {"dropout"}:
            linears = {gate: (INNER, WIDTH), up: (INNER, WIDTH), down: (WIDTH, INNER)}
            for kind in ACTIVATIONS:
                members = {"forward": _gated_apart(gate, up, down, kind, module, act), "_fused": True}
                leaves = _input(module, 3, 5, WIDTH)
                yield Candidate(f"gated MLP ({kind})", members, leaves, linears, replaced=(act,), weighed=down)
    for both, down, act in GATED_TOGETHER:
        if {both, down, act} == children.keys():
            linears = {both: (2 * INNER, WIDTH), down: (WIDTH, INNER)}
            for kind in ACTIVATIONS:
                members = {"forward": _gated_together(both, down, kind, module, act), "_fused": True}
                yield Candidate(f"gated MLP ({kind})", members, _input(module, 3, 5, WIDTH), linears, replaced=(act,))


def _gated_apart(gate: str, up: str, down: str, kind: Any, module: nn.Module, act: str) -> Callable[..., Tensor]:
    plain, changed = type(module).forward, _changed(module, act)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        if changed(self):
            found: Tensor = plain(self, x)
            return found
        inner = gated(getattr(self, gate)(x), getattr(self, up)(x), kind)
        if "dropout" in self._modules:
            inner = self.get_submodule("dropout")(inner)
        last = getattr(self, down)
        wider = inner.dtype.itemsize < last.weight.dtype.itemsize  # T5 keeps this one's weight in fp32
        return last(inner.to(last.weight.dtype) if wider else inner)

    return forward


def _gated_together(both: str, down: str, kind: Any, module: nn.Module, act: str) -> Callable[..., Tensor]:
    plain, changed = type(module).forward, _changed(module, act)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        if changed(self):
            found: Tensor = plain(self, x)
            return found
        gate, up = getattr(self, both)(x).chunk(2, -1)
        return getattr(self, down)(gated(gate, up, kind))

    return forward


def _changed(module: nn.Module, act: str) -> Callable[[nn.Module], bool]:
    """Return what says whether a module's activation, which an exchange does not call, is no more what it was."""
    proved = type(module._modules[act])

    def changed(self: nn.Module) -> bool:
        now = self._modules[act]
        if now is None or not issubclass(type(now), proved) or "forward" in vars(now):
            return True
        return bool(hooks_on(now, EVERY)) or has_global_hooks()

    return changed


# --- rotary


def _fuse_rotations(model: nn.Module, dtype: torch.dtype, device: torch.device, found: Fused) -> None:
    """Exchange the rotation in every attention that calls it by its name."""
    proved: dict[Hashable, bool] = {}
    for name, module in model.named_modules():
        forward = type(module).forward
        if not isinstance(forward, FunctionType) or ROTATION not in forward.__code__.co_names or "forward" in vars(module):
            continue
        original = forward.__globals__.get(ROTATION)
        width = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
        if not callable(original) or not isinstance(width, int) or width % 2:
            found.left[name] = f"{type(module).__name__}'s rotation is of another form"
            continue
        if not (_is_known(forward) and _is_known(original)):
            found.left[name] = f"{type(module).__name__} turns by code of the user's own"
            continue
        if (original, width) not in proved:
            proved[original, width] = _rotates(original, width, dtype, device)
        if proved[original, width]:
            specialise(module, forward=_rebound(forward, **{ROTATION: rotated(original)}), _fused=True)
            found.note("rotary", name)
        else:
            found.left[name] = f"{type(module).__name__}'s rotation is of another form"


def rotated(original: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a drop-in replacement for `original`; calls of a form that was not proved go to the original.

    Args:
        original: a model's `apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)`, heads in dimension `unsqueeze_dim`.
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


def _rebound(function: FunctionType, **names: Any) -> FunctionType:
    """Return the same function with some of its global names bound otherwise: code, defaults and cells are its own."""
    bound = FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__, function.__closure__
    )
    bound.__kwdefaults__, bound.__doc__, bound.__module__ = function.__kwdefaults__, function.__doc__, function.__module__
    bound.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # functions may carry one
    return bound


def _rotates(original: Callable[..., Any], width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `rotated(original)` does what `original` does, for the whole head and, where that can, for its half."""
    chance = Chance().manual_seed(0)
    agrees = []
    for turning in {width, width // 4 * 2}:
        leaves = {name: torch.randn(2, heads, 5, width, generator=chance) for name, heads in (("q", 3), ("k", 2))}
        angles = torch.randn(2, 5, turning, generator=chance) * 3
        cast = {name: leaf.to(device, dtype) for name, leaf in leaves.items()}
        cos, sin = (angle.to(device, dtype) for angle in (angles.cos(), angles.sin()))

        def run(function: Callable[..., Any], given: dict[str, Tensor], cos: Tensor, sin: Tensor) -> dict[str, Tensor]:
            found = results(lambda q, k: tuple(function(q, k, cos, sin)), given, {})
            return {name: value.cpu() for name, value in found.items()}

        try:
            theirs = run(original, cast, cos, sin)
            exact = run(original, {name: leaf.double() for name, leaf in cast.items()}, cos.double(), sin.double())
        except (RuntimeError, TypeError, ValueError):
            if turning == width:
                return False
            continue  # this family turns whole heads only
        agrees.append(difference(run(rotated(original), cast, cos, sin), theirs, exact) is not None)
    return all(agrees)
