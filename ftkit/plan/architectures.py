"""Facts of models that are fine-tuned often, so that they are planned without a download. They stand in architectures.yaml.

Of other names it knows nothing. Cost: a small file, read when it is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml


@dataclass(frozen=True)
class Architecture:
    """A model's shape.

    Args:
        name: name on the hub.
        parameters: number of its parameters.
        config: fields of its config.json, `model_type` among them.
    """

    name: str
    parameters: int
    config: dict[str, Any]


def architectures() -> dict[str, Architecture]:
    """Return those that are known, by hub name."""
    text = (resources.files("ftkit.plan") / "architectures.yaml").read_text(encoding="utf-8")
    return {name: Architecture(name, **facts) for name, facts in yaml.safe_load(text).items()}
