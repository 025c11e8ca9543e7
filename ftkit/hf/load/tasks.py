"""Tasks, and the transformers class that a configuration selects for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import transformers
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto

from ftkit.errors import UserError

TASKS = {
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "masked-lm": "AutoModelForMaskedLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "multiple-choice": "AutoModelForMultipleChoice",
    "image-text-to-text": "AutoModelForImageTextToText",
    "image-classification": "AutoModelForImageClassification",
    "audio-classification": "AutoModelForAudioClassification",
    "speech-ctc": "AutoModelForCTC",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "feature-extraction": "AutoModel",
}
"""Task to the transformers class that builds its model."""

_NAMES: dict[str, Any] = {
    "causal-lm": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked-lm": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "sequence-classification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "token-classification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "question-answering": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "multiple-choice": modeling_auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES,
    "image-text-to-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "image-classification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "audio-classification": modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    "speech-ctc": modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
    "speech-seq2seq": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
}
"""Task to model type to class names."""


def task_of(config: PretrainedConfig, where: str) -> str:
    """Return the task of the class in a configuration's `architectures`.

    A base model without a head, or a configuration without `architectures`, becomes a language model if its type is one.

    Args:
        config: Configuration of the model.
        where: The folder, for errors.

    Raises:
        UserError: The class belongs to no task.
    """
    named = (getattr(config, "architectures", None) or [None])[0]
    kind = config.model_type
    for task, names in _NAMES.items():
        if named is not None and named in _classes(names.get(kind)):
            return task
    if named is None or named in _classes(modeling_auto.MODEL_MAPPING_NAMES.get(kind)):
        if config.is_encoder_decoder and kind in _NAMES["seq2seq"]:
            return "seq2seq"
        if kind in _NAMES["causal-lm"] and kind not in _NAMES["masked-lm"]:
            return "causal-lm"
    found = f"architectures is [{named}]" if named else "there are no architectures"
    raise UserError(f"{where}: {found}, and no task follows: set task to one of {', '.join(tasks_for(config))}")


def tasks_for(config: PretrainedConfig) -> list[str]:
    """Return the tasks for which a model type has a class."""
    return [task for task, names in _NAMES.items() if config.model_type in names] + ["feature-extraction"]


def build(config: PretrainedConfig, task: str, where: str, **options: Any) -> Any:
    """Build the model of a task from its configuration, on the current default device.

    Args:
        config: Configuration of the model.
        task: A task of `TASKS`, or "auto".
        where: The folder, for errors.
        options: Keyword arguments of `from_config`.

    Raises:
        UserError: The model type has no class for the task.
    """
    task = task_of(config, where) if task == "auto" else task
    try:
        return getattr(transformers, TASKS[task]).from_config(config, **options)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        others = ", ".join(other for other in tasks_for(config) if other != task)
        kind = config.model_type
        raise UserError(f"{where}: a {kind} model has no class for task {task}; other tasks: {others}") from error


def _classes(names: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)
