"""`ftkit generate`, `ftkit eval` and `ftkit export`: commands on a model or checkpoint."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ftkit.cli.options import (
    DataName,
    Dtype,
    Json,
    ModelName,
    Nproc,
    RemoteCode,
    Task,
    echo_json,
    rank_count,
    say,
    start_ranks,
)
from ftkit.errors import UserError


def generate(
    model: ModelName,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Default: the lines of stdin.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Sample from the most likely tokens of this probability.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of sampling.")] = 0,
    nproc: Nproc = None,
    as_json: Json = False,
) -> None:
    """Answer prompts with a base or fine-tuned model. With --nproc above 1, the ranks shard its parameters."""
    asked = prompts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not asked:
        raise UserError("no prompt: give one or more after the model, or write them to stdin, one per line")
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    answers = _on_ranks("ftkit.train.generate:answers", (model, asked, settings), nproc)
    if as_json:
        echo_json([{"prompt": prompt, "answer": answer} for prompt, answer in zip(asked, answers)])
        return
    for prompt, answer in zip(asked, answers):
        typer.echo(answer if len(asked) == 1 else f"> {prompt}\n{answer}\n")


def eval_model(
    model: ModelName,
    data: DataName,
    nproc: Nproc = None,
    sequence_tokens: Annotated[
        int, typer.Option("--sequence-tokens", min=3, help="Longest sequence. Longer rows are cut, longer texts split.")
    ] = 2048,
    as_json: Json = False,
) -> None:
    """Print loss (nats per label token) and perplexity of a model on rows of text, prompts or chats.

    Labels are the answers only, as in training: prompts and user turns are masked. With --nproc above 1, the ranks shard the
    model's parameters.
    """
    found = asdict(_on_ranks("ftkit.train.generate:evaluation", (model, data, sequence_tokens), nproc))
    if as_json:
        echo_json(found)
    else:
        typer.echo(f"loss {found['loss']:.4f}, perplexity {found['perplexity']:.3f}, {found['tokens']:,} label tokens")


def _on_ranks(entry: str, arguments: tuple[Any, ...], nproc: int | None) -> Any:
    """Call a function of `ftkit.train.generate` in this process, or in several ranks."""
    ranks = rank_count(nproc)
    if ranks > 1:
        return start_ranks(entry, (ranks, *arguments), ranks)
    from ftkit.launch.ranks import Stop
    from ftkit.train import generate as functions

    return getattr(functions, entry.partition(":")[2])(Stop(), 1, *arguments)


def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Folder checkpoint-N of a run.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FOLDER", help="Folder for the model.")],
    dtype: Annotated[Dtype | None, typer.Option("--dtype", help="Default: the dtype of the original model files.")] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Largest safetensors file, such as 500MB or 5GB.")
    ] = "5GB",
    task: Annotated[Task, typer.Option("--task", help="Kind of model.")] = Task.causal_lm,
    merge_adapter: Annotated[
        bool, typer.Option("--merge-adapter", help="Merge a LoRA adapter into its base, in host memory.")
    ] = False,
    base: Annotated[
        str | None, typer.Option("--base", metavar="MODEL", help="Base of the adapter. Default: the one that it names.")
    ] = None,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder, for `from_pretrained`.

    Tensors are copied one by one. Only --merge-adapter loads the model.
    """
    if base is not None and not merge_adapter:
        raise UserError("--base needs --merge-adapter: without it, nothing of the base is written")
    from accelerate.utils.modeling import convert_file_size_to_int

    from ftkit.hf.save.export import export_checkpoint
    from ftkit.hf.save.merge import merge_adapter as merge

    try:
        shard_bytes = convert_file_size_to_int(max_shard_size)
    except ValueError as error:
        raise UserError(f"--max-shard-size: {error}") from None
    options: dict[str, Any] = {"dtype": dtype.value if dtype is not None else None, "shard_bytes": shard_bytes}
    options |= {"task": task.value, "trust_remote_code": trust_remote_code}
    if merge_adapter:
        numel = merge(checkpoint, out, base=base, **options)
    else:
        numel = export_checkpoint(checkpoint, out, **options)
    say(f"{out}: {numel:,} parameters")
