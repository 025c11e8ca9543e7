"""`TrainingArguments` with the field `ftkit`, and checks that the engine can be used with the other arguments.

`ftkit="auto"` (the default) trains on ftkit's engine, a mapping or a YAML file forces parts of it, None leaves the Trainer
as it is. The field holds plain data, as Trainer saves its arguments, and is settable from the command line through
`HfArgumentParser` (a mapping as JSON). `ArgumentsMixin` adds it to other argument classes (TRL's SFTConfig, DPOConfig).

A stock Trainer ignores a field that it does not know, and would train by plain DDP without an error. So would a Trainer
class that stands before the mixin. `place_model_on_device`, which every Trainer reads when it is built, notices both.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar

import transformers

from ftkit.config.engine import EngineSettings
from ftkit.errors import UserError

BUILDING: ContextVar[bool] = ContextVar("building a Trainer on ftkit's engine", default=False)

REFUSED = {
    "auto_find_batch_size": "it would rebuild a sharded model; limit memory instead (ftkit={'device_gib': ...})",
    "torch_compile": "compiled blocks are not supported",
    "use_liger_kernel": "it patches blocks that the engine runs itself",
    "fp16_full_eval": "evaluation uses the compute dtype already",
    "bf16_full_eval": "evaluation uses the compute dtype already",
    "sync_ref_model": "it adds two models element by element, whose elements are in shards",
}
"""Arguments that the engine cannot honour, with the reason."""


def check_arguments(args: Any) -> None:
    """Raise UserError for arguments that the engine cannot honour."""
    for name, reason in REFUSED.items():
        if getattr(args, name, None):
            raise UserError(
                f"{name}={getattr(args, name)!r} cannot be used with ftkit's engine: {reason}. Set ftkit=None to train "
                "without it"
            )
    if args.n_gpu > 1:
        raise UserError(
            f"one process sees {args.n_gpu} GPUs, and the Trainer would copy the model to all of them: start one rank per "
            f"GPU (torchrun --nproc-per-node {args.n_gpu} ...) or `ftkit finetune`"
        )


def sequence_tokens(args: Any, model: Any) -> int:
    """Return the tokens of one sequence, for the memory estimate: those of the arguments, else the model's limit or 2048."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return int(getattr(args, "max_length", None) or min(limit or 2048, 2048))


@dataclass
class ArgumentsMixin:
    """Adds `ftkit` to a subclass of `transformers.TrainingArguments`: `class C(ArgumentsMixin, SFTConfig)`."""

    _VALID_DICT_FIELDS: ClassVar[list[str]]  # transformers' own: fields that are mappings

    ftkit: dict | str | None = field(
        default="auto",
        metadata={"help": "ftkit's engine: 'auto', a mapping (JSON on the command line), a .yaml file, or None for off."},
    )

    logging_nan_inf_filter: bool = field(
        default=False,
        metadata={"help": "Log a NaN loss as the mean of the others. Off by default, unlike in transformers."},
    )

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Make the subclass a dataclass, and its parent's fields that hold mappings readable from the command line."""
        super().__init_subclass__(**kwargs)
        if transformers.TrainingArguments in cls.__mro__[: cls.__mro__.index(ArgumentsMixin)]:
            raise UserError(f"class {cls.__name__}: name ftkit.ArgumentsMixin first, or its methods are not called")
        cls._VALID_DICT_FIELDS = [*cls._VALID_DICT_FIELDS, "ftkit"]
        dataclass(cls)

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # the class that this is mixed into has it
        if self.ftkit in ("none", "None", "off"):
            self.ftkit = None
        if self.ftkit is not None:
            EngineSettings.of(self.ftkit)  # raises for unknown keys

    @property
    def place_model_on_device(self) -> bool | None:
        """Whether the Trainer moves the model to its device; every Trainer asks when it is built.

        Raises:
            UserError: The engine is asked for, and the Trainer does not know it.
        """
        if self.ftkit is not None and not BUILDING.get():
            raise UserError(
                f"{type(self).__name__}(ftkit=...) asks for ftkit's engine, and the Trainer that was given it does not know "
                "the engine: it would train by plain DDP. Use ftkit.Trainer, or class T(ftkit.TrainerMixin, SFTTrainer), "
                "ftkit's class first; ftkit=None trains without the engine"
            )
        if self.ftkit is not None:  # sharding places weights itself; a whole model may not fit
            return False
        placed: bool | None = super().place_model_on_device  # type: ignore[misc]  # as above
        return placed


@dataclass
class TrainingArguments(ArgumentsMixin, transformers.TrainingArguments):
    """`transformers.TrainingArguments` with `ftkit`."""


@dataclass
class Seq2SeqTrainingArguments(TrainingArguments, transformers.Seq2SeqTrainingArguments):
    """`transformers.Seq2SeqTrainingArguments` with `ftkit`."""
