"""Random numbers by (seed, step, number of the micro-batch in the global batch), not by rank.

Micro-batch j of rank r of W has the number j * W + r in its step: one rank with W times the accumulation takes the same
micro-batches in the same order. The random numbers of torch and numpy are seeded by that number before each micro-batch and
restored after it, so that dropout and noise do not depend on the number of ranks. Python's own are seeded by j: a step that
branches on `random.random()` does so on all ranks.

`SeededCollator` does the same for a collator that draws (masks of a masked language model): by (seed, epoch, number of the
batch in the epoch). It counts its calls; a worker process of a loader makes every n-th batch. Random numbers that a data set
draws itself are left as they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import DataLoader, get_worker_info

STEPS, BATCHES = 0, 1
"""First numbers of a seed: for the random numbers of steps, and for the collation of batches."""


@contextmanager
def seeded(device: torch.device, *numbers: int, together: int | None = None) -> Iterator[None]:
    """Draw random numbers in the body that are a function of `numbers`; restore the random state after it.

    Args:
        device: Device whose random state is seeded beside the host's.
        numbers: Integers that the seed is made of.
        together: Replaces the last number in the seed of Python's own `random`; None leaves the last number.

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
    low, high = np.random.SeedSequence([abs(number) for number in numbers]).generate_state(2, np.uint32)
    return int(low), int(high)


class SeededCollator:
    """A collator whose random numbers depend on the batch, not on the rank that makes it.

    Args:
        collate: The collator.
        seed: Seed of the run.
        rank: Number of this process among those that make batches; its batch m has the number m * ranks + rank.
        ranks: Number of processes that make batches.
        shared: Whether worker processes collate.
    """

    def __init__(self, collate: Callable[[Any], Any], seed: int, rank: int, ranks: int, *, shared: bool = False) -> None:
        self.collate, self.seed, self.rank, self.ranks = collate, seed, rank, ranks
        self.place = torch.zeros(3, dtype=torch.int64)  # epochs begun, epoch, first batch
        if shared:  # workers that outlive an epoch see the next one here
            self.place.share_memory_()
        self.begun, self.calls = 0, 0

    def begin(self, epoch: int, first: int = 0) -> None:
        """Begin an epoch.

        Args:
            epoch: Number of the epoch.
            first: Number of this process's first batch; a resumed run does not collate those before.
        """
        self.place.copy_(torch.tensor([int(self.place[0]) + 1, epoch, first]))

    def __call__(self, rows: Any) -> Any:
        """Collate the rows of the next batch."""
        begun, epoch, first = self.place.tolist()
        if begun != self.begun:
            self.begun, self.calls = begun, 0
        worker = get_worker_info()
        workers, own = (1, 0) if worker is None else (worker.num_workers, worker.id)
        number = (first + self.calls * workers + own) * self.ranks + self.rank
        self.calls += 1
        with seeded(torch.device("cpu"), BATCHES, self.seed, epoch, number):
            return self.collate(rows)


def seed_collator(loader: Any, seed: int, accelerator: Any) -> SeededCollator | None:
    """Replace the collator of accelerate's loader by a seeded one, and return that; None for a loader of another kind.

    Args:
        loader: The loader.
        seed: Seed of the run.
        accelerator: The accelerator of this rank.
    """
    base = getattr(loader, "base_dataloader", loader)
    if not isinstance(base, DataLoader):
        return None
    if not isinstance(base.collate_fn, SeededCollator):
        one = isinstance(loader, DataLoaderDispatcher)  # rank 0 makes all ranks' batches
        rank, ranks = (0, 1) if one else (accelerator.process_index, accelerator.num_processes)
        base.collate_fn = SeededCollator(base.collate_fn, seed, rank, ranks, shared=base.num_workers > 0)
    return base.collate_fn


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
    """Restore what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
