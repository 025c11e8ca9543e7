"""`make bench-memory`: host memory of loading, saving and exporting a model.

A random bf16 Llama folder is loaded and sharded at stage 3, saved by `ftkit.save_model`, and exported from a checkpoint, on
1 and on 2 gloo ranks. RssAnon and RssShmem of each process are sampled; their sum may grow by 64 MiB at most (in a load by
the rank's own shard + 64 MiB). Mapped files (RssFile) are not counted: the kernel drops them when it needs memory.

Exits with 1 if a bound is exceeded.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

import ftkit
from benchmarks.shapes import SHAPES, write_model
from ftkit.engine.checkpoint.manifest import ENGINE_FOLDER
from ftkit.engine.checkpoint.sealed import write_contents
from ftkit.engine.model import ShardedModel
from ftkit.hf.save.export import export_checkpoint
from ftkit.hf.save.model import save_config
from ftkit.plan.memory import MIB

SPARE_BYTES = 64 * MIB
"""Staging: pieces of 8 MiB that are read, converted and written."""
SETTINGS = {"stage": 3, "activations": "recompute", "reshard_after_forward": True, "affinity": False, "kernels": "off"}


class Sampler:
    """Samples this process's anonymous and shared memory; `peak` is the largest increase since the start, in bytes."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that the process still has would hide an increase
        self.before, self.peak = self._used(), 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _used(self) -> int:
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        return sum(int(words[1]) << 10 for words in lines if words[0] in ("RssAnon:", "RssShmem:"))

    def _run(self) -> None:
        while not self._ended.wait(0.005):
            self.peak = max(self.peak, self._used() - self.before)

    def end(self) -> int:
        """Stop sampling and return the peak."""
        self._ended.set()
        self._thread.join()
        return self.peak


def save_checkpoint(folder: Path, units: ShardedModel) -> None:
    """Save the weights as a checkpoint that `ftkit export` reads. A collective."""
    ftkit.save_checkpoint(folder / ENGINE_FOLDER, units)
    if units.comm.rank == 0:
        save_config(units.model, folder)
        write_contents(folder, apart=(ENGINE_FOLDER,))
    dist.barrier()


def files_main(rank: int, world: int, scratch: str) -> None:
    """Load, shard and save as one rank; write (peak, bound) of each call."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store{world}", rank=rank, world_size=world)
    figures = {}
    for size in ("small", "model"):  # the small one first: imports and first uses do not count
        sampler = Sampler()
        units = ftkit.shard(ftkit.load_model(f"{scratch}/{size}"), SETTINGS)
        figures["load_model and shard"] = sampler.end(), units.state_bytes()["parameters"] + SPARE_BYTES
        dist.barrier()
        sampler = Sampler()
        ftkit.save_model(units, f"{scratch}/saved-{size}-{world}")
        figures["save_model"] = sampler.end(), SPARE_BYTES
        save_checkpoint(Path(scratch, f"checkpoint-{size}-{world}"), units)
    Path(scratch, f"{world} ranks, rank {rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def export_main(_: int, world: int, scratch: str) -> None:
    """Export the checkpoint of `world` ranks; write (peak, bound)."""
    torch.set_num_threads(1)
    figures = {}
    for size in ("small", "model"):
        sampler = Sampler()
        export_checkpoint(Path(f"{scratch}/checkpoint-{size}-{world}"), Path(f"{scratch}/exported-{size}-{world}"))
        figures["export"] = sampler.end(), SPARE_BYTES
    Path(scratch, f"{world} ranks, export.json").write_text(json.dumps(figures))


def main() -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="700m")
    options, exceeded = parser.parse_args(), 0
    with tempfile.TemporaryDirectory(prefix="ftkit-bench-") as scratch:
        for name, size in (("small", "13m"), ("model", options.model)):
            write_model(size, Path(scratch, name))
        for world in (1, 2):
            torch.multiprocessing.spawn(files_main, (world, scratch), nprocs=world)
            torch.multiprocessing.spawn(export_main, (world, scratch), nprocs=1)
        for file in sorted(Path(scratch).glob("*.json")):
            for call, (peak, bound) in json.loads(file.read_text()).items():
                exceeded += peak > bound
                print(f"{file.stem}, {call}: peak {peak / MIB:.0f} MiB, bound {bound / MIB:.0f} MiB")
    print("bound exceeded" if exceeded else "within the bounds")
    return int(exceeded > 0)


if __name__ == "__main__":
    sys.exit(main())
