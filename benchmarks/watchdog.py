"""`make bench-watchdog`: the overhead of the watchdog.

Two CPU ranks train a small Llama at stage 3. Half of the steps run without the watchdog: their collectives are neither
recorded nor compared, their waits do not wake up in between, and the watchdog's thread does nothing. The benchmark prints
the median time of both kinds of steps, and the median ratio of neighbouring steps. It also times the record of a collective
and a look of the thread by themselves: on a box with other work these figures are the more exact ones.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

import ftkit
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.comm.ledger import Ledger
from ftkit.engine.comm.shared_stage import Ranks, SharedStage
from ftkit.launch.local import loopback_store

RANKS = 2


class Unwatched(Communicator):
    """Collectives that are not recorded, and whose waits do not wake up in between."""

    def _in(self, operation: str, of: str = "") -> AbstractContextManager[None]:  # type: ignore[override]  # the same
        return nullcontext()

    def _wait(self, work: dist.Work | None) -> None:
        if work is not None:
            work.wait()


class Unlabelled(SharedStage):
    """A stage whose barriers compare nothing."""

    def meet(self, comm: Ranks) -> None:
        comm.meet()


def turns(steps: int) -> dict[str, Any]:
    """Be one rank: train, half of the steps unwatched, and return the seconds of each kind."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=8, num_key_value_heads=4))
    units = ftkit.shard(model, {"stage": 3})
    optimizer = ftkit.ShardedAdamW(units, lr=1e-4)
    comm, ids = units.comm, torch.randint(0, 1024, (2, 128))
    watchdog = comm._watchdog
    assert watchdog is not None
    assert comm._stage is not None
    look = watchdog._tick
    kinds: dict[str, tuple[type, type, Callable[[], None]]] = {
        "watched": (Communicator, SharedStage, look),
        "unwatched": (Unwatched, Unlabelled, lambda: None),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    collectives = 0
    for step in range(2 * steps + 8):
        kind = "watched" if (step % 4) in (0, 3) else "unwatched"
        comm.barrier("the end of a step")
        comm.__class__, comm._stage.__class__, watchdog._tick = kinds[kind]  # type: ignore[assignment,method-assign]  # the two kinds
        comm.ledger.leave()
        entered, began = comm.ledger.entered, time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 8:  # the first ones allocate
            seconds[kind].append(time.perf_counter() - began)
        collectives = max(collectives, comm.ledger.entered - entered)
        comm.__class__, comm._stage.__class__ = Communicator, SharedStage  # type: ignore[assignment]  # as above
    watchdog._tick = look  # type: ignore[method-assign]  # as above
    return {
        **{kind: statistics.median(each) for kind, each in seconds.items()},
        "ratio": statistics.median(one / two for one, two in zip(*seconds.values())),  # of neighbours
        "collectives": collectives,
        "note": timed(lambda: noted(comm.ledger), 2000),
        "look": timed(look, 200),
    }


def noted(ledger: Ledger) -> None:
    """Record one collective, as `Passage` does, and make the header that ranks compare."""
    ledger.enter("all-gather", "model.layers.0")
    ledger.header()
    ledger.leave()


def timed(act: Callable[[], None], times: int) -> float:
    """Return the median seconds of an act."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def rank(number: int, port: int, steps: int, folder: str) -> None:
    """Join the other rank, and write what was found."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    dist.init_process_group("gloo")
    found = turns(steps)
    if number == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of each kind")
    steps = parser.parse_args(arguments).steps
    store = loopback_store()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank, (store.port, steps, folder), nprocs=RANKS)
        found = json.loads(Path(folder, "found.json").read_text())
    step = found["unwatched"]
    print(f"a step, median of {steps}: {1e3 * found['watched']:.2f} ms watched, {1e3 * step:.2f} ms unwatched; "
          f"median ratio of neighbours {found['ratio']:.4f}")
    noting = found["collectives"] * found["note"] / step
    print(f"noting {found['collectives']} collectives of {1e6 * found['note']:.1f} us: {100 * noting:.3f} % of it; "
          f"a look of {1e6 * found['look']:.0f} us each second: {100 * found['look']:.3f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
