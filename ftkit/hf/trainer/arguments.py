"""`TrainingArguments` with the field `ftkit`, and checks that the engine can be used with the other arguments.

`ftkit="auto"` (the default) trains on ftkit's engine, a mapping or a YAML file forces parts of it, None leaves the Trainer
as it is. The field holds plain data, as Trainer saves its arguments, and is settable from the command line through
`HfArgumentParser` (a mapping as JSON). `ArgumentsMixin` adds it to other argument classes (TRL's SFTConfig, DPOConfig).

A mixin behind the class that it should extend overrides nothing, and a stock Trainer ignores a field that it does not know:
both would train by plain DDP without an error. The order of bases is checked when a class is made. `place_model_on_device`,
which every Trainer reads once, notices a stock Trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar

import transformers
from transformers.debug_utils import DebugOption

from ftkit.config.engine import EngineSettings
from ftkit.errors import UserError

_building: ContextVar[bool] = ContextVar("building a Trainer on ftkit's engine", default=False)

REFUSED = {
    "deepspeed": "it is another engine",
    "fsdp": "it is another engine",
    "parallelism_config": "tensor, context and pipeline parallelism are not supported",
    "auto_find_batch_size": "it would rebuild a sharded model; limit memory instead (ftkit={'device_gib': ...})",
    "torch_compile": "compiled blocks are not supported",
    "use_liger_kernel": "it patches blocks that the engine runs itself",
    "fp16_full_eval": "evaluation uses the compute dtype already",
    "bf16_full_eval": "evaluation uses the compute dtype already",
    "enable_jit_checkpoint": "ranks would save at different steps",
    "sync_ref_model": "it adds two models element by element, whose elements are in shards",
    "logging_nan_inf_filter": "it logs a loss of NaN as 0.0; losses are logged as they are",
    "save_on_each_node": "all ranks write into one folder, which every machine must see",
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
    if DebugOption.UNDERFLOW_OVERFLOW in args.debug:
        raise UserError("debug=underflow_overflow cannot be used with ftkit's engine: it reads weights that are in shards")
    if args.n_gpu > 1:
        raise UserError(
            f"one process sees {args.n_gpu} GPUs, and the Trainer would copy the model to all of them: start one rank per "
            f"GPU (torchrun --nproc-per-node {args.n_gpu} ...) or `ftkit finetune`"
        )
    if not args.accelerator_config.even_batches:
        raise UserError("accelerator_config.even_batches=False: ranks with fewer batches would leave the others waiting")


def sequence_tokens(args: Any, model: Any) -> int:
    """Return the tokens of one sequence, for the memory estimate: those of the arguments, else the model's limit or 2048."""
    given = getattr(args, "max_length", None) or getattr(args, "max_seq_length", None)
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return int(given or min(limit or 2048, 2048))


def check_order(cls: type, mixin: type, base: type) -> None:
    """Raise where a class of transformers stands before `mixin`, whose methods would not be called.

    Args:
        cls: The new class.
        mixin: ftkit's mixin.
        base: The class of transformers that the mixin extends.

    Raises:
        UserError: Naming the class, and the right order.
    """
    before = cls.__mro__[: cls.__mro__.index(mixin)]
    wrong = next((each for each in before if issubclass(each, base) and not issubclass(each, mixin)), None)
    if wrong is not None:
        others = ", ".join(each.__name__ for each in cls.__bases__ if not issubclass(each, mixin))
        raise UserError(
            f"{cls.__name__}: {wrong.__name__} comes before {mixin.__name__}, whose methods would not be called: ftkit's "
            f"engine would not be in place. Write class {cls.__name__}(ftkit.{mixin.__name__}, {others})"
        )


@contextmanager
def engine_trainer() -> Iterator[None]:
    """Mark that a Trainer on the engine is built in the body."""
    token = _building.set(True)
    try:
        yield
    finally:
        _building.reset(token)


@dataclass
class ArgumentsMixin:
    """Adds `ftkit` to a subclass of `transformers.TrainingArguments`: `class C(ArgumentsMixin, SFTConfig)`."""

    _VALID_DICT_FIELDS: ClassVar[list[str]]  # transformers' own: fields that are mappings

    ftkit: dict | str | None = field(
        default="auto",
        metadata={"help": "ftkit's engine: 'auto', a mapping (JSON on the command line), a .yaml file, or None for off."},
    )

    logging_nan_inf_filter: bool | None = field(
        default=None,
        metadata={"help": "Log a NaN loss as the mean of the others; default: off on ftkit's engine."},
    )

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Make the subclass a dataclass, and its parent's fields that hold mappings readable from the command line."""
        super().__init_subclass__(**kwargs)
        check_order(cls, ArgumentsMixin, transformers.TrainingArguments)
        cls._VALID_DICT_FIELDS = [*cls._VALID_DICT_FIELDS, "ftkit"]
        dataclass(cls)

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # the class that this is mixed into has it
        if self.ftkit in ("none", "None", "off"):
            self.ftkit = None
        if self.ftkit is not None:
            EngineSettings.of(self.ftkit)  # raises for unknown keys
        elif self.logging_nan_inf_filter is None:
            self.logging_nan_inf_filter = True  # as the stock Trainer
        self.logging_nan_inf_filter = bool(self.logging_nan_inf_filter)

    @property
    def place_model_on_device(self) -> bool | None:
        """Whether the Trainer moves the model to its device; every Trainer asks when it is built.

        Raises:
            UserError: The engine is asked for, and the Trainer does not know it.
        """
        if self.ftkit is not None and not _building.get():
            raise UserError(
                f"{type(self).__name__}(ftkit=...) asks for ftkit's engine, and the Trainer that was given it does not know "
                "the engine: it would train by plain DDP. Use ftkit.Trainer, or class T(ftkit.TrainerMixin, SFTTrainer); "
                "ftkit=None trains without the engine"
            )
        placed: bool | None = super().place_model_on_device  # type: ignore[misc]  # as above
        return placed


@dataclass
class TrainingArguments(ArgumentsMixin, transformers.TrainingArguments):  # type: ignore[misc]  # our filter may be None
    """`transformers.TrainingArguments` with `ftkit`."""
