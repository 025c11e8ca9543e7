"""Faults of what makes a NaN loud, and of what keeps the engine in place."""

from __future__ import annotations

from tests.mutants.fault import fault

_READS = "tests/hf/test_reads.py::"
_NONFINITE = "tests/hf/test_nonfinite.py::"
_OPTIMIZER = "tests/engine/test_optimizer.py::"
_PLACE = "tests/hf/test_engine_in_place.py::"

FAULTS = (
    fault(
        "a run whose last gradient was NaN ends well",
        "ftkit/hf/trainer/trainer.py",
        "        if problem is None and made and (names",
        "        if problem is None and not made and (names",
        _NONFINITE + "test_a_run_whose_last_gradient_is_nan_fails[1-1]",
    ),
    fault(
        "in fp16 a last loss that is no number is no failure",
        "ftkit/hf/trainer/trainer.py",
        "        return optimizer is not None and optimizer.loss_scale.dynamic and optimizer.step_was_skipped\n",
        "        return optimizer is not None and optimizer.loss_scale.dynamic\n",
        _NONFINITE + "test_a_last_loss_of_fp16_that_is_nan_fails_where_its_step_was_not_skipped",
    ),
    fault(
        "a resharded parameter is computed with: its NaN goes on",
        "ftkit/engine/core/flat_parameter.py",
        "            parameter.__class__ = placeholder.resharded\n",
        "",
        _READS + "test_values_of_a_resharded_parameter_raise_and_metadata_do_not",
    ),
    fault(
        "a head that a loss reads outside the model is no function of its shards",
        "ftkit/hf/trainer/trainer.py",
        "        with read_by_all(self), self.engine",
        "        with torch.enable_grad(), self.engine",
        _READS + "test_a_loss_that_reads_a_root_parameter_is_that_of_one_rank[HeadOutside-llama-3]",
    ),
    fault(
        "an optimizer of torch steps on a sharded model and trains nothing",
        "ftkit/engine/optim/foreign_optimizers.py",
        "if own is None or isinstance(optimizer, ShardedOptimizer):",
        "if own is None or isinstance(optimizer, torch.optim.Optimizer):",
        _PLACE + "test_a_trainer_with_a_foreign_optimizer_stops",
    ),
    fault(
        "a stock Trainer takes arguments that ask for the engine",
        "ftkit/hf/trainer/arguments.py",
        "            check_reader(type(self).__name__)\n",
        "            pass\n",
        _PLACE + "test_arguments_that_a_trainer_on_the_engine_has_read_are_refused_to_others",
    ),
    fault(
        "a checkpoint with NaN is written, and pushes out the last good one",
        "ftkit/engine/checkpoint/saving.py",
        "            if kind in WEIGHT_KINDS:\n",
        "            if False:\n",
        _NONFINITE + "test_a_trainer_whose_last_loss_is_nan_fails_and_keeps_the_last_good_checkpoint",
    ),
    fault(
        "a model with NaN is written",
        "ftkit/engine/checkpoint/safetensors.py",
        "            if check:\n",
        "            if False:\n",
        _NONFINITE + "test_what_is_not_finite_is_not_exported",
    ),
    fault(
        "weights that are not finite give answers",
        "ftkit/hf/inference/generation.py",
        "    if broken := at_hand_not_finite(model, units):\n",
        "    if broken := []:\n",
        _NONFINITE + "test_a_folder_that_is_not_finite_answers_nothing[nan]",
    ),
    fault(
        "a run of fp16 that never made an update ends well",
        "ftkit/hf/trainer/trainer.py",
        "            problem = made_no_update(self.engine_optimizer, self.state.global_step - first)\n",
        "            problem = None\n",
        _NONFINITE + "test_in_fp16_a_run_without_an_update_fails[1]",
    ),
    fault(
        "a gradient norm whose square fp32 does not hold is no number",
        "ftkit/engine/optim/optimizer.py",
        "torch.zeros(len(gradients), dtype=torch.float64, device=self.units.comm.device)",
        "torch.zeros(len(gradients), dtype=torch.float32, device=self.units.comm.device)",
        _OPTIMIZER + "test_a_norm_whose_square_no_float_holds_clips_exactly",
    ),
    fault(
        "an edit of a weight that is whole passes within gathered_parameters, and is lost",
        "ftkit/engine/holding.py",
        "    if edited:\n",
        "    if False:\n",
        _READS + "test_an_edit_within_gathered_parameters_raises_and_an_update_does_not",
    ),
)
