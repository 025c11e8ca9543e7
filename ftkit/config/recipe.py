"""A recipe: the facts of a run, read from YAML and checked before anything starts.

A recipe states facts: which model, which rows, how many tokens per step, how much memory may be used. The optional
section `engine:` forces what the plan otherwise derives. Each key is defined here once, with its unit and its default. All
problems of a recipe are reported at once, with file, line and key. This module does not import torch.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from ftkit.config.engine import Memory
from ftkit.config.errors import RecipeError, problems
from ftkit.config.optimizer import FOLLOWING, Optimizer
from ftkit.config.recipe_files import read_file, resolve
from ftkit.config.values import (
    Count,
    ExistingPath,
    Format,
    Fraction,
    Length,
    ModelName,
    NotNegative,
    PathText,
    Positive,
    Real,
    Section,
    Seed,
    Texts,
    as_list,
)
from ftkit.config.wording import counted
from ftkit.config.yaml_lines import Document, override
from ftkit.errors import UserError
from ftkit.spec.strategy import AUTO, OPEN, Strategy


class Model(Section):
    """The model to train: a folder or hub id, or a configuration to train from scratch."""

    name: ModelName | None = Field(None, description="folder or hub id; weights are read from it")
    revision: str | None = Field(None, description="branch, tag or commit of a hub id")
    config: ExistingPath | dict[str, Any] | None = Field(None, description="config.json or a mapping: train from scratch")
    tokenizer: ModelName | None = Field(None, description="folder or hub id; default: that of the model")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")

    @model_validator(mode="after")
    def _enough(self) -> Model:
        if (self.name is None) == (self.config is None):
            raise ValueError("needs either `name` (a folder or hub id), or `config` to train from scratch")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("a model from `config` needs a `tokenizer` (folder or hub id)")
        return self


class Rows(Section):
    """The keys that name a data set: a file, a folder of files, or a data set of the hub."""

    path: ExistingPath | None = Field(None, description="file or folder: JSONL, JSON, CSV, TSV, Parquet, Arrow")
    name: str | None = Field(None, description="hub data set: owner/set, or owner/set:configuration")
    split: str = Field("train", description="split of a hub data set")
    format: Format = Field("auto", description="format of a row; auto finds it from the columns")


class Source(Rows):
    """One data set."""

    weight: Positive | None = Field(None, description="how often its rows are drawn, relative to the other sources'")

    @model_validator(mode="after")
    def _one(self) -> Source:
        if (self.path is None) == (self.name is None):
            raise ValueError("needs one of `path` (a file) and `name` (a hub data set)")
        return self

    @property
    def label(self) -> str:
        """The source in a message."""
        return self.path or f"{self.name} ({self.split})"


class Data(Rows):
    """The rows to train on and how they become sequences."""

    sources: tuple[Source, ...] = Field((), description="several data sets, instead of path or name")
    sequence_tokens: Length = Field(1024, description="tokens of a sequence; longer samples are cut, or see `long_text`")
    long_text: Literal["split", "cut", "stop"] = Field("split", description="plain text that is longer than a sequence")
    packing: bool = Field(False, description="fill each sequence with several rows, positions restarting per row")
    loss_on: Literal["answers", "all"] = Field("answers", description="tokens that count in the loss")
    on_bad_row: Literal["stop", "skip"] = Field("stop", description="stop before training, or skip and count")
    cache_dir: PathText | None = Field(None, description="where prepared rows are kept; default: that of `datasets`")
    workers: Count | None = Field(None, description="processes that prepare rows; default: one a core, at most 8")

    @model_validator(mode="after")
    def _one(self) -> Data:
        if sum(given is not None for given in (self.path, self.name, self.sources or None)) != 1:
            raise ValueError("needs exactly one of `path` (a file), `name` (a hub data set) and `sources` (a list)")
        if self.sources and (self.split, self.format) != ("train", "auto"):
            raise ValueError("found `split` or `format` beside `sources`, each of which has its own; write it in those")
        if len({source.weight is None for source in self.sources}) > 1:
            raise ValueError("needs a weight for all `sources` or for none")
        return self

    @property
    def all_sources(self) -> tuple[Source, ...]:
        """The data sets as a list, also where only one was named."""
        return self.sources or (_source_of(self),)


class Eval(Rows):
    """Held-out rows, measured before, after and in between."""

    share: Annotated[Real, Field(gt=0, lt=1)] | None = Field(None, description="share of the rows held out, 0 to 1")
    every_steps: Count | None = Field(None, description="optimizer steps between two evaluations")
    every_epoch: bool = Field(False, description="also at the end of each epoch")
    metrics: Annotated[tuple[Literal["loss", "perplexity", "accuracy"], ...], BeforeValidator(as_list)] = Field(
        ("loss",), description="what is computed of them; one, or a list"
    )
    max_rows: Count | None = Field(None, description="most rows: a share is that small; of path or name, the first samples")
    best: Literal["loss", "perplexity", "accuracy"] = Field(
        "loss", description="metric that names the best evaluation, for patience and the checkpoint that stays"
    )
    patience: Count | None = Field(
        None, description="evaluations without a new best after which training ends; default: never"
    )

    @model_validator(mode="after")
    def _one(self) -> Eval:
        if sum(given is not None for given in (self.path, self.name, self.share)) != 1:
            raise ValueError(
                "needs one of `path` (a file), `name` (a hub data set) and `share` (a held-out share, such as 0.05)"
            )
        if self.every_steps is not None and self.every_epoch:
            raise ValueError("found both `every_steps` and `every_epoch`; keep one")
        if self.patience is not None and self.every_steps is None and not self.every_epoch:
            raise ValueError("found `patience` without evaluations during training; set `every_steps` or `every_epoch`")
        return self

    @property
    def source(self) -> Source | None:
        """The data set that is held out; None for a share of the rows."""
        return None if self.share is not None else _source_of(self)


def _source_of(section: Rows) -> Source:
    """Return the source that a section names by its own keys, which were checked when the section was read."""
    return Source.model_construct(weight=None, **{name: getattr(section, name) for name in Rows.model_fields})


class Train(Section):
    """How long to train, and with what arithmetic."""

    batch_tokens: Count = Field(65536, description="tokens of one optimizer step, all ranks together; whole sequences")
    epochs: Positive = Field(1.0, description="passes over the data")
    max_steps: Count | None = Field(None, description="optimizer steps; wins over epochs")
    seed: Seed = Field(17, description="of weights, dropout and the order of samples")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field("auto", description="of compute; master weights are fp32")
    neftune_noise_alpha: NotNegative | None = Field(None, description="noise on the embeddings (NEFTune)")
    label_smoothing: Fraction = Field(0.0, description="share of the probability spread over all tokens")
    on_divergence: Literal["continue", "skip", "stop"] = Field(
        "continue", description="on a NaN loss or a spike: warn; warn and skip the step; stop"
    )


class Adapter(Section):
    """LoRA instead of all parameters."""

    rank: Count = Field(16, description="inner width of each adapter")
    alpha: Positive = Field(32.0, description="an adapter's output is multiplied by alpha / rank")
    dropout: Fraction = Field(0.0, description="share of an adapter's inputs left out in training")
    targets: Literal["all-linear"] | tuple[str, ...] = Field("all-linear", description="modules that get an adapter")
    modules_to_save: Texts = Field((), description="modules trained whole beside the adapters")


class Output(Section):
    """Where results go and how often."""

    dir: PathText = Field(description="folder of the run; created if absent")
    save_every_steps: Count | None = Field(None, description="optimizer steps between checkpoints; default: none")
    keep: Count | None = Field(None, description="number of last checkpoints that stay, beside the best; default: all")
    logging_steps: Count = Field(1, description="optimizer steps between lines of metrics.jsonl")
    report_to: Texts = Field((), description="tensorboard, wandb and others of the HF Trainer")


class Show(Section):
    """Questions that the model answers before and after training, and at each evaluation."""

    prompts: Texts = Field((), description="questions, as a user would ask them")
    path: ExistingPath | None = Field(None, description="take the first rows of a file")
    count: Count = Field(3, description="rows taken from `path`")
    max_new_tokens: Count = Field(64, description="length of an answer, in tokens")

    @model_validator(mode="after")
    def _one(self) -> Show:
        if bool(self.prompts) == (self.path is not None):
            raise ValueError("needs one of `prompts` (a list of questions) and `path` (a file with rows)")
        return self


OTHER_SECTIONS = {"dtype": "train.dtype", "master": "optimizer.master", "convert_state": "optimizer.convert_state"}
"""Choices of the strategy that a recipe has outside `engine:`."""


class Recipe(Section):
    """All facts of one run."""

    task: Literal["causal-lm", "seq2seq"] = Field("causal-lm", description="decoder; or encoder and decoder, such as T5")
    ranks: Literal["auto"] | Count = Field("auto", description="processes on this node; auto = one per GPU, or 1")
    hardware: PathText = Field("auto", description="profile with the rates of the plan: its name, or a file NAME.yaml")
    model: Model
    data: Data
    eval: Eval | None = None
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    adapter: Adapter | None = None
    memory: Memory = Memory()
    engine: Strategy = OPEN
    output: Output
    show: Show | None = None

    @model_validator(mode="after")
    def _whole_sequences(self) -> Recipe:
        batch, sequence = self.train.batch_tokens, self.data.sequence_tokens
        if batch % sequence and "batch_tokens" not in self.train.model_fields_set:
            sequences = 1 << (max(1, batch // sequence).bit_length() - 1)  # a power of 2: most numbers of ranks divide it
            train = self.train.model_copy(update={"batch_tokens": sequences * sequence})
            object.__setattr__(self, "train", train)  # the recipe is frozen once it is made
        elif batch % sequence:
            raise ValueError(
                f"train.batch_tokens is {batch} and data.sequence_tokens {sequence}: a step needs whole sequences; "
                f"set train.batch_tokens to {_nearest_multiple(batch, sequence)}"
            )
        return self

    @model_validator(mode="after")
    def _together(self) -> Recipe:
        if self.task == "seq2seq" and self.data.packing:
            raise ValueError("data.packing works with task: causal-lm only; set data.packing to false")
        if self.task == "seq2seq" and self.data.loss_on != "answers":
            raise ValueError(f"data.loss_on is {self.data.loss_on} and task: seq2seq trains on answers only; remove it")
        for key, home in OTHER_SECTIONS.items():
            if (given := getattr(self.engine, key)) != getattr(OPEN, key):
                raise ValueError(f"engine.{key} is {given}; in a recipe, set {home}")
        return self

    @model_validator(mode="after")
    def _evaluations_of_the_schedule(self) -> Recipe:
        name, held_out = self.optimizer.schedule, self.eval
        if name in FOLLOWING and not (held_out and (held_out.every_steps or held_out.every_epoch)):
            raise ValueError(
                f"optimizer.schedule {name} follows the held-out loss; set eval.every_steps or eval.every_epoch"
            )
        return self

    def inputs(self) -> list[str]:
        """Return the files, folders and hub names that the run reads."""
        sections = (*self.data.all_sources, self.eval, self.show)
        paths = [section.path for section in sections if section is not None]
        named = [self.model.name, self.model.tokenizer, self.model.config, *paths]
        return [name for name in named if isinstance(name, str)]

    def dump(self) -> str:
        """Return the recipe as YAML, with every default."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def load(path_or_name: str, overrides: list[str] | None = None, *, check_files: bool = True) -> Recipe:
    """Read and check a recipe.

    Args:
        path_or_name: A YAML file, or the name of a packaged recipe.
        overrides: `key.sub=value`, set over the file in order. Values are read as YAML.
        check_files: Also check that the files it names exist.

    Raises:
        RecipeError: With all problems at once.
    """
    path, text = read_file(path_or_name)
    return _checked(resolve(text, path_or_name, path), overrides, check_files=check_files)


def parse(text: str, source: str, overrides: list[str] | None = None, *, check_files: bool = True) -> Recipe:
    """Check the text of a recipe, as `load` does. `source` is the name of the file; `extends` is relative to its folder."""
    return _checked(resolve(text, source), overrides, check_files=check_files)


def _checked(document: Document, overrides: list[str] | None, *, check_files: bool) -> Recipe:
    for assignment in overrides or []:
        override(document, assignment)
    found = list(document.problems)
    if document.readable:
        try:
            recipe = Recipe.model_validate(document.values, context={"check_files": check_files})
            if not found:
                return recipe
        except ValidationError as error:
            found += problems(error, document, Recipe)
    raise RecipeError(found)


def steps_of(recipe: Recipe, sequences: int, step_sequences: int) -> int:
    """Return the optimizer steps of a run with so many sequences in an epoch, and in a step over all ranks."""
    return recipe.train.max_steps or math.ceil(recipe.train.epochs * (sequences // step_sequences))


def split_batch(recipe: Recipe, ranks: int) -> tuple[int, int]:
    """Divide the sequences of a step among the ranks of the whole run, and those of a rank among micro-batches.

    Returns:
        Sequences of a rank in one forward, and micro-batches in one optimizer step.

    Raises:
        UserError: The sequences cannot be divided evenly.
    """
    sequence_tokens = recipe.data.sequence_tokens
    sequences = recipe.train.batch_tokens // sequence_tokens
    micro_batch, accumulation = recipe.engine.micro_batch, recipe.engine.accumulation
    forced = ranks * (1 if micro_batch == AUTO else micro_batch) * (1 if accumulation == AUTO else accumulation)
    fitting = forced if AUTO not in (micro_batch, accumulation) else _nearest_multiple(sequences, forced)
    if sequences != fitting:
        raise UserError(
            f"a step has {counted(sequences, 'sequence')} (train.batch_tokens {recipe.train.batch_tokens} / "
            f"data.sequence_tokens {sequence_tokens}), which {counted(ranks, 'rank')} x micro_batch {micro_batch} x "
            f"accumulation {accumulation} cannot share evenly; set train.batch_tokens to {fitting * sequence_tokens}"
        )
    each = sequences // ranks
    if micro_batch != AUTO:
        return micro_batch, each // micro_batch
    if accumulation != AUTO:
        return each // accumulation, accumulation
    most = min(each, AUTO_MICRO_BATCH_TOKENS // sequence_tokens)
    micro = max((count for count in range(1, most + 1) if each % count == 0), default=1)
    return micro, each // micro


AUTO_MICRO_BATCH_TOKENS = 4096
"""Tokens of one forward on one rank if nothing is forced."""


def _nearest_multiple(number: int, step: int) -> int:
    return max(1, (2 * number + step) // (2 * step)) * step
