"""Measure the host memory of `ftkit.load_model` and `ftkit.shard` at stage 3, compared with one shard per rank:

    python -m benchmarks.load_memory

It writes a random Llama folder of at least 1 GB, loads it on 1 and on 2 gloo ranks, and samples RssAnon of each rank. On
the CPU the shards are in shared memory, which the kernel counts as RssShmem. Both are reported, as an increase over the
process before `load_model`; their sum must not exceed the rank's own shard + 64 MiB. Pages of the mapped files (RssFile)
are not counted: the kernel drops them when it needs memory. Exits with 1 if a rank exceeds the bound.
"""

from __future__ import annotations

import argparse
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
from ftkit.engine.checkpoint.safetensors import TensorFile, create_file

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

    def end(self) -> None:
        """Stop sampling."""
        self._ended.set()
        self._thread.join()


def rank_main(rank: int, world: int, results: str) -> None:
    """Load and shard as one rank, and write the figures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{results}/store{world}", rank=rank, world_size=world)
    ftkit.shard(ftkit.load_model(f"{results}/small"), SETTINGS)  # imports and first uses do not belong to the load
    dist.barrier()
    sampler = Sampler()
    units = ftkit.shard(ftkit.load_model(f"{results}/model"), SETTINGS)
    sampler.end()
    figures: dict[str, Any] = {"shard": units.state_bytes()["parameters"], "peak": sampler.peak, "after": sampler.increase()}
    (Path(results) / f"{world}-{rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def write_small(folder: Path) -> None:
    """Write a model of one narrow block."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "vocab_size": 64}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)


def main() -> int:
    """Measure on 1 and 2 ranks; return the exit code."""
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
            for rank in range(world):
                found = json.loads((Path(name) / f"{world}-{rank}.json").read_text())
                bound = found["shard"] + SPARE_BYTES
                exceeded += found["peak"]["sum"] > bound
                mib = {f"{when} {kind}": size / 2**20 for when in ("peak", "after") for kind, size in found[when].items()}
                mib = {"shard": found["shard"] / 2**20, "bound": bound / 2**20, **mib}
                print(f"world {world}, rank {rank}, MiB:", ", ".join(f"{kind} {size:.0f}" for kind, size in mib.items()))
    print("bound exceeded" if exceeded else "within the bound")
    return int(exceeded > 0)


if __name__ == "__main__":
    sys.exit(main())
