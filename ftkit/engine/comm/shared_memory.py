"""Memory that all CPU ranks of one machine have mapped.

Rank 0 makes an anonymous file (memfd), and the others open it through /proc. /dev/shm is not used: a container has 64 MiB
there. The memory is freed with the last tensor that refers to it, also when a rank is killed.
"""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftkit.engine.comm.communicator import Communicator


def map_shared(comm: Communicator, size_bytes: int) -> mmap.mmap | None:
    """Return zeros that all ranks have mapped, or None on all ranks if one of them cannot map them. A collective."""
    memory, path = None, None
    with ExitStack() as until_mapped:  # closes the file; the mappings keep its memory
        if comm.rank == 0:
            with suppress(OSError):
                file = os.memfd_create("ftkit", os.MFD_CLOEXEC)
                until_mapped.callback(os.close, file)
                # Without posix_fallocate, which would touch every page now, on rank 0's NUMA node.
                os.ftruncate(file, size_bytes)
                path = f"/proc/{os.getpid()}/fd/{file}"
        path = comm.same(path)
        if path is not None:
            with suppress(OSError), open(path, "r+b") as shared:
                memory = mmap.mmap(shared.fileno(), size_bytes)
        everywhere = all(comm.all(memory is not None))
    return memory if everywhere else None


def of_other_ranks() -> int:
    """Return the part of this process's resident shared memory that counts for other processes, bytes.

    Each page counts in equal parts for the processes that use it. 0 if the kernel has no `Pss_Shmem` in smaps_rollup.

    Cost: the kernel walks all pages of this process, 0.04 s per GiB of shared memory.
    """
    kib = {"RssShmem": 0, "Pss_Shmem": 0}
    with suppress(OSError):
        for file in ("status", "smaps_rollup"):
            for line in Path("/proc/self", file).read_text().splitlines():
                name, _, size = line.partition(":")
                if name in kib:
                    kib[name] = int(size.split()[0])
    return 1024 * (kib["RssShmem"] - kib["Pss_Shmem"]) if kib["Pss_Shmem"] else 0


def machine() -> tuple[str, ...]:
    """Return an identity that ranks share if they can share memory: the booted kernel, its network and pid namespaces."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip(), os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        return (str(os.getpid()),)
