"""PEFT adapters: their parameters, their names in files, and the adapters that the engine cannot train.

PEFT's layers name their own parameters (`adapter_layer_names`); no list of kinds is kept here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft import AdaLoraModel, LoraConfig, PeftConfig, PeftModel, PeftType, get_peft_model, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import ModulesToSaveWrapper
from torch import nn

from ftkit.engine.core.buffers import persistent_buffers
from ftkit.errors import UserError

HEADS = {"classifier", "score", "qa_outputs"}
"""Names that PEFT adds to `modules_to_save` for a task, whether a model has them or not."""
UNTRAINABLE = {
    PeftType.PREFIX_TUNING: "it passes its prefix to the blocks in a cache, which recomputed blocks would fill twice",
    PeftType.CPT: "its forward replaces the tensor that the optimizer updates",
    PeftType.XLORA: "it runs the model twice",
}
"""Adapters that the engine cannot train, each with the reason."""


def base_of(model: nn.Module) -> Any:
    """Return the base model inside a PEFT model, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def adapter_parameters(model: nn.Module, *, copies: bool = False) -> set[str]:
    """Return the names of the parameters that belong to adapters of any kind.

    PEFT's layers list them in `adapter_layer_names`. Prompt learning keeps its parameters in `prompt_encoder`.

    Args:
        model: A model, with or without adapters.
        copies: Whether the copies that `modules_to_save` makes of whole modules are among them.
    """
    found: set[int] = set()
    for module in model.modules():
        parts = ("prompt_encoder",) if isinstance(module, PeftModel) else getattr(module, "adapter_layer_names", ())
        if parts and (copies or not isinstance(module, ModulesToSaveWrapper)):
            found.update(id(parameter) for name, parameter in module.named_parameters() if name.partition(".")[0] in parts)
    return {name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in found}


def adds_to_loss(model: nn.Module) -> bool:
    """Return whether PEFT adds a penalty on weights to the loss that the model returns (AdaLoRA)."""
    return isinstance(model, PeftModel) and isinstance(model.base_model, AdaLoraModel)


def may_read_logits(model: nn.Module) -> bool:
    """Return whether the adapter has a forward of its own around the model, which may call its head again (Shadow)."""
    tuner = model.base_model if isinstance(model, PeftModel) else None
    return isinstance(tuner, BaseTuner) and type(tuner).forward is not BaseTuner.forward and not adds_to_loss(model)


def add_adapter(model: nn.Module, config: PeftConfig) -> PeftModel:
    """Return `peft.get_peft_model(model, config)`, once every name in the configuration matches a module.

    Raises:
        UserError: An entry of `target_modules` or `modules_to_save` matches no module. PEFT only requires that one does.
    """
    modules = [f".{name}" for name, _ in model.named_modules()]
    for field, dot in (("target_modules", "."), ("modules_to_save", "")):  # PEFT compares whole names, or ends of names
        entries = getattr(config, field, None)
        for entry in set(entries) - HEADS if isinstance(entries, (list, tuple, set)) else ():
            if not any(name.endswith(f"{dot}{entry}") for name in modules):
                known = sorted({last for _, _, last in (name.rpartition(".") for name in modules) if not last.isdigit()})
                raise UserError(
                    f"adapter: {field}: {entry!r} matches no module of {type(model).__name__}, so it would train nothing. "
                    f"Its modules are {', '.join(filter(None, known))}"
                )
    return get_peft_model(model, config)


def check_plain_lora(adapter: PeftConfig) -> None:
    """Refuse an adapter that cannot be initialised on a base without weights.

    Raises:
        UserError: The adapter is not LoRA with its default initialisation.
    """
    plain = isinstance(adapter, LoraConfig) and adapter.init_lora_weights in (True, "gaussian")
    if not plain or adapter.use_dora or adapter.trainable_token_indices:  # type: ignore[attr-defined]  # LoRA's
        raise UserError(
            f"adapter: {PeftType(adapter.peft_type).value} with these settings is initialised from the base's weights, and "
            "a model built from a configuration has none. Save the model first and load its folder with "
            "ftkit.load_model(folder), or build it with from_config() and apply get_peft_model()"
        )


def saved_names(model: PeftModel, names: Iterable[str], adapter: str) -> dict[str, str]:
    """Return which of the tensors `names` PEFT saves with an adapter, each with its name in the file."""
    # PEFT renames the entries of a state dict. Empty tensors stand for the values; identity connects the two names.
    empty = {name: torch.empty(0, device="meta") for name in names}
    with names_only(model):
        saved = get_peft_model_state_dict(model, state_dict=empty, adapter_name=adapter)
    keys = {id(tensor): key for key, tensor in saved.items()}
    return {name: keys[id(tensor)] for name, tensor in empty.items() if id(tensor) in keys}


@contextmanager
def names_only(model: PeftModel) -> Iterator[None]:
    """Let trained copies of modules_to_save return their names from `state_dict()`: the engine refuses it for shards.

    PEFT calls it for the names and takes the values from the state dict that it is given.
    """
    wrappers = [module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)]
    copies = [module for wrapper in wrappers for module in wrapper.modules_to_save.values()]
    try:
        for module in copies:
            module.state_dict = partial(dict, {**dict(module.named_parameters()), **persistent_buffers(module)})
        yield
    finally:
        for module in copies:
            vars(module).pop("state_dict", None)


def refuse_untrainable(model: nn.Module) -> None:
    """Raise UserError for adapters that the engine cannot train."""
    for config in model.peft_config.values() if isinstance(model, PeftModel) else ():
        reason = UNTRAINABLE.get(PeftType(config.peft_type))
        if reason is not None and not config.inference_mode:
            raise UserError(
                f"adapter: {PeftType(config.peft_type).value} is not supported: {reason}. Use LoRA, prompt tuning or "
                "p-tuning, or ftkit=None"
            )
