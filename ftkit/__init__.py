"""ftkit: fine-tune 10B-15B models on one node of older GPUs, through the Hugging Face Trainer."""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftkit.config.engine import EngineSettings
    from ftkit.engine.checkpoint.loading import load_checkpoint
    from ftkit.engine.checkpoint.saving import save_checkpoint
    from ftkit.engine.comm.communicator import Communicator
    from ftkit.engine.model import ShardedModel
    from ftkit.engine.optim.adamw import ShardedAdamW
    from ftkit.engine.optim.loss_scale import LossScale
    from ftkit.engine.optim.sgd import ShardedSGD
    from ftkit.errors import UserError
    from ftkit.hf.load.model import load_model, load_weights
    from ftkit.hf.reading import gathered_parameters, root_parameters
    from ftkit.hf.save.model import save_model
    from ftkit.hf.sharding import shard, units_of
    from ftkit.hf.trainer.accelerator import Accelerator
    from ftkit.hf.trainer.arguments import ArgumentsMixin, Seq2SeqTrainingArguments, TrainingArguments
    from ftkit.hf.trainer.trainer import Seq2SeqTrainer, Trainer, TrainerMixin
    from ftkit.spec.strategy import Strategy
    from ftkit.train.preview import preview

_HOMES = {
    "Accelerator": "ftkit.hf.trainer.accelerator",
    "ArgumentsMixin": "ftkit.hf.trainer.arguments",
    "Communicator": "ftkit.engine.comm.communicator",
    "EngineSettings": "ftkit.config.engine",
    "LossScale": "ftkit.engine.optim.loss_scale",
    "Strategy": "ftkit.spec.strategy",
    "Seq2SeqTrainer": "ftkit.hf.trainer.trainer",
    "Seq2SeqTrainingArguments": "ftkit.hf.trainer.arguments",
    "ShardedAdamW": "ftkit.engine.optim.adamw",
    "ShardedSGD": "ftkit.engine.optim.sgd",
    "Trainer": "ftkit.hf.trainer.trainer",
    "TrainerMixin": "ftkit.hf.trainer.trainer",
    "TrainingArguments": "ftkit.hf.trainer.arguments",
    "ShardedModel": "ftkit.engine.model",
    "UserError": "ftkit.errors",
    "gathered_parameters": "ftkit.hf.reading",
    "load_checkpoint": "ftkit.engine.checkpoint.loading",
    "load_model": "ftkit.hf.load.model",
    "load_weights": "ftkit.hf.load.model",
    "preview": "ftkit.train.preview",
    "root_parameters": "ftkit.hf.reading",
    "save_checkpoint": "ftkit.engine.checkpoint.saving",
    "save_model": "ftkit.hf.save.model",
    "shard": "ftkit.hf.sharding",
    "units_of": "ftkit.hf.sharding",
}

__all__ = [
    "Accelerator",
    "ArgumentsMixin",
    "Communicator",
    "EngineSettings",
    "LossScale",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "ShardedAdamW",
    "ShardedModel",
    "ShardedSGD",
    "Strategy",
    "Trainer",
    "TrainerMixin",
    "TrainingArguments",
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
