"""Names in a Trainer's arguments that nobody reads: the Trainer takes any, and does what it would do without them.

Looked at where a Trainer on the engine is built. What an optimizer reads of `optim_args` is known of those that the engine
has; a Trainer that makes its optimizer itself may read others. Labels are known with the first batch: see `unknown_labels`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import TrainingArguments

from ftkit.errors import UserError

OPTIMIZER_READS = {
    "adamw_torch": (),
    "adamw_torch_fused": (),
    "sgd": ("momentum", "dampening", "weight_decay", "nesterov"),
}
"""What transformers reads of `optim_args`, by optimizer."""

IN_METRICS = ("inputs", "loss")
"""What transformers reads of `include_for_metrics`."""

CHECKPOINTING = (
    *("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state"),
    *("every_n_layers", "offload"),
)
"""What torch.utils.checkpoint takes, and two that transformers takes from there."""

SAMPLING: tuple[str, ...] = tuple(TrainingArguments.__dataclass_fields__["train_sampling_strategy"].metadata["choices"])
"""What transformers knows of `train_sampling_strategy`; any other word means random."""
BY_LENGTH = ("group_by_length", "batch_rebalance")
"""Those that take the lengths of rows from a column."""

TOKENS_SEEN = ("all", "non_padding", "no")
"""What transformers knows of `include_num_input_tokens_seen`; any other word means all."""

WITHOUT_KWARGS = ("constant", "constant_with_warmup")
"""Schedules for which transformers does not read `lr_scheduler_kwargs`; for others an unknown name raises."""


def check_arguments(args: Any, trainer: type) -> None:
    """Stop for names in a Trainer's arguments that nobody reads.

    Args:
        args: the Trainer's arguments.
        trainer: the Trainer's class.

    Raises:
        UserError: with the argument, the name, and what is read.
    """
    kwargs = getattr(args, "activation_checkpointing_kwargs", None) or getattr(args, "gradient_checkpointing_kwargs", None)
    _check("gradient_checkpointing_kwargs", kwargs if isinstance(kwargs, Mapping) else (), CHECKPOINTING)
    _check("include_for_metrics", args.include_for_metrics or (), IN_METRICS)
    if not isinstance(args.include_num_input_tokens_seen, bool):
        _check("include_num_input_tokens_seen", [args.include_num_input_tokens_seen], TOKENS_SEEN)
    if not _is_own(trainer, "_get_train_sampler", "get_train_dataloader"):
        _check("train_sampling_strategy", [args.train_sampling_strategy], SAMPLING)
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if schedule in WITHOUT_KWARGS and not _is_own(trainer, "create_scheduler"):
        _check(f"lr_scheduler_kwargs (with lr_scheduler_type={schedule})", args.lr_scheduler_kwargs or (), ())
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer not in OPTIMIZER_READS or _is_own(trainer, "create_optimizer", "get_optimizer_cls_and_kwargs"):
        return
    said = args.optim_args if isinstance(args.optim_args, str) else ""
    names = [part.partition("=")[0] for part in said.replace(" ", "").split(",") if part]
    advice = "; betas and eps are adam_beta1, adam_beta2 and adam_epsilon" if optimizer.startswith("adamw") else ""
    _check(f"optim_args (with optim={optimizer})", names, OPTIMIZER_READS[optimizer], advice)
    if args.optim_target_modules:
        raise UserError(
            f"optim_target_modules={args.optim_target_modules!r} is not read with optim={optimizer}, which trains all "
            "parameters that want gradients; remove it"
        )


def check_length_column(args: Any, dataset: Any) -> None:
    """Stop for a column with the lengths of rows that the data have not: they would be measured instead.

    Args:
        args: the Trainer's arguments.
        dataset: the training data.

    Raises:
        UserError: with the nearest column.
    """
    name, columns = args.length_column_name, getattr(dataset, "column_names", None)
    if args.train_sampling_strategy in BY_LENGTH and name != "length" and isinstance(columns, list):
        close = difflib.get_close_matches(name, columns, 1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        if name not in columns:
            raise UserError(f"length_column_name: no row has {name!r}; {meant}There are {', '.join(columns)}")


def unknown_labels(names: Iterable[str] | None, batch: Any) -> str:
    """Return what to tell the user of `label_names` that a batch does not have, or ""."""
    absent = [name for name in names or () if name not in batch] if isinstance(batch, Mapping) else []
    if not absent:
        return ""
    close = difflib.get_close_matches(absent[0], map(str, batch), 1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return (
        f"label_names: no batch has {absent[0]!r}; {meant}There are {', '.join(map(str, batch))}. Without its labels "
        "an evaluation has no loss and no metrics"
    )


def _check(argument: str, names: Iterable[Any], known: Iterable[str], advice: str = "") -> None:
    for name in map(str, names):
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            read = ", ".join(known) or "none"
            raise UserError(f"{argument}: {name!r} is not read{meant or '.'} Read: {read}{advice}")


def _is_own(trainer: type, *methods: str) -> bool:
    """Return whether a class of the user's has one of these methods."""
    own = [each for each in trainer.__mro__ if each.__module__.partition(".")[0] not in ("ftkit", "transformers", "trl")]
    return any(name in vars(each) for each in own for name in methods)
