"""What PEFT does to a model and a sharded one cannot: each is refused with the way out."""

from __future__ import annotations

from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import nn

from ftkit.engine.core.instance_class import specialise
from ftkit.errors import UserError

MERGING = ("merge_and_unload", "merge_adapter", "unmerge_adapter", "unload", "add_weighted_adapter")
"""Methods of PEFT that write to the base's weights, or exchange its modules."""
PREFIXES = {"PREFIX_TUNING": "prefix tuning", "CARTRIDGE": "a cartridge"}
"""Kinds of adapters that train through the key/value cache; a PEFT may not know them all."""


def refuse_merging(model: nn.Module) -> None:
    """Let the methods that merge an adapter raise on sharded PEFT models, also inside a module of the user's: their bases'
    weights are in shards.
    """
    for module in model.modules():
        if isinstance(module, (PeftModel, BaseTuner)):
            specialise(module, **{name: _refusal(name) for name in MERGING})


def _refusal(name: str) -> Any:
    def refuse(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise UserError(
            f"{name}() on a sharded model: the base's weights are in shards, and the optimizer has copies of them. Save the "
            "adapter with trainer.save_model() or ftkit.save_model() and merge its folder: ftkit export ADAPTER OUT "
            "--merge-adapter. Or call it before sharding"
        )

    return refuse


def refuse_allocating(model: nn.Module) -> None:
    """Let the methods raise by which AdaLoRA, and AdaMSS that adapts its subspaces, choose what goes on training: they read
    gradients, which the engine has, and mask weights or switch them off.
    """
    tuners = [module for module in model.modules() if isinstance(module, BaseTuner)]
    for module in (each for each in tuners if hasattr(each, "update_and_allocate")):
        if any(getattr(config, "use_asa", True) for config in module.peft_config.values()):
            specialise(module, update_and_allocate=_refuse_allocating)


def _refuse_allocating(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    raise UserError(
        f"{type(self).__name__}.update_and_allocate() on a sharded model: it reads each parameter's .grad, which is with "
        "ftkit's engine, and masks weights. Leave the call out: AdaLoRA trains at its first rank then (init_r; set it "
        "to the rank that you want), with its penalty, and AdaMSS takes use_asa=False. Or use LoRA, or train without the "
        "engine (ftkit=None)"
    )


def refuse_prefixes(model: nn.Module) -> None:
    """Raise for adapters that train in a way which the engine cannot follow, also inside a module of the user's.

    Raises:
        UserError: for prefix tuning, and cartridges, which are its kind: they hand blocks their prefix in a key/value cache,
            and a recomputed block would add to the cache twice. For CPT, which gives its weights new memory in each forward.
    """
    adapted = [module for module in model.modules() if isinstance(module, PeftModel)]
    for config in (each for module in adapted for each in module.peft_config.values() if not each.inference_mode):
        named = str(getattr(config.peft_type, "value", config.peft_type))
        kind = PREFIXES.get(named)
        if named == "CPT":
            raise UserError(
                "adapter: CPT replaces the .data of its weights in each forward, which the optimizer would not update nor a "
                "save write. Use prompt tuning or p-tuning (PromptTuningConfig, PromptEncoderConfig), or train without the "
                "engine (ftkit=None)"
            )
        if kind is not None:
            raise UserError(
                f"adapter: {kind} trains through the key/value cache, in which it hands its prefix to every block. "
                "Blocks that run again in backward would fill the cache twice, so gradients through it are not supported. "
                "Use LoRA, or prompt tuning or p-tuning (PromptTuningConfig, PromptEncoderConfig), which train embeddings"
            )


def refuse_merged(model: nn.Module) -> None:
    """Raise for an adapter that is merged and asks for gradients: the forward of a merged layer does not use it.

    Raises:
        UserError: naming the layer and the adapter.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer) or not isinstance(layer, nn.Module) or not layer.merged:
            continue
        trained = {part for key, parameter in layer.named_parameters() if parameter.requires_grad for part in key.split(".")}
        if at_work := sorted(trained.intersection(layer.merged_adapters)):
            raise UserError(
                f"{name}: the adapter {at_work[0]} is merged into the weights, so training it would change nothing: call "
                "model.unmerge_adapter() before the model is sharded, or model.merge_and_unload() to train what was merged"
            )
