"""Faults of saving and resuming: bookkeeping, files of others, the base, buffers and schedules."""

from __future__ import annotations

from tests.mutants.fault import fault

_CHECKPOINTS = "ftkit/hf/trainer/run_checkpoints.py"
_WHOLE = "tests/hf/test_saved_whole.py::"

FAULTS = (
    fault(
        "a best checkpoint that was saved before its evaluation is forgotten",
        _CHECKPOINTS,
        "or os.path.isdir(folder) else None",
        "else None",
        "tests/hf/test_bookkeeping.py::test_the_best_checkpoint_and_those_that_stay_are_stocks",
    ),
    fault(
        "callbacks of others run before a checkpoint has its name",
        _CHECKPOINTS,
        "if self.push_later or read_now or edited or trainer.units.saving is None:",
        "if self.push_later or edited or trainer.units.saving is None:",
        _WHOLE + "test_a_callback_by_attribute_finds_the_folder",
    ),
    fault(
        "what a callback changes in a checkpoint is taken for damage",
        _CHECKPOINTS,
        "if (folder / CONTENTS).is_file():  # a callback",
        "if False:  # a callback",
        _WHOLE + "test_what_a_callback_writes_into_a_checkpoint_stays_and_is_no_damage",
    ),
    fault(
        "a user's files are taken along only where a list can be read",
        "ftkit/output/ownership.py",
        "known = SAVED.fullmatch(name) is not None or (name == \"README.md\" and PEFT_CARD in _head(each))",
        "known = True",
        "tests/test_own_files.py::test_a_checkpoint_takes_a_folders_place_and_the_users_files_stay",
    ),
    fault(
        "a state takes the place of a user's files",
        "ftkit/hf/trainer/accelerator_states.py",
        "        if not _is_nothing(path := folder / name):",
        "        if not _is_nothing(path := folder / name) and False:",
        "tests/hf/test_accelerator.py::test_a_state_takes_the_place_of_nothing_that_is_not_one",
    ),
    fault(
        "an error leaves the checkpoint that is being written unfinished",
        "ftkit/hf/trainer/trainer.py",
        "            self.checkpoints.rescue()\n",
        "",
        _WHOLE + "test_a_checkpoint_is_finished_when_an_error_ends_the_run",
    ),
    fault(
        "an upload of a user's own is given a folder that is being written",
        "ftkit/hf/trainer/trainer.py",
        "            self._push_from_checkpoint = self.checkpoints.push_when_named",
        "            self._push_from_checkpoint = self._push_from_checkpoint",
        _WHOLE + "test_an_upload_of_ones_own_is_given_whole_checkpoints",
    ),
    fault(
        "what is edited before the next step comes into the checkpoint of the last",
        _CHECKPOINTS,
        "edited = comm.any(getattr(trainer.sharded_optimizer, \"edited\", False))",
        "edited = comm.any(False)",
        _WHOLE + "test_a_checkpoint_has_the_weights_of_its_step_whatever_is_edited_after",
    ),
    fault(
        "a learning rate that a callback set is the schedule's after a resume",
        "ftkit/hf/trainer/checkpoint_files.py",
        '                if group["lr"] == last:\n',
        "                if True:\n",
        "tests/hf/test_schedules.py::test_a_learning_rate_that_a_callback_sets_goes_on",
    ),
    fault(
        "the best model comes back with its moments",
        "ftkit/engine/checkpoint/checkpoint.py",
        "for moment, store in own.moments.items() if state else ():",
        "for moment, store in own.moments.items():",
        "tests/engine/test_checkpoint.py::test_weights_come_back_without_the_state",
    ),
    fault(
        "schedules see the engine's own learning rate",
        "ftkit/hf/trainer/accelerator.py",
        "    made.defaults = {**made.defaults, **optimizer.defaults}",
        "    pass",
        "tests/hf/test_schedules.py::test_an_exchanged_optimizer_keeps_the_users_defaults",
    ),
    fault(
        "rows of the base that changed places go unseen",
        "ftkit/engine/checkpoint/weight_sums.py",
        "(column_sums * places)",
        "(column_sums)",
        "tests/hf/test_base.py::test_sums_add_up_however_a_tensor_is_cut",
    ),
    fault(
        "projections that adapters share are saved once",
        "ftkit/hf/weights/loading.py",
        "model.named_modules(remove_duplicate=False)\n        for key, buffer",
        "model.named_modules()\n        for key, buffer",
        _WHOLE + "test_an_adapter_is_saved_with_everything_that_stock_saves[randlora]",
    ),
    fault(
        "a state that no checkpoint holds is lost without a word",
        "ftkit/hf/weights/saving.py",
        "    refuse_unsaved(units.model)\n",
        "",
        "tests/hf/test_refused_before_training.py::test_what_cannot_be_saved_is_refused_before_the_first_step",
    ),
    fault(
        "--resume auto goes on from a line that the run left",
        "ftkit/output/run_folder.py",
        "        return [path for path in self.checkpoints()[::-1] if path not in left]\n",
        "        return self.checkpoints()[::-1]\n",
        "tests/test_finetune.py::test_lines_of_a_run_that_goes_back_again_and_again",
    ),
    fault(
        "a file of the model that was edited without changing its size is replaced",
        "ftkit/output/ownership.py",
        "return size == path.lstat().st_size and sums in ([], [_sum(path)])",
        "return size == path.lstat().st_size",
        "tests/test_own_files.py::test_a_file_of_the_model_that_was_edited_without_changing_its_size_is_not_replaced",
    ),
    fault(
        "folders of the user's are rotated",
        "ftkit/hf/trainer/trainer.py",
        "use_mtime=True) if is_rotated(Path(path))]",
        "use_mtime=True)]",
        "tests/hf/test_bookkeeping.py::test_folders_of_the_users_are_not_rotated",
    ),
    fault(
        "of several models in a module only the first is compared",
        "ftkit/hf/weights/base_digest.py",
        "{name: config_note(inner[name]) for name in others}",
        "{}",
        "tests/hf/test_base.py::test_every_model_of_a_users_module_is_compared",
    ),
    fault(
        "an adapter's scale that was set by hand is not noted",
        "ftkit/hf/weights/base_digest.py",
        'note["scales"] = _scales_note(model)',
        'note["scales"] = {}',
        "tests/hf/test_base.py::test_a_scale_that_was_set_by_hand_is_compared",
    ),
    fault(
        "a number in base 8 is read in silence",
        "ftkit/config/yaml_lines.py",
        "elif node.tag in NUMBERS and",
        "elif node.tag in () and",
        "tests/test_recipe.py::test_numbers_of_base_8_in_an_override_stop_and_quoted_ones_are_text",
    ),
    fault(
        "a configuration that cannot be written costs every checkpoint",
        _CHECKPOINTS,
        "            self._try_small_files()\n",
        "            pass\n",
        "tests/hf/test_refused_before_training.py::test_what_cannot_be_saved_is_refused_before_the_first_step",
    ),
)
