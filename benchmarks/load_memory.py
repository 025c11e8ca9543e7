"""Measure the host memory of `ftkit.load_model` and `ftkit.shard` at stage 3, of `ftkit.save_model` and of `ftkit export`:

    python -m benchmarks.load_memory

It writes a random Llama folder of at least 1 GB. On 1 and on 2 gloo ranks it loads the folder, saves the sharded model, and
saves a checkpoint of weights, which a fresh process exports. It samples RssAnon of each process. On several
CPU ranks the shards are in shared memory, which the kernel counts as RssShmem. Both are reported, as an increase over the
process before the call. Their sum must not exceed 64 MiB, for a load the rank's own shard + 64 MiB. These 64 MiB cover the
staging: pieces of 8 MiB that are read, converted and written. Pages of mapped files (RssFile) are not counted: the
kernel drops them when it needs memory. Exits with 1 if a process exceeds the bound.
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
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers

import ftkit
from benchmarks.resident import status
from ftkit.engine.checkpoint.manifest import ENGINE_FOLDER
from ftkit.engine.checkpoint.safetensors import TensorFile, create_file
from ftkit.engine.checkpoint.sealed import write_contents
from ftkit.engine.model import ShardedModel
from ftkit.hf.save.export import export_checkpoint
from ftkit.hf.save.model import save_config

SPARE_BYTES = 64 << 20
SETTINGS = {"stage": 3, "activations": "recompute", "reshard_after_forward": True, "affinity": False, "kernels": "off"}


def write_folder(folder: Path, layers: int) -> int:
    """Write a random bf16 Llama, tensor by tensor; return the bytes of its weights."""
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=16,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    config.save_pretrained(folder)
    path = folder / "model.safetensors"
    create_file(path, [(name, tuple(p.shape), torch.bfloat16) for name, p in model.named_parameters()])
    with TensorFile(path, writable=True) as file:
        for name, parameter in model.named_parameters():
            file.write(name, 0, torch.randn(parameter.numel()) / 50)
    return path.stat().st_size


class Sampler:
    """Samples this process's anonymous and shared memory in a thread; `peak` is the largest increase, in bytes."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that the process still has would hide an increase
        self.before, self.peak = status(), {"RssAnon": 0, "RssShmem": 0, "sum": 0}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def increase(self) -> dict[str, int]:
        """Return the present increase, in bytes."""
        now = status()
        found = {kind: now[kind] - self.before[kind] for kind in ("RssAnon", "RssShmem")}
        return {**found, "sum": sum(found.values())}

    def _run(self) -> None:
        while not self._ended.wait(0.005):
            self.peak = {kind: max(size, self.peak[kind]) for kind, size in self.increase().items()}

    def end(self, bound: int) -> dict[str, Any]:
        """Stop sampling; return the figures, bytes."""
        self._ended.set()
        self._thread.join()
        return {"bound": bound, "peak": self.peak, "after": self.increase()}


def save_checkpoint(folder: Path, units: ShardedModel) -> None:
    """Save the weights as a checkpoint that `ftkit export` reads. A collective."""
    ftkit.save_checkpoint(folder / ENGINE_FOLDER, units)
    if units.comm.rank == 0:
        save_config(units.model, folder)  # type: ignore[arg-type]  # a transformers model
        write_contents(folder, apart=(ENGINE_FOLDER,))
    dist.barrier()


def rank_main(rank: int, world: int, results: str) -> None:
    """Load, shard and save as one rank, and write the figures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{results}/store{world}", rank=rank, world_size=world)
    # Imports and first uses do not belong to the figures.
    small = ftkit.shard(ftkit.load_model(f"{results}/small"), SETTINGS)
    ftkit.save_model(small, f"{results}/saved-small-{world}")
    save_checkpoint(Path(results) / f"checkpoint-small-{world}", small)
    sampler = Sampler()
    units = ftkit.shard(ftkit.load_model(f"{results}/model"), SETTINGS)
    load = sampler.end(units.state_bytes()["parameters"] + SPARE_BYTES)
    dist.barrier()
    sampler = Sampler()
    ftkit.save_model(units, f"{results}/saved-{world}")
    figures = {"load": load, "save": sampler.end(SPARE_BYTES)}
    save_checkpoint(Path(results) / f"checkpoint-{world}", units)
    (Path(results) / f"{world}-{rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def export_main(_: int, world: int, results: str) -> None:
    """Export the checkpoint of `world` ranks, and write the figures."""
    torch.set_num_threads(1)
    for size in ("-small", ""):
        sampler = Sampler()
        export_checkpoint(Path(f"{results}/checkpoint{size}-{world}"), Path(f"{results}/exported{size}-{world}"))
        figures = {"export": sampler.end(SPARE_BYTES)}
    (Path(results) / f"{world}-export.json").write_text(json.dumps(figures))


def report(file: Path) -> bool:
    """Print the figures of a process; return whether one exceeds its bound."""
    exceeded = False
    for call, found in json.loads(file.read_text()).items():
        sizes = {f"{when} {kind}": size for when in ("peak", "after") for kind, size in found[when].items()}
        text = ", ".join(f"{kind} {size / 2**20:.0f}" for kind, size in {"bound": found["bound"], **sizes}.items())
        print(f"{file.stem} {call}, MiB: {text}")
        exceeded = exceeded or found["peak"]["sum"] > found["bound"]
    return exceeded


def write_small(folder: Path) -> None:
    """Write a model of one narrow block."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "vocab_size": 64}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)


def main() -> int:
    """Measure with 1 and 2 ranks; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28, help="32 MiB of weights each")
    layers, exceeded = parser.parse_args().layers, 0
    with tempfile.TemporaryDirectory(prefix="ftkit-bench-") as name:
        folder = Path(name) / "model"
        folder.mkdir()
        write_small(Path(name) / "small")
        print(f"folder: {write_folder(folder, layers) / 1e9:.2f} GB")
        for world in (1, 2):
            torch.multiprocessing.spawn(rank_main, (world, name), nprocs=world)
            torch.multiprocessing.spawn(export_main, (world, name), nprocs=1)
            print(f"world {world}")
            exceeded += sum(report(Path(name) / f"{world}-{part}.json") for part in (*range(world), "export"))
    print("bound exceeded" if exceeded else "within the bound")
    return int(exceeded > 0)


if __name__ == "__main__":
    sys.exit(main())
