"""The memory guard: limits of cgroups, the marks at which it saves or ends, and a run that it ends."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest

from ftkit.errors import NOTHING_SAVED, RESUME_ME, MemoryShort, RankError, UserError, refusal
from ftkit.launch.ranks import Failure, explain
from ftkit.output.run_folder import RunFolder
from ftkit.plan.host_memory import MACHINE, HostMemory, Reading
from ftkit.train.memory_guard import END, SAVE, WINDOW_SECONDS, WINDOWS, Alarm, Guard, Mark
from ftkit.train.memory_report import text_of
from ftkit.train.memory_stop import MemoryStop
from tests.jobs import job, recipe

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


class Box:
    """A memory of 100 GiB that is looked at by hand, and its clock."""

    def __init__(self):
        self.now, self.used, self.other = 0.0, 50.0, 0.5
        self.ends = []
        self.guard = Guard(self, self.ends.append, lambda: self.now)

    def read(self):
        return [Reading("box", 100 * GIB, round(self.used * GIB)), Reading("other", 10 * GIB, round(self.other * 10 * GIB))]

    def pass_(self, seconds, used, every=0.05):
        """Let time pass with so many GiB in use."""
        self.used = used
        for _ in range(round(seconds / every)):
            self.now += every
            self.guard.look()

    def step(self, seconds=1.0, low=50.0, high=60.0):
        """Be a step: use rises, and falls again."""
        self.pass_(seconds / 2, high)
        self.pass_(seconds / 2, low)
        return self.guard.step_ended()


@pytest.fixture
def box():
    return Box()


def test_less_than_the_save_mark_asks_for_a_checkpoint_at_the_next_step_end(box):
    assert box.step(high=100 * (1 - SAVE.share) - 0.1) is None
    alarm = box.step(seconds=2 * SAVE.seconds + 0.2, high=100 * (1 - SAVE.share) + 0.1)
    assert alarm.reading.source == "box"
    assert "3,072 MiB were left for 0.5 s" in alarm.reason
    assert box.step() is None  # it is judged anew: the step that was too high is over
    assert not box.ends


def test_less_than_the_end_mark_ends_once_and_at_once(box):
    box.pass_(1.0, 100 * (1 - END.share) - 0.1)
    assert not box.ends
    box.pass_(END.seconds / 2, 100 * (1 - END.share) + 0.1)
    assert not box.ends
    box.pass_(3.0, 100 * (1 - END.share) + 0.1)
    (alarm,) = box.ends
    assert alarm.reading.used > 99 * GIB


def test_the_tightest_of_several_limits_counts(box):
    box.other = 0.995
    box.pass_(1.0, 50.0)
    assert [alarm.reading.source for alarm in box.ends] == ["other"]


def test_spikes_shorter_than_the_times_above_are_ignored(box):
    for _ in range(20):
        box.pass_(END.seconds / 2, 99.9)  # one look
        box.pass_(0.05, 98.0)
        box.pass_(0.5, 50.0)
        assert box.guard.step_ended() is None
    assert not box.ends


def test_growth_asks_before_the_mark_is_reached(box):
    alarms = []
    for number in range(60):
        alarms.append(box.step(low=30.0, high=70.0 + 0.5 * number))
        if alarms[-1]:
            break
    highest = max(box.guard.histories["box"].peaks) / GIB
    # The box grows by 0.5 GiB per second. The guard asks while there is still time to save.
    assert 100 - highest == pytest.approx(WINDOWS * WINDOW_SECONDS * 0.5, abs=1.1)
    assert "rose by" in alarms[-1].reason
    assert not box.ends


def test_a_healthy_run_close_to_its_limit_is_left_alone(box):
    box.pass_(3.0, 98.0)  # loading
    box.guard.begin()
    highs = [60, 80, 92, 92, 92, 96, 92, 93, 94, 94, 96.5, 95, 96, 96.8, 96.8, 96.8]  # jumps: evaluation, the first save
    for high in highs + [96.8, 95.5] * 30:
        assert box.step(seconds=2.2, low=40.0, high=high) is None, high
    assert not box.ends


def test_exit_codes_and_the_cause():
    assert (MemoryShort("x", True).exit_code, MemoryShort("x", False).exit_code) == (RESUME_ME, NOTHING_SAVED) == (75, 71)
    assert type(refusal("x", 2)) is UserError
    pids = {0: 10, 1: 11}
    told = explain({0: Failure(-9), 1: Failure(RESUME_ME, refusal="the report", time_ns=5)}, pids)
    assert isinstance(told, MemoryShort)
    assert (str(told), told.exit_code) == ("the report", RESUME_ME)
    assert isinstance(explain({0: Failure(RESUME_ME)}, {0: 10}), RankError)  # the code alone is no report


def test_the_end_at_once_is_resumable_if_this_run_saved(tmp_path):
    left = []
    alarm = Alarm(Reading(MACHINE, GIB, GIB), "it is so")
    (tmp_path / "checkpoint-2").mkdir()
    stop = MemoryStop(RunFolder(tmp_path), 0, left.append)
    stop.end_at_once(alarm)
    (tmp_path / "checkpoint-4").mkdir()
    stop.end_at_once(alarm)
    # Started again and again with --resume auto, a run that saves nothing new would never stop being started.
    assert [error.exit_code for error in left] == [NOTHING_SAVED, RESUME_ME]
    assert "continues from" in str(left[0])
    assert json.loads((tmp_path / "guard.json").read_text())["checkpoint"] == str(tmp_path / "checkpoint-4")
    stop.folder = RunFolder(tmp_path / "gone")
    stop.end_at_once(alarm)
    assert "PSS" in str(left[2])
    assert "guard.json could not be written: FileNotFoundError" in str(left[2])


# ---- in a run


class Falling:
    """A memory of which rank 1 alone sees the end come: at its third step."""

    def __init__(self, rank):
        self.rank, self.readings = rank, 0

    def read(self):
        self.readings += 1
        used = 980 if self.rank == 1 and self.readings > 3 else 500
        return [Reading("box", 1000 * MIB, used * MIB)]


def guarded_job(text):
    memory = Falling(int(os.environ["RANK"]))
    with (
        mock.patch("ftkit.train.memory_stop.HostMemory", mock.Mock(find=lambda: memory)),
        mock.patch("ftkit.train.memory_guard.SAVE", Mark(0.03, 0, 0.0)),
        mock.patch.object(Guard, "_watch"),  # readings are counted: only those of step ends
        pytest.raises(MemoryShort) as caught,  # a real rank would leave
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
    report = json.loads((folder / "guard.json").read_text())
    assert (report["outcome"], report["step"], report["limit"]["used_bytes"]) == ("saved", 4, 980 * MIB)
    assert report["checkpoint"].endswith("checkpoint-4")
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    for rank in report["ranks"]:
        held = rank["tenants_bytes"]
        # fp32: weights serve as their master, so that the state is two moments of the same size.
        assert held["state"] == pytest.approx(2 * held["parameters"], rel=0.1)
        assert held["slots"] > 0
        assert 0 < sum(held.values()) + rank["unexplained_bytes"] == rank["pss_bytes"]
    assert text == others == text_of(report)
