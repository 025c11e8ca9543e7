"""The table of the Trainer's cases, as data."""

from __future__ import annotations

from functools import partial

import torch
from transformers import EarlyStoppingCallback

from tests.compat.case import Case
from tests.compat.trainer_cases import (
    Batched,
    Norms,
    OwnOptimizer,
    OwnStep,
    Regression,
    StopAt,
    Stream,
    Writer,
    accuracy,
    adapted,
    arguments,
    asks,
    card,
    case,
    evaluates,
    held,
    hub_rows,
    labelled,
    own_optimizers,
    padded,
    plus_one,
    points,
    predicts,
    ragged,
    resuming,
    saves,
    steps_by_hand,
    watched,
    written,
)
from tests.hf.runs import classifier, tied_llama

SIXTEEN_BITS = "the engine computes in 16 bits with fp32 masters; stock keeps fp32 weights and casts by autocast"
REGRESSION = {"model": Regression, "rows": points}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 2}
SAVES = {"save_strategy": "steps", "save_steps": 2}
BEST = {**EVALUATES, **SAVES, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}

LOOP = [
    *arguments(
        "Loop",
        {"num_train_epochs": 1.5},
        {"num_train_epochs": 2},
        {"per_device_train_batch_size": 5},
        {"per_device_train_batch_size": 5, "dataloader_drop_last": True},
        {"gradient_accumulation_steps": 4, "max_steps": 3},
        {"weight_decay": 0.3},
        {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6},
        {"seed": 7},
        {"seed": 7, "data_seed": 3},
        {"full_determinism": True},
        {"neftune_noise_alpha": 5.0},
        {"gradient_checkpointing": True},
        {"torch_empty_cache_steps": 1},
        {"skip_memory_metrics": False},
        {"use_cache": False},
    ),
    *arguments("Loop", {"bf16": True}, differs=SIXTEEN_BITS),
    *arguments("Loop", {"fp16": True}, differs=SIXTEEN_BITS),
    case("Loop", "training_step and prediction_step by hand", act=steps_by_hand),
    case("Loop", "answers of documented methods", act=asks),
]

MODELS = [
    case("Models", "two scalars, tuple output", **REGRESSION),
    case("Models", "two scalars, dictionary output", model=partial(Regression, "dict"), rows=points),
    case("Models", "two scalars, two predictions", model=partial(Regression, "double"), rows=points),
    case("Models", "two scalars, accumulation", arguments={"gradient_accumulation_steps": 3}, **REGRESSION),
    case(
        "Models",
        "a classifier, accumulation over an uneven epoch",
        differs="a loss that is a mean over rows: ours is the mean over the step's micro-batches, stock adds them up",
        model=classifier,
        rows=labelled,
        arguments={"gradient_accumulation_steps": 4, "per_device_train_batch_size": 3},
    ),
    case("Models", "saved and read again", act=saves),
    case("Models", "a plain module saved and read again", act=saves, **REGRESSION),
]

SCHEDULES = [
    *arguments(
        "Schedules",
        *(
            {"lr_scheduler_type": name, "warmup_steps": 2}
            for name in ("linear", "cosine", "constant", "constant_with_warmup")
        ),
        *({"lr_scheduler_type": name, "warmup_steps": 2} for name in ("polynomial", "inverse_sqrt", "cosine_with_restarts")),
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-3}},
        {"lr_scheduler_type": "cosine_warmup_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-3}, "warmup_steps": 2},
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 2}, "warmup_steps": 2},
        {"warmup_steps": 0.3},
    ),
]

OPTIMIZERS = [
    *arguments(
        "Optimizers",
        *({"optim": name} for name in ("adamw_torch", "adamw_torch_fused", "adafactor", "rmsprop", "adagrad")),
    ),
    case(
        "Optimizers",
        "optimizers=(SGD with nesterov, ...)",
        options={"optimizers": own_optimizers(torch.optim.SGD, momentum=0.9, nesterov=True)},
    ),
    case("Optimizers", "optimizers=(Adam, ...)", options={"optimizers": own_optimizers(torch.optim.Adam)}),
    case(
        "Optimizers",
        "optimizer_cls_and_kwargs=(AdamW, ...)",
        options={"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 5e-3})},
    ),
    case("Optimizers", "create_optimizer overridden, two learning rates", mixin=OwnOptimizer),
]

DATA = [
    case("Data", "rows of different lengths, a collator of one's own", rows=ragged, options={"data_collator": padded}),
    *arguments("Data", {"train_sampling_strategy": "sequential"}),
    case("Data", "a stream that is shorter than max_steps", rows=Stream, arguments={"max_steps": 20}),
    case(
        "Data",
        "a stream, dispatched",
        rows=Stream,
        arguments={"max_steps": 4, "accelerator_config": {"dispatch_batches": True}},
    ),
    case("Data", "a datasets.Dataset with an unused column", rows=hub_rows),
    case(
        "Data",
        "remove_unused_columns=False with an unused column",
        rows=hub_rows,
        arguments={"remove_unused_columns": False},
    ),
    *arguments("Data", {"dataloader_num_workers": 1}),
    *arguments(
        "Data", {"accelerator_config": {"use_seedable_sampler": False}}, {"accelerator_config": {"even_batches": False}}
    ),
    case(
        "Data",
        "two label columns",
        model=Regression,
        rows=partial(points, second=True),
        arguments={"label_names": ["labels", "labels_2"]},
    ),
    case("Data", "get_train_dataloader, training_step and log overridden", mixin=OwnStep),
]

EVALUATION = [
    *arguments(
        "Evaluation",
        {"eval_strategy": "epoch", "num_train_epochs": 2},
        {**EVALUATES, "eval_on_start": True},
        {**EVALUATES, "eval_delay": 4},
        {**EVALUATES, "eval_accumulation_steps": 1},
        {**EVALUATES, "prediction_loss_only": True},
        held_out=held,
        options={"compute_metrics": accuracy},
    ),
    case(
        "Evaluation",
        "include_for_metrics=['inputs', 'loss']",
        arguments={**EVALUATES, "include_for_metrics": ["inputs", "loss"]},
        held_out=held,
        options={"compute_metrics": accuracy},
    ),
    case(
        "Evaluation", "a plain module, before and after training", act=evaluates, held_out=partial(points, 18), **REGRESSION
    ),
    case(
        "Evaluation", "predict, two outputs", act=predicts, model=partial(Regression, "double"), rows=points, held_out=points
    ),
    case(
        "Evaluation",
        "predict, two labels",
        act=predicts,
        model=Regression,
        rows=points,
        held_out=partial(points, 18, second=True),
        arguments={"label_names": ["labels", "labels_2"]},
    ),
    case(
        "Evaluation",
        "batch_eval_metrics",
        arguments={**EVALUATES, "batch_eval_metrics": True},
        held_out=held,
        options={"compute_metrics": Batched},
    ),
    case(
        "Evaluation",
        "preprocess_logits_for_metrics",
        arguments=EVALUATES,
        held_out=held,
        options={"compute_metrics": accuracy, "preprocess_logits_for_metrics": plus_one},
    ),
    case("Evaluation", "several held-out sets", arguments=EVALUATES, held_out=lambda: {"one": held(), "two": held(6)}),
    case(
        "Evaluation",
        "rows of different lengths",
        arguments=EVALUATES,
        rows=ragged,
        held_out=partial(ragged, 10),
        options={"data_collator": padded, "compute_metrics": accuracy},
    ),
    case("Evaluation", "eval_use_gather_object", arguments={**EVALUATES, "eval_use_gather_object": True}, held_out=held),
    *arguments("Evaluation", {"bf16_full_eval": True, **EVALUATES}, {"fp16_full_eval": True, **EVALUATES}, held_out=held),
]

LOGGING = [
    *arguments(
        "Logging",
        {"logging_steps": 4},
        {"logging_steps": 4, "logging_first_step": True},
        {"logging_steps": 0.4},
        {"logging_strategy": "epoch", "num_train_epochs": 2},
        {"logging_strategy": "no"},
        {"logging_nan_inf_filter": False},
        {"report_to": "tensorboard"},
    ),
    case("Logging", "create_model_card", act=card),
]

CALLBACKS = [
    case("Callbacks", "control: save, evaluate, log, stop", options={"callbacks": lambda model: [StopAt()]}, held_out=held),
    case(
        "Callbacks",
        "EarlyStoppingCallback",
        options={"callbacks": lambda model: [EarlyStoppingCallback(1, 10.0)]},
        arguments=BEST,
        held_out=held,
    ),
    case("Callbacks", "gradients in on_pre_optimizer_step", act=watched, options={"callbacks": lambda model: [Norms()]}),
    case(
        "Callbacks",
        "a file written into each checkpoint by on_save",
        act=written,
        options={"callbacks": lambda model: [Writer()]},
        arguments=SAVES,
    ),
]

CHECKPOINTS = [
    *arguments(
        "Checkpoints",
        SAVES,
        {"save_strategy": "epoch", "num_train_epochs": 2},
        {"save_strategy": "steps", "save_steps": 0.4},
        {**SAVES, "save_total_limit": 1},
        {**SAVES, "save_only_model": True},
        BEST,
        held_out=held,
    ),
    case(
        "Checkpoints",
        "a plain module, best at the end",
        arguments={**BEST, "label_names": ["labels"]},
        held_out=partial(points, 16),
        **REGRESSION,
    ),
    case("Checkpoints", "LoRA, best at the end", arguments=BEST, held_out=held, model=adapted),
    case(
        "Checkpoints",
        "push_to_hub without a hub",
        raises=True,
        arguments={**SAVES, "push_to_hub": True, "hub_model_id": "a/b", "hub_token": "none"},
    ),
]

RESUMING = [
    resuming(
        "the last checkpoint",
        arguments=SAVES,
        differs="a run resumed from its last step ends there; stock makes one step more",
    ),
    resuming("ignore_data_skip", resume="checkpoint-2", arguments={**SAVES, "ignore_data_skip": True}),
    resuming(
        "for more epochs",
        differs="its first step takes the rate of the longer schedule; stock takes the rate at which the old one ended",
        resume="checkpoint-6",
        changes={"num_train_epochs": 2},
        arguments={**SAVES, "num_train_epochs": 1},
    ),
    resuming("a stream", resume="checkpoint-2", arguments={**SAVES, "max_steps": 4}, rows=Stream),
    resuming("a plain module", resume="checkpoint-8", arguments={"save_strategy": "steps", "save_steps": 8}, **REGRESSION),
    resuming("a folder that is not there", raises=True, resume="checkpoint-99", arguments=SAVES),
    resuming("from weights alone (save_only_model)", resume="checkpoint-2", arguments={**SAVES, "save_only_model": True}),
]

OTHERS = [
    *arguments(
        "Other engines and switches",
        {"torch_compile": True},
        {"auto_find_batch_size": True},
    ),
    *arguments(
        "Other engines and switches",
        {"fsdp": True},
        {"deepspeed": {"zero_optimization": {"stage": 2}}},
        {"use_liger_kernel": True},
        raises=True,
    ),
    case(
        "Other engines and switches",
        "hyperparameter_search without a search library",
        raises=True,
        act=lambda trainer: trainer.hyperparameter_search(n_trials=1),
        model=None,
        options={"model_init": tied_llama},
    ),
]

TRAINER: tuple[Case, ...] = tuple(
    each
    for group in (
        LOOP,
        MODELS,
        SCHEDULES,
        OPTIMIZERS,
        DATA,
        EVALUATION,
        LOGGING,
        CALLBACKS,
        CHECKPOINTS,
        RESUMING,
        OTHERS,
    )
    for each in group
)
