"""The facts of a machine that `ftkit doctor` judges: GPUs, driver, torch, Triton, host, drive.

`ftkit doctor --json` prints the facts beside the findings. Tests judge recorded facts. Cost: a few seconds.
"""

from __future__ import annotations

import io
import os
import platform
import re
import shutil
import time
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib import metadata
from itertools import combinations
from pathlib import Path
from typing import Any

import pynvml

from ftkit.errors import UserError

PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "safetensors", "triton", "numba")
VOLTA = 70
MEASURED_BYTES = 256 << 20
"""Bytes written to and read from a drive to measure it."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as the driver reports it."""

    name: str
    capability: int  # 70 is compute capability 7.0


@dataclass(frozen=True)
class Probe:
    """The facts of a machine."""

    gpus: tuple[Gpu, ...] = ()  # GPUs that the driver reports
    driver: str | None = None  # version of the driver
    driver_error: str | None = None  # why the driver reports no GPU
    linked_pairs: int = 0  # pairs of GPUs joined by NVLink
    torch_cuda: str | None = None  # CUDA version that torch was built with; None for a CPU build
    torch_gpus: int = 0  # GPUs that torch computes on
    torch_error: str | None = None  # why it does not on the next one
    triton_error: str | None = None  # why Triton cannot compile a kernel for sm_70
    compiler: str | None = None  # path of a C compiler, for Triton's launchers
    python: str = ""
    memory_bytes: int = 0  # memory of the machine
    cgroup: tuple[str, int] | None = None  # tightest cgroup limit below that: folder, bytes
    shm_bytes: int | None = None  # size of /dev/shm
    versions: dict[str, str | None] = field(default_factory=dict)  # of each package; None: not installed
    nvme: dict[str, Any] | None = None  # result of measure_drive, or its error


def probe(nvme_dir: Path | None = None) -> Probe:
    """Return the facts of this machine. The drive of `nvme_dir` is measured if it is given."""
    nvme = None
    if nvme_dir is not None:
        try:
            nvme = measure_drive(nvme_dir)
        except UserError as error:
            nvme = {"error": str(error)}
    return Probe(
        compiler=next(filter(None, map(shutil.which, (os.environ.get("CC") or "gcc", "gcc", "clang"))), None),
        python=platform.python_version(),
        versions={name: _version(name) for name in PACKAGES},
        nvme=nvme,
        triton_error=_triton_error(),
        **_driver(),
        **_torch(),
        **_host(),
    )


def _driver() -> dict[str, Any]:
    """Return what the NVIDIA driver reports."""
    try:
        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        if not handles:
            return {"driver_error": f"{driver} finds no GPU"}
        return {"gpus": tuple(map(_gpu, handles)), "driver": driver, "linked_pairs": _linked_pairs(handles)}
    except pynvml.NVMLError_LibraryNotFound:
        return {}
    except pynvml.NVMLError as error:
        return {"driver_error": str(error)}


def _gpu(handle: Any) -> Gpu:
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(pynvml.nvmlDeviceGetName(handle), 10 * major + minor)


def _linked_pairs(handles: list[Any]) -> int:
    """Return how many pairs of GPUs NVLink joins, directly or by a switch. 0 if the driver does not report it."""
    index = pynvml.NVML_P2P_CAPS_INDEX_NVLINK
    try:
        found = [pynvml.nvmlDeviceGetP2PStatus(one, other, index) for one, other in combinations(handles, 2)]
    except pynvml.NVMLError:
        return 0
    return sum(status == pynvml.NVML_P2P_STATUS_OK for status in found)


def _triton_error() -> str | None:
    """Compile a small kernel for sm_70, and return why it fails. Needs no GPU."""

    def kernel() -> None:
        pass

    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.runtime.jit import JITFunction

        with redirect_stdout(io.StringIO()):  # Triton prints the assembly of a failure
            source, target = ASTSource(fn=JITFunction(kernel), signature={}), GPUTarget("cuda", VOLTA, 32)
            triton.compile(source, target=target, options={"enable_fp_fusion": True})
    except Exception as error:  # of Triton, LLVM or ptxas
        fatal = re.search(r"ptxas fatal.*", str(error))
        return fatal[0] if fatal else " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return None


def _torch() -> dict[str, Any]:
    """Return the facts of torch, and on how many GPUs it computes."""
    import torch

    found: dict[str, Any] = {"torch_cuda": torch.version.cuda, "torch_gpus": 0}
    for number in range(torch.cuda.device_count()):
        try:
            torch.ones(1, device=f"cuda:{number}").item()
            found["torch_gpus"] += 1
        except RuntimeError as error:
            found["torch_error"] = str(error).splitlines()[0]
    return found


def _host() -> dict[str, Any]:
    """Return the facts of memory."""
    from ftkit.cgroups import MACHINE, HostMemory

    readings = HostMemory.find().read()
    machine = next((each.limit for each in readings if each.source == MACHINE), 0)
    limits = sorted((each.limit, each.source) for each in readings if each.source != MACHINE and each.limit < machine)
    return {
        "memory_bytes": machine,
        "cgroup": (limits[0][1], limits[0][0]) if limits else None,
        "shm_bytes": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
    }


def measure_drive(folder: Path) -> dict[str, Any]:
    """Measure the drive of a folder by writing and reading a scratch file.

    Raises:
        DiskError: The folder cannot be written.
    """
    import torch

    from ftkit.engine.memory.arena import Arena
    from ftkit.engine.memory.disk import Disk

    disk = Disk(folder, "doctor")
    file = disk.file("measure", MEASURED_BYTES, torch.uint8)
    data = Arena(MEASURED_BYTES).take(MEASURED_BYTES, torch.uint8)
    data.view(torch.int64).random_()  # some drives compress
    seconds = []
    for move in (file.write, file.write, file.read):  # the first write to a block is slower
        began = time.perf_counter()
        move(0, data).wait()
        seconds.append(time.perf_counter() - began)
    disk.close()
    return {
        "path": str(folder),
        "filesystem": disk.filesystem,
        "direct": disk.direct,
        "free_bytes": shutil.disk_usage(folder).free,
        "write_bytes_per_s": MEASURED_BYTES / seconds[1],
        "read_bytes_per_s": MEASURED_BYTES / seconds[2],
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
