"""`ftkit doctor`: check GPUs, driver, torch and host, and print fixes.

A `fail` stops a run or changes its result; a `warn` costs speed or memory. Sources of the hardware facts:
docs/quickstart-v100.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from ftkit.cli.probe import Probe
from ftkit.config.wording import counted
from ftkit.report.text import literal

Verdict = Literal["ok", "warn", "fail"]
GIB = 1 << 30
TURING = 75
CUDA_DRIVERS = {12: 525, 13: 580}
"""The first driver branch that runs any CUDA of a major version."""
TORCH_FOR_VOLTA = 'pip install "torch==2.13.*" --index-url https://download.pytorch.org/whl/cu126'
TRITON_FOR_VOLTA = 'pip install "triton>=3.4,<3.10"'
TORCH_FOR_ALL = 'pip install "torch==2.13.*"'
SHM_BYTES = 1 * GIB
SLOW_NVME = 1e9
COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""  # command or step that fixes it


def judge(facts: Probe) -> list[Finding]:
    """Return the findings about a machine."""
    checks = (_gpus, _torch, _driver, _links, _triton, _memory, _nvme, _versions)
    return [finding for check in checks for finding in check(facts)]


def show(findings: list[Finding], console: Console) -> None:
    """Print a table, and the number of failures and warnings."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for each in findings:
        fix = f"\n[dim]-> {literal(each.fix)}[/]" if each.fix else ""
        verdict = f"[{COLOURS[each.verdict]}]{each.verdict}[/]"
        table.add_row(verdict, f"[bold]{each.name}[/]", literal(each.found) + fix)
    console.print(table)
    failed, warned = (sum(each.verdict == verdict for each in findings) for verdict in ("fail", "warn"))
    console.print(f"{counted(failed, 'failure')}, {counted(warned, 'warning')}")


def _gpus(facts: Probe) -> Iterator[Finding]:
    if facts.driver_error is not None:
        fix = "reload or reinstall the driver, or reboot; for V100s, R580 is the last branch"
        yield Finding("GPUs", "fail", f"NVIDIA driver: {facts.driver_error}", fix)
    elif not facts.gpus:
        yield Finding("GPUs", "warn", "none: ftkit computes on the CPU, for trials and tests")
    else:
        kinds = Counter(f"{gpu.name}, sm_{gpu.capability}" for gpu in facts.gpus)
        yield Finding("GPUs", "ok", "; ".join(f"{number} x {kind}" for kind, number in kinds.items()))


def _wheel(facts: Probe) -> str:
    return TORCH_FOR_VOLTA if any(gpu.capability < TURING for gpu in facts.gpus) else TORCH_FOR_ALL


def _torch(facts: Probe) -> Iterator[Finding]:
    built = f"{facts.versions.get('torch')}, built for {f'CUDA {facts.torch_cuda}' if facts.torch_cuda else 'the CPU'}"
    if facts.gpus and facts.torch_cuda is None:
        yield Finding("torch", "fail", f"{built}: it cannot use GPUs", _wheel(facts))
    elif facts.torch_gpus < len(facts.gpus):
        reason = f": {facts.torch_error}" if facts.torch_error else ""
        found = f"{built}, computes on {facts.torch_gpus} of {counted(len(facts.gpus), 'GPU')}{reason}"
        fix = "unset CUDA_VISIBLE_DEVICES; reboot if the driver was updated"
        fix = _wheel(facts) if "no kernel image" in reason else fix
        fix = "end the process that uses the GPU's memory" if "out of memory" in reason else fix
        yield Finding("torch", "warn" if facts.torch_gpus else "fail", found, fix)
    else:
        yield Finding("torch", "ok", built)


def _driver(facts: Probe) -> Iterator[Finding]:
    if facts.driver is None:
        return
    branch = int(facts.driver.split(".")[0])
    needed = CUDA_DRIVERS.get(int(facts.torch_cuda.split(".")[0]), 0) if facts.torch_cuda else 0
    if branch >= needed:
        yield Finding("driver", "ok", facts.driver)
        return
    fix = TORCH_FOR_VOLTA if branch >= CUDA_DRIVERS[12] else f"install a driver of branch R{needed} or later"
    found = f"{facts.driver} is too old for CUDA {facts.torch_cuda}, which needs R{needed}"
    yield Finding("driver", "fail", found, fix)


def _links(facts: Probe) -> Iterator[Finding]:
    if len(facts.gpus) < 2:
        return
    pairs = len(facts.gpus) * (len(facts.gpus) - 1) // 2
    if not facts.linked_pairs:
        yield Finding("links", "warn", "no NVLink reported: gathering weights and reducing gradients is slow over PCIe")
    else:
        share = "all" if facts.linked_pairs == pairs else f"{facts.linked_pairs} of {pairs}"
        yield Finding("links", "ok", f"NVLink between {share} pairs of GPUs")


def _triton(facts: Probe) -> Iterator[Finding]:
    version = facts.versions.get("triton")
    if version is None:
        return  # `_versions` reports it
    if facts.triton_error is not None:
        found = f"{version} cannot compile for sm_70 ({facts.triton_error}); Triton 3.4 to 3.9 can"
        volta = any(gpu.capability < TURING for gpu in facts.gpus)
        yield Finding("Triton", "fail" if volta else "warn", found, TRITON_FOR_VOLTA)
    elif facts.gpus and facts.compiler is None:
        found = f"{version} needs a C compiler for its launchers, and there is none: kernels are not fused"
        yield Finding("Triton", "fail", found, "apt-get install gcc libc6-dev")
    else:
        yield Finding("Triton", "ok", f"{version}, compiles for sm_70")


def _memory(facts: Probe) -> Iterator[Finding]:
    total = f"{facts.memory_bytes / GIB:.0f} GiB"
    if facts.cgroup is not None:
        folder, limit = facts.cgroup
        found = f"{limit / GIB:.1f} of {total}: limited by {folder}; plans use no more"
        yield Finding("memory", "warn", found, "raise the memory limit (docker run --memory, Slurm --mem)")
    else:
        yield Finding("memory", "ok", f"{total}, no lower limit")
    if facts.shm_bytes is not None and facts.shm_bytes < SHM_BYTES:
        found = f"/dev/shm has {facts.shm_bytes >> 20} MiB: NCCL and DataLoader workers exchange data there"
        yield Finding("shared memory", "warn", found, "docker run --shm-size=8g, or --ipc=host")


def _nvme(facts: Probe) -> Iterator[Finding]:
    drive = facts.nvme
    if drive is None:
        return
    if "error" in drive:
        yield Finding("NVMe", "fail", drive["error"], "name a writable folder of a local drive")
        return
    write, read = drive["write_bytes_per_s"], drive["read_bytes_per_s"]
    found = f"{drive['path']} ({drive['filesystem']}): writes {write / 1e9:.1f} GB/s, reads {read / 1e9:.1f} GB/s, "
    found += f"{drive['free_bytes'] / 1e9:.0f} GB free"
    if not drive["direct"]:
        fix = "name a folder on ext4 or xfs of a local drive"
        yield Finding("NVMe", "warn", f"{found}; no O_DIRECT, so its page cache competes for memory", fix)
    elif min(write, read) < SLOW_NVME:
        yield Finding("NVMe", "warn", f"{found}: below 1 GB/s, steps wait for it", "name a folder on a local NVMe drive")
    else:
        yield Finding("NVMe", "ok", found)


def _versions(facts: Probe) -> Iterator[Finding]:
    wrong = []
    for requirement in required():
        name, version = requirement.name, facts.versions.get(requirement.name, "")
        fix = _wheel(facts) if name == "torch" else f'pip install "{name}{requirement.specifier}"'
        if version is None:
            wrong.append(Finding(name, "fail", "not installed", fix))
        elif version and not requirement.specifier.contains(version, prereleases=True):
            wrong.append(Finding(name, "fail", f"{version}; ftkit is tested with {requirement.specifier}", fix))
    yield from wrong
    if not wrong:
        found = ", ".join(f"{name} {version}" for name, version in facts.versions.items() if version is not None)
        yield Finding("versions", "ok", f"Python {facts.python}, {found}: within the tested versions")


def required() -> list[Requirement]:
    """Return the requirements of the ftkit package, without those of extras."""
    found = [Requirement(line) for line in metadata.requires("ftkit") or ()]
    return [each for each in found if each.marker is None or "extra" not in str(each.marker)]
