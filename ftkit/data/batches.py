"""Which samples make a step, and how they become tensors.

`StepOrder` is a function of (seed, epoch) alone, never of the world size, so that a run resumed on another number of ranks
sees the same data. It is drawn with numpy's frozen `RandomState`, which gives the same numbers in all versions.

`Collator` pads to the longest sample of the batch, on the right. Packed sequences say where their samples end by restarted
positions, or by boundaries for ftkit's attention; padding is then one more sample without labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ftkit.data.packing import boundaries_of
from ftkit.data.tokenize import IGNORED_LABEL
from ftkit.errors import UserError


class StepOrder(torch.utils.data.Sampler):
    """The order in which samples are seen, epoch by epoch.

    Without weights, every sample comes once per epoch. With weights, an epoch has as many samples as the data set, and
    source *s* gives its share `weights[s] / sum(weights)` of them: a source with more samples than its share draws
    some of them anew in each epoch, one with fewer repeats them.

    Args:
        rows: Number of samples.
        seed: The run's seed.
        sources: (rows,) integers, the source of each sample; not read without weights.
        weights: One positive number per source, or None.
    """

    def __init__(self, rows: int, *, seed: int, sources: Any = None, weights: Sequence[float] | None = None):
        self.rows, self.seed, self.epoch = rows, seed, 0
        self.members, self.weights = [np.arange(rows)], [1.0]
        if weights is not None:
            members = [np.flatnonzero(np.asarray(sources) == source) for source in range(len(weights))]
            self.weights = [float(weight) for weight, own in zip(weights, members) if len(own)]
            self.members = [own for own in members if len(own)]

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        return self.rows

    def __iter__(self) -> Iterator[int]:
        """Yield the sample numbers of the current epoch."""
        return iter(self.order(self.epoch).tolist())

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; DataLoaders of Accelerate call it."""
        self.epoch = epoch

    def order(self, epoch: int) -> np.ndarray:
        """Return the sample numbers of an epoch, (rows,) int64."""
        drawn = []
        for source, (members, count) in enumerate(zip(self.members, self._counts()), 1):
            random = self._random(epoch, source)
            rounds = math.ceil(count / len(members))  # no member comes again before all have come
            drawn.append(np.concatenate([random.permutation(members) for _ in range(rounds)])[:count])
        return np.concatenate(drawn)[self._random(epoch, 0).permutation(self.rows)]

    def _counts(self) -> np.ndarray:
        """Return how many samples of an epoch each source gives: its share, rounded by largest remainders."""
        shares = np.asarray(self.weights) / sum(self.weights) * self.rows
        counts = np.floor(shares).astype(np.int64)
        largest_remainders = np.argsort(counts - shares, kind="stable")
        counts[largest_remainders[: self.rows - counts.sum()]] += 1
        return counts

    def _random(self, *salt: int) -> np.random.RandomState:
        low, high = self.seed % 2**32, (self.seed >> 32) % 2**32
        return np.random.RandomState([low, high, *salt])


@dataclass(frozen=True)
class Collator:
    """Make a batch of tensors from samples, padded to the longest.

    Args:
        pad_token_id: Token that pads input_ids.
        decoder_inputs: Makes decoder_input_ids from (B, T) labels; None leaves that to the model.
        boundaries: Whether packed batches get an attention_mask of boundaries, for a model with ftkit's attention.
    """

    pad_token_id: int
    decoder_inputs: Callable[[torch.Tensor], torch.Tensor] | None = None
    boundaries: bool = False

    @classmethod
    def of(cls, tokenizer: Any, decoder_inputs: Callable | None = None, *, boundaries: bool = False) -> Collator:
        """Return a collator that pads with the tokenizer's padding token, or with its end-of-sequence token.

        Raises:
            UserError: The tokenizer has neither.
        """
        token = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        if token is None:
            raise UserError("the tokenizer has neither a padding nor an end-of-sequence token; set tokenizer.pad_token")
        return cls(token, decoder_inputs, boundaries)

    def __call__(self, samples: Sequence[dict]) -> dict[str, Any]:
        """Return the batch of B samples.

        Args:
            samples: Dictionaries with input_ids, labels and, if packed, position_ids.

        Returns:
            All int64: input_ids (B, T); labels (B, T), -100 where padded (of an encoder-decoder of their own length);
            decoder_input_ids if they are made here; attention_mask (B, T). If packed, instead of the mask: position_ids
            (B, T), use_cache=False and, with boundaries, attention_mask (B, 1, 1, S + 1) int32 (`boundaries_of`).
        """
        ids = [torch.as_tensor(sample["input_ids"], dtype=torch.int64) for sample in samples]
        labels = [torch.as_tensor(sample["labels"], dtype=torch.int64) for sample in samples]
        batch: dict[str, Any] = {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self.pad_token_id),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED_LABEL),
        }
        if self.decoder_inputs is not None:
            batch["decoder_input_ids"] = self.decoder_inputs(batch["labels"])
        if "position_ids" not in samples[0]:
            batch["attention_mask"] = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
            return batch
        longest = batch["input_ids"].shape[1]
        positions = [torch.as_tensor(sample["position_ids"], dtype=torch.int64) for sample in samples]
        padded = torch.stack([torch.cat([own, torch.arange(longest - len(own))]) for own in positions])
        # A cache, even an empty one, makes transformers overlook that the sequences are packed.
        batch |= {"position_ids": padded, "use_cache": False}
        if self.boundaries:
            batch["attention_mask"] = boundaries_of(padded)
        return batch
