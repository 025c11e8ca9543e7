"""Probe copies: small copies of a module with random weights, on which an exchange is proved before the module gets it.

A probe has the module's class, settings and structure, but parameters of its own, so a model on meta has probes that
compute, and none of its weights are touched. Linear layers are narrowed: what stands between them is proved, not they.

An exchange agrees if its values and gradients are as near as the original's own, in the same dtype, to the original in fp64;
with a factor of two and some roundings, as the order of sums may differ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Chance = torch.Generator
ROUNDINGS = 8
"""Of the largest value, allowed besides: probes are small, where the original's own error may by chance be none."""


def probe_of(module: nn.Module, chance: Chance, linears: Mapping[str, tuple[int, int]] | None = None) -> nn.Module:
    """Return a probe in fp32 on the CPU, in eval mode, with no hooks.

    Args:
        module: the module that the probe is made of.
        chance: generator of the probe's random weights.
        linears: name of a direct child to (outputs, inputs) of the linear layer that replaces it; it has a bias where the
            child has one.
    """
    probe = copy.copy(module)
    fresh: dict[str, Any] = {key: type(value)() for key, value in vars(module).items() if key.endswith("_hooks")}
    probe.__dict__.update(fresh)
    probe.__dict__["_parameters"] = {name: _random(value, chance) for name, value in module._parameters.items()}
    probe.__dict__["_buffers"] = {name: _random(value, chance) for name, value in module._buffers.items()}
    children: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        if linears is not None and name in linears:
            children[name] = linear(*linears[name], chance, bias=getattr(child, "bias", None) is not None)
        else:
            children[name] = None if child is None else probe_of(child, chance)
    probe.__dict__["_modules"] = children
    return probe.eval()


def linear(outputs: int, inputs: int, chance: Chance, *, bias: bool = False) -> nn.Linear:
    """Return a random linear layer, fp32 on the CPU."""
    made = nn.Linear(inputs, outputs, bias=bias, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, inputs**-0.5, generator=chance)
    return made


def _random(value: Tensor | None, chance: Chance) -> Any:
    """Return a parameter or buffer like `value`: numbers around 1, for scales, which are also good shifts."""
    if value is None or not value.is_floating_point():
        return None if value is None else torch.zeros(value.shape, dtype=value.dtype)
    data = 1 + torch.randn(value.shape, generator=chance) / 4
    return nn.Parameter(data) if isinstance(value, nn.Parameter) else data


Function = Callable[..., Any]


def results(function: Function, leaves: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of a function of `leaves`, in their order, and the gradients of a fixed sum of them.

    Args:
        function: the function, called with the leaves in their order.
        leaves: arguments by name; each gets a gradient.
        parameters: parameters that get a gradient besides the leaves.
    """
    own = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    for parameter in parameters.values():
        parameter.grad = None
    outputs = function(*own.values())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    chance = Chance().manual_seed(0)
    total: Any = 0
    for out in outputs:
        factors = torch.randn(out.shape, generator=chance, dtype=torch.float64)
        total = total + (out.double() * factors.to(out.device)).sum()
    total.backward()
    found = {f"output {number}": out.detach() for number, out in enumerate(outputs)}
    gradients = {name: leaf.grad for name, leaf in {**own, **parameters}.items() if leaf.grad is not None}
    return found | {f"gradient of {name}": gradient for name, gradient in gradients.items()}


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor], exact: dict[str, Tensor]) -> float | None:
    """Return how far ours is from theirs, as a share of the largest value; None if it is not as exact as theirs."""
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
    exchanged: nn.Module,
    leaves: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    *,
    given: torch.dtype | None = None,
) -> float | None:
    """Return the `difference` of two modules, of the same weights, on the same input in `dtype`; None if they disagree.

    Args:
        original: the model's own module, fp32 on the CPU, in eval mode.
        exchanged: the module that may take its place, fp32 on the CPU, in eval mode.
        leaves: arguments of their forward, in order, fp32.
        dtype: dtype of the weights.
        device: where both compute.
        given: dtype of the leaves; None takes that of the weights.
    """
    exact = copy.deepcopy(original).double()
    theirs, ours = (module.to(device, dtype) for module in (original, exchanged))
    cast = {name: leaf.to(device, given or dtype) for name, leaf in leaves.items()}
    wide = {name: leaf.cpu().double() for name, leaf in cast.items()}
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            parameter.copy_(original.get_parameter(name))
    found = [results(module, given, dict(module.named_parameters())) for module, given in ((ours, cast), (theirs, cast))]
    truth = results(exact, wide, dict(exact.named_parameters()))
    on_cpu = [{name: value.cpu() for name, value in each.items()} for each in found]
    return difference(on_cpu[0], on_cpu[1], truth)


def same_in_training(original: nn.Module, exchanged: nn.Module, leaves: Mapping[str, Tensor]) -> bool:
    """Return whether two modules of the same weights do the same in training, dropout and its random numbers included."""
    found = []
    for module in (original, exchanged):
        module.train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            found.append(results(module, leaves, dict(module.named_parameters())))
        module.eval()
    theirs, ours = found
    return difference(ours, theirs, {name: value.double() for name, value in theirs.items()}) is not None
