"""Random numbers by (seed, step, number of the micro-batch in the global batch), not by rank.

Micro-batch j of rank r of W has the number j * W + r in its step: one rank with W times the accumulation takes the same
micro-batches in the same order. Python's own random numbers are seeded by j: a step that branches on `random.random()` does
so on all ranks.

`SeededCollator` seeds a collator that draws (masks of a masked language model) by (seed, epoch, number of the batch in the
epoch). Random numbers that a data set draws itself are left as they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
        numbers: Integers from 0 that the seed is made of.
        together: Replaces the last number in the seed of Python's own `random`; None leaves the last number.

    Cost: two copies of the random states.
    """
    before, seed = random_state(device), _seed(*numbers)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed if together is None else _seed(*numbers[:-1], together))
    try:
        yield
    finally:
        set_random_state(before, device)


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


class SeededCollator:
    """A collator whose random numbers depend on the batch, not on the rank that makes it.

    It counts its calls in an epoch; a worker process of a loader makes every n-th batch.

    Args:
        collate: The collator.
        seed: Seed of the run.
        rank: Number of this process among those that make batches; its batch m has the number m * ranks + rank.
        ranks: Number of processes that make batches.
    """

    def __init__(self, collate: Callable[[Any], Any], seed: int, rank: int, ranks: int) -> None:
        self.collate, self.seed, self.rank, self.ranks = collate, seed, rank, ranks
        self.place = torch.zeros(2, dtype=torch.int64).share_memory_()  # for workers that outlive an epoch
        self.counted, self.calls = [0, 0], 0  # the place for which calls are counted

    def begin(self, epoch: int, first: int = 0) -> None:
        """Begin an epoch with this process's batch number `first`: a resumed run does not collate those before."""
        self.place.copy_(torch.tensor([epoch, first]))
        self.calls = 0

    def __call__(self, rows: Any) -> Any:
        """Collate the rows of the next batch."""
        place = self.place.tolist()
        if place != self.counted:
            self.counted, self.calls = place, 0
        worker = get_worker_info()
        workers, own = (1, 0) if worker is None else (worker.num_workers, worker.id)
        epoch, first = place
        number = (first + self.calls * workers + own) * self.ranks + self.rank
        self.calls += 1
        with seeded(torch.device("cpu"), BATCHES, self.seed, epoch, number):
            return self.collate(rows)


def seed_collator(loader: Any, seed: int, accelerator: Any) -> SeededCollator | None:
    """Replace the collator of accelerate's loader by a seeded one, and return that; None for a loader of another kind."""
    base = getattr(loader, "base_dataloader", loader)
    if not isinstance(base, DataLoader):
        return None
    one = isinstance(loader, DataLoaderDispatcher)  # rank 0 makes all ranks' batches
    rank, ranks = (0, 1) if one else (accelerator.process_index, accelerator.num_processes)
    if not isinstance(base.collate_fn, SeededCollator):  # a user's method may return the same loader again
        base.collate_fn = SeededCollator(base.collate_fn, seed, rank, ranks)
    return base.collate_fn


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all random numbers of this process, as plain data."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore a state that `random_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
