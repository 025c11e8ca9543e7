"""Every name in an adapter's configuration must match something of the model.

PEFT asks that some target matches, and lets the others pass: a misspelt one trains nothing and says nothing. Here each entry
is looked for by PEFT's own rules, before training, in a configuration given to `load_model` or a recipe, and in those of a
PEFT model that is sharded.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from peft import PeftConfig, PeftModel, PeftType, TaskType
from torch import nn

from ftkit.errors import UserError

IN_A_RECIPE = {"target_modules": "adapter.targets", "modules_to_save": "adapter.modules_to_save"}
"""Field of PEFT's configuration to the recipe's key."""

ADDED_BY_PEFT = {
    TaskType.SEQ_CLS: {"classifier", "score"},
    TaskType.TOKEN_CLS: {"classifier", "score"},
    TaskType.QUESTION_ANS: {"qa_outputs"},
}
"""Modules that PEFT itself adds to modules_to_save for a task, whether a model has them or not."""

INDEX = r".*?\.[^.]*\.(\d+)\."
"""How PEFT finds a layer's number in a module's name, where no layers_pattern is given."""


def check_all(model: nn.Module) -> None:
    """Check every adapter of a model, those that PEFT injected or `model.add_adapter` added included; others pass.

    Raises:
        UserError: see `check_names`.
    """
    configs = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        check_names(model.get_base_model() if isinstance(model, PeftModel) else model, config)


def check_names(model: nn.Module, config: PeftConfig) -> None:
    """Raise for a name in an adapter's configuration that matches nothing of the model it is for.

    Args:
        model: the base, with or without the adapter.

    Raises:
        UserError: with the field, the name, and the nearest one that would match.
    """
    modules = [name for name, _ in model.named_modules() if name]
    asked = {field: getattr(config, field, None) for field in _FIELDS}
    if config.peft_type == PeftType.ADAPTION_PROMPT and isinstance(asked["target_modules"], str):
        asked["target_modules"] = [asked["target_modules"]]  # the end of a name, and no pattern
    added = ADDED_BY_PEFT.get(config.task_type, set())
    _each(model, "target_modules", asked["target_modules"], modules, _is_target)
    _each(model, "exclude_modules", asked["exclude_modules"], modules, _is_target)
    _each(model, "feedforward_modules", asked["feedforward_modules"], modules, _is_target)
    saved = [name for name in asked["modules_to_save"] or () if name not in added]
    _each(model, "modules_to_save", saved, modules, lambda name, found: found.endswith(name))
    parameters = [name.replace(".base_layer.", ".") for name, _ in model.named_parameters()]
    _each(model, "target_parameters", asked["target_parameters"], parameters, _is_target)
    adapted = [
        name
        for name in modules
        if _is_adapted(name, asked["target_modules"]) and not _is_adapted(name, asked["exclude_modules"])
    ]
    adapted += [name for name in parameters if _is_adapted(name, list(asked["target_parameters"] or ()))]
    for field in ("rank_pattern", "alpha_pattern"):
        _each(model, field, list(asked[field] or ()), adapted or modules, _is_pattern)
    _check_layers(model, asked["layers_to_transform"], asked["layers_pattern"], adapted or modules)
    _check_tokens(model, asked["trainable_token_indices"], modules)


_FIELDS = (
    "target_modules",
    "exclude_modules",
    "feedforward_modules",
    "modules_to_save",
    "target_parameters",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layers_pattern",
    "trainable_token_indices",
)


def _is_target(name: str, found: str) -> bool:
    return found == name or found.endswith(f".{name}")


def _is_pattern(name: str, found: str) -> bool:
    return re.match(rf"(.*\.)?({name})$", found) is not None


def _is_adapted(module: str, targets: Any) -> bool:
    """Return whether PEFT's targets, one pattern or several names, include a module; all-linear and none are no choice."""
    if targets is None or (isinstance(targets, str) and targets == "all-linear"):
        return False
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(_is_target(name, module) for name in targets)


def _each(
    model: nn.Module, field: str, names: Any, there: Sequence[str], is_match: Callable[[str, str], bool]
) -> None:
    """Raise for the first of `names`, or a single pattern, that matches none of what is there."""
    if not names or (isinstance(names, str) and names in ("all-linear", "all")):
        return
    if isinstance(names, str):
        if not any(re.fullmatch(names, found) for found in there):
            raise UserError(_refusal(model, field, names, there, "is a pattern that matches no"))
        return
    for name in sorted(map(str, names)):
        if not name.strip() or not any(is_match(name, found) for found in there):
            raise UserError(_refusal(model, field, name, there, "matches no"))


def _refusal(model: nn.Module, field: str, name: str, there: Sequence[str], says: str) -> str:
    key = f"{field} ({IN_A_RECIPE[field]} in a recipe)" if field in IN_A_RECIPE else field
    kind = "parameter" if field == "target_parameters" else "module"
    return f"adapter: {key}: {name!r} {says} {kind} of {type(model).__name__}{_near(name, there)}"


def _near(name: str, there: Iterable[str]) -> str:
    """Return a hint at the names that come nearest, last parts before whole names."""
    whole = list(there)
    last = sorted({found.rpartition(".")[2] for found in whole if not found.rpartition(".")[2].isdigit()})
    close = difflib.get_close_matches(name.rpartition(".")[2], last, n=3, cutoff=0.5)
    close = close or difflib.get_close_matches(name, whole, n=1)
    return f"; did you mean {' or '.join(close)}?" if close else f"; there are {', '.join(last[:12])}"


def _check_layers(model: nn.Module, layers: Any, patterns: Any, adapted: Sequence[str]) -> None:
    """Raise for numbers of layers, and names of lists of layers, that no adapted module has."""
    if isinstance(patterns, str):
        patterns = [patterns] if patterns else []
    for pattern in patterns or ():
        if not any(re.match(_way(pattern), name) for name in adapted):
            raise UserError(_refusal(model, "layers_pattern", pattern, [*adapted, *_parents(adapted)], "matches no"))
    if layers is None:
        return
    ways = [_way(pattern) for pattern in patterns or ()] or [INDEX]
    numbers = {int(found[1]) for name in adapted for way in ways if (found := re.match(way, name))}
    for layer in [layers] if isinstance(layers, int) else layers:
        if layer not in numbers:
            there = f"layers {min(numbers)} to {max(numbers)} have targets" if numbers else "no layer has a target"
            raise UserError(f"adapter: layers_to_transform: {layer} is no layer of {type(model).__name__}: {there}")


def _way(pattern: str) -> str:
    """Return how PEFT finds a layer's number behind a list's name: the first that there is."""
    return rf"(?:^|.*?\.){pattern}\.(\d+)\."


def _parents(names: Sequence[str]) -> list[str]:
    """Return the names of lists of numbered modules."""
    return sorted({found[1] for name in names if (found := re.match(r"(.*?)\.\d+\.", name))})


def _check_tokens(model: Any, indices: Any, modules: Sequence[str]) -> None:
    """Raise for tokens that an embedding has no row for."""
    if not indices:
        return
    if isinstance(indices, dict):
        _each(model, "trainable_token_indices", list(indices), modules, _is_target)
        asked = [(name, rows) for name, rows in indices.items()]
    else:
        asked = [("", indices)]
    for name, rows in asked:
        found = [each for path, each in model.named_modules() if name and _is_target(name, path)]
        table = found[0] if found else model.get_input_embeddings()
        weight = getattr(getattr(table, "original_module", getattr(table, "base_layer", table)), "weight", None)
        wrong = [row for row in rows if weight is not None and not 0 <= row < len(weight)]
        if wrong:
            raise UserError(
                f"adapter: trainable_token_indices: {wrong[0]} is no token of {name or 'the input embedding'}, which has "
                f"rows 0 to {len(weight) - 1}"
            )
