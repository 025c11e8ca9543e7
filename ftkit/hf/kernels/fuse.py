"""Replace submodules of a model by fused kernels, each after a proof on a probe.

    norms          RMSNorm with the casting of the model; LayerNorm keeps PyTorch's own kernel
    gated MLPs     gate, up and down projections (Llama), gate and up in one layer (Phi-3)
    rotary         the function with which an attention rotates queries and keys

ftkit selects submodules by their parameters and children (an eps and one weight; linear layers and an activation), not by
their class. The proof compares values and gradients on a probe with random weights, in the dtypes of the run. A selected
submodule that does not agree stays as it is and is reported. A replaced instance gets a subclass of its own class
(`engine/core/instance_class.py`), so names, adapters and weights stay. A fused gated MLP does not call its activation, so
hooks that are added to the activation later do not run. On a CPU the kernels run as plain PyTorch.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Generator, Tensor, nn

from ftkit.engine.core.instance_class import specialise
from ftkit.hf.kernels.probes import FAILURES, difference, probe_of, results
from ftkit.kernels.gated import ACTIVATIONS, gated
from ftkit.kernels.launch import FLOATS, LARGEST_ROW
from ftkit.kernels.rms_norm import rms_norm
from ftkit.kernels.rotary import rotary

ROTATION = "apply_rotary_pos_emb"
"""Name under which attentions of transformers call the function that rotates queries and keys."""
CASTINGS = (("Llama's casting", "llama", 0.0), ("Gemma's", "gemma", 1.0), ("OLMo-2's", "gemma", 0.0), ("T5's", "t5", 0.0))
ANY_MODULE = frozenset(vars(nn.Module()))
"""Names of the attributes that every module has."""
PLAIN = (int, float, str, bool, tuple, type(None), torch.dtype)
WIDTH, INNER = 8, 12
"""Sizes of a probe's linear layers."""


@dataclass
class Fused:
    """Report of the replaced submodules of a model.

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
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            reasons.setdefault(reason, []).append(name)
        left = [
            f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} ({reason})"
            for reason, names in reasons.items()
        ]
        return found + (f"; not replaced: {', '.join(left)}" if left else "")


@dataclass(frozen=True)
class Candidate:
    """A replacement that may fit a submodule.

    Args:
        kind: Name for the report.
        forward: Forward of the replaced submodule.
        x: Input of the probe, fp32.
        linears: Linear layers of the probe by name (see `probe_of`).
    """

    kind: str
    forward: Callable[..., Tensor]
    x: Tensor
    linears: dict[str, tuple[int, int]] = field(default_factory=dict)


def fuse(model: nn.Module, dtype: torch.dtype, device: torch.device) -> Fused:
    """Replace the submodules of `model` for which a fused kernel passes its proof, in place.

    Args:
        model: The model, on any device, meta included.
        dtype: Compute dtype.
        device: Compute device.

    Returns:
        The report.

    Cost: a proof per distinct submodule; on a GPU also the compilation of its kernels.
    """
    found, proved = Fused(), {}
    if dtype not in FLOATS:
        return Fused(left={"all of it": f"no kernel computes in {str(dtype).removeprefix('torch.')}"})
    if (problem := unusable(device)) is not None:
        return Fused(left={"all of it": problem})
    for name, module in model.named_modules():
        candidates = list(_candidates(module))
        if not candidates:
            continue
        key = _key(module, candidates[0].linears)
        if key not in proved:
            proved[key] = _best(module, candidates, dtype, device)
        best = proved[key]
        if best is not None:
            specialise(module, forward=best.forward)
            found.note(best.kind, name)
        else:
            found.left[name] = f"{type(module).__name__} does not compute what its attributes say"
    _fuse_rotations(model, dtype, device, found)
    return found


def unusable(device: torch.device) -> str | None:
    """Return why Triton cannot run on `device`, such as a missing C compiler or an unsupported GPU; None if it can."""
    try:
        gated(*torch.zeros(2, 1, device=device))
    except Exception as error:  # of a compiler, a driver or a GPU
        return "Triton does not run here: " + " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return None


def _key(module: nn.Module, linears: Collection[str] = ()) -> Hashable:
    """Return a key; submodules with the same key share one proof. `linears` are narrow in the probe."""
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
        if not candidate.linears:  # a norm in an fp32 residual stream
            dtypes.add((torch.float32, dtype))
        differences = [_proved(module, candidate, *pair, device) for pair in sorted(dtypes, key=str)]
        if None not in differences:
            scores.append((sum(differences), place))  # type: ignore[arg-type]  # none is None
    return candidates[min(scores)[1]] if scores else None


def _proved(
    module: nn.Module, candidate: Candidate, given: torch.dtype, dtype: torch.dtype, device: torch.device
) -> float | None:
    """Return the difference from the module for inputs of `given` and weights of `dtype`; None if they disagree."""
    try:
        original = probe_of(module, Generator().manual_seed(0), candidate.linears).to(dtype)
        replaced, exact = copy.deepcopy(original), copy.deepcopy(original).double()
        specialise(replaced, forward=candidate.forward)
        x = candidate.x.to(given)
        ours, theirs, truth = (
            results(probe.to(where), {"x": leaf.to(where)}, dict(probe.named_parameters()))
            for probe, leaf, where in ((replaced, x, device), (original, x, device), (exact, x.double(), x.device))
        )
        return difference(ours, theirs, truth)
    except FAILURES:
        return None


def _candidates(module: nn.Module) -> Iterator[Candidate]:
    if "forward" not in vars(module) and len(inspect.signature(type(module).forward).parameters) == 2:  # self and one input
        yield from _norms(module) if module._parameters else _gated(module)


def _input(width: int) -> Tensor:
    return torch.randn(3, 5, width, generator=Generator().manual_seed(1))


def _norms(module: nn.Module) -> Iterator[Candidate]:
    weight = module._parameters.get("weight")
    floats = [name for name, value in vars(module).items() if isinstance(value, float)]
    alone = len(module._parameters) == 1 and not module._modules and not module._buffers
    if alone and weight is not None and weight.dim() == 1 and len(floats) == 1 and 0 < len(weight) <= LARGEST_ROW:
        for name, casting, offset in CASTINGS:
            yield Candidate(f"RMSNorm ({name})", _rms_norm(floats[0], casting, offset), _input(len(weight)))


def _rms_norm(eps_name: str, casting: Any, offset: float) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, getattr(self, eps_name), offset=offset, casting=casting)

    return forward


def _gated(module: nn.Module) -> Iterator[Candidate]:
    children = dict(module.named_children())
    for make, linears in GATED:
        others = [child for name, child in children.items() if name not in linears]
        if linears.keys() <= children.keys() and len(others) == 1 and not _has_hooks(others[0]):
            for kind in ACTIVATIONS:
                yield Candidate(f"gated MLP ({kind})", make(kind), _input(WIDTH), linears)


def _has_hooks(module: nn.Module) -> bool:
    return any(hooks for name, hooks in vars(module).items() if name.endswith("_hooks"))


def _gated_apart(kind: Any) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), kind))

    return forward


def _gated_together(kind: Any) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(gated(gate, up, kind))

    return forward


GATED: tuple[tuple[Callable[[Any], Callable[..., Tensor]], dict[str, tuple[int, int]]], ...] = (
    (_gated_apart, {"gate_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH), "down_proj": (WIDTH, INNER)}),
    (_gated_together, {"gate_up_proj": (2 * INNER, WIDTH), "down_proj": (WIDTH, INNER)}),
)
"""Forwards of gated MLPs, and the (outputs, inputs) of their linear layers in a probe. One more child is the activation."""


def _fuse_rotations(model: nn.Module, dtype: torch.dtype, device: torch.device, found: Fused) -> None:
    """Replace the rotation in every attention that calls it by its name.

    transformers' decorator for this function, `use_kernel_forward_from_hub`, does nothing without the package `kernels`, is
    missing in Phi-3 and others, and applies to all models of the process. Here one module gets a forward in which the name
    is bound to another function.
    """
    proved: dict[Hashable, bool] = {}
    for name, module in model.named_modules():
        forward = type(module).forward
        if not isinstance(forward, FunctionType) or ROTATION not in forward.__code__.co_names or "forward" in vars(module):
            continue
        original: Any = forward.__globals__.get(ROTATION)
        width: Any = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
        if (original, width) not in proved:
            turns = (width, width // 4 * 2) if isinstance(width, int) and width % 2 == 0 else ()
            agrees = {_rotates(original, width, turning, dtype, device) for turning in turns}
            proved[original, width] = agrees - {None} == {True}  # most families turn whole heads only
        if proved[original, width]:
            specialise(module, forward=_rebound(forward, ROTATION, rotated(original)))
            found.note("rotary", name)
        else:
            found.left[name] = f"{type(module).__name__} has another form of rotation"


def rotated(original: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a replacement for `original` that leaves calls of a form that was not proved to it.

    Args:
        original: A model's `apply_rotary_pos_emb(q, k, cos, sin)`, with heads in dimension 1.
    """

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
        if others or named or {q.dim(), k.dim()} != {4} or cos.dim() != 3:
            found: tuple[Tensor, Tensor] = original(q, k, cos, sin, *others, **named)
            return found
        return rotary(q, k, cos, sin)

    return apply


def _rebound(function: FunctionType, name: str, value: Any) -> FunctionType:
    """Return the same function with one of its global names bound to another value."""
    namespace = {**function.__globals__, name: value}
    bound = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    bound.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(bound, function)
    return bound


def _rotates(
    original: Callable[..., Any], width: int, turning: int, dtype: torch.dtype, device: torch.device
) -> bool | None:
    """Return whether `rotated(original)` agrees for `turning` elements of a head; None if `original` cannot turn so many."""
    generator = Generator().manual_seed(0)
    leaves = {name: torch.randn(2, heads, 5, width, generator=generator) for name, heads in (("q", 3), ("k", 2))}
    angles = torch.randn(2, 5, turning, generator=generator) * 3

    def run(function: Callable[..., Any], of: torch.dtype) -> dict[str, Tensor]:
        cos, sin = (angle.to(device, dtype).to(of) for angle in (angles.cos(), angles.sin()))
        given = {name: leaf.to(device, dtype).to(of) for name, leaf in leaves.items()}
        return results(lambda q, k: tuple(function(q, k, cos, sin)), given, {})

    try:
        theirs, exact = run(original, dtype), run(original, torch.float64)
    except FAILURES:
        return None
    return difference(run(rotated(original), dtype), theirs, exact) is not None
