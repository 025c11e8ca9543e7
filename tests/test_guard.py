"""The memory guard: limits of cgroups, the marks at which it saves or ends, and a run that it ends."""

import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from ftkit.cgroups import MACHINE, HostMemory, Reading
from ftkit.errors import NOTHING_SAVED, RESUME_ME, MemoryShort, RankError, UserError, refusal
from ftkit.launch.ranks import Failure, explain
from ftkit.train.memory_guard import END, SAVE, Guard, Mark, MemoryStop
from tests.jobs import Asked, job, recipe

MIB, GIB = 1 << 20, 1 << 30
NO_LIMIT_V1 = 9223372036854771712

# ---- limits


def place(root, path, **files):
    """Write the files of a folder under a fake root; `_` in a name stands for `.`, after the first word."""
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("memory_", "memory.", 1)).write_text(f"{content}\n")
    return folder


def proc(root, cgroup, mounts, total=32 * GIB, available=20 * GIB):
    place(root, "proc/self", cgroup=cgroup, mountinfo="\n".join(mounts))
    place(root, "proc", meminfo=f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB")


V1_MOUNT = "35 31 0:32 {} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
V2_MOUNT = "30 23 0:26 {} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"


def v1(root, path, limit, usage, inactive=0, active=0):
    # The group's own lines come first in the file and leave out the groups below it: they are not the ones.
    stat = f"cache 7\ninactive_file 3\nactive_file 3\ntotal_inactive_file {inactive}\ntotal_active_file {active}"
    files = {"memory_limit_in_bytes": limit, "memory_usage_in_bytes": usage, "memory_stat": stat}
    return place(root, f"sys/fs/cgroup/memory/{path}", **files)


def v2(root, path, limit, usage, stat="anon 1"):
    return place(root, f"sys/fs/cgroup/{path}", memory_max=limit, memory_current=usage, memory_stat=stat)


def found(root):
    return {Path(each.source).name: (each.limit, each.used) for each in HostMemory.find(root).read()}


def test_v1_limits_are_those_of_the_group_and_all_above_it(tmp_path):
    proc(tmp_path, "4:cpu,memory:/slurm/job/step\n0::/", [V1_MOUNT.format("/")])
    v1(tmp_path, "", NO_LIMIT_V1, 9 * GIB)
    v1(tmp_path, "slurm", NO_LIMIT_V1, 9 * GIB)
    v1(tmp_path, "slurm/job", 4 * GIB, 3 * GIB, inactive=GIB, active=GIB)
    v1(tmp_path, "slurm/job/step", 6 * GIB, 2 * GIB)
    v1(tmp_path, "slurm/other", GIB, GIB)
    assert found(tmp_path) == {
        "step": (6 * GIB, 2 * GIB),
        "job": (4 * GIB, GIB),
        MACHINE: (32 * GIB, 12 * GIB),
    }


def test_v2_limits_leave_out_what_the_kernel_can_take_back(tmp_path):
    proc(tmp_path, "0::/user.slice/run.scope", [V2_MOUNT.format("/")])
    v2(tmp_path, "user.slice", 8 * GIB, 5 * GIB)
    stat = f"anon 5\nfile 7\nshmem 9\ninactive_file {GIB}\nactive_file {MIB}\nslab_reclaimable {MIB}\nslab_unreclaimable 5"
    v2(tmp_path, "user.slice/run.scope", "max", 5 * GIB, stat)
    assert found(tmp_path) == {"user.slice": (8 * GIB, 5 * GIB), MACHINE: (32 * GIB, 12 * GIB)}
    v2(tmp_path, "user.slice/run.scope", 6 * GIB, 5 * GIB, stat)
    assert found(tmp_path)["run.scope"] == (6 * GIB, 4 * GIB - 2 * MIB)


@pytest.mark.parametrize(("path", "root"), [("/docker/a1", "/docker/a1"), ("/docker/a1", "/docker/b2"), ("/../a1", "/")])
def test_a_container_sees_its_own_group_as_the_root_of_the_mount(tmp_path, path, root):
    proc(tmp_path, f"9:memory:{path}", [V1_MOUNT.format(root)])
    v1(tmp_path, "", 2 * GIB, GIB)
    assert found(tmp_path)["memory"] == (2 * GIB, GIB)


def test_what_cannot_be_read_is_no_limit(tmp_path):
    assert HostMemory.find(tmp_path).read() == []
    proc(tmp_path, "garbage\n0::/a\n4:memory:/a", ["garbage", "x - y", V1_MOUNT.format("/"), V2_MOUNT.format("/")])
    v1(tmp_path, "a", "many", GIB)
    place(tmp_path, "sys/fs/cgroup/a", memory_max=GIB)
    assert set(found(tmp_path)) == {MACHINE}
    place(tmp_path, "sys/fs/cgroup/a", memory_current=MIB, memory_stat="\ninactive_file\nactive_file x\n".strip())
    (tmp_path / "sys/fs/cgroup/a/memory.stat").unlink()
    assert found(tmp_path)["a"] == (GIB, MIB)


# ---- marks


class Machine:
    """A machine with 100 GiB, and a cgroup with 10 GiB, whose memory use and clock a test sets."""

    def __init__(self):
        self.now, self.group_gib, self.used_gib = 0.0, 5.0, 50.0
        self.ends = []
        self.guard = Guard(self, self.ends.append, lambda: self.now)

    def read(self):
        return [
            Reading("machine", 100 * GIB, round(self.used_gib * GIB)),
            Reading("group", 10 * GIB, round(self.group_gib * GIB)),
        ]

    def spend(self, seconds, used_gib, every=0.05):
        """Let time pass with so much memory in use."""
        self.used_gib = used_gib
        for _ in range(round(seconds / every)):
            self.now += every
            self.guard.look()


@pytest.fixture
def machine():
    return Machine()


def test_less_than_the_save_mark_asks_for_a_checkpoint(machine):
    machine.spend(2.0, 100 * (1 - SAVE.share) - 0.1)
    assert machine.guard.low is None
    machine.spend(SAVE.seconds / 2, 100 * (1 - SAVE.share) + 0.1)
    assert machine.guard.low is None
    machine.spend(SAVE.seconds, 100 * (1 - SAVE.share) + 0.1)
    assert machine.guard.low.source == "machine"
    assert not machine.ends


def test_less_than_the_end_mark_ends_once_and_at_once(machine):
    machine.spend(1.0, 100 * (1 - END.share) - 0.1)
    assert not machine.ends
    machine.spend(END.seconds / 2, 100 * (1 - END.share) + 0.1)
    assert not machine.ends
    machine.spend(3.0, 100 * (1 - END.share) + 0.1)
    (reading,) = machine.ends
    assert reading.used > 99 * GIB


def test_the_tightest_of_several_limits_counts(machine):
    machine.group_gib = 9.95
    machine.spend(1.0, 50.0)
    assert [reading.source for reading in machine.ends] == ["group"]


def test_a_short_peak_is_ignored(machine):
    for _ in range(20):
        machine.spend(0.05, 99.9)  # one reading
        machine.spend(0.05, 98.0)
        machine.spend(0.5, 50.0)
    assert machine.guard.low is None
    assert not machine.ends


def test_a_small_limit_has_marks_of_a_useful_size():
    assert SAVE.bytes(GIB) == 96 * MIB
    assert END.bytes(GIB) == 32 * MIB


# ---- ending a run


def test_exit_codes_and_the_cause():
    assert (MemoryShort("x", True).exit_code, MemoryShort("x", False).exit_code) == (RESUME_ME, NOTHING_SAVED) == (75, 71)
    assert type(refusal("x", 2)) is UserError
    pids = {0: 10, 1: 11}
    cause = explain({0: Failure(-9), 1: Failure(RESUME_ME, refusal="the report")}, pids)
    assert isinstance(cause, MemoryShort)
    assert (str(cause), cause.exit_code) == ("the report", RESUME_ME)
    assert isinstance(explain({0: Failure(RESUME_ME)}, {0: 10}), RankError)  # the code alone is no report


def test_a_run_that_ends_at_once_is_resumable_if_it_saved():
    """Started again with --resume auto, a run that saves nothing new would end in the same place for ever."""
    left = []
    stop = MemoryStop(3, left.append)
    stop.trainer = SimpleNamespace(checkpoints=SimpleNamespace(published=None, problem=None))
    stop.engine_bytes = {"parameters": 10 * MIB, "gradients": 0}
    stop.end_at_once(Reading(MACHINE, 2 * GIB, 2 * GIB - 5 * MIB))
    stop.trainer.checkpoints.published = "checkpoint-4"
    stop.end_at_once(Reading("/sys/fs/cgroup/job", GIB, GIB))
    assert [error.exit_code for error in left] == [NOTHING_SAVED, RESUME_ME]
    first, second = map(str, left)
    assert (
        "rank 3: less than 32 MiB were free for 0.1 s. The limit of the machine is 2,048 MiB: 2,043 MiB are used, " in first
    )
    assert "no checkpoint was saved" in first
    assert "holds parameters 10 MiB. " in first
    assert "memory.nvme_dir" in first
    assert "the cgroup /sys/fs/cgroup/job is 1,024 MiB" in second
    assert "--resume auto continues from checkpoint-4" in second


def test_memory_use_before_the_first_step_does_not_ask():
    stop = MemoryStop(0, lambda error: None)
    stop.guard.low = Reading(MACHINE, GIB, GIB)
    stop.on_step_begin(None, None, None)
    assert not stop.asked
    stop.guard.low = Reading(MACHINE, GIB, GIB)
    stop.on_step_begin(None, None, None)
    assert stop.asked


class Falling:
    """The memory of two ranks. Rank 1 is below the save mark from its third reading on."""

    def __init__(self, rank):
        self.rank, self.readings = rank, 0

    def read(self):
        self.readings += 1
        used = 980 if self.rank == 1 and self.readings > 3 else 500
        return [Reading("group", 1000 * MIB, used * MIB)]


def guarded_job(text):
    """Run one rank whose guard reads its memory once per step, and return the error with which it ends."""
    memory, guards = Falling(int(os.environ["RANK"])), []

    def look(stop):
        guards[0].look()
        return False

    with (
        mock.patch("ftkit.train.memory_guard.HostMemory", mock.Mock(find=lambda: memory)),
        mock.patch("ftkit.train.memory_guard.SAVE", Mark(0.03, 0, 0.0)),
        mock.patch.object(Guard, "_watch", lambda guard: guards.append(guard)),  # its thread does not read
        mock.patch.object(Asked, "asked", property(look)),  # read once per step
        pytest.raises(MemoryShort) as caught,  # a process outside of tests exits
    ):
        job(text)
    return str(caught.value), caught.value.exit_code


def test_all_ranks_save_and_end_when_one_sees_the_mark(home, worlds):
    folder = home / "short"
    folder.mkdir()
    (text, code), (others, other_code) = worlds[2].run(guarded_job, recipe(home, "short"))
    assert (code, other_code) == (RESUME_ME, RESUME_ME)
    assert [path.name for path in sorted(folder.glob("checkpoint-*"))] == ["checkpoint-4"]
    assert not (folder / "model").exists()
    assert text == others
    assert "rank 1: " in text
    assert "980 MiB are used, 20 MiB are free" in text
    assert "The run ended after the step; --resume auto continues from checkpoint-4" in text


def counted_job(text):
    """Run one rank to its end, and return the bytes of its engine after the last step."""
    seen = []
    with mock.patch.object(MemoryStop, "on_step_end", wraps_step_end(seen)):
        job(text)
    return seen[-1]


def wraps_step_end(seen):
    inner = MemoryStop.on_step_end

    def on_step_end(self, *args, **kwargs):
        inner(self, *args, **kwargs)
        seen.append(self.engine_bytes)

    return on_step_end


def test_the_report_counts_what_the_engine_holds(home, worlds):
    (home / "holds").mkdir()
    train = {"batch_tokens": 192, "max_steps": 2}
    for sizes in worlds[2].run(counted_job, recipe(home, "holds", train=train)):
        # In fp32 the weights are their own master weights, and the state is two moments of the same size.
        assert sizes["state"] == pytest.approx(2 * sizes["parameters"], rel=0.1)
        assert sizes["slots"] > 0
