"""Keys of other tools, and the key of a recipe with the same meaning.

A user of the Trainer, TRL, Axolotl, LLaMA-Factory or DeepSpeed writes the names of that tool. They are refused as any
unknown key is; the message names the recipe's key.
"""

from __future__ import annotations

_TARGETS: dict[str, str] = {
    "optimizer.lr": "learning_rate peak_lr base_lr",
    "optimizer.schedule": "lr_scheduler_type lr_scheduler scheduler scheduler_type lr_schedule",
    "optimizer.schedule_args": "lr_scheduler_kwargs lr_scheduler_args scheduler_kwargs scheduler_specific_kwargs",
    "optimizer.warmup_steps": "warmup num_warmup_steps lr_warmup_steps",
    "optimizer.warmup_ratio": "lr_warmup_ratio warmup_fraction warmup_proportion",
    "optimizer.min_lr": "lr_end lr_min eta_min min_learning_rate min_lr_rate min_lr_ratio cosine_min_lr_ratio",
    "optimizer.groups": "param_groups parameter_groups lr_groups embedding_lr embedding_learning_rate loraplus_lr_ratio",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.eps": "adam_epsilon adam_eps epsilon",
    "optimizer.args": "optim_args momentum nesterov",
    "optimizer.name": "optim optimizer_type optimizer_name",
    "optimizer.weight_decay": "wd decay",
    "optimizer.max_grad_norm": "gradient_clipping clip_grad clip_grad_norm grad_clip max_norm gradient_clip_val",
    "train.batch_tokens": "per_device_train_batch_size per_gpu_train_batch_size train_batch_size batch_size"
    " global_batch_size train_micro_batch_size_per_gpu",
    "engine.micro_batch": "micro_batch_size micro_batchsize",
    "engine.accumulation": "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches grad_accum",
    "train.epochs": "num_train_epochs num_epochs n_epochs max_epochs epoch",
    "train.max_steps": "max_train_steps total_steps num_steps",
    "train.dtype": "bf16 fp16 torch_dtype precision mixed_precision compute_dtype",
    "train.neftune_noise_alpha": "neftune_alpha noise_alpha",
    "train.label_smoothing": "label_smoothing_factor",
    "data.sequence_tokens": "max_seq_length max_length cutoff_len sequence_len sequence_length seq_length seq_len"
    " max_seq_len block_size model_max_length max_tokens",
    "data.packing": "sample_packing pack_sequences multipack",
    "data.loss_on": "train_on_inputs train_on_prompt completion_only_loss assistant_only_loss train_on_responses_only",
    "data.path": "dataset datasets dataset_path data_files data_file train_file train_data dataset_name_or_path data_path",
    "data.name": "dataset_name hub_dataset",
    "data.format": "dataset_format chat_format prompt_format formatting",
    "data.workers": "num_workers dataset_num_proc preprocessing_num_workers num_proc dataloader_num_workers",
    "data.long_text": "truncation truncate split_long",
    "data.cache_dir": "dataset_prepared_path preprocessed_path",
    "eval.share": "val_set_size test_size val_size validation_split",
    "eval.path": "eval_file validation_file val_file eval_dataset",
    "eval.every_steps": "eval_steps eval_strategy evaluation_strategy evals_per_epoch",
    "eval.max_rows": "max_eval_samples",
    "eval.best": "metric_for_best_model best_metric",
    "eval.patience": "early_stopping_patience early_stopping",
    "adapter.rank": "lora_r lora_rank r",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.targets": "lora_target_modules lora_target target_modules lora_target_linear",
    "adapter.modules_to_save": "lora_modules_to_save additional_target",
    "adapter": "lora peft peft_config lora_config",
    "model.name": "model_name_or_path base_model pretrained_model_name_or_path model_name model_path model_id",
    "model.tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path tokenizer_config",
    "engine.stage": "zero_stage zero_optimization zero sharding_strategy",
    "engine.activations": "gradient_checkpointing activation_checkpointing use_gradient_checkpointing",
    "engine.state": "offload_optimizer optimizer_offload",
    "engine.parameters": "offload_param offload_params cpu_offload param_offload",
    "memory.device_gib": "max_memory gpu_memory gpu_memory_gib",
    "memory.host_gib": "cpu_memory host_memory",
    "memory.nvme_dir": "nvme_path offload_dir offload_folder",
    "output.dir": "output_dir save_dir out_dir",
    "output.save_every_steps": "save_steps save_strategy save_freq saves_per_epoch",
    "output.keep": "save_total_limit keep_last_n_checkpoints",
    "output.logging_steps": "log_every log_every_n_steps logging_strategy",
    "ranks": "nproc_per_node num_gpus num_processes n_gpus world_size gpus",
}
PEERS = {word: key for key, words in _TARGETS.items() for word in words.split()}
"""The key of another tool to the recipe's."""
_QUANTISED = "quantised bases are not supported: ftkit shards plain weights; remove the key, or train an adapter"
_LAUNCHER = "ftkit starts its ranks itself, and joins those of torchrun or Slurm; remove the key, and set `ranks` or --nproc"
REFUSED = {
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization", "quantization_config", "bits", "qlora"), _QUANTISED),
    **dict.fromkeys(("launcher", "deepspeed", "fsdp"), _LAUNCHER),
    "extends": "is a key at the top of a recipe's file; write it there, not in a section and not in --set",
}
"""Keys that are refused where they stand, most of other tools, and the message."""
