"""Faults in what is read of the data: names, files, long texts, marks."""

from __future__ import annotations

from tests.mutants.fault import fault as _fault

_NAMES = "tests/hf/test_names_in_rows.py::"

FAULTS = (
    _fault(
        "an adapter in the folder of a model is left out",
        "ftkit/hf/load/config.py",
        "    if source is not None and config is None and (Path(source)",
        "    if source is None and config is None and (Path(source)",
        "tests/hf/test_loading.py::test_an_adapter_in_place_of_a_model_stops",
    ),
    _fault(
        "a column that says 0 or false is passed over",
        "ftkit/data/columns.py",
        'return value is None or value in ("", [], {})',
        "return not value",
        _NAMES + "test_a_name_that_nobody_reads_stops[zero says something]",
    ),
    _fault(
        "the collator takes all tokens of a row for its own, whatever its mask says",
        "ftkit/data/batches.py",
        'if "attention_mask" in sample else',
        "if False else",
        "tests/hf/test_data.py::test_a_masked_row_has_the_loss_of_the_row_alone",
    ),
    _fault(
        "a muted answer is learned",
        "ftkit/data/template.py",
        "[span for span in rendered.answers if span not in silent]",
        "rendered.answers",
        _NAMES + "test_a_muted_answer_is_read_and_not_learned",
    ),
    _fault(
        "the last token of a text is left alone, and nothing predicts it",
        "ftkit/data/tokenize.py",
        "if tokens > most and tokens - edges[-2] == 1:",
        "if tokens > most and tokens - edges[-2] == 0:",
        "tests/hf/test_long_text.py::test_no_token_of_a_split_text_is_lost",
    ),
    _fault(
        "bytes of a table become the text of a Python literal",
        "ftkit/data/sources.py",
        "default=lambda value: {FOREIGN: type(value).__name__}",
        "default=str",
        "tests/hf/test_files_of_rows.py::test_bytes_are_not_taken_for_text[.parquet]",
    ),
    _fault(
        "weights trained beside an adapter are lost in silence",
        "ftkit/hf/save/model.py",
        "    if (left := sorted(trained - names)) and",
        "    if (left := []) and",
        "tests/hf/test_peft.py::test_weights_trained_beside_an_adapter_are_named_when_it_is_saved",
    ),
)
