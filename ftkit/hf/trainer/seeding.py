"""Random numbers by (seed, step, number of the micro-batch in the global batch), not by rank.

Micro-batch j of rank r of W is number j * W + r of its step: one rank with W times the accumulation takes the same
micro-batches in the same order. Before each the random numbers of torch and numpy are seeded by that number, and restored
after it, so that dropout and noise do not depend on the number of ranks, and nothing outside sees a change. Python's own are
seeded by j: a step that takes a branch by `random.random()` takes it on all ranks.
`SeededCollator` does the same for a collator that draws (masks of a masked language model): by (seed, epoch, number of the
batch in the epoch). It counts the calls; a worker process of a loader makes every n-th batch.

Random numbers that a data set draws itself, as it gives a row, are left as they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import get_worker_info

STEPS, BATCHES = 0, 1
"""First numbers of a seed: of the random numbers of steps, and of the collation of batches."""


@contextmanager
def seeded(device: torch.device, *numbers: int, together: int | None = None) -> Iterator[None]:
    """Draw random numbers in the body that are a function of `numbers`; afterwards go on as if none had been drawn.

    Args:
        device: the device whose random state is seeded beside the host's.
        numbers: integers that the seeds are made of.
        together: stands for the last number in the seed of Python's own `random`, so that it is the same on all ranks, which
            take branches by it; None leaves the last number.

    Cost: two copies of the random states, about 0.1 ms.
    """
    before = random_state(device)
    low, high = _words(numbers)
    torch.default_generator.manual_seed(low + (high << 31))
    if device.type == "cuda":
        torch.cuda.manual_seed(low + (high << 31))
    np.random.seed(low)
    if together is not None:
        low, high = _words((*numbers[:-1], together))
    random.seed(low + (high << 32))
    try:
        yield
    finally:
        set_random_state(before, device)


def _words(numbers: Sequence[int]) -> tuple[int, int]:
    sequence = np.random.SeedSequence([abs(number) for number in numbers])
    low, high = (int(word) for word in sequence.generate_state(2, np.uint32))
    return low, high


class SeededCollator:
    """A collator whose random numbers depend on the batch, not on the rank that makes it.

    Args:
        collate: the collator.
        seed: seed of the run.
        rank: number of this process among those that make batches; its batch m is number m * ranks + rank of the epoch.
        ranks: number of processes that make batches.
        shared: whether worker processes collate.
    """

    def __init__(self, collate: Callable[[Any], Any], seed: int, rank: int, ranks: int, *, shared: bool = False) -> None:
        self.collate, self.seed, self.rank, self.ranks = collate, seed, rank, ranks
        self.place = torch.zeros(3, dtype=torch.int64)  # epochs begun, epoch, first batch
        if shared:  # workers that outlive an epoch see a new one here
            self.place.share_memory_()
        self.begun, self.calls = 0, 0

    def begin(self, epoch: int, first: int = 0) -> None:
        """Begin an epoch.

        Args:
            epoch: number of the epoch.
            first: number of this process's first batch; a resumed run does not collate those before.
        """
        self.place.copy_(torch.tensor([int(self.place[0]) + 1, epoch, first]))

    def __call__(self, rows: Any) -> Any:
        """Collate the rows of the next batch."""
        begun, epoch, first = self.place.tolist()
        if begun != self.begun:
            self.begun, self.calls = begun, 0
        worker = get_worker_info()
        each, own = (1, 0) if worker is None else (worker.num_workers, worker.id)
        number = (first + self.calls * each + own) * self.ranks + self.rank
        self.calls += 1
        with seeded(torch.device("cpu"), BATCHES, self.seed, epoch, number):
            return self.collate(rows)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all random numbers of this process, as plain data."""
    version, keys, gauss = random.getstate()
    kind, words, position, has_gauss, cached = cast(tuple[str, np.ndarray, int, int, float], np.random.get_state())
    state = {
        "torch": torch.get_rng_state(),
        "python": (version, list(keys), gauss),
        "numpy": (kind, torch.from_numpy(words.astype(np.int64)), position, has_gauss, cached),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Go back to what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
