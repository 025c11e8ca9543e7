"""What is in a node, as its own tools say it: the facts that `ftkit doctor` judges.

Every fact is asked once, nothing is judged here, and a tool that is missing or fails is a fact too. A probe is plain data:
`ftkit doctor --json` writes it beside its findings, so that another machine can be judged, and tests keep a few.

Cost: some seconds for importing torch and asking nvidia-smi; with a folder to measure, two more and 256 MiB written
there.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftkit.engine.memory.disk import Disk

PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "safetensors", "triton", "numba")
CAPABILITIES = {"V100": 70, "T4": 75, "A100": 80, "A30": 80, "A10": 86, "A40": 86, "L4": 89, "H100": 90, "H200": 90}
CPU_FLAGS = ("avx2", "f16c", "avx512f")
MEASURED_BYTES = 256 << 20
"""Bytes written to and read from a drive to measure it."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as the driver sees it: compute capability 70 is 7.0; what it does not say is 0."""

    name: str
    memory_mib: int
    capability: int
    pci: str = ""


@dataclass(frozen=True)
class Probe:
    """The facts of a node.

    Args:
        gpus: GPUs that the driver sees.
        driver: version of the driver.
        driver_error: why the driver could not be asked.
        topology: the table of `nvidia-smi topo -m`.
        torch_cuda: CUDA version that torch was built with; None: a CPU build.
        arch_list: GPU architectures that torch has kernels for.
        torch_gpus: number of GPUs that torch can open.
        torch_error: why torch sees no GPU.
        nccl: version of NCCL.
        triton_runs: whether Triton and its ptxas are there.
        compiler: path of the C compiler for Triton's launchers; None: there is none.
        visible: what CUDA_VISIBLE_DEVICES says, if it is set.
        system: name of the operating system.
        python: version of Python.
        memory_bytes: memory of the machine.
        cgroup: the tightest cgroup limit below that, as (folder, bytes).
        shm_bytes: size of /dev/shm.
        memlock_bytes: bytes that a process may lock; None: any number.
        huge_pages: the kernel's setting for transparent huge pages.
        cpu: name of the processor.
        cpu_flags: the flags of `CPU_FLAGS` that the processor has.
        cores: number of physical cores that this process may use.
        numa_nodes: number of NUMA nodes that these cores lie on.
        versions: version of each package; None: not installed.
        nvme: what was found of the folder asked for: path, filesystem, direct, free_bytes, write_bytes_per_s and
            read_bytes_per_s, or error.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    driver_error: str | None = None
    topology: str | None = None
    torch_cuda: str | None = None
    arch_list: tuple[str, ...] = ()
    torch_gpus: int = 0
    torch_error: str | None = None
    nccl: str | None = None
    triton_runs: bool = False
    compiler: str | None = None
    visible: str | None = None
    system: str = "Linux"
    python: str = ""
    memory_bytes: int = 0
    cgroup: tuple[str, int] | None = None
    shm_bytes: int | None = None
    memlock_bytes: int | None = None
    huge_pages: str | None = None
    cpu: str = ""
    cpu_flags: tuple[str, ...] = ()
    cores: int = 0
    numa_nodes: int = 0
    versions: dict[str, str | None] = field(default_factory=dict)
    nvme: dict[str, Any] | None = None

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Probe:
        """Return a probe that was written as JSON.

        Raises:
            TypeError: for facts that are none of a probe's.
        """
        cgroup = facts.get("cgroup")
        lists = {name: tuple(facts.get(name, ())) for name in ("arch_list", "cpu_flags")}
        gpus = tuple(Gpu(**each) for each in facts.get("gpus", ()))
        return cls(**{**facts, **lists, "gpus": gpus, "cgroup": None if cgroup is None else (cgroup[0], cgroup[1])})

    def as_dict(self) -> dict[str, Any]:
        """Return the facts for JSON."""
        return asdict(self)


def probe(nvme_dir: Path | None = None) -> Probe:
    """Ask this machine.

    Args:
        nvme_dir: folder whose drive is measured; None: none is.
    """
    gpus, driver, driver_error = _gpus()
    return Probe(
        gpus=gpus,
        driver=driver,
        driver_error=driver_error,
        topology=_output("nvidia-smi", "topo", "-m")[0] if len(gpus) > 1 else None,
        compiler=next(filter(None, map(shutil.which, (os.environ.get("CC") or "gcc", "gcc", "clang"))), None),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        system=platform.system(),
        python=platform.python_version(),
        versions={name: _version(name) for name in PACKAGES},
        nvme=None if nvme_dir is None else _nvme(nvme_dir),
        **_torch(),
        **_host(),
    )


def _output(*command: str) -> tuple[str | None, str | None]:
    """Return what a command printed, or why it did not."""
    if shutil.which(command[0]) is None:
        return None, f"{command[0]} is not installed"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    said = done.stdout.strip() or done.stderr.strip()
    if done.returncode:
        return None, said.splitlines()[0] if said else f"exit {done.returncode}"
    return done.stdout, None


def _gpus() -> tuple[tuple[Gpu, ...], str | None, str | None]:
    """Return GPUs, driver version, and why they could not be asked for. Old drivers do not know compute capabilities."""
    fields = "name,memory.total,pci.bus_id,driver_version"
    text, error = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    if text is None:
        return (), None, error
    capabilities = (_output("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")[0] or "").splitlines()
    rows = [[each.strip() for each in line.split(",")] for line in text.splitlines() if line.count(",") == 3]
    gpus = []
    for number, (name, memory, pci, _) in enumerate(rows):
        told = re.fullmatch(r"\s*(\d+)\.(\d+)\s*", capabilities[number]) if number < len(capabilities) else None
        capability = 10 * int(told[1]) + int(told[2]) if told else _capability_of(name)
        gpus.append(Gpu(name, int(memory) if memory.isdigit() else 0, capability, pci))
    return tuple(gpus), rows[0][3] if rows else None, None if rows else "nvidia-smi lists no GPU"


def _capability_of(name: str) -> int:
    """Return the compute capability of a card that fine-tuning is done on, by its name; 0 if it is not known."""
    return next((number for part, number in CAPABILITIES.items() if part in name), 0)


def _torch() -> dict[str, Any]:
    """Return what torch says of its build and its GPUs."""
    import torch  # here: the facts above are worth having where it cannot be imported

    found: dict[str, Any] = {"torch_cuda": torch.version.cuda, "arch_list": tuple(torch.cuda.get_arch_list())}
    try:
        found["torch_gpus"] = torch.cuda.device_count()
        if found["torch_gpus"]:
            torch.cuda.init()
    except RuntimeError as error:
        found["torch_error"] = str(error).splitlines()[0]
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        from triton.backends import nvidia

        found["triton_runs"] = Path(nvidia.__path__[0], "bin", "ptxas").is_file()
    except ImportError:
        found["triton_runs"] = False
    return found


def _host() -> dict[str, Any]:
    """Return what the system says of memory, processors and limits."""
    from ftkit.cgroups import MACHINE, HostMemory
    from ftkit.engine.memory.affinity import find_cores

    readings = HostMemory.find().read()
    machine = next((each.limit for each in readings if each.source == MACHINE), 0)
    limits = sorted((each.limit, each.source) for each in readings if each.source != MACHINE and each.limit < machine)
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    information = _text(Path("/proc/cpuinfo"))
    name = re.search(r"^model name\s*:\s*(.+)$", information, re.MULTILINE)
    flags = set(next(iter(re.findall(r"^flags\s*:\s*(.+)$", information, re.MULTILINE)), "").split())
    pages = re.search(r"\[(\w+)\]", _text(Path("/sys/kernel/mm/transparent_hugepage/enabled")))
    cores = find_cores()
    return {
        "memory_bytes": machine,
        "cgroup": (limits[0][1], limits[0][0]) if limits else None,
        "shm_bytes": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        "memlock_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "huge_pages": pages[1] if pages else None,
        "cpu": name[1].strip() if name else platform.processor(),
        "cpu_flags": tuple(flag for flag in CPU_FLAGS if flag in flags),
        "cores": len(cores),
        "numa_nodes": len({core.node for core in cores}),
    }


def _nvme(folder: Path) -> dict[str, Any]:
    """Return what a folder's drive gives."""
    from ftkit.engine.memory.disk import Disk
    from ftkit.engine.memory.flat_file import DiskError

    try:
        disk = Disk(folder, "doctor")
        write, read = _disk_rates(disk)
    except (DiskError, OSError) as error:
        return {"path": str(folder), "error": str(error)}
    found = {
        "path": str(folder),
        "filesystem": disk.filesystem,
        "direct": disk.direct,
        "free_bytes": shutil.disk_usage(folder).free,
        "write_bytes_per_s": write,
        "read_bytes_per_s": read,
    }
    disk.close()
    return found


def _disk_rates(disk: Disk) -> tuple[float, float]:
    """Write and read a scratch file, and return the rates of writing and reading in bytes per second."""
    import torch

    from ftkit.engine.memory.arena import Arena

    file = disk.file("measure", MEASURED_BYTES, torch.uint8)
    data = Arena(MEASURED_BYTES).take(MEASURED_BYTES, torch.uint8)
    data.view(torch.int64).random_()  # some drives compress
    seconds = []
    for move in (file.write, file.write, file.read):  # the first write to a block is slower
        began = time.perf_counter()
        move(0, data).wait()
        seconds.append(time.perf_counter() - began)
    file.path.unlink()
    return MEASURED_BYTES / seconds[1], MEASURED_BYTES / seconds[2]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
