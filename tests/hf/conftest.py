"""What the Hugging Face tests share: ranks that have imported everything once, and stock runs that serve many tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import pytest

from tests.hf.runs import Outcome, Run, train
from tests.worlds import World

# Imports before the fork are not in the seconds of a case.
multiprocessing.get_context("forkserver").set_forkserver_preload(
    [
        *("torch.distributed", "transformers.models.llama.modeling_llama", "transformers.trainer", "peft"),
        "ftkit.hf.trainer.trainer",
    ]
)


@pytest.fixture(scope="session")
def stock(world1: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], Outcome]:
    """`stock(run)` is the outcome of a run under transformers' own Trainer, in one process; each run is made once."""
    # The key holds addresses of objects in a run: each run is kept, so that no other object gets the same address.
    made: dict[str, tuple[Run, Outcome]] = {}

    def outcome(run: Run) -> Outcome:
        key = repr(run)
        if key not in made:
            made[key] = run, world1.run(train, "stock", str(tmp_path_factory.mktemp("stock")), run)[0]
        return made[key][1]

    return outcome
