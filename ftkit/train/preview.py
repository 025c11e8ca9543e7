"""A recipe's data before training: counts, warnings, and some rows as the model gets them.

`preview` prepares the data as a run does and leaves them in the cache for it. `ftkit data` prints the result
or writes it as a page (`report/data_view.py`). A notebook shows the object itself.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from ftkit.config.recipe import Recipe, load
from ftkit.data.prepare import Prepared
from ftkit.data.preview import Findings, Shown, row_at, sequence_of
from ftkit.data.report import Checks, Warned, stops_of
from ftkit.errors import UserError
from ftkit.hf.load.model import generation_config
from ftkit.report import data_view
from ftkit.train.build import load_tokenizer, prepare_rows

ROWS_SHOWN = 3
WARNINGS_SHOWN = 4
"""Kinds of warnings of which a row is shown beside the first ones."""


class Preview(Findings):
    """Facts of a recipe's data before training. A notebook shows it as a picture."""

    def __repr__(self) -> str:
        text = io.StringIO()
        console = Console(file=text, width=110, color_system=None, highlight=False, emoji=False, force_jupyter=False)
        self.show(console, rows=False)
        return text.getvalue().rstrip()

    def _repr_html_(self) -> str:
        return data_view.fragment(self)

    def show(self, console: Console, *, rows: bool = True) -> None:
        """Print the counts and warnings, and the rows as tokens if asked."""
        data_view.show(self, console, rows=rows)

    def page(self) -> str:
        """Return one HTML file that loads nothing, in light and dark."""
        return data_view.render(self)


def preview(recipe: str | Path, *, settings: Sequence[str] = (), rows: int = ROWS_SHOWN) -> Preview:
    """Prepare a recipe's data as a run does, and return counts, warnings and some rows.

    Args:
        recipe: A YAML file, or the name of a packaged recipe.
        settings: `key.sub=value`, laid over the recipe in order.
        rows: Rows (or packed sequences) to show, beside one for each kind of warning.

    Raises:
        UserError: The recipe or the tokenizer cannot be used. Data that a run refuses are no error here: the result has
            the reason in `refused`.
    """
    title, known = f"data of {Path(recipe).name}", load(str(recipe), list(settings))
    tokenizer = load_tokenizer(known.model)
    prepared, refused = _prepared(known, tokenizer)
    if prepared is None:
        return Preview(title, None, None, (), refused, (), known.data.sequence_tokens)
    warnings = tuple(prepared.warnings(tokenizer, _stops(known)))
    shown = tuple(_shown(prepared, warnings, Checks.of(tokenizer), known, rows))
    report, held_out = prepared.report, prepared.held_out_report
    return Preview(title, report, held_out, warnings, refused, shown, known.data.sequence_tokens)


def _stops(recipe: Recipe) -> tuple[int, ...]:
    """Return the tokens at which the model stops generating; none if its configuration is not here, as data need none."""
    model, remote = recipe.model, recipe.model.trust_remote_code
    with suppress(UserError):
        config = generation_config(model.name, config=model.config, revision=model.revision, trust_remote_code=remote)
        return stops_of(config)
    return ()


def _prepared(recipe: Recipe, tokenizer: Any) -> tuple[Prepared | None, str]:
    """Return the rows and why a run would refuse them; then they are those that `on_bad_row: skip` keeps, or None."""
    refused = ""
    for on_bad_row in dict.fromkeys((recipe.data.on_bad_row, "skip")):
        data = recipe.data.model_copy(update={"on_bad_row": on_bad_row})
        try:
            return prepare_rows(recipe.model_copy(update={"data": data}), tokenizer), refused
        except UserError as error:
            refused = refused or str(error)
    return None, refused


def _shown(prepared: Prepared, warnings: Sequence[Warned], checks: Checks, recipe: Recipe, count: int) -> list[Shown]:
    """Return the first rows, and one for each kind of warning."""
    dataset = prepared.train
    packed = "position_ids" in dataset.column_names
    chosen = dict.fromkeys(range(min(count, len(dataset))), "")
    for warned in [each for each in warnings if each.places and each.kind not in ("unusable", "overlap")][:WARNINGS_SHOWN]:
        number = row_at(dataset, warned.places[0].partition(", as ")[0])
        if number is not None:
            chosen[number] = f"{chosen.get(number, '')} · {warned.kind.replace('_', ' ')}"
    noun = "sequence" if packed else "sample"
    length = recipe.data.sequence_tokens if packed else 0
    seq2seq = recipe.task == "seq2seq"
    return [
        sequence_of(checks, dataset[number], f"{noun} {number + 1} of {len(dataset)}{why}", length, seq2seq=seq2seq)
        for number, why in chosen.items()
    ]
