"""Every name in an adapter's configuration must match something of the model.

PEFT asks that some target matches, and lets the others pass: a misspelt one trains nothing and says nothing. Here each entry
is looked for by PEFT's own rules, before training, in a configuration given to `load_model` or a recipe, and in those of a
PEFT model that is sharded.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from peft import PeftConfig, PeftModel, PeftType, TaskType
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

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
        model: the base model, with or without the adapter.
        config: the adapter's configuration.

    Raises:
        UserError: with the field, the name, and the nearest one that would match.
    """
    check_kinds(config)
    modules = [name for name, _ in model.named_modules() if name]
    asked = {field: getattr(config, field, None) for field in _FIELDS}
    if config.peft_type == PeftType.ADAPTION_PROMPT and isinstance(asked["target_modules"], str):
        asked["target_modules"] = [asked["target_modules"]]  # the end of a name, and no pattern
    added = ADDED_BY_PEFT.get(TaskType(config.task_type), set()) if config.task_type is not None else ()
    _each(model, "target_modules", asked["target_modules"], modules, _is_target)
    _each(model, "exclude_modules", asked["exclude_modules"], modules, _is_target)
    _each(model, "feedforward_modules", asked["feedforward_modules"], modules, _is_target)
    saved = [name for name in asked["modules_to_save"] or () if name not in added]
    _each(model, "modules_to_save", saved, modules, lambda name, found: found.endswith(name))
    parameters = [name.replace(".base_layer.", ".") for name, _ in model.named_parameters()]
    _each(model, "target_parameters", asked["target_parameters"], parameters, _is_target)
    text = isinstance(targets := asked["target_modules"], str)
    targets = _linear(model) if text and str(targets).lower() == "all-linear" else targets
    targeted = [name for name in modules if _is_adapted(name, targets)]
    _check_excluded(asked["exclude_modules"], modules, targeted)
    adapted = [name for name in modules if _is_adapted(name, targets) and not _is_adapted(name, asked["exclude_modules"])]
    others = [name for name in parameters if _is_adapted(name, list(asked["target_parameters"] or ()))]
    layers, lists = asked["layers_to_transform"], asked["layers_pattern"]
    if isinstance(targets, str) and layers not in (None, []):
        raise UserError(
            f"adapter: layers_to_transform is not read beside target_modules={targets!r}, which is a pattern: write the "
            "layers into it, or name the targets in a list"
        )
    if lists and layers in (None, []):
        raise UserError("adapter: layers_pattern is read beside layers_to_transform only: give both, or neither")
    _check_layers(model, layers, lists, [*adapted, *others] or modules)
    if not text and not _is_made_by_peft(model, asked["exclude_modules"], targeted):
        _check_left(targets, [name for name in adapted if _is_in_layers(name, layers, lists)], adapted)
        _check_not_saved(targets, adapted, asked["modules_to_save"])
    chosen = adapted or ([] if others else modules)
    chosen = [name for name in chosen if not _is_saved(name, asked["modules_to_save"])]
    if not isinstance(targets, str):  # of a pattern PEFT leaves layers aside
        chosen = [name for name in chosen if _is_in_layers(name, layers, lists)]
    is_match = _matching(config)
    for field, names in _patterns(config).items():
        _each(model, field, names, [*chosen, *others], is_match)
        if is_match is _is_pattern:
            _check_hidden(field, names, [*chosen, *others])
    _check_tokens(model, "trainable_token_indices", asked["trainable_token_indices"], modules)
    _check_tokens(model, "alora_invocation_tokens", getattr(config, "alora_invocation_tokens", None), modules)
    blocks = getattr(config, "use_bdlora", None)
    for field in ("target_modules_bd_a", "target_modules_bd_b"):
        _each(model, f"use_bdlora.{field}", getattr(blocks, field, None), adapted, lambda name, found: name in found)
    if config.peft_type == PeftType.TRAINABLE_TOKENS:
        found = [name for name in modules if _is_adapted(name, targets)]
        tokens = getattr(config, "token_indices", None)
        _check_tokens(model, "token_indices", dict.fromkeys(found, tokens) or tokens, modules)


def _is_made_by_peft(model: nn.Module, excluded: Any, targeted: Sequence[str]) -> bool:
    """Return whether targets may be PEFT's own: where it was before, a model's default, and all-linear, stand in a list."""
    if not any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        return False
    return bool(excluded) or set(_linear(model)) <= set(targeted)


def _check_excluded(excluded: Any, modules: Sequence[str], targeted: Sequence[str]) -> None:
    """Raise for a name that excludes no target, but lies above some: PEFT excludes modules, and not what is in them."""
    for name in [excluded] if isinstance(excluded, str) else sorted(excluded or ()):
        named = {module for module in modules if _is_adapted(module, name if excluded == name else [name])}
        below = [target for target in targeted if any(target.startswith(f"{module}.") for module in named)]
        if below and named.isdisjoint(targeted):
            raise UserError(
                f"adapter: exclude_modules: {name!r} excludes none of the targets: PEFT excludes modules of this name, and "
                f"not modules inside them, such as {below[0]}. Name that, or give a pattern (text, not a list): "
                f"exclude_modules={'(.*[.])?' + (name if excluded == name else re.escape(name)) + '[.].*'!r}"
            )


def _check_left(targets: Any, left: Sequence[str], adapted: Sequence[str]) -> None:
    """Raise for a target of which nothing is left once layers are chosen and modules excluded."""
    for name in sorted(map(str, targets or ())):
        if not any(_is_target(name, module) for module in left):
            inside = any(_is_target(name, module) for module in adapted)
            why = "is in none of the layers_to_transform" if inside else "is excluded whole by exclude_modules"
            raise UserError(
                f"adapter: target_modules (adapter.targets in a recipe): {name!r} {why}, so that it would have no adapter. "
                "Remove it, or correct the other field"
            )


def _check_not_saved(targets: Any, adapted: Sequence[str], saved: Any) -> None:
    """Raise for a target all of whose modules are trained whole: PEFT gives them no adapter."""
    for name in sorted(map(str, targets or ())):
        found = [module for module in adapted if _is_target(name, module)]
        if found and all(_is_saved(module, saved) for module in found):
            raise UserError(
                f"adapter: target_modules: {name!r} is in modules_to_save, too: its modules would be trained whole and get "
                "no adapter. Remove it from one of the two"
            )


def check_kinds(config: Any) -> None:
    """Raise for what is no configuration, for X-LoRA, and for a text where PEFT reads a list: it would take its letters.

    Raises:
        UserError: with what is needed.
    """
    if not isinstance(config, PeftConfig):
        raise UserError(
            f"adapter: {str(config)[:60]!r} is not a configuration of PEFT: give load_model an object, such as "
            "peft.LoraConfig(r=8, target_modules='all-linear'). A trained adapter's folder is added with "
            "peft.PeftModel.from_pretrained(model, folder, is_trainable=True)"
        )
    if config.peft_type == PeftType.XLORA:
        raise UserError(
            "adapter: X-LoRA runs the model twice for one forward, the first time to choose among adapters, and is not "
            "supported. Use LoRA"
        )
    for field in ("modules_to_save", "target_parameters"):
        value = getattr(config, field, None)
        if isinstance(value, str):
            raise UserError(f"adapter: {field} is the text {value!r}, and a list is needed: [{value!r}]")


_FIELDS = (
    "target_modules",
    "exclude_modules",
    "feedforward_modules",
    "modules_to_save",
    "target_parameters",
    "layers_to_transform",
    "layers_pattern",
    "trainable_token_indices",
)


def _patterns(config: PeftConfig) -> dict[str, list[str]]:
    """Return PEFT's fields that say something of some of the adapted modules, with the names of these."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: list(value) for name, value in values.items() if name.endswith("_pattern") and isinstance(value, dict)}


def _matching(config: PeftConfig) -> Callable[[str, str], bool]:
    """Return how PEFT compares a name of such a field with a module's."""
    if config.peft_type == PeftType.OSF:
        return lambda name, found: re.search(name, found) is not None
    if config.peft_type == PeftType.ADALORA:  # writes the names of parameters there while it trains
        return lambda name, found: _is_pattern(name, found) or found in name
    return _is_pattern


def _linear(model: Any) -> list[str]:
    """Return the modules that PEFT takes for all-linear: all such but the output embedding; its own, once it was there."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    kinds = (nn.Linear, Conv1D, BaseTunerLayer)
    inside = tuple(f"{name}." for name, each in model.named_modules() if isinstance(each, BaseTunerLayer))
    found = [name for name, each in model.named_modules() if isinstance(each, kinds) and each is not head]
    return [name for name in found if not name.startswith(inside)]


def _is_target(name: str, found: str) -> bool:
    return found == name or found.endswith(f".{name}")


def _is_pattern(name: str, found: str) -> bool:
    return re.match(rf"(.*\.)?({name})$", found) is not None


def _is_adapted(module: str, targets: Any) -> bool:
    """Return whether PEFT's targets, one pattern or several names, include a module; none are no choice."""
    if targets is None:
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


def _check_hidden(field: str, names: Sequence[str], there: Sequence[str]) -> None:
    """Raise for a name before which others match all of its modules: PEFT takes the first that matches."""
    matched = {name: {found for found in there if _is_pattern(name, found)} for name in names}
    for number, name in enumerate(names):
        hiding = [earlier for earlier in names[:number] if matched[name] & matched[earlier]]
        if matched[name] and matched[name] <= set().union(*(matched[earlier] for earlier in hiding)):
            before = any(matched[name] < matched[earlier] for earlier in hiding)
            raise UserError(
                f"adapter: {field}: {name!r} stands behind {' and '.join(map(repr, hiding))}, and each of its modules is "
                f"matched there. PEFT takes the first that matches, so that {name!r} would never be used. "
                + (f"Write it before {hiding[0]!r}, or remove it" if before and len(hiding) == 1 else "Remove it")
            )


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
    patterns = [patterns] if isinstance(patterns, str) and patterns else patterns
    for pattern in patterns or ():
        if not any(_layer_of(name, [pattern]) is not None for name in adapted):
            raise UserError(_refusal(model, "layers_pattern", pattern, [*adapted, *_parents(adapted)], "matches no"))
    if layers is None:
        return
    numbers = {number for name in adapted if (number := _layer_of(name, patterns)) is not None}
    for layer in [layers] if isinstance(layers, int) else layers:
        if layer not in numbers:
            there = f"layers {min(numbers)} to {max(numbers)} have targets" if numbers else "no layer has a target"
            raise UserError(f"adapter: layers_to_transform: {layer} is not a layer of {type(model).__name__}: {there}")


def _layer_of(module: str, patterns: Any) -> int | None:
    """Return the number of the layer that a module is in, as PEFT finds it, or None."""
    lists = [patterns] if isinstance(patterns, str) and patterns else patterns or ()
    ways = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in lists] or [INDEX]
    return next((int(found[1]) for way in ways if (found := re.match(way, module))), None)


def _is_in_layers(module: str, layers: Any, patterns: Any) -> bool:
    """Return whether PEFT adapts a module in spite of the layers that were chosen."""
    if layers is None or layers == []:
        return True
    return _layer_of(module, patterns) in ([layers] if isinstance(layers, int) else layers)


def _is_saved(module: str, saved: Any) -> bool:
    """Return whether a module is trained whole, so that PEFT gives it no adapter."""
    return any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in saved or ())


def _parents(names: Sequence[str]) -> list[str]:
    """Return the names of lists of numbered modules."""
    return sorted({found[1] for name in names if (found := re.match(r"(.*?)\.\d+\.", name))})


def _check_tokens(model: Any, field: str, indices: Any, modules: Sequence[str]) -> None:
    """Raise for tokens that an embedding has no row for."""
    if not indices:
        return
    if isinstance(indices, dict):
        _each(model, field, list(indices), modules, _is_target)
        asked = [(name, rows) for name, rows in indices.items()]
    else:
        asked = [("", indices)]
    for name, rows in asked:
        found = [each for path, each in model.named_modules() if name and _is_target(name, path)]
        table = found[0] if found else model.get_input_embeddings()
        weight: Any = getattr(getattr(table, "original_module", getattr(table, "base_layer", table)), "weight", None)
        wrong = [row for row in rows if weight is not None and not 0 <= row < len(weight)]
        if wrong:
            raise UserError(
                f"adapter: {field}: {wrong[0]} is not a token of {name or 'the input embedding'}, which has "
                f"rows 0 to {len(weight) - 1}"
            )
