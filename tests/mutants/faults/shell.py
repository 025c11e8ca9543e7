"""Faults in what users meet first: the output folder, templates, the dry run, messages."""

from tests.mutants.fault import fault

OWN = "tests/test_own_files.py"

FAULTS = (
    fault(
        "a folder of a user's is taken for a run",
        "ftkit/output/run_folder.py",
        "if set(found) - {VERIFY} and not is_marked:",
        "if False:",
        f"{OWN}::test_a_folder_that_is_no_run_is_refused",
    ),
    fault(
        "--overwrite removes the model that the run reads",
        "ftkit/output/run_folder.py",
        "            self._refuse_inputs(inputs)\n",
        "",
        f"{OWN}::test_overwrite_does_not_remove_what_the_run_reads",
    ),
    fault(
        "after --overwrite a folder is no run until its recipe is written",
        "ftkit/output/run_folder.py",
        "        files = (self.metrics,",
        "        files = (self.recipe, self.metrics,",
        f"{OWN}::test_overwrite_removes_what_a_run_wrote_and_nothing_else",
    ),
    fault(
        "a checkpoint that a kill put aside is removed",
        "ftkit/output/run_folder.py",
        "        if final.exists():\n            _discard(path",
        "        if True:\n            _discard(path",
        f"{OWN}::test_a_checkpoint_replaces_one_of_its_name",
    ),
    fault(
        "a checkpoint is removed under its name",
        "ftkit/output/run_folder.py",
        "    checkpoint.rename(hidden)\n    _discard(hidden)",
        "    _discard(checkpoint)",
        f"{OWN}::test_a_kill_while_a_checkpoint_is_removed_leaves_no_half_of_it",
    ),
    fault(
        "the newest checkpoint is that of the highest step",
        "ftkit/output/run_folder.py",
        "key=lambda path: (written_at(path), int(steps[path]))",
        "key=lambda path: int(steps[path])",
        f"{OWN}::test_checkpoints_are_ordered_by_when_they_were_written",
    ),
    fault(
        "the checkpoint that was just written is removed after a resume",
        "ftkit/hf/trainer/checkpoints.py",
        "path.name not in (newest.name, ",
        "path.name not in (",
        f"{OWN}::test_after_a_resume_from_an_older_step_the_newest_and_the_best_stay",
    ),
    fault(
        "a refused export leaves its files",
        "ftkit/hf/save/export.py",
        "        with TemporaryDirectory(prefix=PARTIAL, dir=out) as partial_folder:\n",
        "        partial_folder = out / PARTIAL\n        partial_folder.mkdir()\n        if True:\n",
        f"{OWN}::test_a_refused_export_leaves_nothing",
    ),
    fault(
        "a batch is divided by a walk over its sequences",
        "ftkit/config/recipe.py",
        "most = min(each, AUTO_MICRO_BATCH_TOKENS // sequence_tokens)",
        "most = min(each, 10**8)",
        "tests/plan/test_bounds.py::test_a_batch_is_divided_without_a_walk_over_its_sequences",
    ),
    fault(
        "a plan tries no micro-batch above the root of a step's sequences",
        "ftkit/plan/candidates.py",
        "range(min(number, most), 0, -1)",
        "range(min(math.isqrt(number), most), 0, -1)",
        "tests/plan/test_bounds.py::test_divisors_are_all_found_on_both_sides_of_the_root",
    ),
    fault(
        "what transformers raises over a config.json is a traceback",
        "ftkit/hf/load/config.py",
        "    except Exception as error:\n        text",
        "    except OSError as error:\n        text",
        "tests/hf/test_model_config.py::test_the_error_names_the_file_and_has_the_reason",
    ),
    fault(
        "a dry run looks at no checkpoint",
        "ftkit/train/run.py",
        "make_parts(recipe, ranks, [str(each) for each in checkpoints], None, tell)",
        "make_parts(recipe, ranks, [], None, tell)",
        "tests/test_dry_run_refuses.py::test_a_checkpoint_that_is_none_or_another_runs",
    ),
    fault(
        "with one checkpoint to keep, the newest one is removed at the end",
        "ftkit/train/arguments.py",
        "return max(keep, 2) if keep and recipe.eval else keep",
        "return keep",
        "tests/test_finetune.py::test_the_last_checkpoints_and_the_best_are_kept",
    ),
    fault(
        "a resumed run prepares its rows for today",
        "ftkit/train/resume.py",
        'return Start(found.get("day") or today, path, found.get("rows"))',
        'return Start(today, path, found.get("rows"))',
        "tests/test_hostile_checkpoints.py::test_the_day_of_the_rows_is_the_checkpoints",
    ),
)
