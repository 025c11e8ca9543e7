"""Probes: small trial copies of a module, on which a replacement is proved before the module gets it.

A probe has the class, settings and structure of its module, but its own random parameters. So a model on meta has probes
that compute, and no probe reads the model's weights. Narrow linear layers replace the module's: the proof concerns the
operations between them.

A replacement agrees if its values and gradients are as near to the original in fp64 as the original's own in the same dtype,
within a factor of two and some roundings, as the order of sums may differ. Nothing agrees with a module that draws random
numbers in training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor, nn

FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)
"""Errors of a probe whose module has another form than the replacement needs."""
ROUNDINGS = 8
"""Allowed beside the original's own error, which may be zero by chance; in units of eps times the largest value."""


def probe_of(module: nn.Module, generator: Generator, linears: Mapping[str, tuple[int, int]]) -> nn.Module:
    """Return a probe in fp32 on the CPU, in training mode and without hooks.

    Args:
        module: The original, on any device.
        generator: Source of the random weights.
        linears: Direct children that become linear layers, each with (outputs, inputs). A bias stays a bias.
    """
    probe = without_hooks(module)
    probe.__dict__["_parameters"] = {name: _random(value, generator) for name, value in module._parameters.items()}
    probe.__dict__["_buffers"] = {name: _random(value, generator) for name, value in module._buffers.items()}
    probe.__dict__["_modules"] = {
        name: linear(*linears[name], generator, bias=getattr(child, "bias", None) is not None)
        if name in linears
        else probe_of(child, generator, {})
        for name, child in module.named_children()
    }
    return probe.train()


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

    Raises:
        ValueError: The function draws random numbers.
    """
    own = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    for parameter in parameters.values():
        parameter.grad = None
    state = torch.get_rng_state()
    outputs = function(*own.values())
    if not torch.equal(state, torch.get_rng_state()):
        raise ValueError("the module draws random numbers")
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = Generator().manual_seed(0)
    factors = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device) for out in outputs]
    torch.autograd.backward([(out.double() * factor).sum() for out, factor in zip(outputs, factors)])
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
