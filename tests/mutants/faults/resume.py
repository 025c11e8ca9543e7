"""Faults of saving and resuming: bookkeeping, files of others, the base, buffers and schedules."""

from __future__ import annotations

from tests.mutants.fault import fault

_CHECKPOINTS = "ftkit/hf/trainer/checkpoints.py"
_WHOLE = "tests/hf/test_saved_whole.py::"

FAULTS = (
    fault(
        "a best checkpoint that was saved before its evaluation is forgotten",
        _CHECKPOINTS,
        "best == final or best.is_dir()",
        "best == final",
        "tests/hf/test_bookkeeping.py::test_the_best_checkpoint_and_those_that_stay_are_stocks",
    ),
    fault(
        "an error leaves the checkpoint that is being written unfinished",
        "ftkit/hf/trainer/trainer.py",
        "            self.checkpoints.rescue()\n",
        "",
        _WHOLE + "test_a_checkpoint_is_finished_when_an_error_ends_the_run",
    ),
    fault(
        "a learning rate that a callback set is the schedule's after a resume",
        _CHECKPOINTS,
        '            if group["lr"] == last:  # otherwise',
        "            if True:  # otherwise",
        "tests/hf/test_schedules.py::test_a_learning_rate_that_a_callback_sets_goes_on",
    ),
    fault(
        "the best model comes back with its moments",
        "ftkit/engine/checkpoint/loading.py",
        "for moment, store in own.moments.items() if state else ():",
        "for moment, store in own.moments.items():",
        "tests/engine/test_checkpoint.py::test_weights_come_back_without_the_state",
    ),
    fault(
        "schedules see the engine's own learning rate",
        "ftkit/hf/trainer/optimizers.py",
        "    made.defaults = {**made.defaults, **optimizer.defaults}",
        "    pass",
        "tests/hf/test_schedules.py::test_an_exchanged_optimizer_keeps_the_users_defaults",
    ),
    fault(
        "projections that adapters share are saved once",
        "ftkit/hf/load/model.py",
        "model.named_modules(remove_duplicate=False)\n        for key, buffer",
        "model.named_modules()\n        for key, buffer",
        _WHOLE + "test_an_adapter_is_saved_with_everything_that_stock_saves[randlora]",
    ),
    fault(
        "an earlier state is removed before the new one has its name",
        "ftkit/hf/trainer/accelerator.py",
        "        state.rename(former)\n",
        "        shutil.rmtree(state)\n",
        "tests/hf/test_accelerator.py::test_a_state_is_replaced_as_a_whole_or_not_at_all[1]",
    ),
    fault(
        "groups in another order take each other's learning rate",
        "ftkit/engine/checkpoint/saving.py",
        '"members": optimizer.group_of',
        '"members": {}',
        "tests/hf/test_resume_everywhere.py::test_groups_in_another_order_are_refused_at_resume",
    ),
    fault(
        "of a key given twice the last value is taken in silence",
        "ftkit/config/yaml_lines.py",
        "        if below in document.places:",
        "        if below in ():",
        "tests/test_recipe.py::test_refusals",
    ),
    fault(
        "an override keeps the lines of the section that it replaces",
        "ftkit/config/yaml_lines.py",
        "if known[: len(path)] == path]",
        "if known == path]",
        "tests/test_recipe.py::test_an_override_of_a_section_is_the_place_of_its_keys",
    ),
)
