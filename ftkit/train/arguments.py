"""A recipe as `TrainingArguments`, as a `LoraConfig`, and as settings of the engine.

The recipe leaves two things open, which are decided here: the compute dtype (`auto`: fp16 on GPUs below compute capability
8.0, bf16 from there, fp32 on a CPU) and the division of a step among ranks (`recipe.split_batch`). Other arguments of the
Trainer are for scripts with `from ftkit import Trainer`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from accelerate import PartialState
from peft import LoraConfig, TaskType
from transformers.integrations import get_available_reporting_integrations

from ftkit.config.engine import EngineSettings
from ftkit.config.optimizer import FOLLOWING, Optimizer
from ftkit.config.recipe import Adapter, Recipe, split_batch
from ftkit.engine.comm.communicator import GROUP_TIMEOUT
from ftkit.errors import UserError
from ftkit.hf.trainer.arguments import TrainingArguments
from ftkit.spec.strategy import Strategy
from ftkit.train.held_out import METRICS
from ftkit.train.schedule import schedule_of, warmup_of


def compute_dtype(wanted: str) -> str:
    """Return fp32, bf16 or fp16 for a recipe's `train.dtype`, which may also be auto."""
    if wanted != "auto":
        return wanted
    if not torch.cuda.is_available():
        return "fp32"
    return "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp16"


def lora_config(adapter: Adapter | None, task: str) -> LoraConfig | None:
    """Return PEFT's configuration of a recipe's adapter."""
    if adapter is None:
        return None
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]  # PEFT multiplies by it; any number does
        lora_dropout=adapter.dropout,
        target_modules=adapter.targets if isinstance(adapter.targets, str) else list(adapter.targets),
        modules_to_save=list(adapter.modules_to_save) or None,
        task_type=TaskType.CAUSAL_LM if task == "causal-lm" else TaskType.SEQ_2_SEQ_LM,
    )


def strategy_of(recipe: Recipe, dtype: str) -> Strategy:
    """Return the decisions of a recipe: its section `engine:`, and those of its other sections. `dtype` is not auto."""
    chosen: dict[str, Any] = {"dtype": dtype, "master": recipe.optimizer.master}
    return replace(recipe.engine, **chosen, convert_state=recipe.optimizer.convert_state)


def engine_settings(recipe: Recipe) -> EngineSettings:
    """Return the engine's settings of a recipe, with the dtype that it computes in on this machine."""
    return EngineSettings(strategy_of(recipe, compute_dtype(recipe.train.dtype)), recipe.memory)


def check_report_to(names: tuple[str, ...]) -> None:
    """Raise UserError for a reporting integration of HF Trainer that is unknown or not installed."""
    for name in names:
        if name not in get_available_reporting_integrations():
            raise UserError(f"output.report_to: {name} is unknown or not installed; pip install {name}, or remove it")


def checkpoints_kept(recipe: Recipe) -> int | None:
    """Return how many checkpoints stay, or None for all. The newest and the best evaluated one are always among them."""
    keep = recipe.output.keep
    # With 1, the Trainer deletes at the end of a run every checkpoint but the best one.
    return max(keep, 2) if keep and recipe.eval else keep


def _rule_arguments(optimizer: Optimizer) -> dict[str, Any]:
    """Return the Trainer's arguments for the update rule."""
    arguments: dict[str, Any] = {"optim": _TRAINER_NAMES.get(optimizer.name, optimizer.name)}
    own = dict(optimizer.args)
    if optimizer.betas is not None:
        arguments |= {"adam_beta1": optimizer.betas[0], "adam_beta2": optimizer.betas[1]}
    if optimizer.eps is not None:
        if optimizer.betas is None:
            own["eps"] = optimizer.eps
        else:
            arguments["adam_epsilon"] = optimizer.eps
    return {**arguments, "optim_args": ",".join(f"{key}={value}" for key, value in own.items()) or None}


_TRAINER_NAMES = {"adamw": "adamw_torch", "lion": "lion_32bit"}
"""Names of rules in transformers where they differ."""


def training_arguments(recipe: Recipe, ranks: int) -> TrainingArguments:
    """Return the Trainer's arguments. This also makes the process group of the ranks.

    Args:
        recipe: The recipe.
        ranks: Number of processes of the whole run.

    Raises:
        UserError: The sequences of a step cannot be divided among the ranks.
    """
    micro_batch, accumulation = split_batch(recipe, ranks)
    train, optimizer, output, held_out = recipe.train, recipe.optimizer, recipe.output, recipe.eval
    every_steps = held_out.every_steps if held_out else None
    schedule, schedule_args = schedule_of(optimizer)
    if optimizer.schedule in FOLLOWING and held_out and held_out.best == "accuracy":
        schedule_args = {"mode": "max", **schedule_args}
    cpu = not torch.cuda.is_available()
    PartialState(cpu=cpu, timeout=GROUP_TIMEOUT)  # TrainingArguments passes no timeout on a CPU
    return TrainingArguments(
        output_dir=output.dir,
        per_device_train_batch_size=micro_batch,
        per_device_eval_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=train.epochs,
        max_steps=train.max_steps or -1,
        seed=train.seed,
        neftune_noise_alpha=train.neftune_noise_alpha,
        label_smoothing_factor=train.label_smoothing,
        learning_rate=optimizer.lr,
        **_rule_arguments(optimizer),
        weight_decay=optimizer.weight_decay,
        warmup_steps=warmup_of(optimizer),
        lr_scheduler_type=schedule,
        lr_scheduler_kwargs=schedule_args,
        max_grad_norm=optimizer.max_grad_norm,
        logging_steps=output.logging_steps,
        report_to=list(output.report_to) or "none",
        save_strategy="steps" if output.save_every_steps else "no",
        save_steps=output.save_every_steps or 500,
        save_total_limit=checkpoints_kept(recipe),
        metric_for_best_model=METRICS[held_out.best] if held_out else None,  # the best checkpoint stays
        greater_is_better=held_out.best == "accuracy" if held_out else None,
        eval_strategy="steps" if every_steps else "epoch" if held_out and held_out.every_epoch else "no",
        eval_steps=every_steps,
        include_num_input_tokens_seen="non_padding",
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=cpu,
        dataloader_pin_memory=not cpu,
        ftkit=engine_settings(recipe).as_dict(),
    )
