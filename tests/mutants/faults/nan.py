"""Faults of what makes a NaN loud, and of what keeps the engine in place."""

from __future__ import annotations

from tests.mutants.fault import fault

_READS = "tests/hf/test_reads.py::"
_NONFINITE = "tests/hf/test_nonfinite.py::"
_OPTIMIZER = "tests/engine/test_optimizer.py::"
_PLACE = "tests/hf/test_engine_in_place.py::"

FAULTS = (
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
        "            stack.enter_context(read_by_all(self))\n            if",
        "            if",
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
        "        if self.ftkit is not None and not BUILDING.get():\n",
        "        if False:\n",
        _PLACE + "test_arguments_that_a_trainer_on_the_engine_has_read_are_refused_to_others",
    ),
    fault(
        "a checkpoint with NaN is written, and pushes out the last good one",
        "ftkit/engine/checkpoint/saving.py",
        "            if part.weights:\n",
        "            if False:\n",
        _NONFINITE + "test_a_trainer_whose_weights_become_nan_keeps_the_last_good_checkpoint",
    ),
    fault(
        "a model with NaN is written",
        "ftkit/engine/checkpoint/safetensors.py",
        "            if check:\n",
        "            if False:\n",
        _NONFINITE + "test_what_is_not_finite_is_not_exported",
        _NONFINITE + "test_what_is_not_finite_is_not_written",
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
