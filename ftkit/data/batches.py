"""Which samples make a step, and how they become tensors.

`StepOrder` is the order of samples: a function of (seed, epoch) alone, never of the world size, so that a run resumed
on another number of ranks sees the same data. Accelerate deals consecutive batches to the ranks, so the samples of a
step are the same whatever the number of ranks, as long as the global batch is. The order is drawn with numpy's frozen
`RandomState` stream: it stays the same across versions of numpy and torch.

`Collator` pads to the longest of the batch, on the right. For packed sequences the restarted positions are the
mask (see `ftkit.data.packing`), or boundaries, and padding is one more sample, with no labels. Labels of an
encoder-decoder batch have a length of their own; the model makes `decoder_input_ids` from them, or the collator does
where the model will not see the labels (label smoothing).

Refused: order by length here (Trainer has it), padding on the left (positions would shift; rows that are padded themselves
have an attention_mask, which is kept), columns that nobody reads.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch

from ftkit.data.packing import boundaries_of
from ftkit.data.tokenize import IGNORED_LABEL
from ftkit.errors import UserError


class StepOrder(torch.utils.data.Sampler):
    """The order in which samples are seen, epoch by epoch.

    Without weights, every sample comes once an epoch. With weights, an epoch has as many samples as the data set, and
    source *s* gives its share `weights[s] / sum(weights)` of them, exact to one sample: a source with more samples than
    its share gives other ones each epoch, one with fewer repeats, each sample once before any comes again.

    Args:
        rows: number of samples
        seed: the run's seed
        sources: (rows,) integers, which source a sample came from; needed with weights
        weights: one positive number for each source, or None

    Raises:
        UserError: weights that do not match the sources
    """

    def __init__(
        self,
        rows: int,
        *,
        seed: int,
        sources: Sequence[int] | np.ndarray | None = None,
        weights: Sequence[float] | None = None,
    ):
        self.rows, self.seed, self.epoch = rows, seed, 0
        self.members, self.weights = [np.arange(rows)], [1.0]
        if weights is None:
            return
        if sources is None or len(sources) != rows:
            raise UserError(f"{len(weights)} weights need the source of each of the {rows} samples; found none")
        numbers = np.asarray(sources)
        self.members = [np.flatnonzero(numbers == source) for source in range(len(weights))]
        self.weights = [float(weight) for weight in weights]
        for source, (members, weight) in enumerate(zip(self.members, self.weights)):
            if not weight > 0 or not len(members):
                raise UserError(f"source {source}: weight {weight}, {len(members)} samples; both must be above 0")

    @classmethod
    def of(cls, dataset: datasets.Dataset, *, seed: int, weights: Sequence[float] | None = None) -> StepOrder:
        """Make the order of a prepared data set, whose column `source` is there when it has several sources."""
        sources = np.asarray(dataset["source"][:]) if "source" in dataset.column_names else None
        if sources is None and weights is not None:
            weights = None
        return cls(len(dataset), seed=seed, sources=sources, weights=weights)

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        return self.rows

    def __iter__(self) -> Iterator[int]:
        """Yield the sample numbers of the current epoch."""
        return iter(self.order(self.epoch).tolist())

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration gives; DataLoaders of Accelerate call it."""
        self.epoch = epoch

    def order(self, epoch: int) -> np.ndarray:
        """Return the sample numbers of an epoch, (rows,) int64."""
        drawn = [
            self.draw(members, count, [epoch, source + 1])
            for source, (members, count) in enumerate(zip(self.members, self.counts()))
        ]
        return np.concatenate(drawn)[self.random([epoch, 0]).permutation(self.rows)]

    def counts(self) -> list[int]:
        """Return how many samples of an epoch each source gives."""
        shares = np.asarray(self.weights) / sum(self.weights) * self.rows
        counts = np.floor(shares).astype(np.int64)
        largest_remainders = np.argsort(counts - shares, kind="stable")
        counts[largest_remainders[: self.rows - counts.sum()]] += 1
        return [int(count) for count in counts]

    def draw(self, members: np.ndarray, count: int, salt: list[int]) -> np.ndarray:
        """Return `count` of the members in random order, none again before all have come."""
        random, rounds = self.random(salt), -(-count // len(members)) if len(members) else 0
        if not rounds:
            return members[:0]
        return np.concatenate([random.permutation(members) for _ in range(rounds)])[:count]

    def random(self, salt: list[int]) -> np.random.RandomState:
        """Return the random stream of (seed, salt)."""
        low, high = self.seed % 2**32, (self.seed >> 32) % 2**32
        return np.random.RandomState([low, high, *salt])


READ = ("input_ids", "labels", "attention_mask", "position_ids")
"""Columns of samples that become tensors."""
NOTES = ("place", "source")
"""Columns of prepared data that say where a sample is from."""


@dataclass(frozen=True)
class Collator:
    """Make a batch of tensors from samples, padded to the longest.

    Args:
        pad_token_id: what input_ids are padded with
        multiple_tokens: lengths are rounded up to a multiple of this (8 suits tensor cores)
        decoder_inputs: makes decoder_input_ids from (B, T) labels; None leaves that to the model
        boundaries: packed batches get an attention_mask of boundaries, for a model with ftkit's attention
    """

    pad_token_id: int
    multiple_tokens: int = 1
    decoder_inputs: Callable[[torch.Tensor], torch.Tensor] | None = None
    boundaries: bool = False

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        multiple_tokens: int = 1,
        decoder_inputs: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        boundaries: bool = False,
    ) -> Collator:
        """Take the padding token of a tokenizer, or its end-of-sequence token where it has none.

        Raises:
            UserError: the tokenizer has neither
        """
        token = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        if token is None:
            raise UserError("the tokenizer has neither a padding nor an end-of-sequence token; set tokenizer.pad_token")
        return cls(token, multiple_tokens, decoder_inputs, boundaries)

    def __call__(self, samples: Sequence[dict]) -> dict[str, Any]:
        """Return the batch of B samples.

        Args:
            samples: dictionaries with input_ids, labels and, if packed, position_ids; or an attention_mask, 0 where a
                sample is padded itself

        Returns:
            input_ids (B, T) int64, labels (B, T) int64 with -100 where padded (encoder-decoder: of their own length),
            decoder_input_ids like them where they are made here,
            and either attention_mask (B, T) int64, or, if packed, position_ids (B, T) int64, use_cache=False and perhaps
            attention_mask (B, 1, 1, S + 1) int32 (see `ftkit.data.packing.boundaries_of`).

        Raises:
            UserError: a sample without input_ids or labels, or with a column of which nothing would be made
        """
        _check_columns(samples)
        ids = [torch.as_tensor(sample["input_ids"], dtype=torch.int64) for sample in samples]
        labels = [torch.as_tensor(sample["labels"], dtype=torch.int64) for sample in samples]
        batch: dict[str, Any] = {"input_ids": self.padded(ids, self.pad_token_id)}
        batch["labels"] = self.padded(labels, IGNORED_LABEL)
        if self.decoder_inputs is not None:
            batch["decoder_input_ids"] = self.decoder_inputs(batch["labels"])
        if "position_ids" in samples[0]:
            positions = torch.arange(batch["input_ids"].shape[1]).repeat(len(samples), 1)
            for row, sample in enumerate(samples):
                own = torch.as_tensor(sample["position_ids"], dtype=torch.int64)
                positions[row, len(own) :] -= len(own)
                positions[row, : len(own)] = own
            # A cache, even an empty one, makes transformers overlook that the sequences are packed.
            packed = {"attention_mask": boundaries_of(positions)} if self.boundaries else {}
            return {**batch, "position_ids": positions, "use_cache": False, **packed}
        batch["attention_mask"] = self.padded([_mask_of(sample, row) for sample, row in zip(samples, ids)], 0)
        return batch

    def padded(self, rows: list[torch.Tensor], filler: int) -> torch.Tensor:
        """Stack 1-D rows into (B, T), filled on the right."""
        longest = max(len(row) for row in rows)
        longest += -longest % self.multiple_tokens
        stacked = rows[0].new_full((len(rows), longest), filler)
        for number, row in enumerate(rows):
            stacked[number, : len(row)] = row
        return stacked


def _check_columns(samples: Sequence[dict]) -> None:
    """Raise for a column that is not there, for one that nobody reads, and for a mask beside positions."""
    packed = "position_ids" in samples[0]
    for sample in samples:
        there = ", ".join(map(str, sample))
        for name in READ[:2] if not packed else (*READ[:2], READ[3]):
            if name not in sample:
                close = difflib.get_close_matches(name, map(str, sample), 1)
                meant = f"did you mean {close[0]!r}? " if close else ""
                raise UserError(f"a batch: a row has no {name!r}; {meant}It has {there}")
        for name in sample:
            if name not in (*READ, *NOTES) or (name == READ[3] and not packed):
                close = difflib.get_close_matches(str(name), READ, 1)
                meant = f"did you mean {close[0]!r}? " if close and close[0] not in sample else ""
                raise UserError(
                    f"a batch: rows have {name!r}, of which ftkit's Collator makes nothing; {meant}Correct the name, remove "
                    "the column, or use a collator that reads it"
                )
        if packed and not torch.as_tensor(sample.get("attention_mask", 1)).all():
            raise UserError(
                "a batch: rows have position_ids, and an attention_mask with zeros, which is not read beside them: cut the "
                "masked tokens off"
            )


def _mask_of(sample: dict, ids: torch.Tensor) -> torch.Tensor:
    """Return the attention mask of a sample: its own, or ones.

    Raises:
        UserError: it has another length than the tokens
    """
    mask = torch.as_tensor(sample["attention_mask"], dtype=ids.dtype) if "attention_mask" in sample else torch.ones_like(ids)
    if mask.shape != ids.shape:
        raise UserError(f"a batch: a row has {len(ids)} input_ids and an attention_mask of {list(mask.shape)}")
    return mask
