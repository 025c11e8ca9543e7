"""The small files of a Trainer's checkpoint, read as what they should hold: numbers, text, and lists and tensors of them.

A checksum proves that a file is what was sealed, not who sealed it. Files of torch.save are pickles: torch's restricted
reader builds plain data, tensors and NumPy arrays of them and calls nothing else, and what it makes of a file is compared
with what will use it before it is used: the Trainer's state with its fields, random states by giving them to generators of
their own, a scheduler's state with that of the scheduler. `training_args.bin`, written for people, is never read.

Refused by name: whatever is something else. What it costs: reading files of some KiB once more.
"""

from __future__ import annotations

import io
import pickle
import random
import re
import struct
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerState
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_pt_utils import safe_globals

from ftkit.engine.checkpoint.manifest import alike
from ftkit.engine.checkpoint.sealed import BrokenCheckpoint, file_size, read_small
from ftkit.errors import UserError

STATE_LIMIT_BYTES = 1 << 30
"""The Trainer's state holds its log; a million lines are 200 MB."""
OURS = ("torch.", "transformers.", "accelerate.")
"""Modules whose schedules hold what they began with."""
RANDOM_WORDS = 624
"""Of a Mersenne Twister's state; NumPy does not look whether the position lies among them."""
UNREADABLE = (
    *(pickle.UnpicklingError, struct.error, RuntimeError, OSError, EOFError, MemoryError),
    *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError),
)
"""What torch's reader raises on bytes that are none of its own, and generators on a state that is none of theirs."""

Steps = Annotated[int, Field(ge=0, lt=2**53)]
Epochs = Annotated[int, Field(ge=0, lt=2**63)]
"""A stream with `max_steps` has sys.maxsize epochs."""
Every = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""0 where the run did not do it by steps."""
OF_EVERY_SCHEDULE = ("base_lrs", "last_epoch", "_last_lr", "_step_count", "_get_lr_called_within_step")
RANDOM_STATE = re.compile(r"rng_state(_\d+)?\.pth")
SCHEDULES = {
    "num_bad_epochs": "ReduceLROnPlateau",
    "lr_lambdas": "LambdaLR",
    "_schedulers": "SequentialLR or ChainedScheduler",
    "T_max": "CosineAnnealingLR",
    "total_iters": "LinearLR or alike",
    "total_steps": "OneCycleLR",
}
"""What the state of a schedule of torch has that those of others have not."""


class _State(BaseModel):
    """What resuming reads of trainer_state.json; steps between logs, evaluations and saves may be shares of all steps."""

    model_config = ConfigDict(strict=True, extra="allow")

    epoch: float | None = 0.0
    global_step: Steps
    max_steps: Steps = 0
    logging_steps: Every = 1.0
    eval_steps: Every = 1.0
    save_steps: Every = 1.0
    train_batch_size: Annotated[int, Field(gt=0, lt=2**53)]
    num_train_epochs: Epochs = 0
    num_input_tokens_seen: Steps = 0
    total_flos: float = 0.0
    log_history: list[dict[str, Any]] = []
    best_metric: float | bool | None = None
    best_global_step: Steps | None = None
    best_model_checkpoint: str | None = None
    stateful_callbacks: dict[str, dict[str, Any] | list[dict[str, Any]]] = {}


def check_state(folder: Path) -> None:
    """Look through the small files that resuming reads: the Trainer's state, the scheduler's, all ranks' random numbers.

    Raises:
        BrokenCheckpoint: naming the first that is missing or holds something else.
    """
    read_trainer_state(folder / TRAINER_STATE_NAME)
    if (folder / SCHEDULER_NAME).exists():
        read_plain(folder / SCHEDULER_NAME)
    for path in sorted(path for path in folder.iterdir() if RANDOM_STATE.fullmatch(path.name)):
        check_random_state(path)


def read_trainer_state(path: Path) -> TrainerState:
    """Return the state of a Trainer.

    Raises:
        BrokenCheckpoint: if the file is missing or holds something else.
    """
    data = read_small(path, STATE_LIMIT_BYTES)
    try:
        _State.model_validate_json(data)
        return TrainerState.load_from_json(str(path))
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, found["loc"]))
        raise BrokenCheckpoint(f"{path}: not a Trainer's state ({where}: {found['msg']})".replace("(: ", "(")) from error
    except (ValueError, TypeError, RecursionError) as error:  # fields that this version of transformers does not know
        raise BrokenCheckpoint(f"{path}: not a Trainer's state ({_first_line(error)})") from error


def read_plain(path: Path) -> Any:
    """Return what torch.save wrote: plain data, tensors, NumPy arrays.

    Raises:
        BrokenCheckpoint: if the file is missing, broken, or a pickle that wants to call anything.
    """
    file_size(path, path.parent)
    try:
        with safe_globals():
            return torch.load(path, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        called = forbidden(error)
        what = f"a pickle that names {called}, which could run code; it was not run" if called else _first_line(error)
        raise BrokenCheckpoint(f"{path}: not read: {what}") from error


def forbidden(error: BaseException) -> str | None:
    """Return the class or function for which torch refused to read a pickle, if that was its reason."""
    found = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
    return found.group(1) if found else None


def check_random_state(path: Path) -> None:
    """Look through the random states of a rank, as the Trainer writes them.

    Raises:
        BrokenCheckpoint: if the file is missing or holds something else.
    """
    state = read_plain(path)
    try:
        random.Random().setstate(state["python"])
        kind, words, position, has_gauss, cached = state["numpy"]
        np.random.RandomState().set_state((kind, words, position, has_gauss, cached))
        torch.Generator().set_state(state["cpu"])
        fits = 0 <= position <= RANDOM_WORDS
    except UNREADABLE as error:
        raise BrokenCheckpoint(f"{path}: not the random states of a rank ({_first_line(error)})") from error
    if not fits:
        raise BrokenCheckpoint(f"{path}: not the random states of a rank (position {position})")


def load_scheduler(path: Path, scheduler: Any) -> None:
    """Give a scheduler the state that a file holds.

    What the scheduler has itself must be alike; lists and dictionaries of a user's own class or rule may have grown. What it
    does not (another version's fields) may be there, unless it would stand in a method's place.

    Raises:
        BrokenCheckpoint: if the file is missing or holds something else.
    """
    state, own = read_plain(path), scheduler.state_dict()
    inner = getattr(scheduler, "scheduler", scheduler)
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise BrokenCheckpoint(f"{path}: not the state of a scheduler")
    theirs = any(not type(each).__module__.startswith(OURS) for each in (inner, *getattr(inner, "_schedulers", ())))
    for key, value in state.items():
        if key not in own:
            fits = not hasattr(inner, key)
        elif key == "lr_lambdas":
            fits = _fits_rules(value, own[key])
        else:
            fits = (grown if theirs and key not in OF_EVERY_SCHEDULE else alike)(value, own[key])
        if not fits:
            was = next((f" of a {name}" for kept, name in SCHEDULES.items() if kept in state and kept not in own), "")
            raise BrokenCheckpoint(
                f"{path}: not the state of a {type(inner).__name__} ({key!r:.80}) but{was or ' another'}. If the schedule's "
                "type was changed since it was saved (lr_scheduler_type, optimizers), set it as it was"
            )
    try:
        scheduler.load_state_dict(state)
        if type(inner) is LambdaLR and not any(state.get("lr_lambdas", ())):  # (a rule with a state of its own goes on)
            # the lr is this run's schedule's: the run may be longer than it was to be. What a callback has set stays
            rates = [base * rule(inner.last_epoch) for base, rule in zip(inner.base_lrs, inner.lr_lambdas)]
            for group, last, rate in zip(inner.optimizer.param_groups, inner._last_lr, rates, strict=True):
                if group["lr"] == last:
                    group["lr"] = rate
            inner._last_lr = rates
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise BrokenCheckpoint(f"{path}: not the state of a {type(inner).__name__} ({error})") from error


def grown(found: Any, own: Any) -> bool:
    """Return whether a value that was read can have become of one that a schedule begins with, among plain data."""
    if own is None:
        return True
    if isinstance(own, dict):
        return isinstance(found, dict) and all(key not in own or grown(found[key], own[key]) for key in found)
    if isinstance(own, (list, tuple)):
        return isinstance(found, (list, tuple)) and all(map(grown, found, own))
    return alike(found, own)


def _fits_rules(found: Any, own: list[Any]) -> bool:
    """Return whether states of a LambdaLR's rules can be those of its own: of objects with as many attributes."""
    if not isinstance(found, (list, tuple)) or len(found) != len(own):
        return False
    return all(
        not one if not two else isinstance(one, dict) and one.keys() == two.keys() and grown(one, two)
        for one, two in zip(found, own)  # a function has None, an object without attributes {}: neither has a state
    )


def readable(name: str, thing: Any) -> bytes:
    """Return the state of a scheduler or registered object as a resume will read it: plain data and tensors.

    Args:
        name: name of the file, for messages.
        thing: an object with `state_dict()`.

    Raises:
        UserError: if it holds anything else, which would only show when the state is needed.
    """
    buffer = io.BytesIO()
    kind = None
    try:
        torch.save(thing.state_dict(), buffer)
        with safe_globals():
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except pickle.UnpicklingError as error:
        kind = forbidden(error) or "something else"
    except (AttributeError, TypeError, pickle.PicklingError) as error:  # what pickle makes of local functions and locks
        kind = _first_line(error)
    if kind is not None:
        raise UserError(
            f"{name}, the state_dict() of a {type(thing).__name__}, holds {kind}, which a resume would not read (a pickle "
            "can run code): let it return numbers, strings, lists, dictionaries and tensors"
        )
    return buffer.getvalue()


def _first_line(error: BaseException) -> str:
    return f"{(str(error).strip() or type(error).__name__).splitlines()[0]:.200}"
