"""What trains, saves and loads in `make bench-checkpoints`: ftkit on three tiers, FSDP2 with torch DCP, DeepSpeed ZeRO-3.

Each is used as its own documentation shows, in a loop without the Trainer, so that nothing but the engine is measured:

    engine = SAVERS[name].build(model, folder, rows)     a Llama in fp32 on the CPU; `folder` is for the NVMe tier
    engine.step(ids)                                     one step on this rank's rows; returns its loss
    engine.save(folder)                                  returns when this rank's part is written, by the engine's own word
    engine.begin(folder)                                 the same while training goes on: a `Pending`; None: it cannot
    engine.load(folder)                                  weights, state and counts, in a fresh set of processes

All compute in bf16 with fp32 masters and moments. What writes without syncing is synced by the caller, on its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

LEARNING_RATE = 1e-4
MAX_NORM = 1.0
LEAN = {"stage": 3, "activations": "recompute", "reshard_after_forward": True, "dtype": "bf16"}


class Pending(Protocol):
    """A save under way.

    Attributes:
        seconds: that the writing took, once it is done. blocked_seconds: of these, what updates waited; None: not known.
    """

    seconds: float
    blocked_seconds: float | None

    def poll(self) -> bool:
        """Return whether all ranks are done. A collective."""


class Ftkit:
    """ftkit: `Saving`, `load_checkpoint`. The checkpoint lies in a subfolder, where a Trainer has it."""

    def __init__(self, model: Any, folder: str, rows: Tensor, tiers: dict[str, str]) -> None:
        import ftkit

        where = {"nvme_dir": folder} if "nvme" in tiers.values() else {}
        settings = {**LEAN, **tiers, **where}
        self.units = ftkit.shard(model, settings, device=torch.device("cpu"), micro_batch_tokens=rows.numel())
        self.optimizer = ftkit.ShardedAdamW(self.units, lr=LEARNING_RATE, weight_decay=0.0)
        self.model = model

    @property
    def unit_bytes(self) -> int:
        """Bytes of the weights of one block, the widest, as they are gathered."""
        groups = [unit.weights.flats for unit in self.units.units]
        return max(sum(flat.layout.padded_numel * flat.dtype.itemsize for flat in group) for group in groups)

    def step(self, ids: Tensor) -> Tensor:
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        self.optimizer.scale(loss).backward()
        self.optimizer.clip_grad_norm_(MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def settle(self) -> None:
        self.optimizer.settle()

    def save(self, folder: Path) -> None:
        from ftkit.engine.checkpoint.saving import save_checkpoint

        save_checkpoint(folder / "ftkit", self.units, self.optimizer)

    def begin(self, folder: Path) -> Pending:
        from ftkit.engine.checkpoint.saving import Saving

        class Timed(Saving):
            """Measures the thread's writing, without publishing, and the time that updates waited for it."""

            seconds = blocked_seconds = 0.0

            def await_capture(self, flat: Any) -> None:
                began = time.perf_counter()
                super().await_capture(flat)
                self.blocked_seconds += time.perf_counter() - began

            def _write(self) -> None:
                began = time.perf_counter()
                super()._write()
                self.seconds = time.perf_counter() - began

        return Timed(folder / "ftkit", self.units, self.optimizer)

    def load(self, folder: Path) -> None:
        from ftkit.engine.checkpoint.loading import load_checkpoint

        load_checkpoint(folder / "ftkit", self.units, self.optimizer)

    def export(self, folder: Path) -> None:
        """Write the Hugging Face folder that a run ends with."""
        from ftkit.hf.save.model import save_model

        save_model(self.units, folder, self.optimizer, dtype=torch.bfloat16)

    def close(self) -> None:
        self.units.tiers.close()


class Fsdp2:
    """torch's `fully_shard`, saved and loaded by torch.distributed.checkpoint with its own state-dict functions."""

    def __init__(self, model: Any, folder: str, rows: Tensor) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}
        for block in model.model.layers:
            fully_shard(block, **how)
        fully_shard(model, **how)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
        self.group = dist.new_group(backend="gloo")  # of the thread that writes: the default group is the steps'

    def step(self, ids: Tensor) -> Tensor:
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach().float()

    def settle(self) -> None:
        pass

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(), checkpoint_id=folder)

    def begin(self, folder: Path) -> Pending:
        import torch.distributed.checkpoint as dcp

        began = time.perf_counter()
        return FuturePending(dcp.async_save(self._state(), checkpoint_id=folder, process_group=self.group), began)

    def load(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def close(self) -> None:
        pass


class FuturePending:
    """A save whose end a future tells."""

    blocked_seconds = None

    def __init__(self, future: Any, began: float) -> None:
        self.future, self.seconds = future, 0.0
        future.add_done_callback(lambda _: setattr(self, "seconds", time.perf_counter() - began))

    def poll(self) -> bool:
        done = torch.tensor(float(self.future.done()))
        dist.all_reduce(done, dist.ReduceOp.MIN)
        if done:
            self.future.result()
        return bool(done)


class Zero3:
    """DeepSpeed ZeRO-3: `save_checkpoint`, `load_checkpoint`; with `nvme` its optimizer state lies on the drive."""

    def __init__(self, model: Any, folder: str, rows: Tensor, *, nvme: bool) -> None:
        import deepspeed

        zero: dict[str, Any] = {"stage": 3}
        config: dict[str, Any] = {
            "zero_optimization": zero,
            "bf16": {"enabled": True},
            "train_micro_batch_size_per_gpu": len(rows),
            "gradient_accumulation_steps": 1,
            "gradient_clipping": MAX_NORM,
            "steps_per_print": 10**9,
        }
        hyper = {"lr": LEARNING_RATE, "weight_decay": 0.0}
        optimizer = None
        if nvme:
            zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder, "pin_memory": False, "buffer_count": 4}
            config["aio"] = {"block_size": 1 << 20, "queue_depth": 32, "thread_count": 2, "single_submit": False}
            config["optimizer"] = {"type": "AdamW", "params": hyper}
        else:
            optimizer = torch.optim.AdamW(model.parameters(), **hyper, fused=True)
        deepspeed.init_distributed("gloo")
        self.engine = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), optimizer=optimizer, config=config
        )[0]

    def step(self, ids: Tensor) -> Tensor:
        loss = self.engine(input_ids=ids, labels=ids, use_cache=False).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach().float()

    def settle(self) -> None:
        pass

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag="checkpoint")

    def begin(self, folder: Path) -> None:
        return None

    def load(self, folder: Path) -> None:
        path, _ = self.engine.load_checkpoint(str(folder))
        if path is None:
            raise RuntimeError("load_checkpoint returned no path")

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Saver:
    """One competitor; a `peer` needs the extra environment."""

    title: str
    build: Callable[[Any, str, Tensor], Any]
    ours: bool = False
    peer: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def _ours(title: str, **tiers: str) -> Saver:
    return Saver(title, lambda *given: Ftkit(*given, tiers), ours=True)


def _deepspeed(title: str, *, nvme: bool) -> Saver:
    return Saver(title, lambda *given: Zero3(*given, nvme=nvme), peer=True, environment={"DS_ACCELERATOR": "cpu"})


SAVERS = {
    "ftkit-device": _ours("ftkit, all on the device"),
    "ftkit-host": _ours("ftkit, gradients and state in host arenas", gradients="host", state="host"),
    "ftkit-nvme": _ours("ftkit, everything on NVMe", parameters="nvme", gradients="nvme", state="nvme", state_host_bytes=0),
    "fsdp2": Saver("FSDP2 with torch DCP", Fsdp2),
    "zero3": _deepspeed("DeepSpeed ZeRO-3", nvme=False),
    "zero3-nvme": _deepspeed("DeepSpeed ZeRO-3, state on NVMe", nvme=True),
}
