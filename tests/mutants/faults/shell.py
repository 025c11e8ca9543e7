"""Faults in what users meet first: the output folder, templates, the dry run, messages."""

from tests.mutants.fault import fault

OWN = "tests/test_own_files.py"

FAULTS = (
    fault(
        "a foreign checkpoint folder is rotated away",
        "ftkit/output/run_folder.py",
        "foreign += [path for path in checkpoints if not ownership.is_our_checkpoint(path)]",
        "",
        f"{OWN}::test_a_file_that_no_run_wrote_stops_the_run",
    ),
    fault(
        "a refused export leaves its files",
        "ftkit/hf/save/export.py",
        "        with TemporaryDirectory(prefix=PARTIAL, dir=out) as partial_folder:\n",
        "        partial_folder = out / PARTIAL\n        partial_folder.mkdir()\n        if True:\n",
        f"{OWN}::test_a_refused_export_leaves_nothing",
    ),
    fault(
        "an error of a template that is none of jinja's is a traceback",
        "ftkit/data/template_process.py",
        'return "error", f"{type(error).__name__}: {error}"',
        "raise",
        "tests/hf/test_data.py::test_a_template_runs_in_the_sandbox_and_its_errors_name_it",
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
        "ftkit/hf/load/config.py",
        "    except Exception as error:\n        text",
        "    except OSError as error:\n        text",
        "tests/hf/test_model_config.py::test_the_error_names_the_file_and_has_the_reason",
    ),
    fault(
        "a dry run takes any reporter",
        "ftkit/train/build.py",
        "    check_report_to(recipe.output.report_to)\n",
        "",
        "tests/test_dry_run_refuses.py::test_what_a_recipe_says",
    ),
    fault(
        "a dry run looks at no checkpoint",
        "ftkit/train/run.py",
        "tell, tried = teller(say), [str(each) for each in checkpoints]",
        "tell, tried = teller(say), []",
        "tests/test_dry_run_refuses.py::test_a_checkpoint_that_is_none_or_another_runs",
    ),
)
