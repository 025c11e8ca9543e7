"""What a recipe means to the HF Trainer, to PEFT and to the engine: one mapping, in one place.

The recipe states facts; here they become `TrainingArguments`, a `LoraConfig` and the engine's settings. Nothing is
decided that the recipe left open except the compute dtype (`auto`: fp16 on GPUs below compute capability 8.0, bf16 from
there, fp32 on a CPU) and the division of a step among ranks, which `recipe.split_batch` does.

It refuses a division that does not come out even. What it costs: an argument of the Trainer that the recipe does not
name cannot be set; a script with `from ftkit import Trainer` can set them all.
"""

from __future__ import annotations

import torch
from accelerate import PartialState
from peft import LoraConfig, TaskType
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from ftkit.config.engine import EngineSettings
from ftkit.config.recipe import Adapter, Recipe, split_batch
from ftkit.engine.comm.communicator import GROUP_TIMEOUT
from ftkit.errors import UserError
from ftkit.hf.trainer.arguments import TrainingArguments


def compute_dtype(wanted: str) -> str:
    """Return fp32, bf16 or fp16 for what a recipe's `train.dtype` says.

    Args:
        wanted: auto, fp32, bf16 or fp16.
    """
    if wanted != "auto":
        return wanted
    if not torch.cuda.is_available():
        return "fp32"
    major, _ = torch.cuda.get_device_capability()
    return "bf16" if major >= 8 else "fp16"


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


def engine_settings(recipe: Recipe) -> EngineSettings:
    """Return the engine's settings of a recipe, with the dtype that it computes in on this machine."""
    return EngineSettings(recipe.engine, recipe.memory).choosing(dtype=compute_dtype(recipe.train.dtype))


def check_report_to(names: tuple[str, ...]) -> None:
    """Refuse places to report to that HF Trainer does not know or that are not installed.

    Raises:
        UserError: With the known ones, or what to install.
    """
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            raise UserError(f"output.report_to: {name} is unknown; known: {', '.join(sorted(INTEGRATION_TO_CALLBACK))}")
        if name not in get_available_reporting_integrations():
            raise UserError(f"output.report_to: {name} is not installed; pip install {name}, or remove it")


def training_arguments(recipe: Recipe, ranks: int) -> TrainingArguments:
    """Return the Trainer's arguments; where ranks were started this also makes their process group.

    Args:
        recipe: The facts.
        ranks: Processes of the whole run.

    Raises:
        UserError: The sequences of a step cannot be divided among the ranks.
    """
    check_report_to(recipe.output.report_to)
    micro_batch, accumulation = split_batch(recipe, ranks)
    train, optimizer, output, held_out = recipe.train, recipe.optimizer, recipe.output, recipe.eval
    schedule: str = optimizer.schedule
    if schedule == "constant" and optimizer.warmup_steps:
        schedule = "constant_with_warmup"
    # The process group of the ranks; TrainingArguments would pass no timeout on a CPU.
    PartialState(cpu=not torch.cuda.is_available(), timeout=GROUP_TIMEOUT)
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
        optim="sgd" if optimizer.name == "sgd" else "adamw_torch",
        optim_args=f"momentum={optimizer.momentum}" if optimizer.momentum else None,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        warmup_steps=optimizer.warmup_steps,
        lr_scheduler_type=schedule,
        max_grad_norm=optimizer.max_grad_norm,
        logging_steps=output.logging_steps,
        report_to=list(output.report_to) or "none",
        save_strategy="steps" if output.save_every_steps else "no",
        save_steps=output.save_every_steps or 500,
        # At 1, the Trainer removes the last checkpoint at the end of training if another one is better.
        save_total_limit=2 if output.keep == 1 and held_out else output.keep,
        metric_for_best_model="token_loss" if held_out else None,
        greater_is_better=False,
        eval_strategy="no" if held_out is None else _when(held_out.every_steps, held_out.every_epoch),
        eval_steps=held_out.every_steps if held_out else None,
        include_num_input_tokens_seen="non_padding",
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        ftkit=engine_settings(recipe).as_dict(),
    )


def _when(every_steps: int | None, every_epoch: bool) -> str:
    if every_steps:
        return "steps"
    return "epoch" if every_epoch else "no"
