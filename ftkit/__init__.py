"""ftkit: fine-tune 10B-15B models on one box of older GPUs, through the Hugging Face Trainer."""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftkit.data_preview import preview
    from ftkit.engine.checkpoint import load_checkpoint
    from ftkit.engine.comm import Communicator
    from ftkit.engine.flat import Policy
    from ftkit.engine.optimizer import LossScale, ShardedAdamW, ShardedSGD
    from ftkit.engine.saving import save_checkpoint
    from ftkit.engine.shard import Units
    from ftkit.errors import UserError
    from ftkit.hf.accelerator import Accelerator
    from ftkit.hf.arguments import ArgumentsMixin, TrainingArguments
    from ftkit.hf.blocks import shard, units_of
    from ftkit.hf.loading import load_model, load_weights
    from ftkit.hf.reading import gathered_parameters, root_parameters
    from ftkit.hf.saving import save_model
    from ftkit.hf.seq2seq import Seq2SeqTrainer, Seq2SeqTrainingArguments
    from ftkit.hf.settings import EngineSettings
    from ftkit.hf.trainer import Trainer, TrainerMixin

_HOMES = {
    "Accelerator": "ftkit.hf.accelerator",
    "ArgumentsMixin": "ftkit.hf.arguments",
    "Communicator": "ftkit.engine.comm",
    "EngineSettings": "ftkit.hf.settings",
    "LossScale": "ftkit.engine.optimizer",
    "Policy": "ftkit.engine.flat",
    "Seq2SeqTrainer": "ftkit.hf.seq2seq",
    "Seq2SeqTrainingArguments": "ftkit.hf.seq2seq",
    "ShardedAdamW": "ftkit.engine.optimizer",
    "ShardedSGD": "ftkit.engine.optimizer",
    "Trainer": "ftkit.hf.trainer",
    "TrainerMixin": "ftkit.hf.trainer",
    "TrainingArguments": "ftkit.hf.arguments",
    "Units": "ftkit.engine.shard",
    "UserError": "ftkit.errors",
    "gathered_parameters": "ftkit.hf.reading",
    "load_checkpoint": "ftkit.engine.checkpoint",
    "load_model": "ftkit.hf.loading",
    "load_weights": "ftkit.hf.loading",
    "preview": "ftkit.data_preview",
    "root_parameters": "ftkit.hf.reading",
    "save_checkpoint": "ftkit.engine.saving",
    "save_model": "ftkit.hf.saving",
    "shard": "ftkit.hf.blocks",
    "units_of": "ftkit.hf.blocks",
}

__all__ = [
    "Accelerator",
    "ArgumentsMixin",
    "Communicator",
    "EngineSettings",
    "LossScale",
    "Policy",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "ShardedAdamW",
    "ShardedSGD",
    "Trainer",
    "TrainerMixin",
    "TrainingArguments",
    "Units",
    "UserError",
    "gathered_parameters",
    "load_checkpoint",
    "load_model",
    "load_weights",
    "preview",
    "root_parameters",
    "save_checkpoint",
    "save_model",
    "shard",
    "units_of",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `ftkit recipes list` should not wait for torch."""
    if name == "__version__":
        return metadata.version("ftkit")
    if name == "notebook":
        return import_module("ftkit.notebook")
    if name not in _HOMES:
        raise AttributeError(f"module 'ftkit' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the public names, also those not yet imported: a tab in an interpreter should find them."""
    return sorted({*globals(), *__all__, "__version__"})
