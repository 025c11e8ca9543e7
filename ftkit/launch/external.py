"""Join a job of torchrun or Slurm as one rank. This module does not import torch: the threads must be set before."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ftkit.engine.memory.affinity import OWN_THREADS, find_cores
from ftkit.errors import UserError


def outer_job(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return the variables with which this process joins an outer job as one rank, or None if the environment has no job.

    Raises:
        UserError: The outer launcher did not set all that is needed, or a number is not a number.
    """
    is_rank = "RANK" in environ and "WORLD_SIZE" in environ
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if is_rank and name not in environ]
    start = "start it with torchrun or srun, or unset RANK, WORLD_SIZE and SLURM_PROCID to let ftkit start its own ranks"
    if missing:
        raise UserError(f"RANK and WORLD_SIZE are set, but {' and '.join(missing)} is not: {start}")
    try:
        return _of_torchrun(environ) if is_rank else _of_slurm(environ)
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(f"the outer job's variables cannot be used ({type(error).__name__}: {error}): {start}") from None


def _of_torchrun(environ: Mapping[str, str]) -> dict[str, str]:
    found = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **environ}
    variables = {name: str(int(found[name])) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    # torchrun sets one thread per rank by default, which would leave all other cores idle.
    if "TORCHELASTIC_RUN_ID" in environ and environ.get("OMP_NUM_THREADS") == "1" and variables["LOCAL_WORLD_SIZE"] != "1":
        threads = threads_per_rank(int(variables["LOCAL_WORLD_SIZE"]))
        variables |= dict.fromkeys(("OMP_NUM_THREADS", OWN_THREADS), str(threads))
    return variables


def _of_slurm(environ: Mapping[str, str]) -> dict[str, str] | None:
    # A batch script has SLURM_PROCID and SLURM_NTASKS too. Only srun sets the variables of a step.
    if "SLURM_PROCID" not in environ or environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return None
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ["SLURM_STEP_TASKS_PER_NODE"])  # 2(x3),1 is 2, 2, 2, 1
    tasks_of_nodes = [count for count, times in groups for _ in range(int(times or 1))]
    return {
        "RANK": str(int(environ["SLURM_PROCID"])),
        "WORLD_SIZE": str(int(environ["SLURM_STEP_NUM_TASKS"])),
        "LOCAL_RANK": str(int(environ["SLURM_LOCALID"])),
        "LOCAL_WORLD_SIZE": tasks_of_nodes[int(environ["SLURM_NODEID"])],
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(environ["SLURM_STEP_NODELIST"]),
        # All ranks must agree without communication. The job number separates two jobs on one host.
        "MASTER_PORT": environ.get("MASTER_PORT") or str(20000 + int(environ["SLURM_JOB_ID"]) % 20000),
    }


def first_host(hosts: str) -> str:
    """Return the first host of a Slurm list such as `gpu[03-05,9],login1`: gpu03."""
    return re.sub(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^,]*).*", r"\1\2\3", hosts, count=1)


def threads_per_rank(ranks: int) -> int:
    """Return the physical cores that this process may use, divided by the ranks of the node; at least 1."""
    return max(1, len(find_cores()) // ranks)
