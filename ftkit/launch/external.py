"""What the environment says about an outer job: torchrun's or Slurm's, of which this process is one rank.

Under `torchrun` or `srun` ftkit starts nothing; `outer_job` says with which variables this process joins. It is a pure
function of the environment, and it knows no torch: the number of threads must be in place before torch is imported.

It refuses half an outer job (RANK without an address to meet at) instead of waiting for ranks that never come. What it
costs: `RANK` or `SLURM_PROCID` left over in a shell is taken seriously.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ftkit.engine.memory.affinity import OWN_THREADS, find_cores
from ftkit.errors import UserError


def outer_job(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return the variables with which this process joins an outer job as one rank, or None without one.

    Args:
        environ: The environment of this process.

    Raises:
        UserError: An outer launcher left out what is needed to join, or set a number to something else.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if missing:
            raise UserError(
                f"RANK and WORLD_SIZE are set, so this is a rank of an outer job, but {' and '.join(missing)} "
                "is not: start it with torchrun or srun, or unset RANK and WORLD_SIZE to let ftkit start its own ranks"
            )
        ranks, rank = _number(environ, "WORLD_SIZE", least=1), _number(environ, "RANK")
        if rank >= ranks:
            raise UserError(f"RANK is {rank} and WORLD_SIZE {ranks}: ranks are counted from 0")
        _number(environ, "MASTER_PORT")
        local, of_box = _number(environ, "LOCAL_RANK"), _number(environ, "LOCAL_WORLD_SIZE", 1, 1)
        return {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(of_box), **_threads_of_torchrun(environ)}
    # A batch script has SLURM_PROCID and SLURM_NTASKS too; only inside srun is there a step.
    in_batch_script = "SLURM_JOB_ID" in environ and not {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} & set(environ)
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "1")
    if "SLURM_PROCID" not in environ or tasks == "1" or in_batch_script:
        return None
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    if not hosts and "MASTER_ADDR" not in environ:
        raise UserError("SLURM_PROCID is set but not SLURM_JOB_NODELIST: set MASTER_ADDR to the first host of the job")
    node = _number(environ, "SLURM_NODEID")
    on_nodes = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "1")
    tasks_here, rank = _tasks_of_node(on_nodes, node), _number(environ, "SLURM_PROCID")
    if not re.fullmatch("[0-9]{1,18}", tasks) or tasks_here is None or rank >= int(tasks):
        raise UserError(
            f"Slurm's variables do not fit together: {tasks:.40} tasks, {on_nodes:.40} on each node; this is task {rank} on "
            f"node {node}. Start the job with srun, or unset SLURM_PROCID to let ftkit start its own ranks"
        )
    return {
        "RANK": str(rank),
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": str(_number(environ, "SLURM_LOCALID")),
        "LOCAL_WORLD_SIZE": str(tasks_here),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(hosts),
        # All ranks of a job must agree without talking; the job number keeps two jobs of a host apart.
        "MASTER_PORT": environ.get("MASTER_PORT") or str(20000 + _number(environ, "SLURM_JOB_ID") % 20000),
    }


def _number(environ: Mapping[str, str], name: str, default: int = 0, least: int = 0) -> int:
    """Return the whole number that a variable holds.

    Raises:
        UserError: it holds something else, or less than `least`.
    """
    text = environ.get(name, str(default))
    if not re.fullmatch(r"\s*[0-9]{1,18}\s*", text) or int(text) < least:
        raise UserError(
            f"{name}={text!r}: a whole number of at least {least} is needed. A launcher (torchrun, srun) sets it; unset it "
            "to let ftkit start its own ranks"
        )
    return int(text)


def first_host(hosts: str) -> str:
    """Return the first host of a Slurm list such as `gpu[03-05,9],login1`: gpu03."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", hosts)
    return "".join(part or "" for part in match.groups()) if match else hosts


def _tasks_of_node(text: str, node: int) -> int | None:
    """Return how many tasks Slurm's `2(x3),1` gives to a node, of 2, 2, 2 and 1; None where it knows no such node."""
    for count, times in re.findall(r"([0-9]{1,18})(?:\(x([0-9]{1,18})\))?", text):
        if node < int(times or 1):
            return int(count)
        node -= int(times or 1)
    return None


def _threads_of_torchrun(environ: Mapping[str, str]) -> dict[str, str]:
    """Undo torchrun's default of one thread a rank, which idles all cores but one."""
    local_ranks = _number(environ, "LOCAL_WORLD_SIZE", 1, 1)
    if "TORCHELASTIC_RUN_ID" in environ and local_ranks > 1 and environ.get("OMP_NUM_THREADS") == "1":
        return dict.fromkeys(("OMP_NUM_THREADS", OWN_THREADS), str(threads_per_rank(local_ranks)))
    return {}


def threads_per_rank(ranks: int) -> int:
    """Return the physical cores this process may use, divided among the ranks of the box; at least 1.

    With this they start; `ftkit.engine.memory.affinity` knows better once they have met.
    """
    return max(1, len(find_cores()) // ranks)
