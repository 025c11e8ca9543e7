"""A recipe's data before training: what becomes of the rows, a few of them as the model gets them, and what is wrong.

`preview` prepares the data as a run would (and leaves them in the cache for it), so what is shown is what is trained on.
Where a run would refuse them, it says why, and shows the first rows as far as they can be made into tokens; only what no
row survives is an error here too: a missing file, a template that cannot be masked.

`ftkit data` shows it on the terminal (`report/data_screen.py`) and as a page (`report/data_page.py`); a notebook shows the
object itself. All rows are looked at for faults, once, when they are prepared; what is drawn of them is a handful.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import GenerationConfig

from ftkit.config.recipe import Recipe, load, parse
from ftkit.data.build_once import RefusedError
from ftkit.data.columns import without
from ftkit.data.faults import Fault, Marks, stops_of
from ftkit.data.findings import Findings
from ftkit.data.formats import BadRowError, detect, parse_record
from ftkit.data.preparation import ROWS_LOOKED_AT
from ftkit.data.prepare import sources_of
from ftkit.data.preview import Sample, Shown, row_at, sample_of, sequence_of
from ftkit.data.sources import Source
from ftkit.data.template import Rendering
from ftkit.data.tokenize import IGNORED_LABEL, Tokenise
from ftkit.errors import UserError
from ftkit.hf.load.model import generation_config
from ftkit.report import data_page, data_screen
from ftkit.train.run_rows import Rows, load_tokenizer, prepare_rows

ROWS_SHOWN = 3
FAULTS_SHOWN = 4
"""Kinds of faults of which a row is shown beside the first ones."""


class Preview(Findings):
    """What is known of a recipe's data before training; a notebook shows it as a picture."""

    def __repr__(self) -> str:
        """Return it without its rows, as lines."""
        told = io.StringIO()
        console = Console(file=told, width=110, color_system=None, highlight=False, emoji=False, force_jupyter=False)
        self.show(console, rows=False)
        return told.getvalue().rstrip()

    def _repr_html_(self) -> str:
        return data_page.fragment(self)

    def show(self, console: Console, *, rows: bool = True) -> None:
        """Print it.

        Args:
            console: Where to; without colours the brackets and names still tell everything.
            rows: Whether rows are shown as tokens.
        """
        data_screen.show(self, console, rows=rows)

    def page(self) -> str:
        """Return it as one HTML file that needs no other, in light and dark."""
        return data_page.render(self)


def preview(
    recipe: Recipe | Mapping[str, Any] | str | Path, *, settings: Sequence[str] = (), rows: int = ROWS_SHOWN
) -> Preview:
    """Prepare a recipe's data as a run would, and return what a person should see of them.

    Args:
        recipe: A YAML file, the name of a packaged recipe, a dictionary, or a recipe that was read.
        settings: `key.sub=value`, laid over the recipe in order; not over one that was read.
        rows: How many rows (or packed sequences) to show, beside one for each kind of fault.

    Raises:
        UserError: The recipe, the tokenizer or the files cannot be used; see `ftkit.data.prepare.prepare`.
    """
    title = f"data of {Path(recipe).name}" if isinstance(recipe, (str, Path)) else "data of a recipe"
    facts = _facts(recipe, settings)
    tokenizer = load_tokenizer(facts.model)
    marks = Marks.of(tokenizer)
    prepared, refused = _prepared(facts, tokenizer)
    notes = tuple(_notes(tokenizer))
    if prepared is None:
        shown = tuple(_straight(facts, tokenizer, marks, rows))
        return Preview(title, None, None, (), refused, shown, facts.data.sequence_tokens, notes)
    faults = prepared.faults(tokenizer, stops_of(_generation_config(facts)))
    apart = prepared.prepared_held_out
    shown = tuple(_rows(prepared, faults, marks, facts, rows))
    report = prepared.prepared.report
    held_out = None if apart is None else apart.report
    return Preview(title, report, held_out, tuple(faults), refused, shown, facts.data.sequence_tokens, notes)


def _facts(recipe: Recipe | Mapping[str, Any] | str | Path, settings: Sequence[str]) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        return parse(json.dumps(recipe), "recipe", list(settings))  # JSON is YAML
    return load(str(recipe), list(settings))


def _prepared(recipe: Recipe, tokenizer: Any) -> tuple[Rows | None, str]:
    """Return the rows, without the unusable ones where a run would refuse them, and why it would."""
    try:
        return prepare_rows(recipe, tokenizer), ""
    except RefusedError as error:
        refused = str(error)
    if recipe.data.on_bad_row == "stop":
        tolerant = recipe.data.model_copy(update={"on_bad_row": "skip"})
        try:
            return prepare_rows(recipe.model_copy(update={"data": tolerant}), tokenizer), refused
        except RefusedError as error:
            refused = str(error)
    return None, refused


def _generation_config(recipe: Recipe) -> GenerationConfig | None:
    """Return how the run's model would generate; None where no configuration is here, as the data alone need none."""
    model = recipe.model
    try:
        return generation_config(
            model.name, config=model.config, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except UserError:
        return None


def _notes(tokenizer: Any) -> list[str]:
    """Return what a person may wonder about, though nothing is wrong."""
    notes = []
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id) and tokenizer.eos_token_id is not None:
        notes.append(
            "the tokenizer pads with its end-of-sequence token. ftkit masks padding by its place, so the ends of answers "
            "are trained on; a collator that masks by token would mask them too"
        )
    return notes


def _rows(prepared: Rows, faults: list[Fault], marks: Marks, recipe: Recipe, count: int) -> list[Shown]:
    """Return the first rows, and one of each kind of fault."""
    dataset = prepared.prepared.dataset
    packed = "position_ids" in dataset.column_names
    noun = "sequence" if packed else "sample"
    chosen = {number: f"{noun} {number + 1:,} of {len(dataset):,}" for number in range(min(count, len(dataset)))}
    told = [fault for fault in faults if fault.places and fault.kind not in ("unusable", "overlap")][:FAULTS_SHOWN]
    for fault in told:
        number = row_at(dataset, fault.places[0].partition(", as ")[0])
        if number is not None:
            title = chosen.get(number, f"{noun} {number + 1:,} of {len(dataset):,}")
            chosen[number] = f"{title} · {fault.kind.replace('_', ' ')}"
    room = recipe.data.sequence_tokens if packed else 0
    seq2seq = recipe.task == "seq2seq"
    return [sequence_of(marks, dataset[number], title, room, seq2seq=seq2seq) for number, title in chosen.items()]


def _straight(recipe: Recipe, tokenizer: Any, marks: Marks, count: int) -> list[Shown]:
    """Return the first rows of each source of the refused part as tokens, whether they can be trained on or not."""
    shown, ignored = [], frozenset(recipe.data.ignore_columns)
    for source in _refused_sources(recipe, tokenizer):
        rows = list(islice(source.rows(), count))
        parsed, problems = [], []
        for row in islice(source.rows(), ROWS_LOOKED_AT):
            try:
                if row.problem:
                    raise BadRowError(row.problem)
                parsed.append(parse_record(row.record))
                problems.append("")
            except BadRowError as error:
                problems.append(str(error))
        if not parsed:  # no format can be told: their rows stand there with what is wrong with them
            for row, problem in zip(rows, problems):
                shown.append(Shown("cannot be read", (sample_of(marks, [], [], row.place, problem=problem),)))
            continue
        tokenise = Tokenise(
            Rendering.of(tokenizer),
            marks,
            detect([without(row, ignored, set()) for row in parsed], source.label, source.format),
            recipe.data.sequence_tokens,
            "all" if recipe.data.loss_on == "all" else "marks",  # rows are shown whatever the marks cover
            recipe.task,
            recipe.data.long_text,
            ignored,
        )
        for row in rows:
            shown.append(Shown("cannot be trained on", (_one(tokenise, marks, row.place, row.record, row.problem),)))
    return shown


def _refused_sources(recipe: Recipe, tokenizer: Any) -> list[Source]:
    """Return the sources of the part that a run refuses: those to train on, or the held-out file where those are good."""
    if recipe.eval is not None and recipe.eval.path is not None:
        data = recipe.data.model_copy(update={"on_bad_row": "skip"})
        try:
            prepare_rows(recipe.model_copy(update={"data": data, "eval": None}), tokenizer)
        except RefusedError:
            return sources_of(recipe.data)
        return [Source(path=recipe.eval.path)]
    return sources_of(recipe.data)


def _one(tokenise: Tokenise, marks: Marks, place: str, record: str, problem: str) -> Sample:
    """Return one row as far as it can be made into tokens."""
    made = tokenise({"place": [place], "record": [record], "problem": [problem]})
    problem = made["problem"][0].removeprefix(f"{place}: ")
    ids, labels = made["input_ids"][0], made["labels"][0]
    if tokenise.task == "seq2seq":
        return sample_of(marks, ids, None, place, problem=problem)
    if not ids:
        try:
            rendered, labels = tokenise.labelled(tokenise.read(record)[0])
            ids, labels = rendered.ids[: tokenise.sequence_tokens], labels[: tokenise.sequence_tokens]
            labels = [IGNORED_LABEL, *labels[1:]]
        except BadRowError:
            return sample_of(marks, [], [], place, problem=problem)
    return sample_of(marks, ids, labels, place, problem=problem)
