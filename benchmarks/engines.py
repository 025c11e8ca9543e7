"""The engines that are compared: what each adds to the same `TrainingArguments`.

Two peers do not start on CPU ranks without a small change, made here. accelerate applies an FSDP plugin only on GPUs
(on a CPU `fsdp=True` silently trains DDP). transformers and accelerate disagree about which of them starts DeepSpeed's
process group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Engine:
    """One engine.

    Args:
        arguments: Returns keywords for TrainingArguments, given a folder for the engine's files.
        ours: Whether ftkit's Trainer trains.
        peer: Whether DeepSpeed's environment is needed.
        environment: Environment variables of the ranks.
    """

    arguments: Callable[[str], dict[str, Any]]
    ours: bool = False
    peer: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def _ours(optim: str = "adamw_torch_fused", **settings: Any) -> Callable[[str], dict[str, Any]]:
    def arguments(folder: str) -> dict[str, Any]:
        given = {**settings, "nvme_dir": folder} if "nvme" in settings.values() else settings or "auto"
        return {"ftkit": given, "optim": optim}

    return arguments


def _fsdp2(folder: str) -> dict[str, Any]:
    from accelerate.state import AcceleratorState, DistributedType

    original = AcceleratorState.__init__

    def with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)

    AcceleratorState.__init__ = with_fsdp
    return {
        "fsdp": True,
        "fsdp_config": {"version": 2, "reshard_after_forward": True, "state_dict_type": "SHARDED_STATE_DICT"},
    }


def _zero3(folder: str, **zero: Any) -> dict[str, Any]:
    import transformers.training_args
    from accelerate.state import DistributedType, PartialState

    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_CPU)
    config = {
        "zero_optimization": {"stage": 3, **zero},
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "thread_count": 2, "single_submit": False, "overlap_events": True},
        "bf16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 10**9,
    }
    return {"deepspeed": config, "use_cpu": False, "ddp_backend": None}


def _zero3_host(folder: str) -> dict[str, Any]:
    return _zero3(folder, offload_optimizer={"device": "cpu", "pin_memory": False})


def _zero3_nvme(folder: str) -> dict[str, Any]:
    return _zero3(folder, offload_optimizer={"device": "nvme", "nvme_path": folder, "pin_memory": False, "buffer_count": 4})


_LEAN = {"stage": 3, "activations": "recompute", "reshard_after_forward": True}
_HOST = {**_LEAN, "gradients": "host", "state": "host", "update": "deferred"}
_NVME = {**_LEAN, "state": "nvme", "state_host_bytes": 0}
_DEEPSPEED = {"peer": True, "environment": {"DS_ACCELERATOR": "cpu"}}

ENGINES = {
    "ftkit": Engine(_ours(), ours=True),
    "ftkit-zero3": Engine(_ours(**_LEAN), ours=True),
    "floor": Engine(lambda folder: {}),  # forward and backward alone: `worker.floor`
    "ddp": Engine(lambda folder: {"ddp_find_unused_parameters": False}),
    "fsdp2": Engine(_fsdp2),
    "deepspeed-zero3": Engine(_zero3, **_DEEPSPEED),
    "ftkit-host": Engine(_ours(**_LEAN, gradients="host", state="host"), ours=True),
    "ftkit-host-deferred": Engine(_ours(**_HOST), ours=True),
    "ftkit-host-8bit": Engine(_ours("adamw_8bit", **_HOST), ours=True),
    "ftkit-host-8bit-split": Engine(_ours("adamw_8bit", master="split", **_HOST), ours=True),
    "ftkit-nvme": Engine(_ours(**_LEAN, state="nvme"), ours=True),
    "ftkit-nvme-all": Engine(_ours(**_NVME), ours=True),
    "ftkit-nvme-all-8bit": Engine(_ours("adamw_8bit", **_NVME), ours=True),
    "ftkit-nvme-all-8bit-split": Engine(_ours("adamw_8bit", master="split", **_NVME), ours=True),
    "ftkit-nvme-now": Engine(_ours(**_LEAN, state="nvme", update="now"), ours=True),
    "deepspeed-host": Engine(_zero3_host, **_DEEPSPEED),
    "deepspeed-nvme": Engine(_zero3_nvme, **_DEEPSPEED),
}

SIDE_BY_SIDE = ("ftkit", "ftkit-zero3", "ddp", "fsdp2", "deepspeed-zero3")
"""What `make bench` compares; the others are for `make bench-offload`."""
