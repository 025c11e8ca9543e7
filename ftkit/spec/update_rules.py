"""Update rules: what an optimizer keeps per trained element, its settings, and its names in other tools.

Recipe, plan, engine and checkpoint read the rule. Its `moments` are the kinds of fp32 state besides the master weight, named
as in torch.optim; a checkpoint has one file per kind and flat parameter. A new rule needs an `UpdateRule` here, a
`ShardedOptimizer` that computes it (`ftkit/engine/optim/`) and a loop for the host (`ftkit/engine/kernels/numba_loops.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

FP32_BYTES, NARROW_BYTES = 4, 2


@dataclass(frozen=True)
class UpdateRule:
    """The state and the settings of an optimizer.

    Args:
        name: Name in a recipe (`optimizer.name`).
        moments: Kinds of fp32 state besides the master weight.
        settings: Settings of a parameter group with their defaults.
        optional: Settings that need one more moment where they are not zero, with its kind.
        read_twice: Moments that a step reads once more, together with the gradient, before the update.
        coded: Moments of matrices in blocks are stored in 8 bits (`state_forms.py`).
        roots: Moments of which an 8-bit code stores the square root, without a sign.
    """

    name: str
    moments: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)
    optional: Mapping[str, str] = field(default_factory=dict, compare=False)
    read_twice: tuple[str, ...] = ()
    coded: bool = False
    roots: tuple[str, ...] = ()

    def of(self, settings: Mapping[str, Any]) -> UpdateRule:
        """Return the rule with these settings over its defaults, and with the moments that they need.

        Raises:
            ValueError: The rule has no such setting.
        """
        if unknown := [key for key in settings if key not in self.settings]:
            raise ValueError(f"{unknown[0]} is not a setting of {self.name}; it has {', '.join(self.settings)}")
        needed = tuple(moment for key, moment in self.optional.items() if settings.get(key, self.settings[key]))
        return replace(self, moments=self.moments + needed, settings={**self.settings, **settings}, optional={})

    def needed(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the settings that need a moment, each as large as in any group."""
        return {key: max(group.get(key, 0) for group in groups) for key in self.optional}

    @property
    def arguments(self) -> dict[str, Any]:
        """The settings that belong to this rule alone, with their defaults: `optimizer.args`, or `optim_args`."""
        return {key: value for key, value in self.settings.items() if key not in ("lr", "weight_decay", "betas", "eps")}

    @property
    def in_8_bits(self) -> UpdateRule | None:
        """The same rule with 8-bit moments. None if there is none, or if this one has them."""
        return None if self.coded else RULES.get(f"{self.name}_8bit")

    @property
    def state_bytes(self) -> int:
        """Bytes of state per element in fp32: the master weight and the moments."""
        return FP32_BYTES * (1 + len(self.moments))

    @property
    def traffic_bytes(self) -> int:
        """Bytes of memory traffic per element: read and write the state, read a 16-bit gradient, write a 16-bit weight."""
        return 2 * self.state_bytes + 2 * NARROW_BYTES


ADAMW = UpdateRule(
    "adamw",
    ("exp_avg", "exp_avg_sq"),
    {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
    roots=("exp_avg_sq",),
)
SGD = UpdateRule(
    "sgd",
    (),
    {"lr": 1e-3, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
    optional={"momentum": "momentum_buffer"},
)
LION = UpdateRule("lion", ("exp_avg",), {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0})
ADAGRAD = UpdateRule("adagrad", ("sum",), {"lr": 1e-2, "lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0})
RMSPROP = UpdateRule(
    "rmsprop",
    ("square_avg",),
    {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "centered": False, "weight_decay": 0.0},
    optional={"momentum": "momentum_buffer", "centered": "grad_avg"},
)
ADEMAMIX = UpdateRule(
    "ademamix",
    ("exp_avg", "exp_avg_slow", "exp_avg_sq"),
    {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "beta3": 0.9999,
        "alpha": 5.0,
        "t_alpha": 0,
        "t_beta3": 0,
        "eps": 1e-8,
        "weight_decay": 1e-2,
    },
)
STABLE_ADAMW = UpdateRule(
    "stable_adamw",
    ("exp_avg", "exp_avg_sq"),
    {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 1e-2},
    read_twice=("exp_avg_sq",),
)
ADAMW_8BIT = replace(ADAMW, name="adamw_8bit", coded=True)
LION_8BIT = replace(LION, name="lion_8bit", coded=True)
RULES = {
    rule.name: rule
    for rule in (ADAMW, SGD, LION, ADAGRAD, RMSPROP, ADEMAMIX, STABLE_ADAMW, ADAMW_8BIT, LION_8BIT)
}
"""All rules by name. The class of each in `ftkit/engine/optim/` names the source of its arithmetic."""

_OTHER_NAMES = {
    "adamw": "adamw_torch adamw_torch_fused paged_adamw paged_adamw_32bit",
    "lion": "lion_32bit paged_lion paged_lion_32bit",
    "rmsprop": "rmsprop_bnb rmsprop_bnb_32bit",
    "ademamix": "paged_ademamix paged_ademamix_32bit",
    "adamw_8bit": "adamw_bnb_8bit adamw_torch_8bit paged_adamw_8bit",
    "lion_8bit": "paged_lion_8bit",
}
NAMES = {name: name for name in RULES} | {each: name for name, others in _OTHER_NAMES.items() for each in others.split()}
"""Names of optimizers in transformers and its peers that are one of the rules. State on the host is paged state."""

_REFUSED = {
    "its 4-bit state is not supported; use adamw_8bit": "adamw_torch_4bit",
    "its 8-bit state is not supported; use adamw_8bit, or ademamix, whose state can be offloaded": (
        "ademamix_8bit paged_ademamix_8bit"
    ),
    "its 8-bit state is not supported; use adamw_8bit, or rmsprop, whose state can be offloaded": "rmsprop_bnb_8bit",
    "it is for other devices than GPUs of CUDA and the CPU; use adamw": "adamw_torch_xla adamw_torch_npu_fused",
    "it replaces fp32 master weights, which ftkit keeps; use adamw": "adamw_anyprecision",
    "it needs the means of rows and columns, and ranks have parts of a matrix; use adamw": "adafactor",
    "it projects whole gradient matrices, and ranks have parts of one; use adamw with an adapter (LoRA), or lion": (
        "galore_adamw galore_adamw_8bit galore_adafactor galore_adamw_layerwise galore_adamw_8bit_layerwise "
        "galore_adafactor_layerwise apollo_adamw apollo_adamw_layerwise"
    ),
    "it updates inside the backward pass; use sgd, or adamw, whose state can be offloaded": "lomo adalomo",
    "it keeps a second average of gradients outside the optimizer; use ademamix": "grokadamw",
    "it evaluates other weights than it trains; use adamw or sgd with a schedule": (
        "schedule_free_radam schedule_free_adamw schedule_free_sgd"
    ),
}
REFUSED = {name: reason for reason, names in _REFUSED.items() for name in names.split()}
"""Names of optimizers in transformers that no rule computes, each with the reason and what to use."""


def rule_named(name: str) -> UpdateRule:
    """Return the rule of a name, which may be that of transformers.

    Raises:
        ValueError: No rule has this name. The text says what to use.
    """
    if name in NAMES:
        return RULES[NAMES[name]]
    raise ValueError(f"optimizer {name}: {REFUSED.get(name, 'not known to ftkit; use one of ' + ', '.join(RULES))}")
