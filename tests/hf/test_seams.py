"""The private parts of transformers, accelerate and PEFT on which ftkit relies, in one table, with one test per entry.

A test fails, and names the entry, when a release removes it or changes its parameters. `tried` says why the public interface
is not enough. Overrides of private methods of the Trainer must all be in the table.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers

import ftkit
from ftkit.hf.trainer.trainer import TrainerMixin

TRAINER = "transformers.trainer.Trainer."
MODEL = "transformers.modeling_utils.PreTrainedModel."


@dataclass(frozen=True)
class Seam:
    """A private name that ftkit uses.

    Args:
        name: Module, class and attribute; an attribute that only instances have is looked for in the source of its class.
        reason: What ftkit does with it.
        tried: The public interface that was considered, and why it is not enough.
        parameters: Names of the parameters on which ftkit relies, of a function.
    """

    name: str
    reason: str
    tried: str
    parameters: tuple[str, ...] = ()


SEAMS = (
    # --- the Trainer's loop
    Seam(
        TRAINER + "_train_batch_size",
        "sets it to the batch of a whole step, where blocks accumulate",
        "the Trainer reads its arguments before the accelerator is made",
    ),
    Seam(
        TRAINER + "_run_epoch",
        "numbers the batches of an epoch for collators that draw, and ends a resumed run that was over",
        "on_epoch_begin does not say how many batches a resume skips",
        ("epoch", "train_dataloader", "epochs_trained", "steps_trained_in_current_epoch"),
    ),
    Seam(
        TRAINER + "_get_num_items_in_batch",
        "gives each rank its share of the count of label tokens",
        "get_batch_samples returns the count for training; prediction_step calls this method itself",
        ("batch_samples", "device"),
    ),
    Seam(
        TRAINER + "_prepare_inputs",
        "casts inputs to the compute dtype, since there is no autocast",
        "a data collator does not know the compute dtype",
        ("inputs",),
    ),
    Seam(
        TRAINER + "_mixed_mesh_grads",
        "sets it to False: the Trainer would read .grad of every parameter, which raises for a sharded model",
        "max_grad_norm=0 would switch clipping off",
    ),
    Seam(
        TRAINER + "_loss_shifts_labels",
        "reads whether the first label of a row counts",
        "no public attribute says it",
    ),
    Seam(
        TRAINER + "_tr_loss",
        "averages the loss since the last log over ranks at the end of training",
        "the loss of on_train_end is summed up already",
    ),
    Seam(
        TRAINER + "_globalstep_last_logged",
        "clears a NaN from the sum of losses after a log: the Trainer subtracts the sum from itself, which keeps a NaN",
        "logging_nan_inf_filter hides the NaN itself",
    ),
    Seam(
        "trl.trainer.sft_trainer.SFTTrainer._metrics",
        "keeps TRL's metrics as they are while the probe computes a loss",
        "TRL adds to them in compute_loss, and has no switch",
    ),
    Seam(
        TRAINER + "_finalize_training",
        "publishes the last checkpoint before the Trainer looks for it",
        "on_train_end comes after that",
        ("trial",),
    ),
    # --- the Trainer's files
    Seam(
        TRAINER + "_save_checkpoint",
        "writes a checkpoint beside training and publishes it when all ranks have written",
        "on_save comes after the checkpoint has its name",
        ("model", "trial"),
    ),
    Seam(
        TRAINER + "_get_output_dir",
        "names the hidden folder while a checkpoint is written",
        "no argument of a save chooses its folder",
        ("trial",),
    ),
    Seam(
        TRAINER + "_push_from_checkpoint",
        "uploads a checkpoint once it is published",
        "no event comes before an upload",
        ("checkpoint_folder",),
    ),
    Seam(
        TRAINER + "_save",
        "writes the model from all ranks",
        "save_model decides which rank saves, and calls this",
        ("output_dir",),
    ),
    Seam(
        TRAINER + "_save_optimizer_and_scheduler",
        "writes weights and optimizer state in sharded form",
        "accelerate's save hooks get whole state dictionaries",
        ("output_dir",),
    ),
    Seam(
        TRAINER + "_load_from_checkpoint",
        "checks a checkpoint before the model is sharded",
        "train(resume_from_checkpoint) loads before on_train_begin",
        ("resume_from_checkpoint", "model"),
    ),
    Seam(
        TRAINER + "_load_optimizer_and_scheduler",
        "loads weights and optimizer state into shards",
        "the same",
        ("checkpoint",),
    ),
    Seam(TRAINER + "_load_best_model", "loads the best checkpoint into shards", "no event comes before it"),
    # --- accelerate
    Seam(
        "accelerate.accelerator.Accelerator._models",
        "finds the models, optimizers and schedulers that were prepared (_optimizers, _schedulers, _custom_objects)",
        "accelerate has no public lists",
    ),
    Seam(
        "accelerate.accelerator.Accelerator._save_model_state_pre_hook",
        "calls the hooks of register_save_state_pre_hook",
        "accelerate calls them in save_state, which ftkit overrides",
    ),
    Seam(
        "accelerate.accelerator.Accelerator._load_model_state_pre_hook",
        "calls the hooks of register_load_state_pre_hook",
        "accelerate calls them in load_state, which ftkit overrides",
    ),
    Seam(
        "torch.optim.lr_scheduler.LRScheduler._last_lr",
        "continues a resumed schedule with the rates of this run",
        "get_last_lr returns it, and nothing sets it",
    ),
    # --- models
    Seam(
        MODEL + "_no_split_modules",
        "finds the blocks of models that mark no layer for activation checkpointing",
        "GradientCheckpointingLayer is used where a model has it",
    ),
    Seam(
        MODEL + "_keep_in_fp32_modules",
        "keeps in fp16 what the family keeps in fp32",
        "from_pretrained applies it itself",
    ),
    Seam(MODEL + "_keep_in_fp32_modules_strict", "the same in all 16-bit dtypes", "the same"),
    Seam(MODEL + "_keys_to_ignore_on_load_missing", "applies the family's rules for missing tensors", "no public form"),
    Seam(MODEL + "_keys_to_ignore_on_save", "applies the family's rules of save_pretrained", "no public form"),
    Seam(
        "transformers.conversion_mapping.get_model_conversion_mapping",
        "finds the name of a model's tensor in a folder",
        "from_pretrained loads whole tensors",
        ("model",),
    ),
    Seam(
        "transformers.core_model_loading.rename_source_key",
        "the same",
        "the same",
        ("source_key", "weight_renamings", "weight_converters"),
    ),
    Seam(
        "transformers.core_model_loading.revert_weight_conversion",
        "finds the name of a tensor in a folder that is saved",
        "save_pretrained needs the whole state dictionary",
        ("model", "state_dict"),
    ),
    Seam(
        "transformers.modeling_utils.PreTrainedModel._loss_function",
        "exchanges the loss function for one that makes no logits",
        "the public getter warns for models without a loss type",
    ),
    # --- PEFT
    Seam(
        "peft.tuners.tuners_utils.BaseTunerLayer.adapter_layer_names",
        "finds the parameters of an adapter",
        "a list of names of all kinds would be ours to keep",
    ),
    Seam(
        "peft.utils.get_peft_model_state_dict",
        "finds the names under which PEFT saves an adapter",
        "save_pretrained needs the values of all shards",
        ("model", "state_dict", "adapter_name"),
    ),
)


SOURCE = "".join(path.read_text() for path in Path(ftkit.__file__).parent.rglob("*.py"))


def resolve(name: str) -> Any:
    """Return what a dotted name refers to; the source of the class for an attribute that only instances have."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            if inspect.isclass(found) and not hasattr(found, part):
                assert f"self.{part}" in inspect.getsource(found), f"{name} is gone"
                return None
            found = getattr(found, part)
        return found
    raise AssertionError(f"{name} is gone")


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_a_private_name_is_as_ftkit_expects_it(seam):
    found = resolve(seam.name)
    assert seam.name.rpartition(".")[2] in SOURCE, "ftkit does not use it any more"
    missing = set(seam.parameters) - (inspect.signature(found).parameters.keys() if seam.parameters else set())
    assert not missing, f"{seam.name} has no parameters {sorted(missing)} any more; ftkit {seam.reason}"


def test_every_private_method_of_the_trainer_that_is_overridden_is_in_the_table():
    own = (name for name in vars(TrainerMixin) if name[0] == "_" and name[1] != "_")
    private = {name for name in own if hasattr(transformers.Trainer, name)}
    assert private <= {seam.name.removeprefix(TRAINER) for seam in SEAMS}
