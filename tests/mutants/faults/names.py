"""Faults in what is read of the data: names, files, long texts, marks."""

from __future__ import annotations

from tests.mutants.fault import fault as _fault

FAULTS = (
    _fault(
        "an adapter in the folder of a model is left out",
        "ftkit/hf/load/config.py",
        "    if source is not None and config is None and (Path(source)",
        "    if source is None and config is None and (Path(source)",
        "tests/hf/test_loading.py::test_an_adapter_in_place_of_a_model_stops",
    ),
    _fault(
        "a muted answer is learned",
        "ftkit/data/template.py",
        "[span for span in answers if span not in silent]",
        "answers",
        "tests/data/test_template.py::test_a_muted_answer_is_read_and_not_learned",
    ),
    _fault(
        "prepared rows are used again on another day",
        "ftkit/data/prepare.py",
        "transformers.__version__, self.template.day)",
        "transformers.__version__)",
        "tests/data/test_template.py::test_the_date_of_a_template_belongs_to_the_prepared_rows",
    ),
    _fault(
        "rows that another version of ftkit prepared are used",
        "ftkit/data/prepare.py",
        '(metadata.version("ftkit"), ',
        "(",
        "tests/data/test_prepare.py::test_the_cache_is_named_by_content_tokenizer_and_settings",
    ),
    _fault(
        "the last token of a text is left alone, and nothing predicts it",
        "ftkit/data/tokenize.py",
        "if tokens > most and tokens - edges[-2] == 1:",
        "if tokens > most and tokens - edges[-2] == 0:",
        "tests/data/test_prepare.py::test_no_token_of_a_split_text_is_lost",
    ),
    _fault(
        "bytes of a table become the text of a Python literal",
        "ftkit/data/sources.py",
        'default=lambda value: {"not JSON": type(value).__name__}',
        "default=str",
        "tests/data/test_sources.py::test_bytes_are_not_taken_for_text",
    ),
    _fault(
        "keys of other rows are nulls in a row of a table",
        "ftkit/data/sources.py",
        "as_json(without_nulls(record))",
        "as_json(record)",
        "tests/data/test_formats.py::test_union_columns_of_parquet_leave_no_nulls",
    ),
    _fault(
        "arguments of a call that are JSON text are encoded twice",
        "ftkit/data/formats.py",
        'with_arguments(rest["tool_calls"], _object)',
        'rest["tool_calls"]',
        "tests/data/test_formats.py::test_arguments_and_tools_as_json_text_give_the_text_of_objects",
    ),
    _fault(
        "an answer is counted as held out in the training set as well",
        "ftkit/data/prepare.py",
        "chosen = usable & ~held_out",
        "chosen = usable",
        "tests/data/test_prepare.py::test_a_share_of_the_rows_is_held_out_before_packing",
    ),
    _fault(
        "weights trained beside an adapter are lost in silence",
        "ftkit/hf/save/model.py",
        "    if (left := sorted(trained - names)) and",
        "    if (left := []) and",
        "tests/hf/test_peft.py::test_weights_trained_beside_an_adapter_are_named_when_it_is_saved",
    ),
)
