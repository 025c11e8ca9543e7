"""Tasks, and the transformers class that a configuration selects for each."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PretrainedConfig

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
    classes = {task: _classes(config, task) for task in TASKS}
    base = classes.pop("feature-extraction")
    for task, names in classes.items():
        if named in names:
            return task
    if named is None or named in base:
        if config.is_encoder_decoder and classes["seq2seq"]:
            return "seq2seq"
        if classes["causal-lm"] and not classes["masked-lm"]:
            return "causal-lm"
    found = f"architectures is [{named}]" if named else "there are no architectures"
    possible = ", ".join([*(task for task, names in classes.items() if names), "feature-extraction"])
    raise UserError(f"{where}: {found}, and no task follows: set task to one of {possible}")


def build(config: PretrainedConfig, task: str, where: str, **options: Any) -> Any:
    """Build the model of a task of `TASKS` or "auto", on the current default device. See `from_config` for the options.

    Raises:
        UserError: No task follows from the configuration; `where` names its folder.
        ValueError: The model type has no class for the task.
    """
    task = task_of(config, where) if task == "auto" else task
    return getattr(transformers, TASKS[task]).from_config(config, **options)


def _classes(config: PretrainedConfig, task: str) -> list[str]:
    """Return the names of the classes that transformers has for a configuration and a task."""
    found = getattr(transformers, TASKS[task])._model_mapping.get(type(config), ())
    return [each.__name__ for each in (found if isinstance(found, tuple) else (found,))]
