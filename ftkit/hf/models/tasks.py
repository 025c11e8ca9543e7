"""Tasks, and the class of transformers that a folder or a configuration means for each."""

from __future__ import annotations

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
"""Task to the class of transformers that builds its model."""

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
"""Task to the class names of each model type."""


def check_task(task: str) -> None:
    """Raise for an unknown task.

    Raises:
        UserError: with the known ones.
    """
    if task != "auto" and task not in TASKS:
        raise UserError(f"task is {task!r}, one of auto, {', '.join(TASKS)} is needed")


def task_of(config: PretrainedConfig, where: str) -> str:
    """Return the task that a configuration's `architectures` name.

    A base model without a head, or a configuration that names nothing, becomes a language model where that is what its
    type is for.

    Args:
        config: configuration of the model.
        where: the folder, for the error.

    Raises:
        UserError: for a class that belongs to no task.
    """
    given: Any = getattr(config, "architectures", None) or [None]
    if not isinstance(given, list):
        raise UserError(f"{where}: architectures is {given!r}, a list of class names is needed")
    named = given[0]
    for task, names in _NAMES.items():
        if named is not None and named in _classes(names.get(config.model_type)):
            return task
    if config.is_encoder_decoder and config.model_type in _NAMES["seq2seq"]:
        headless = "seq2seq"
    elif config.model_type in _NAMES["causal-lm"] and config.model_type not in _NAMES["masked-lm"]:
        headless = "causal-lm"
    else:
        headless = None
    is_base = named is None or named in _classes(modeling_auto.MODEL_MAPPING_NAMES.get(config.model_type))
    if headless is None or not is_base:
        what = f"architectures is [{named}]" if named else "no architectures are given"
        raise UserError(f"{where}: {what}, from which no task follows: set task to {_listed(tasks_for(config))}")
    return headless


def tasks_for(config: PretrainedConfig) -> list[str]:
    """Return the tasks for which a model type has a class."""
    return [task for task, names in _NAMES.items() if config.model_type in names] + ["feature-extraction"]


def build(config: PretrainedConfig, task: str, where: str, **options: Any) -> Any:
    """Build the model of a task from its configuration, on the present default device.

    Args:
        config: configuration of the model.
        task: a task of `TASKS`.
        where: the folder, for the error.
        options: keyword arguments of `from_config`.

    Raises:
        UserError: if the model type has no class for the task.
    """
    try:
        return getattr(transformers, TASKS[task]).from_config(config, **options)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        others = ", ".join(other for other in tasks_for(config) if other != task)
        raise UserError(
            f"{where}: a {config.model_type} model has no form for task {task}; other tasks: {others}"
        ) from error


def _classes(names: Any) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
