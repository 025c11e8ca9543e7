"""The engine's settings: a strategy, and the memory that it may use.

A recipe has the two as its sections `engine:` and `memory:`; `TrainingArguments(ftkit=...)` and
`ftkit.Accelerator(ftkit=...)` give the same keys in one mapping. Both are read by the same two classes, so keys, defaults
and errors are the same.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from ftkit.config.errors import first_message
from ftkit.config.values import ExistingPath, Positive, Section
from ftkit.config.yaml_lines import read
from ftkit.errors import UserError
from ftkit.spec.strategy import AUTO, OPEN, Strategy
from ftkit.spec.tiers import KINDS, NVME

STEPS = ("micro_batch", "accumulation")
"""Keys that a script says elsewhere: the Trainer by its arguments, a loop by what it gives the model."""


class Memory(Section):
    """What the run may use on each node."""

    device_gib: Positive | None = Field(None, description="GiB of each GPU; default: what is free when it starts")
    host_gib: Positive | None = Field(None, description="GiB of host memory of all ranks together")
    nvme_dir: ExistingPath | None = Field(None, description="folder on an NVMe drive, for what host memory cannot hold")
    nvme_gib: Positive | None = Field(None, description="GiB of that drive; default: what is free there")


def contradiction(strategy: Strategy, memory: Memory) -> str | None:
    """Return why a strategy cannot be had with this memory; None if it can."""
    on_disk = [kind for kind in KINDS if getattr(strategy, kind) == NVME]
    if on_disk and memory.nvme_dir is None:
        return f"engine.{on_disk[0]} is nvme and no folder is named for it; set memory.nvme_dir"
    if strategy.reshard_after_forward != AUTO and strategy.stage in (0, 1, 2):
        return f"engine.reshard_after_forward is of stage 3, and engine.stage is {strategy.stage}; remove one of them"
    if strategy.state_host_bytes not in (AUTO, 0) and strategy.state not in (AUTO, NVME):
        return f"engine.state_host_bytes is of a state on NVMe, and engine.state is {strategy.state}; remove one of them"
    return None


@dataclass(frozen=True)
class EngineSettings:
    """The engine's settings.

    Args:
        strategy: how the model is held and trained; "auto" leaves a choice to the plan.
        memory: what may be used; what is not said is what is free.
    """

    strategy: Strategy = OPEN
    memory: Memory = field(default_factory=Memory)

    @classmethod
    def of(cls, value: EngineSettings | Mapping[str, Any] | str) -> EngineSettings:
        """Read settings from what a user gave: keys of `Strategy` and `Memory`, a file with them, or "auto".

        Raises:
            UserError: for an unknown key (with the nearest known one), a value out of its range, an unreadable file.
        """
        if isinstance(value, EngineSettings):
            return value
        if isinstance(value, str):
            value = {} if value == AUTO else _file(value)
        if not isinstance(value, Mapping):
            raise UserError(f"ftkit settings: {value!r} is no 'auto', mapping or .yaml file")
        choices = {each.name for each in fields(Strategy)}
        known = {*choices, *Memory.model_fields}.difference(STEPS)
        for key in map(str, value):
            if key in STEPS:
                raise UserError(
                    f"ftkit settings: {key} is a key of recipes. Here per_device_train_batch_size and "
                    "gradient_accumulation_steps say it, or the loop that calls the model"
                )
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise UserError(f"ftkit settings: unknown key {key!r}{hint} Known: {', '.join(sorted(known))}")
        try:
            settings = cls(
                Strategy(**{key: given for key, given in value.items() if key in choices}),
                Memory(**{key: given for key, given in value.items() if key not in choices}),
            )
        except ValidationError as error:
            raise UserError(f"ftkit settings: {first_message(error)}") from None
        if problem := contradiction(settings.strategy, settings.memory):
            raise UserError(f"ftkit settings: {problem}")
        return settings

    def choosing(self, **choices: Any) -> EngineSettings:
        """Return the settings with some choices of the strategy made."""
        return replace(self, strategy=replace(self.strategy, **choices))

    def as_dict(self) -> dict[str, Any]:
        """Return the mapping that `of` reads, for `TrainingArguments(ftkit=...)`."""
        said = {**asdict(self.strategy), **self.memory.model_dump()}
        return {key: value for key, value in said.items() if key not in STEPS and value is not None}


def _file(path: str) -> Mapping[str, Any]:
    if not path.endswith((".yaml", ".yml", ".json")):
        raise UserError(f"ftkit settings: {path!r} is neither 'auto' nor a .yaml file")
    try:
        document = read(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"ftkit settings: {path}: {error}") from error
    if document.problems:
        raise UserError(f"ftkit settings: {document.problems[0]}")
    return document.values
