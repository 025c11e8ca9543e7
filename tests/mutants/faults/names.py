"""Faults in what is read of the data: names, files, long texts, marks."""

from __future__ import annotations

from tests.mutants.fault import fault as _fault

_NAMES = "tests/hf/test_names_in_rows.py::"
_FILES = "tests/hf/test_files_of_rows.py::"

FAULTS = (
    _fault(
        "a system column that the chat template leaves out is dropped in silence",
        "ftkit/hf/samples.py",
        'return ["system"] if text and is_missing(system, text) else []',
        "return []",
        _NAMES + "test_a_system_column_that_the_template_leaves_out_stops",
    ),
    _fault(
        "a callback's method that no event calls is never called, and nobody is told",
        "ftkit/hf/trainer.py",
        "            check_callbacks(self.callback_handler.callbacks)\n",
        "            pass\n",
        "tests/hf/test_callbacks.py::test_a_trainer_looks_before_it_begins",
    ),
    _fault(
        "a field set beside a configuration matches nothing",
        "ftkit/hf/loading.py",
        "    check_changes(config_changes, settled)\n",
        "",
        "tests/hf/test_config_names.py::test_a_field_set_beside_a_configuration_must_be_one",
    ),
    _fault(
        "a column that says 0 or false is passed over",
        "ftkit/hf/columns.py",
        'return value is None or value in ("", [], {})',
        "return not value",
        _NAMES + "test_a_name_that_nobody_reads_stops[zero says something]",
    ),
    _fault(
        "a key that the template reads of one turn counts as read of all",
        "ftkit/hf/template_process.py",
        "[set() for _ in turns]",
        "[set()] * len(turns)",
        _NAMES + "test_a_key_that_the_template_reads_of_other_turns_only_stops",
    ),
    _fault(
        "a muted answer is learned",
        "ftkit/hf/rendering.py",
        "[span for span in rendered.answers if span not in silent]",
        "rendered.answers",
        _NAMES + "test_a_muted_answer_is_read_and_not_learned",
    ),
    _fault(
        "the last token of a text is left alone, and nothing predicts it",
        "ftkit/hf/samples.py",
        "if tokens > most and tokens - edges[-2] == 1:",
        "if tokens > most and tokens - edges[-2] == 0:",
        "tests/hf/test_long_text.py::test_no_token_of_a_split_text_is_lost",
    ),
    _fault(
        "bytes of a table become the text of a Python literal",
        "ftkit/hf/rows.py",
        "default=lambda value: {FOREIGN: type(value).__name__}",
        "default=str",
        _FILES + "test_bytes_are_not_taken_for_text[.parquet-binary]",
    ),
    _fault(
        "marks around other roles' words are not found",
        "ftkit/hf/roles.py",
        "                foreign.append(number)\n",
        "                pass\n",
        "tests/hf/test_marks_and_roles.py::test_marks_that_do_not_cover_the_answers_stop[everything]",
    ),
)
