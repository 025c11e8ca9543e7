"""What a run may plan with on the node that is here: what is free below the guard's mark, of the tightest limit."""

from __future__ import annotations

from unittest import mock

import psutil
import torch

from ftkit.cgroups import MACHINE, Reading, guarded_bytes
from ftkit.config.engine import EngineSettings
from ftkit.hf.memory.shape import limits_here
from ftkit.plan.memory import GIB, MIB
from ftkit.train.memory_guard import SAVE

CPU = torch.device("cpu")


def here(*readings, ranks=2, **settings):
    """Return the limits on a node whose memory says `readings`, and the bytes that this process holds already."""
    memory = mock.Mock(find=lambda: mock.Mock(read=lambda: list(readings)))
    process = mock.Mock(memory_info=lambda: mock.Mock(rss=300 * MIB))
    with mock.patch("ftkit.hf.memory.shape.HostMemory", memory), mock.patch.object(psutil, "Process", return_value=process):
        return limits_here(EngineSettings.of(settings), CPU, ranks)


MACHINE_64 = Reading(MACHINE, 64 * GIB, 24 * GIB)
GROUP_8 = Reading("/sys/fs/cgroup/slurm", 8 * GIB, 2 * GIB)


def test_the_guards_mark_is_what_a_run_may_not_plan_with():
    for limit in (GIB, 6 * GIB, 330 * GIB):
        assert guarded_bytes(limit) == SAVE.bytes(limit)
        assert Reading("", limit, limit // 2).usable == limit - limit // 2 - SAVE.bytes(limit)
    assert Reading("", GIB, GIB - MIB).usable == 0


def test_of_a_machine_a_share_is_granted_and_of_a_group_all():
    own = 2 * 300 * MIB
    machine = here(MACHINE_64)
    assert machine.host_bytes == MACHINE_64.usable * 8 // 10 + own
    assert machine.name("host") == "free memory of the machine"
    group = here(GROUP_8, MACHINE_64)
    assert group.host_bytes == GROUP_8.usable + own == 6 * GIB - guarded_bytes(8 * GIB) + own
    assert group.name("host") == "free memory of /sys/fs/cgroup/slurm"


def test_of_a_drive_no_more_is_granted_than_was_said(tmp_path):
    with mock.patch("ftkit.hf.memory.shape.shutil.disk_usage", return_value=mock.Mock(free=9 * GIB)):
        assert here(MACHINE_64, nvme_dir=str(tmp_path)).nvme_bytes == 9 * GIB
        assert here(MACHINE_64, nvme_dir=str(tmp_path), nvme_gib=0.5).nvme_bytes == GIB // 2
        assert here(MACHINE_64, nvme_dir=str(tmp_path), nvme_gib=1e9).nvme_bytes == 9 * GIB


def test_a_group_as_wide_as_the_machine_does_not_raise_the_grant():
    wide = Reading("/sys/fs/cgroup/user.slice", 63 * GIB, 24 * GIB)
    assert here(MACHINE_64, wide).host_bytes == here(MACHINE_64).host_bytes


def test_what_is_granted_by_number_is_no_more_than_there_is():
    assert here(MACHINE_64, host_gib=4).host_bytes == 4 * GIB
    assert here(MACHINE_64, host_gib=38).host_bytes == 38 * GIB, "by number more than the share of what is free"
    more = here(GROUP_8, MACHINE_64, host_gib=100)
    assert more.host_bytes == GROUP_8.usable + 600 * MIB
    assert "memory.host_gib is higher" in more.name("host")
