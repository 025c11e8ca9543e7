"""`ftkit doctor`: check GPUs, driver, torch and host, and print fixes.

`judge` reads only the facts of a probe, so tests judge recorded machines. A `fail` stops a run or changes its result; a
`warn` costs speed or memory. Sources of the hardware facts: docs/quickstart-v100.md.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Literal

import typer
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from ftkit.cli.options import Json, NvmeDir, echo_json, screen
from ftkit.cli.probe import VOLTA, Probe, probe
from ftkit.config.wording import counted
from ftkit.report.text import literal

Verdict = Literal["ok", "warn", "fail"]
GIB = 1 << 30
AMPERE = 80
LAST_VOLTA_DRIVER = 580
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
    mend: str = ""  # command or step that fixes it


def doctor(nvme_dir: NvmeDir = None, as_json: Json = False) -> None:
    """Check GPUs, driver, torch, Triton and host, and print fixes. The exit code is 1 if a check fails."""
    facts = probe(nvme_dir)
    findings = judge(facts)
    if as_json:
        echo_json({"findings": [asdict(each) for each in findings], "probe": asdict(facts)})
    else:
        show(findings, screen())
    raise typer.Exit(int(any(each.verdict == "fail" for each in findings)))


def judge(facts: Probe) -> list[Finding]:
    """Return the findings about a machine."""
    return [
        *_gpus(facts),
        *_kernels(facts),
        *_driver(facts),
        *_links(facts),
        *_triton(facts),
        *_memory(facts),
        *_nvme(facts),
        *_versions(facts),
    ]


def show(findings: list[Finding], console: Console) -> None:
    """Print a table, and the number of failures and warnings."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for each in findings:
        mend = f"\n[dim]-> {literal(each.mend)}[/]" if each.mend else ""
        verdict = f"[{COLOURS[each.verdict]}]{each.verdict}[/]"
        table.add_row(verdict, f"[bold]{each.name}[/]", literal(each.found) + mend)
    console.print(table)
    failed, warned = (sum(each.verdict == verdict for each in findings) for verdict in ("fail", "warn"))
    counts = [counted(failed, "failure")] * bool(failed) + [counted(warned, "warning")] * bool(warned)
    console.print(", ".join(counts) or "no problem found")


# --- GPUs and their software


def _gpus(facts: Probe) -> Iterator[Finding]:
    if not facts.gpus and facts.driver_error is not None:
        yield Finding("GPUs", "fail", f"NVIDIA driver: {facts.driver_error}", "reload or reinstall the driver, or reboot")
        return
    if not facts.gpus:
        yield Finding("GPUs", "warn", "none: ftkit computes on the CPU, for trials and tests")
        return
    kinds = Counter((gpu.name, gpu.memory_mib, gpu.capability) for gpu in facts.gpus)
    found = ", ".join(
        f"{number} x {name}, {memory / 1024:.0f} GiB, compute capability {capability // 10}.{capability % 10}"
        for (name, memory, capability), number in kinds.items()
    )
    yield Finding("GPUs", "ok", found)


def _supports(arch_list: tuple[str, ...], capability: int) -> bool:
    """Return whether a build has machine code for a capability (same major version, no newer minor one), or older PTX."""
    for arch in arch_list:
        found = re.fullmatch(r"(sm|compute)_(\d+)[af]?", arch)
        if found is None:
            continue
        number = int(found[2])
        if number <= capability and (found[1] == "compute" or number // 10 == capability // 10):
            return True
    return False


def _wheel(facts: Probe) -> str:
    return TORCH_FOR_VOLTA if any(gpu.capability < 75 for gpu in facts.gpus) else TORCH_FOR_ALL


def _kernels(facts: Probe) -> Iterator[Finding]:
    torch = f"torch {facts.versions.get('torch')}"
    if not facts.gpus:
        built = f"CUDA {facts.torch_cuda}" if facts.torch_cuda else "the CPU"
        yield Finding("torch", "ok", f"{torch}, built for {built}")
        return
    if facts.torch_cuda is None:
        yield Finding("torch", "fail", f"{torch} is built for the CPU: it cannot use GPUs", _wheel(facts))
        return
    missing = sorted(each for each in {gpu.capability for gpu in facts.gpus} if not _supports(facts.arch_list, each))
    built = f"{torch}, CUDA {facts.torch_cuda}"
    if missing:
        needed = ", ".join(f"sm_{each}" for each in missing)
        has = " ".join(facts.arch_list)
        yield Finding("torch", "fail", f"{built}, has no kernels for {needed} (it has {has})", _wheel(facts))
    elif facts.torch_gpus < len(facts.gpus):
        reason = f": {facts.torch_error}" if facts.torch_error else ""
        seen = f"{built}, opens {facts.torch_gpus} of {counted(len(facts.gpus), 'GPU')}{reason}"
        hidden = f" (CUDA_VISIBLE_DEVICES is {facts.visible!r})" if facts.visible is not None else ""
        mend = "reboot if the driver was updated" if facts.visible is None else "unset CUDA_VISIBLE_DEVICES"
        yield Finding("torch", "warn" if facts.torch_gpus else "fail", seen + hidden, mend)
    else:
        kinds = ", ".join(sorted({f"sm_{gpu.capability}" for gpu in facts.gpus}))
        yield Finding("torch", "ok", f"{built}, has kernels for {kinds}")


def _driver(facts: Probe) -> Iterator[Finding]:
    if facts.driver is None:
        return
    branch = int(facts.driver.split(".")[0])
    volta = any(gpu.capability == VOLTA for gpu in facts.gpus)
    needed = CUDA_DRIVERS.get(int(facts.torch_cuda.split(".")[0]), 0) if facts.torch_cuda else 0
    if volta and branch > LAST_VOLTA_DRIVER:
        yield Finding("driver", "fail", f"{facts.driver}: the last for V100s is R580", "install the driver of branch R580")
    elif branch < needed:
        mend = TORCH_FOR_VOLTA if branch >= CUDA_DRIVERS[12] else f"install a driver of branch R{needed} or later"
        yield Finding(
            "driver", "fail", f"{facts.driver} is too old for CUDA {facts.torch_cuda}, which needs R{needed}", mend
        )
    else:
        yield Finding("driver", "ok", f"{facts.driver}{', the last branch for V100s' if volta and branch == 580 else ''}")


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
    volta = any(gpu.capability < AMPERE for gpu in facts.gpus)
    if version is None:
        verdict: Verdict = "fail" if facts.gpus else "warn"
        yield Finding("Triton", verdict, "not installed: fused kernels need it", TRITON_FOR_VOLTA)
    elif facts.triton_error is not None:
        found = f"{version} cannot compile for sm_70 ({facts.triton_error}); Triton 3.4 to 3.9 can"
        yield Finding("Triton", "fail" if volta else "warn", found, TRITON_FOR_VOLTA)
    elif facts.gpus and facts.compiler is None:
        found = f"{version} needs a C compiler for its launchers, and there is none: kernels are not fused"
        yield Finding("Triton", "fail", found, "apt-get install gcc libc6-dev")
    else:
        yield Finding("Triton", "ok", f"{version}, compiles for sm_70")


# --- the host


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
    elif facts.shm_bytes is not None:
        yield Finding("shared memory", "ok", f"{facts.shm_bytes / GIB:.0f} GiB in /dev/shm")


def _nvme(facts: Probe) -> Iterator[Finding]:
    drive = facts.nvme
    if drive is None:
        yield Finding("NVMe", "ok", "not measured; ftkit doctor --nvme-dir FOLDER measures a drive")
        return
    if "error" in drive:
        yield Finding("NVMe", "fail", drive["error"], "name a writable folder on a local drive")
        return
    write, read = drive["write_bytes_per_s"], drive["read_bytes_per_s"]
    found = f"{drive['path']} ({drive['filesystem']}): writes {write / 1e9:.1f} GB/s, reads {read / 1e9:.1f} GB/s, "
    found += f"{drive['free_bytes'] / 1e9:.0f} GB free"
    if not drive["direct"]:
        mend = "name a folder on ext4 or xfs of a local drive"
        yield Finding("NVMe", "warn", f"{found}; no O_DIRECT, so its page cache competes for memory", mend)
    elif min(write, read) < SLOW_NVME:
        yield Finding("NVMe", "warn", f"{found}: below 1 GB/s, steps wait for it", "name a folder on a local NVMe drive")
    else:
        yield Finding("NVMe", "ok", found)


def _versions(facts: Probe) -> Iterator[Finding]:
    wrong = []
    for requirement in required():
        name, version = requirement.name, facts.versions.get(requirement.name, "")
        mend = _wheel(facts) if name == "torch" else f'pip install "{name}{requirement.specifier}"'
        if version is None:
            wrong.append(Finding(name, "fail", "not installed", mend))
        elif version and not requirement.specifier.contains(version, prereleases=True):
            wrong.append(Finding(name, "fail", f"{version}; ftkit is tested with {requirement.specifier}", mend))
    yield from wrong
    if not wrong:
        found = ", ".join(f"{name} {version}" for name, version in facts.versions.items() if version is not None)
        yield Finding("versions", "ok", f"Python {facts.python}, {found}: within the tested versions")


def required() -> list[Requirement]:
    """Return the requirements of the ftkit package, without those of extras."""
    found = [Requirement(line) for line in metadata.requires("ftkit") or ()]
    return [each for each in found if each.marker is None or "extra" not in str(each.marker)]
