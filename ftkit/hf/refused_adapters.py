"""What PEFT does to a model and a sharded one cannot: each is refused with the way out."""

from __future__ import annotations

from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import nn

from ftkit.engine.seam import specialise
from ftkit.errors import UserError

MERGING = ("merge_and_unload", "merge_adapter", "unmerge_adapter", "unload", "add_weighted_adapter")
"""Methods of PEFT that write to the base's weights, or exchange its modules."""
PREFIXES = {"PREFIX_TUNING": "prefix tuning", "CARTRIDGE": "a cartridge"}
"""Kinds of adapters that train through the key/value cache; a PEFT may not know them all."""


def refuse_merging(model: nn.Module) -> None:
    """Let the methods that merge an adapter raise on a sharded PEFT model: its base's weights are in shards."""
    if not isinstance(model, PeftModel):
        return
    for module in (model, model.base_model):
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


def refuse_prefixes(model: nn.Module) -> None:
    """Raise for prefix tuning that trains, and for cartridges, which are its kind.

    Raises:
        UserError: they hand blocks their prefix in a key/value cache; a recomputed block would add to the cache twice.
    """
    configs = model.peft_config.values() if isinstance(model, PeftModel) else ()
    for config in configs:
        kind = PREFIXES.get(str(getattr(config.peft_type, "value", config.peft_type)))
        if kind is not None and not config.inference_mode:
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
        if not isinstance(layer, BaseTunerLayer) or not layer.merged:
            continue
        trained = {part for key, parameter in layer.named_parameters() if parameter.requires_grad for part in key.split(".")}
        if at_work := sorted(trained.intersection(layer.merged_adapters)):
            raise UserError(
                f"{name}: the adapter {at_work[0]} is merged into the weights, so training it would change nothing: call "
                "model.unmerge_adapter() before the model is sharded, or model.merge_and_unload() to train what was merged"
            )
