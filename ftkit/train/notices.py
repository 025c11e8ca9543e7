"""What a user should know of a run before its first step, and would not see from the numbers.

What must not run is refused where it is read. Cost: a few lines on the screen.
"""

from __future__ import annotations

from collections.abc import Sequence

from ftkit.config.recipe import Recipe, steps_of
from ftkit.config.wording import counted
from ftkit.data.faults import Fault
from ftkit.data.report import Report
from ftkit.train.callbacks import Question


def notices(
    recipe: Recipe,
    report: Report,
    sequences: int,
    step_sequences: int,
    faults: Sequence[Fault] = (),
    positions: int | None = None,
    tokenizer_tokens: int | None = None,
    asked: Sequence[Question] = (),
    left_out: Sequence[str] = (),
) -> list[str]:
    """Return the lines to show before the first step.

    Args:
        recipe: The facts.
        report: What became of the rows.
        sequences: Sequences of one epoch.
        step_sequences: Sequences of one optimizer step, all ranks together.
        faults: What is wrong with the rows, though they can be trained on.
        positions: Positions that the model's configuration names; None where it names none.
        tokenizer_tokens: The longest text that the tokenizer's folder names (model_max_length), in tokens.
        asked: The questions of `show`.
        left_out: Which rows are not trained on.
    """
    lines = [f"warning: {fault}" for fault in faults if fault.kind != "unusable"]  # those the report names
    if report.rendering == "plain" and recipe.task == "causal-lm" and {each.format for each in report.sources} != {"text"}:
        glue = "glue (a line break; nothing for prompt/completion)"
        lines.append(f"no chat template: question, {glue} and answer as plain text")
    if rest := sequences % step_sequences:
        of = f"{rest} of {counted(sequences, 'sequence')} {'is' if rest == 1 else 'are'}"
        lines.append(f"{of} left over in each epoch: a step takes {step_sequences}")
    lines += left_out
    steps = steps_of(recipe, sequences, step_sequences)
    warmup_steps = recipe.optimizer.warmup_steps
    if warmup_steps >= steps > 0:
        lines.append(
            f"warning: optimizer.warmup_steps is {warmup_steps} and the run has {counted(steps, 'step')}: the learning rate "
            "never comes to its peak"
        )
    if positions and recipe.data.sequence_tokens > positions:
        lines.append(
            f"warning: data.sequence_tokens is {recipe.data.sequence_tokens} and the model has {positions} "
            "positions (max_position_embeddings): positions beyond these are untrained"
        )
    longest = min(report.lengths.most, recipe.data.sequence_tokens)
    if tokenizer_tokens and longest > tokenizer_tokens:
        lines.append(
            f"warning: samples have up to {longest} tokens, and the tokenizer's model_max_length is {tokenizer_tokens}: "
            "tokens beyond it are trained on all the same"
        )
    if recipe.output.save_every_steps is None:
        lines.append(
            "no checkpoints will be saved (output.save_every_steps is not set), except one if the run is asked to end"
        )
    return lines
