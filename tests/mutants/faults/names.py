"""Faults in what is read of the data: names, files, long texts, marks."""

from __future__ import annotations

from tests.mutants.fault import fault as _fault

_NAMES = "tests/hf/test_names_in_rows.py::"
_FILES = "tests/hf/test_files_of_rows.py::"

FAULTS = (
    _fault(
        "a part of an answer that the chat template leaves out is told to nobody",
        "ftkit/data/faults.py",
        'found["half_read"] = bool(rendered.text) and self._half_read(rendered.text, conversation)',
        'found["half_read"] = False',
        "tests/hf/test_faults.py::test_a_part_of_an_answer_that_the_template_leaves_out_is_told[words beside a call]",
    ),
    _fault(
        "of two calls the chat template reads one",
        "ftkit/data/columns.py",
        "return missed if len(missed) < len(objects) else []",
        "return []",
        _NAMES + "test_a_call_or_a_tool_that_the_template_passes_over_stops",
    ),
    _fault(
        "a rank of an adapter stands behind one that hides it",
        "ftkit/hf/models/adapter_targets.py",
        "        if is_match is _is_pattern:\n",
        "        if False:\n",
        "tests/hf/test_adapter_targets.py::test_a_name_that_matches_nothing_stops[a rank behind one of more modules]",
    ),
    _fault(
        "an adapter in the folder of a model is left out",
        "ftkit/hf/weights/loading.py",
        "    _refuse_other_weights(source, model.config)\n",
        "",
        "tests/hf/test_loading.py::test_an_adapter_in_the_folder_of_a_model_stops",
    ),
    _fault(
        "a system column that the chat template leaves out is dropped in silence",
        "ftkit/data/samples.py",
        'return ["system"] if text and is_missing(system, text) else []',
        "return []",
        _NAMES + "test_a_system_column_that_the_template_leaves_out_stops",
    ),
    _fault(
        "a callback's method that no event calls is never called, and nobody is told",
        "ftkit/hf/trainer/trainer.py",
        "            self._check_callbacks()\n            check_length_column(",
        "            check_length_column(",
        "tests/hf/test_callbacks.py::test_a_trainer_looks_before_it_begins",
    ),
    _fault(
        "a field set beside a configuration matches nothing",
        "ftkit/hf/weights/loading.py",
        "    check_changes(config_changes, settled, generation=source is None)\n",
        "",
        "tests/hf/test_config_names.py::test_a_field_set_beside_a_configuration_must_be_one",
    ),
    _fault(
        "a column that says 0 or false is passed over",
        "ftkit/data/columns.py",
        'return value is None or value in ("", [], {})',
        "return not value",
        _NAMES + "test_a_name_that_nobody_reads_stops[zero says something]",
    ),
    _fault(
        "a key that the template reads of one turn counts as read of all",
        "ftkit/data/template_process.py",
        "[set() for _ in turns]",
        "[set()] * len(turns)",
        _NAMES + "test_a_key_that_the_template_reads_of_other_turns_only_stops",
    ),
    _fault(
        "a generation configuration is looked at as transformers left it, without what it drops",
        "ftkit/hf/models/config_names.py",
        "_content(Path(found)) if found is not None else {}",
        "GenerationConfig.from_pretrained(folder, name, revision=revision).to_diff_dict() if found is not None else {}",
        "tests/hf/test_config_names.py::test_a_generation_configuration_is_read_where_transformers_drops_fields[True]",
    ),
    _fault(
        "an excluded container leaves the adapters in it",
        "ftkit/hf/models/adapter_targets.py",
        '    _check_excluded(asked["exclude_modules"], modules, targeted)\n',
        "",
        "tests/hf/test_adapter_targets.py::test_a_name_that_matches_nothing_stops[an excluded container]",
    ),
    _fault(
        "a key of a prompt's turn that nobody reads is dropped in silence",
        "ftkit/hf/inference/generation.py",
        "            unread += rendering.unread_keys(Conversation(tuple(turns), column=PROMPT), asked=len(turns))\n",
        "",
        "tests/hf/test_generation.py::test_what_nobody_reads_of_a_prompt_stops[a name-none]",
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
        "ftkit/data/rendering.py",
        "[span for span in rendered.answers if span not in silent]",
        "rendered.answers",
        _NAMES + "test_a_muted_answer_is_read_and_not_learned",
    ),
    _fault(
        "the last token of a text is left alone, and nothing predicts it",
        "ftkit/data/samples.py",
        "if tokens > most and tokens - edges[-2] == 1:",
        "if tokens > most and tokens - edges[-2] == 0:",
        "tests/hf/test_long_text.py::test_no_token_of_a_split_text_is_lost",
    ),
    _fault(
        "bytes of a table become the text of a Python literal",
        "ftkit/data/rows.py",
        "default=lambda value: {FOREIGN: type(value).__name__}",
        "default=str",
        _FILES + "test_bytes_are_not_taken_for_text[.parquet-binary]",
    ),
    _fault(
        "marks around other roles' words are not found",
        "ftkit/data/roles.py",
        "                foreign.append(number)\n",
        "                pass\n",
        "tests/hf/test_marks_and_roles.py::test_marks_that_do_not_cover_the_answers_stop[everything]",
    ),
    _fault(
        "a value that the chat template reads and does not write is lost in silence",
        "ftkit/data/unwritten.py",
        "    return any(text.lacks(value) for value in values) or any(",
        "    return any(",
        "tests/hf/test_faults.py::test_a_value_that_a_template_reads_and_does_not_write_is_told[a number]",
    ),
    _fault(
        "a turn that is left out goes unnoticed beside one with the same words",
        "ftkit/data/faults.py",
        "words not in text or text.count(words) < sum(each.count(words) for each in said)",
        "words not in text",
        "tests/hf/test_faults.py::test_a_turn_that_is_left_out_is_told_though_its_words_stand_elsewhere[be brief]",
    ),
    _fault(
        "weights trained beside an adapter are lost in silence",
        "ftkit/hf/weights/saving.py",
        "    if (left := sorted(trained - {line_names[name] for name in wanted})) and",
        "    if (left := []) and",
        "tests/hf/test_peft.py::test_weights_trained_beside_an_adapter_are_named_when_it_is_saved",
    ),
    _fault(
        "a misspelt field in the configuration of a model folder is passed over",
        "ftkit/hf/models/model_config.py",
        '        if fields and type(loaded).__module__.startswith("transformers."):\n',
        '        if config is not None and fields and type(loaded).__module__.startswith("transformers."):\n',
        "tests/hf/test_config_names.py::test_a_field_of_a_models_own_folder_that_is_nearly_one_is_told",
    ),
)
