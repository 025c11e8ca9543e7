"""The engine's settings: a strategy, and the memory that it may use.

A recipe has them as its sections `engine:` and `memory:`. `TrainingArguments(ftkit=...)` and `ftkit.Accelerator(ftkit=...)`
take the same keys in one mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from ftkit.config.errors import problems
from ftkit.config.values import ExistingPath, Positive, Section
from ftkit.config.wording import did_you_mean
from ftkit.config.yaml_lines import Document, read
from ftkit.errors import UserError
from ftkit.spec.strategy import AUTO, OPEN, Strategy

STEPS = ("micro_batch", "accumulation")
"""Keys of recipes only: the Trainer has arguments for them, and a loop passes its own batches."""


class Memory(Section):
    """Memory that the run may use on each node."""

    device_gib: Positive | None = Field(None, description="GiB of each GPU; default: what is free when it starts")
    host_gib: Positive | None = Field(None, description="GiB of host memory of all ranks together")
    nvme_dir: ExistingPath | None = Field(None, description="folder on an NVMe drive, for what host memory cannot hold")
    nvme_gib: Positive | None = Field(None, description="GiB of that drive; default: what is free there")


@dataclass(frozen=True)
class EngineSettings:
    """The strategy and the memory limits. The plan replaces each "auto". Without a limit, all free memory may be used."""

    strategy: Strategy = OPEN
    memory: Memory = field(default_factory=Memory)

    @classmethod
    def of(cls, value: EngineSettings | Mapping[str, Any] | str) -> EngineSettings:
        """Read settings from keys of `Strategy` and `Memory`, a YAML file with them, or "auto".

        Raises:
            UserError: A key is unknown, a value is out of range, or the file is not readable.
        """
        if isinstance(value, EngineSettings):
            return value
        if isinstance(value, str):
            value = {} if value == AUTO else _read_file(value)
        if not isinstance(value, Mapping):
            raise UserError(f"ftkit settings: found {value!r}, needs 'auto', a mapping or a .yaml file")
        choices = {each.name for each in fields(Strategy)}
        known = sorted({*choices, *Memory.model_fields}.difference(STEPS))
        if unknown := [str(key) for key in value if key not in known]:
            hint = did_you_mean(unknown[0], known)
            raise UserError(f"ftkit settings: unknown key {unknown[0]!r}{hint}; known: {', '.join(known)}")
        try:
            strategy = Strategy(**{key: given for key, given in value.items() if key in choices})
            memory = Memory(**{key: given for key, given in value.items() if key not in choices})
        except ValidationError as error:
            first = problems(error, Document("", dict(value)), Memory)[0]
            raise UserError(f"ftkit settings: {first.key}: {first.message}") from None
        return cls(strategy, memory)

    def choosing(self, **choices: Any) -> EngineSettings:
        """Return the settings with some choices of the strategy made."""
        return replace(self, strategy=replace(self.strategy, **choices))

    def as_dict(self) -> dict[str, Any]:
        """Return the mapping that `of` reads, for `TrainingArguments(ftkit=...)`."""
        settings = {**asdict(self.strategy), **self.memory.model_dump()}
        return {key: value for key, value in settings.items() if key not in STEPS and value is not None}


def _read_file(path: str) -> Mapping[str, Any]:
    try:
        document = read(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"ftkit settings: {path!r} is neither 'auto' nor a .yaml file ({error})") from error
    if document.problems:
        raise UserError(f"ftkit settings: {document.problems[0]}")
    return document.values
