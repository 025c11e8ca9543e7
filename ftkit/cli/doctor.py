"""`ftkit doctor`: whether this install can use what is in this machine, and the command that mends what it cannot.

`judge` turns the facts of a probe into findings and asks nothing itself, so that a recorded machine is judged as the one at
hand. A `fail` is what a run would die of or silently do without; a `warn` costs speed or memory; each of both says what to
do.

What it knows of the hardware, with sources in docs/install.md: wheels of torch 2.11 and later have kernels for sm_70 only
where they were built with CUDA 12.6; the last driver for Volta is R580; CUDA 13 needs that driver at least.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from ftkit.cli.probe import Probe
from ftkit.config.wording import counted
from ftkit.report.text import literal

Verdict = Literal["ok", "warn", "fail"]
GIB = 1 << 30
VOLTA = 70
AMPERE = 80
LAST_VOLTA_DRIVER = 580
CUDA_DRIVERS = {12: 525, 13: 580}
"""The first driver branch that runs any CUDA of a major version."""
TORCH_FOR_VOLTA = 'pip install "torch==2.13.*" --index-url https://download.pytorch.org/whl/cu126'
TORCH_FOR_ALL = 'pip install "torch==2.13.*"'
SHM_BYTES = 1 * GIB
SLOW_NVME = 1e9
COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Finding:
    """A line: what was looked at, the verdict, what was found, and the command or step that mends it ("": none)."""

    name: str
    verdict: Verdict
    found: str
    mend: str = ""


def judge(probe: Probe) -> list[Finding]:
    """Return what a node's facts mean for ftkit, a line each."""
    return [
        *_gpus(probe),
        *_kernels(probe),
        *_driver(probe),
        *_links(probe),
        *_triton(probe),
        *_memory(probe),
        *_processors(probe),
        *_nvme(probe),
        *_versions(probe),
    ]


def as_dict(probe: Probe, findings: list[Finding]) -> dict[str, Any]:
    """Return facts and findings for JSON."""
    return {"findings": [asdict(each) for each in findings], "probe": probe.as_dict()}


def show(findings: list[Finding], console: Console) -> None:
    """Print a table, and a line that says what it comes to."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for each in findings:
        mend = f"\n[dim]-> {literal(each.mend)}[/]" if each.mend else ""
        verdict = f"[{COLOURS[each.verdict]}]{each.verdict}[/]"
        table.add_row(verdict, f"[bold]{each.name}[/]", literal(each.found) + mend)
    console.print(table)
    failed, warned = (sum(each.verdict == verdict for each in findings) for verdict in ("fail", "warn"))
    told = [counted(failed, "failure")] * bool(failed) + [counted(warned, "warning")] * bool(warned)
    console.print(", ".join(told) or "all is well")


# --- GPUs and what runs on them


def _capability(number: int) -> str:
    return "unknown" if not number else f"{number // 10}.{number % 10}"


def _gpus(probe: Probe) -> Iterator[Finding]:
    if not probe.gpus:
        reason = probe.driver_error or "the driver sees none"
        if probe.driver_error is not None and "is not installed" not in probe.driver_error and not probe.torch_gpus:
            yield Finding("GPUs", "fail", f"nvidia-smi: {reason}", "reload or reinstall the driver (R525 or later), reboot")
            return
        if probe.torch_gpus:  # torch can open some all the same: a container without nvidia-smi
            seen = f"torch sees {counted(probe.torch_gpus, 'GPU')}, but {reason}"
            yield Finding("GPUs", "warn", seen, "install nvidia-smi")
        else:
            yield Finding("GPUs", "warn", f"none ({reason}): ftkit computes on the CPU, for trials and tests")
        return
    kinds: dict[tuple[str, int, int], int] = {}
    for gpu in probe.gpus:
        key = gpu.name, gpu.memory_mib, gpu.capability
        kinds[key] = kinds.get(key, 0) + 1
    told = ", ".join(
        f"{number} x {name}, {memory / 1024:.0f} GiB, compute capability {_capability(capability)}"
        for (name, memory, capability), number in kinds.items()
    )
    if len(kinds) > 1:
        yield Finding("GPUs", "warn", f"{told}: every rank gets as much work, so the weakest sets the pace")
    else:
        yield Finding("GPUs", "ok", told)


def _supports(arch_list: tuple[str, ...], capability: int) -> bool:
    """Whether a build has machine code for a capability (of its major version, no newer), or PTX to make some of."""
    for arch in arch_list:
        found = re.fullmatch(r"(sm|compute)_(\d+)[af]?", arch)
        if found is None:
            continue
        number = int(found[2])
        if number <= capability and (found[1] == "compute" or number // 10 == capability // 10):
            return True
    return False


def _wheel(probe: Probe) -> str:
    return TORCH_FOR_VOLTA if any(gpu.capability < 75 for gpu in probe.gpus) else TORCH_FOR_ALL


def _kernels(probe: Probe) -> Iterator[Finding]:
    torch = f"torch {probe.versions.get('torch')}"
    if not probe.gpus:
        built = f"CUDA {probe.torch_cuda}" if probe.torch_cuda else "the CPU"
        yield Finding("torch", "ok", f"{torch}, built for {built}")
        return
    if probe.torch_cuda is None:
        yield Finding("torch", "fail", f"{torch} is built for the CPU: it sees no GPU", _wheel(probe))
        return
    known = {gpu.capability for gpu in probe.gpus} - {0}
    missing = sorted(each for each in known if not _supports(probe.arch_list, each))
    built = f"{torch}, CUDA {probe.torch_cuda}"
    if missing:
        needed = ", ".join(f"sm_{each}" for each in missing)
        has = " ".join(probe.arch_list)
        yield Finding("torch", "fail", f"{built}, has no kernels for {needed} (it has {has})", _wheel(probe))
    elif probe.torch_gpus < len(probe.gpus):
        reason = f": {probe.torch_error}" if probe.torch_error else ""
        seen = f"{built}, opens {probe.torch_gpus} of {counted(len(probe.gpus), 'GPU')}{reason}"
        hidden = f" (CUDA_VISIBLE_DEVICES is {probe.visible!r})" if probe.visible is not None else ""
        otherwise = "see the driver, below; reboot if it was updated"
        mend = "unset CUDA_VISIBLE_DEVICES" if probe.visible is not None else otherwise
        seen += hidden
        yield Finding("torch", "warn" if probe.torch_gpus else "fail", seen, mend)
    else:
        kinds = ", ".join(sorted({f"sm_{gpu.capability}" for gpu in probe.gpus}))
        yield Finding("torch", "ok", f"{built}, has kernels for {kinds}")
    old = min(gpu.capability for gpu in probe.gpus) < AMPERE
    yield Finding("dtype", "ok", "fp16 with a loss scale: these GPUs have no bf16" if old else "bf16")


def _driver(probe: Probe) -> Iterator[Finding]:
    if probe.driver is None:
        return
    branch = int(probe.driver.split(".")[0])
    volta = any(gpu.capability == VOLTA for gpu in probe.gpus)
    needed = CUDA_DRIVERS.get(int(probe.torch_cuda.split(".")[0]), 0) if probe.torch_cuda else 0
    if volta and branch > LAST_VOLTA_DRIVER:
        yield Finding("driver", "fail", f"{probe.driver}: the last for V100s is R580", "install the driver of branch R580")
    elif branch < needed:
        mend = TORCH_FOR_VOLTA if branch >= CUDA_DRIVERS[12] else f"install a driver of branch R{needed} or later"
        told = f"{probe.driver} is too old for CUDA {probe.torch_cuda}, which needs R{needed}"
        yield Finding("driver", "fail", told, mend)
    else:
        yield Finding("driver", "ok", f"{probe.driver}{', the last branch for V100s' if volta and branch == 580 else ''}")


def _links(probe: Probe) -> Iterator[Finding]:
    if len(probe.gpus) < 2:
        return
    cells = [cell for line in (probe.topology or "").splitlines() if re.match(r"\s*GPU\d+\s", line) for cell in line.split()]
    linked = [int(cell[2:]) for cell in cells if re.fullmatch(r"NV\d+", cell)]
    pairs = len(probe.gpus) * (len(probe.gpus) - 1)
    if probe.topology is None:
        yield Finding("links", "warn", "not known: nvidia-smi topo -m says nothing")
    elif not linked:
        yield Finding("links", "warn", "PCIe only: weights and gradients travel slowly between the GPUs")
    else:
        share = "all" if len(linked) == pairs else f"{len(linked) // 2} of {pairs // 2}"
        yield Finding("links", "ok", f"NVLink between {share} pairs of GPUs, up to {max(linked)} links")
    if probe.nccl is None:
        yield Finding("NCCL", "fail", "this torch has none, and several GPUs need it", _wheel(probe))
    else:
        yield Finding("NCCL", "ok", probe.nccl)


def _triton(probe: Probe) -> Iterator[Finding]:
    version = probe.versions.get("triton")
    if probe.triton_runs and probe.gpus and probe.compiler is None:
        told = f"{version}: its launchers need a C compiler, and there is none: nothing is fused"
        yield Finding("Triton", "fail", told, "apt-get install gcc libc6-dev")
    elif probe.triton_runs:
        yield Finding("Triton", "ok", f"{version}, with its own ptxas")
    else:
        told = "not installed" if version is None else f"{version}, without ptxas"
        verdict: Verdict = "fail" if probe.gpus else "warn"
        yield Finding("Triton", verdict, f"{told}: fused kernels need it", 'pip install "triton>=3.4,<4"')


# --- the host


def _memory(probe: Probe) -> Iterator[Finding]:
    total = f"{probe.memory_bytes / GIB:.0f} GiB"
    if probe.cgroup is not None:
        folder, limit = probe.cgroup
        told = f"{limit / GIB:.1f} of {total}: {folder} allows no more, and the plan keeps to it"
        mend = "raise the container's or job's memory limit (docker run --memory, Slurm --mem)"
        yield Finding("memory", "warn", told, mend)
    else:
        yield Finding("memory", "ok", f"{total}, no limit below that")
    if probe.gpus and probe.memlock_bytes is not None and probe.memlock_bytes < probe.memory_bytes // 2:
        told = f"a process may lock {probe.memlock_bytes / (1 << 20):.0f} MiB: some drivers pin no more host memory"
        yield Finding("memlock", "warn", told, "ulimit -l unlimited (docker run --ulimit memlock=-1)")
    elif probe.gpus:
        yield Finding("memlock", "ok", "unlimited" if probe.memlock_bytes is None else "enough")
    if probe.shm_bytes is not None and probe.shm_bytes < SHM_BYTES:
        found = f"/dev/shm has {probe.shm_bytes / (1 << 20):.0f} MiB: NCCL and DataLoader workers exchange data there"
        yield Finding("shared memory", "warn", found, "docker run --shm-size=8g, or --ipc=host")
    elif probe.shm_bytes is not None:
        yield Finding("shared memory", "ok", f"{probe.shm_bytes / GIB:.0f} GiB in /dev/shm")
    if probe.huge_pages == "never":
        told = "2 MiB pages are switched off: the NVMe and host tiers are slower"
        mend = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding("huge pages", "warn", told, mend)
    elif probe.huge_pages is not None:
        yield Finding("huge pages", "ok", probe.huge_pages)


def _processors(probe: Probe) -> Iterator[Finding]:
    nodes = counted(probe.numa_nodes, "NUMA node")
    told = f"{probe.cpu}, {counted(probe.cores, 'core')} on {nodes}, {' '.join(probe.cpu_flags) or 'no vector extensions'}"
    lacking = [flag for flag in ("avx2", "f16c") if flag not in probe.cpu_flags]
    if lacking and probe.cpu_flags is not None:
        yield Finding("CPU", "warn", f"{told}: without {' and '.join(lacking)} the optimizer on the host is slow")
    else:
        yield Finding("CPU", "ok", told)
    if probe.gpus and probe.cores < 2 * len(probe.gpus):
        told = f"{counted(probe.cores, 'core')} for {counted(len(probe.gpus), 'GPU')}: two each are wanted"
        yield Finding("cores", "warn", told)


def _nvme(probe: Probe) -> Iterator[Finding]:
    found = probe.nvme
    if found is None:
        yield Finding("NVMe", "ok", "not asked for; ftkit doctor --nvme-dir FOLDER measures a drive")
        return
    if "error" in found:
        yield Finding("NVMe", "fail", found["error"], "name a folder on a local drive that this user may write")
        return
    write, read = found["write_bytes_per_s"], found["read_bytes_per_s"]
    told = f"{found['path']} ({found['filesystem']}): writes {write / 1e9:.1f} GB/s, reads {read / 1e9:.1f} GB/s, "
    told += f"{found['free_bytes'] / 1e9:.0f} GB free"
    if not found["direct"]:
        mend = "name a folder on ext4 or xfs of a local drive"
        yield Finding("NVMe", "warn", f"{told}; takes no O_DIRECT, so it competes for memory", mend)
    elif min(write, read) < SLOW_NVME:
        yield Finding("NVMe", "warn", f"{told}: below 1 GB/s a step waits for it", "name a folder on a local NVMe drive")
    else:
        yield Finding("NVMe", "ok", told)


def _versions(probe: Probe) -> Iterator[Finding]:
    if probe.system != "Linux":
        yield Finding("system", "fail", f"{probe.system}: ftkit runs on Linux", "use Linux, or WSL 2")
    wrong = []
    for requirement in required():
        version = probe.versions.get(requirement.name, "")
        plain = f'pip install "{requirement.name}{requirement.specifier}"'
        if version is None:
            wrong.append(Finding(requirement.name, "fail", "not installed", plain))
        elif version and not requirement.specifier.contains(version, prereleases=True):
            told = f"{version}; ftkit is tested with {requirement.specifier}"
            mend = _wheel(probe) if requirement.name == "torch" else plain
            wrong.append(Finding(requirement.name, "fail", told, mend))
    yield from wrong
    if not wrong:
        told = ", ".join(f"{name} {version}" for name, version in probe.versions.items() if version is not None)
        yield Finding("versions", "ok", f"Python {probe.python}, {told}: within the tested stack")


def required() -> list[Requirement]:
    """Return what ftkit's own package asks for, those of extras left out."""
    found = [Requirement(line) for line in metadata.requires("ftkit") or ()]
    return [each for each in found if each.marker is None or "extra" not in str(each.marker)]
