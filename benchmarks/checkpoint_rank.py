"""One rank of `make bench-checkpoints`. Started by `benchmarks.checkpoints` with one of two things to do:

    save    train, save three times at once, go on for two steps (whose losses are the mark), save three times while
            training goes on; ftkit also writes the model's folder
    load    build everything anew on any number of ranks, load, and take the same two steps; ftkit also loads once more,
            which tells reading from the system's first hand-out of memory

Each step sees the same rows, so that the losses move quickly and whatever was not restored shows. All clocks begin and
end at a barrier. After a save rank 0 syncs every file and folder on the save's time: what the engine has synced already
costs nothing again, and all are durable on equal terms. Each thing's peak of memory is taken apart (resident.py).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.disk import uncached
from benchmarks.resident import Watch, status
from benchmarks.savers import SAVERS
from benchmarks.shapes import VOCABULARY, llama
from benchmarks.warm import warm_memory

SPEC = json.loads(os.environ["BENCH_SPEC"])
FOLDER = Path(SPEC["folder"])
STEPS_AFTER = 2
"""The second shows what the moments are."""
LONGEST = 40
"""Steps under one save."""


def build(name: str) -> tuple[Any, Any, Tensor]:
    """Return the model, the engine around it, and this rank's rows."""
    torch.manual_seed(42)
    config = llama(SPEC["model"])
    model = LlamaForCausalLM(config)
    model.train()
    ids = torch.randint(0, VOCABULARY, (SPEC["rows"], SPEC["tokens"]), generator=torch.Generator().manual_seed(1234))
    rows = ids.chunk(dist.get_world_size())[dist.get_rank()]
    return config, SAVERS[name].build(model, SPEC["nvme"], rows), rows


def step(engine: Any, rows: Tensor) -> tuple[float, float]:
    """Make one step; return its seconds and the loss of the whole batch."""
    began = time.perf_counter()
    loss = engine.step(rows).clone().float()
    dist.all_reduce(loss)
    return time.perf_counter() - began, float(loss) / dist.get_world_size()


def synced(folder: Path) -> None:
    """Make all that lies in `folder` durable: rank 0 does it, and all ranks wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in (*folder.rglob("*"), folder, folder.parent):
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
    dist.barrier()


def save_at_once(engine: Any, folder: Path) -> dict[str, Any]:
    """Save with nothing else going on; return seconds and peaks."""
    engine.settle()
    with Watch() as watch:
        dist.barrier()
        began = time.perf_counter()
        engine.save(folder)
        synced(folder)
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "peaks": watch.peaks}


def save_in_training(engine: Any, rows: Tensor, folder: Path, plain_s: float) -> dict[str, Any] | None:
    """Save while steps are made; return what it took of them beside steps that take `plain_s` each."""
    with Watch() as watch:
        dist.barrier()
        began = time.perf_counter()
        pending = engine.begin(folder)
        if pending is None:
            return None
        call_s = time.perf_counter() - began
        steps = []
        done = False
        while not done and len(steps) < LONGEST:
            steps.append(step(engine, rows)[0])
            done = pending.poll()
        all_s = time.perf_counter() - began
        synced(folder)
        if not done:
            raise RuntimeError(f"a save was not done after {LONGEST} steps, {all_s:.0f} s")
    blocked = [pending.blocked_seconds] if pending.blocked_seconds is not None else []
    return {
        "seconds": pending.seconds,
        "call_s": call_s,
        "steps_s": steps,
        "longer_s": all_s - plain_s * len(steps),
        "waited_s": blocked[0] if blocked else None,
        "peaks": watch.peaks,
    }


def train_and_save(config: Any, engine: Any, rows: Tensor, record: dict[str, Any]) -> None:
    """Do all of 'save', noting into `record`."""
    with Watch() as watch:
        for _ in range(SPEC["warmup"]):
            step(engine, rows)
    record["beginning"] = {"peaks": watch.peaks}
    with Watch() as watch:
        made = [step(engine, rows) for _ in range(SPEC["steps"])]
        engine.settle()
    record["training"] = {"steps_s": [seconds for seconds, _ in made], "losses": [loss for _, loss in made]}
    record["training"]["peaks"] = watch.peaks
    record["saves"] = []
    for number in range(SPEC["rounds"]):
        if number and dist.get_rank() == 0:
            shutil.rmtree(FOLDER / f"once-{number - 1}")
            os.sync()
        record["saves"].append(save_at_once(engine, FOLDER / f"once-{number}"))
    record["saved"] = str(FOLDER / f"once-{SPEC['rounds'] - 1}")
    after = [step(engine, rows) for _ in range(STEPS_AFTER)]
    record["after"] = [loss for _, loss in after]
    plain_s = statistics.median(seconds for seconds, _ in made[1:])
    record["saves_in_training"] = []
    for number in range(SPEC["rounds"]):
        step(engine, rows)
        folder = FOLDER / f"under-way-{number}"
        told = save_in_training(engine, rows, folder, plain_s)
        if told is None:
            break
        record["saves_in_training"].append(told)
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
    if SAVERS[SPEC["engine"]].ours:
        record["unit_bytes"] = engine.unit_bytes
        finish(config, engine, Path(record["saved"]), record)


def finish(config: Any, engine: Any, saved: Path, record: dict[str, Any]) -> None:
    """Write the model's folder from all ranks, and make the checkpoint one that `ftkit export` takes."""
    from ftkit.engine.checkpoint.sealed import write_contents

    with Watch() as watch:
        began = time.perf_counter()
        engine.export(FOLDER / "model")
        record["export"] = {"seconds": time.perf_counter() - began}
    record["export"]["peaks"] = watch.peaks
    if dist.get_rank() == 0:
        shutil.rmtree(FOLDER / "model")
        config.save_pretrained(saved)
        write_contents(saved, apart=("ftkit",))


def load(engine: Any, folder: Path) -> dict[str, Any]:
    """Load; return seconds and peaks."""
    warm_memory(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) // dist.get_world_size())
    with Watch() as watch:
        dist.barrier()
        began = time.perf_counter()
        engine.load(folder)
        dist.barrier()
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "peaks": watch.peaks}


def load_and_train(engine: Any, rows: Tensor, record: dict[str, Any]) -> None:
    """Do all of 'load', noting into `record`."""
    folder = Path(SPEC["saved"])
    record["load"] = load(engine, folder)
    record["after"] = [step(engine, rows)[1] for _ in range(STEPS_AFTER)]
    if SAVERS[SPEC["engine"]].ours:
        if dist.get_rank() == 0:
            uncached(folder)
        record["again"] = load(engine, folder)  # into memory that the system has given already


def main() -> None:
    """Do it, and write `rank<r>.json`, with the error if there was one."""
    dist.init_process_group("gloo")
    record: dict[str, Any] = {}
    try:
        config, engine, rows = build(SPEC["engine"])
        record["start_peak_bytes"] = status()["VmHWM"]
        if SPEC["do"] == "save":
            train_and_save(config, engine, rows, record)
        else:
            load_and_train(engine, rows, record)
    except Exception as error:
        traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = str(error) or f"{where.line} ({Path(where.filename).name}, {where.name})"
        record["error"] = f"{type(error).__name__}: {said}"
    Path(SPEC["results"], f"rank{dist.get_rank()}.json").write_text(json.dumps(record))
    if "error" in record:
        os._exit(1)  # the others may wait in a collective: the launcher ends them
    dist.barrier()
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
