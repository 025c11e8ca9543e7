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
        "a layer that was pruned is saved as it was",
        "ftkit/engine/core/shard.py",
        "        if gone := sorted(self._names - (now := self._present_names())):\n",
        "        if gone := sorted(self._names - (now := self._names)):\n",
        _READS + "test_a_layer_that_is_pruned_after_sharding_is_not_saved_as_it_was[model.layers.1.mlp.up_proj-1]",
    ),
    fault(
        "a plain tensor is cast from a resharded parameter and gives NaN",
        "ftkit/engine/core/resharded.py",
        '        raise _refusal("as_subclass", self)\n',
        "        return torch.Tensor.as_subclass(self, cls)\n",
        _READS + "test_values_of_a_resharded_parameter_raise_and_metadata_do_not",
    ),
    fault(
        "what is cut from a resharded parameter has NaN behind it",
        "ftkit/engine/core/resharded.py",
        "    cut = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=\"meta\").as_subclass(Guard)",
        "    cut = torch.Tensor.detach(own).as_subclass(Guard)",
        _READS + "test_values_of_a_resharded_parameter_raise_and_metadata_do_not",
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
        "            parameter.__class__ = resharded_class(kind)\n",
        "",
        _READS + "test_values_of_a_resharded_parameter_raise_and_metadata_do_not",
    ),
    fault(
        "a head that a loss reads outside the model is no function of its shards",
        "ftkit/hf/trainer/trainer.py",
        "        with read_by_all(self):\n            loss: Tensor = super()",
        "        with torch.enable_grad():\n            loss: Tensor = super()",
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
        "                    self._look(begin + number * PIECE_NUMEL, part)\n",
        "",
        _NONFINITE + "test_a_trainer_whose_last_loss_is_nan_fails_and_keeps_the_last_good_checkpoint",
    ),
    fault(
        "a model with NaN is written",
        "ftkit/engine/files/storage.py",
        "            refuse_not_finite(name, piece, infinite=infinite, source=source)\n",
        "",
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
        "a model that is sharded with NaN trains",
        "ftkit/engine/core/shard.py",
        "    _refuse_values(units)\n",
        "",
        _NONFINITE + "test_a_base_that_is_not_finite_is_found_when_it_is_sharded[3-nan]",
    ),
    fault(
        "a gradient norm whose square fp32 does not hold is no number",
        "ftkit/engine/optim/optimizer.py",
        "torch.zeros(len(gradients), dtype=torch.float64, device=self.units.comm.device)",
        "torch.zeros(len(gradients), dtype=torch.float32, device=self.units.comm.device)",
        _OPTIMIZER + "test_a_norm_whose_square_no_float_holds_clips_exactly",
    ),
    fault(
        "the gradient of a block's weight that is gone is taken for its own",
        "ftkit/engine/core/unit.py",
        "                if isinstance(parameter, Guard):",
        "                if False:",
        _READS + "test_a_penalty_on_a_block_that_cannot_be_trained_raises",
    ),
    fault(
        "an edit of a weight that is whole passes within gathered_parameters, and is lost",
        "ftkit/engine/core/holding.py",
        "    versions, marks = before\n",
        "    versions, marks = before[0], _marks(flat)\n",
        _READS + "test_an_edit_within_gathered_parameters_raises_and_an_update_does_not",
    ),
    fault(
        "a parameter's data is another tensor, which is trained with and never saved",
        "ftkit/engine/optim/optimizer.py",
        "        self.units.take_edits()\n",
        "",
        _OPTIMIZER + "test_a_parameter_that_lies_elsewhere_is_found_at_a_step_and_a_save",
    ),
    fault(
        "an edit in place of a 16-bit weight is undone by the next update",
        "ftkit/engine/optim/optimizer.py",
        "            self._take_edit(flat)\n            flat.edits_taken = edits\n",
        "            flat.edits_taken = edits\n",
        _OPTIMIZER + "test_an_edit_in_place_of_a_whole_weight_is_kept",
    ),
    fault(
        "a weight that is saved after an edit in place is the master's of before",
        "ftkit/engine/checkpoint/export.py",
        "        optimizer.take_edits(unseen=True) if optimizer is not None else units.take_edits()\n",
        "        units.take_edits()\n",
        _READS + "test_an_edit_in_place_is_trained_and_saved",
    ),
)
