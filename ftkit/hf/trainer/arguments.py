"""`TrainingArguments` with one more field.

`ftkit="auto"` (the default) trains on ftkit's engine, a mapping or a YAML file forces parts of it, None leaves the Trainer
as it is. The field holds plain data, as Trainer saves its arguments, and is settable from the command line through
`HfArgumentParser` (a mapping as JSON). `ArgumentsMixin` adds it to other argument classes (TRL's SFTConfig, DPOConfig).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import transformers

from ftkit.config.engine import EngineSettings
from ftkit.hf.trainer.in_place import check_order, check_reader


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
        """Make the subclass a dataclass, and its parent's fields that hold mappings readable from the command line.

        Raises:
            UserError: if the arguments' class comes before this mixin.
        """
        super().__init_subclass__(**kwargs)
        check_order(cls, ArgumentsMixin, transformers.TrainingArguments)
        cls._VALID_DICT_FIELDS = [*cls._VALID_DICT_FIELDS, "ftkit"]
        dataclass(cls)

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # the class that this is mixed into has it
        if self.ftkit in ("none", "None", "off"):
            self.ftkit = None
        if self.ftkit is not None:
            EngineSettings.of(self.ftkit)  # raises for what it does not know
        elif self.logging_nan_inf_filter is None:
            self.logging_nan_inf_filter = True  # as the stock Trainer
        self.logging_nan_inf_filter = bool(self.logging_nan_inf_filter)


    @property
    def place_model_on_device(self) -> bool | None:
        """Whether the Trainer moves the model to its device; every Trainer asks when it is built.

        Raises:
            UserError: if the engine is asked for and the Trainer does not know it.
        """
        if self.ftkit is not None:
            check_reader(type(self).__name__)
        placed: bool | None = super().place_model_on_device  # type: ignore[misc]  # as above
        return placed


@dataclass
class TrainingArguments(ArgumentsMixin, transformers.TrainingArguments):  # type: ignore[misc]  # our filter may be None
    """`transformers.TrainingArguments` with `ftkit`."""
