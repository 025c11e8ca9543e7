"""Probes: small trial copies of a module, on which a replacement is proved before the module gets it.

A probe has the class, settings and structure of its module, but parameters of its own. A model on meta therefore has probes
that compute, and no weight of the model is used. Linear layers are replaced by narrow ones: the proof is about what is
computed between them.

A replacement agrees if its values and gradients are as near to the original in fp64 as the original's own in the same dtype,
within a factor of two and some roundings, as the order of sums may differ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor, nn

READING_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Tables in which a module keeps hooks that see its output or the gradient of it."""
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)
"""Errors of a probe that is not what it was taken for."""
ROUNDINGS = 8
"""Allowed beside the original's own error, which may be zero by chance; in units of eps times the largest value."""


def probe_of(module: nn.Module, generator: Generator, linears: Mapping[str, tuple[int, int]] | None = None) -> nn.Module:
    """Return a probe in fp32 on the CPU, in eval mode and without hooks.

    Args:
        module: The original, on any device.
        generator: Source of the random weights.
        linears: Direct children that become linear layers, each with (outputs, inputs). A bias stays a bias.
    """
    probe = without_hooks(module)
    probe.__dict__["_parameters"] = {name: _random(value, generator) for name, value in module._parameters.items()}
    probe.__dict__["_buffers"] = {name: _random(value, generator) for name, value in module._buffers.items()}
    children: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        if linears is not None and name in linears:
            children[name] = linear(*linears[name], generator, bias=getattr(child, "bias", None) is not None)
        else:
            children[name] = None if child is None else probe_of(child, generator)
    probe.__dict__["_modules"] = children
    return probe.eval()


def without_hooks(module: nn.Module) -> nn.Module:
    """Return a shallow copy of a module that shares everything but its hooks, of which it has none."""
    made = copy.copy(module)
    made.__dict__.update({name: type(value)() for name, value in vars(module).items() if name.endswith("_hooks")})
    return made


def linear(outputs: int, inputs: int, generator: Generator, *, bias: bool = False) -> nn.Linear:
    """Return a random linear layer, fp32 on the CPU."""
    made = nn.Linear(inputs, outputs, bias=bias, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, inputs**-0.5, generator=generator)
    return made


def _random(value: Tensor | None, generator: Generator) -> Any:
    """Return a parameter or buffer like `value`. Numbers around 1 suit scales and shifts."""
    if value is None or not value.is_floating_point():
        return None if value is None else torch.zeros(value.shape, dtype=value.dtype)
    data = 1 + torch.randn(value.shape, generator=generator) / 4
    return nn.Parameter(data) if isinstance(value, nn.Parameter) else data


def results(
    function: Callable[..., Any], leaves: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the outputs of a function, and the gradients of a fixed weighted sum of them, on the CPU.

    Args:
        function: Called with the leaves in their order.
        leaves: Arguments by name. Each gets a gradient.
        parameters: Parameters that get a gradient too.
    """
    own = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    for parameter in parameters.values():
        parameter.grad = None
    outputs = function(*own.values())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = Generator().manual_seed(0)
    total: Any = 0
    for out in outputs:
        factors = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        total = total + (out.double() * factors.to(out.device)).sum()
    total.backward()
    found = {f"output {number}": out.detach() for number, out in enumerate(outputs)}
    found |= {f"gradient of {name}": leaf.grad for name, leaf in {**own, **parameters}.items() if leaf.grad is not None}
    return {name: value.cpu() for name, value in found.items()}


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor], exact: dict[str, Tensor]) -> float | None:
    """Return the distance of ours from theirs as a share of the largest value; None if ours is less exact than theirs."""
    if ours.keys() != theirs.keys():
        return None
    worst = 0.0
    for name, truth in exact.items():
        own, other = ours[name], theirs[name]
        if (own.shape, own.dtype) != (other.shape, other.dtype):
            return None
        largest = max(truth.abs().max().item(), 1e-12)
        off, allowed = ((found.double() - truth).abs().max().item() for found in (own, other))
        if not off <= 2 * allowed + ROUNDINGS * torch.finfo(own.dtype).eps * largest:
            return None
        worst = max(worst, (own.double() - other.double()).abs().max().item() / largest)
    return worst


def agreement(
    original: nn.Module,
    replaced: nn.Module,
    leaves: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    *,
    given: torch.dtype,
) -> float | None:
    """Return the `difference` of two modules with the same weights on the same input; None if they disagree.

    Args:
        original: Probe of the model's module, fp32 on the CPU.
        replaced: Copy of the probe that computes with kernels.
        leaves: Arguments of forward in order, fp32.
        dtype: Dtype of the weights.
        device: Where both compute.
        given: Dtype of the leaves.
    """
    exact = copy.deepcopy(original).to(dtype).double()
    cast = {name: leaf.to(device, given) for name, leaf in leaves.items()}
    wide = {name: leaf.cpu().double() for name, leaf in cast.items()}
    theirs, ours = (
        results(module, cast, dict(module.named_parameters()))
        for module in (original.to(device, dtype), replaced.to(device, dtype))
    )
    return difference(ours, theirs, results(exact, wide, dict(exact.named_parameters())))


def same_in_training(original: nn.Module, replaced: nn.Module, leaves: Mapping[str, Tensor]) -> bool:
    """Return whether two modules with the same weights agree in training, with the same random numbers for dropout."""
    found = []
    for module in (original, replaced):
        module.train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            found.append(results(module, leaves, dict(module.named_parameters())))
        module.eval()
    theirs, ours = found
    return difference(ours, theirs, {name: value.double() for name, value in theirs.items()}) is not None
