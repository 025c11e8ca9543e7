"""PEFT's verbs, without warnings that are nothing to the user: of names inside PEFT, and the same of every rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from peft import PeftConfig, PeftModel, get_peft_model
from torch import nn

OLD_NAME = "`is_gradient_checkpointing` is deprecated"
OF_ALL_RANKS = "Model has `tie_word_embeddings=True` and a tied layer is part of the adapter"


def with_adapter(model: nn.Module, config: PeftConfig) -> PeftModel:
    """Return `peft.get_peft_model(model, config)`."""
    with _quiet():
        return get_peft_model(model, config)


def with_trained_adapter(model: nn.Module, folder: str) -> PeftModel:
    """Return `peft.PeftModel.from_pretrained(model, folder)`."""
    with _quiet():
        return PeftModel.from_pretrained(model, folder)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=OLD_NAME, category=FutureWarning)
        if dist.is_initialized() and dist.get_rank() > 0:
            warnings.filterwarnings("ignore", message=OF_ALL_RANKS)
        yield
