"""Faults of the seam: models without blocks, `no_sync`, trials, models for evaluation only, the table's judge."""

from __future__ import annotations

from tests.mutants.fault import fault

_WITHOUT = "tests/hf/test_models_without_blocks.py::"

FAULTS = (
    fault(
        "a model without blocks is left at the stage that the plan chooses",
        "ftkit/hf/blocks.py",
        'return replace(strategy, stage=1) if strategy.stage == "auto" else strategy',
        "return strategy",
        _WITHOUT + "test_a_model_without_blocks_trains_replicated[2-Vectors]",
    ),
    fault(
        "a second model is granted what the first was planned with",
        "ftkit/hf/memory/beside.py",
        "            if granted and taken:\n",
        "            if granted and taken < 0:\n",
        "tests/hf/test_beside.py::test_a_second_model_is_not_granted_what_the_first_was_planned_with",
    ),
    fault(
        "a model for evaluation only is planned with state",
        "ftkit/hf/sharding.py",
        "shape = shape.frozen() if evaluation else replace(shape, rule=rule)",
        "shape = replace(shape, rule=rule)",
        "tests/hf/test_beside.py::test_a_model_that_is_evaluated_only_has_no_gradients_and_no_state_in_its_plan",
    ),
    fault(
        "blocks divide a batch though micro-batches pass the model one after another",
        "ftkit/hf/sharding.py",
        "    together = STEP if strategy.accumulate_in == AUTO else strategy.accumulate_in",
        '    together = "unit" if strategy.accumulate_in == AUTO else strategy.accumulate_in',
        "tests/hf/test_planned_once.py::test_blocks_divide_a_batch_into_the_micro_batches_of_a_step_where_they_accumulate",
    ),
    fault(
        "a run that was planned is planned again",
        "ftkit/hf/sharding.py",
        "        if plan is None:\n            free =",
        "        if True:\n            free =",
        "tests/hf/test_planned_once.py::test_a_trainer_with_a_plan_plans_nothing",
    ),
    fault(
        "an evaluation before training shards the model as if no callback read weights",
        "ftkit/hf/trainer/trainer.py",
        "            self._sharded(evaluation=True if self.train_dataset is None else None)\n",
        "            self.accelerator.shard(self.model, evaluation=True if self.train_dataset is None else None)\n",
        "tests/hf/test_callbacks.py::test_an_evaluation_before_training_leaves_a_callback_the_steps_weights",
    ),
)
