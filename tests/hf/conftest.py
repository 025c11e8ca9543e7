"""What the Hugging Face tests share: ranks that have imported everything once, and stock runs that serve many tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import tests.worlds
from tests.hf.runs import Outcome, Run, train
from tests.worlds import World

tests.worlds._context.set_forkserver_preload(
    [
        *("torch.distributed", "transformers.models.llama.modeling_llama", "transformers.trainer", "peft"),
        "ftkit.hf.trainer.trainer",
    ]
)


@pytest.fixture(scope="session")
def stock(world1: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], Outcome]:
    """`stock(run)` is the outcome of a run under transformers' own Trainer, in one process; each run is made once."""
    made: dict[str, Outcome] = {}

    def outcome(run: Run) -> Outcome:
        key = repr(run)
        if key not in made:
            made[key] = world1.run(train, "stock", str(tmp_path_factory.mktemp("stock")), run)[0]
        return made[key]

    return outcome
