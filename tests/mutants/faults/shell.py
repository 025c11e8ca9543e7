"""Faults in what users meet first: the output folder, templates, the dry run, messages."""

from tests.mutants.fault import fault

OWN = "tests/test_own_files.py"

FAULTS = (
    fault(
        "a user's changed recipe.yaml is taken for ours",
        "ftkit/output/ownership.py",
        "return found is not None and found[1] == _digest(text[found.end() :])",
        "return found is not None",
        f"{OWN}::test_a_file_that_the_user_added_or_changed_after_a_run_is_not_removed",
    ),
    fault(
        "--overwrite removes what the user added to a model",
        "ftkit/output/run_folder.py",
        "foreign += ownership.strangers_in_model(self.model, self.model_list)",
        "",
        f"{OWN}::test_a_file_that_the_user_added_or_changed_after_a_run_is_not_removed",
    ),
    fault(
        "a foreign checkpoint folder is rotated away",
        "ftkit/output/run_folder.py",
        "foreign += [path for path in checkpoints if not ownership.is_our_checkpoint(path)]",
        "",
        f"{OWN}::test_a_folder_of_the_users_under_a_name_of_ours_stops_the_run",
    ),
    fault(
        "a refused export leaves its files",
        "ftkit/hf/weights/new_folder.py",
        "shutil.rmtree(partial, ignore_errors=True)",
        "pass",
        f"{OWN}::test_a_refused_export_leaves_nothing",
    ),
    fault(
        "a template takes all the time it wants",
        "ftkit/data/template_process.py",
        "if not self._pipe.poll(SECONDS):",
        "if not self._pipe.poll(600):",
        "tests/hf/test_template_process.py::test_a_template_without_end_or_measure_is_named",
    ),
    fault(
        "an error of a template that is none of jinja's is a traceback",
        "ftkit/data/template_process.py",
        'return "error", f"{type(error).__name__}: {error}"',
        "raise",
        "tests/hf/test_template_process.py::test_whatever_a_template_raises_is_an_error_of_its_row",
    ),
    fault(
        "a batch is divided by a walk over its sequences",
        "ftkit/config/recipe.py",
        "most = min(each, AUTO_MICRO_BATCH_TOKENS // recipe.data.sequence_tokens)",
        "most = min(each, 10**8)",
        "tests/plan/test_bounds.py::test_a_batch_is_divided_without_a_walk_over_its_sequences",
    ),
    fault(
        "a plan tries no micro-batch above the root of a step's sequences",
        "ftkit/plan/candidates.py",
        "found = large + small[::-1]",
        "found = small[::-1]",
        "tests/plan/test_bounds.py::test_divisors_are_all_found_on_both_sides_of_the_root",
    ),
    fault(
        "what transformers raises over a config.json is a traceback",
        "ftkit/hf/models/model_config.py",
        "    except Exception as error:\n        keys",
        "    except OSError as error:\n        keys",
        "tests/hf/test_model_config.py::test_a_value_that_no_model_can_be_made_of_is_named",
    ),
    fault(
        "a buffer of many GiB is made",
        "ftkit/hf/models/model_config.py",
        "        if buffer.numel() * buffer.element_size() > MOST_BUFFER_BYTES:",
        "        if False:",
        "tests/hf/test_model_config.py::test_a_buffer_of_many_gib",
    ),
    fault(
        "a dry run takes any reporter",
        "ftkit/train/parts.py",
        "    check_report_to(recipe.output.report_to)\n",
        "",
        "tests/test_dry_run_refuses.py::test_what_a_recipe_says",
    ),
    fault(
        "a dry run looks at no checkpoint",
        "ftkit/train/job.py",
        "checkpoint = first_whole([str(each) for each in checkpoints], alone,",
        "checkpoint = first_whole([], alone,",
        "tests/test_dry_run_refuses.py::test_a_checkpoint_that_is_none_or_another_runs",
    ),
)
