"""Which cores a rank gets: as a pure function of masks and topology, and as the system has it afterwards."""

from __future__ import annotations

import os
import threading
from unittest import mock

import pytest
import torch

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.memory.affinity import Affinity, Claim, bind, divide, take_cores
from ftkit.engine.memory.cores import Core, find_cores, node_of_pci, own_mask
from tests.worlds import PATIENCE, World


def box(nodes, cores, threads=1):
    """Return the cores of a box whose second hardware threads are numbered behind all first ones, as Linux does."""
    total = nodes * cores
    return [
        Core(node, tuple(node * cores + core + total * thread for thread in range(threads)))
        for node in range(nodes)
        for core in range(cores)
    ]


def ranks(number, all_cores, nodes=None):
    mask = frozenset(cpu for core in all_cores for cpu in core.cpus)
    return [Claim(mask, None if nodes is None else nodes[rank]) for rank in range(number)]


def of(all_cores):
    def cores(mask):
        found = [Core(core.node, tuple(cpu for cpu in core.cpus if cpu in mask)) for core in all_cores]
        return [core for core in found if core.cpus]

    return cores


def shares(claims, all_cores):
    return [divide(claims, rank, of(all_cores)) for rank in range(len(claims))]


def test_eight_ranks_on_two_nodes_get_cores_of_their_own():
    cores = box(nodes=2, cores=24, threads=2)
    found = shares(ranks(8, cores), cores)
    assert [share.nodes for share in found] == [(0,)] * 4 + [(1,)] * 4
    assert all(share.threads == 6 and len(share.cpus) == 12 and share.binds for share in found)
    assert sorted(cpu for share in found for cpu in share.cpus) == list(range(96))
    assert found[0].cpus == (*range(6), *range(48, 54)), "a core comes with both of its hardware threads"
    assert str(found[1]) == "6 threads on CPUs 6-11,54-59 of NUMA node 0"


def test_a_rank_goes_to_the_node_of_its_device():
    cores = box(nodes=2, cores=8)
    found = shares(ranks(4, cores, nodes=[1, 0, 1, 0]), cores)
    assert [share.nodes for share in found] == [(1,), (0,), (1,), (0,)]
    assert [share.cpus for share in found] == [(8, 9, 10, 11), (0, 1, 2, 3), (12, 13, 14, 15), (4, 5, 6, 7)]


def test_devices_that_leave_a_node_idle_do_not_crowd_the_ranks_on_the_other():
    cores = box(nodes=2, cores=8)
    found = shares(ranks(4, cores, nodes=[0, 0, 0, 0]), cores)
    assert [len(share.cpus) for share in found] == [4] * 4
    assert sorted(cpu for share in found for cpu in share.cpus) == list(range(16))


def test_fewer_ranks_than_nodes_take_all_of_them():
    cores = box(nodes=4, cores=16)
    found = shares(ranks(2, cores), cores)
    assert [share.nodes for share in found] == [(0, 1), (2, 3)]
    assert [share.threads for share in found] == [32, 32]
    assert "of NUMA nodes 0-1" in str(found[0])


def test_uneven_cores_are_all_used():
    cores = box(nodes=1, cores=11)
    found = shares(ranks(3, cores), cores)
    assert [len(share.cpus) for share in found] == [3, 4, 4]
    assert sorted(cpu for share in found for cpu in share.cpus) == list(range(11))
    cores = box(nodes=2, cores=8)
    assert [share.threads for share in shares(ranks(3, cores), cores)] == [5, 5, 6]


def test_a_rank_that_its_launcher_bound_is_left_alone():
    cores = box(nodes=2, cores=4)
    claims = [Claim(frozenset({0, 1}), None), Claim(frozenset({2, 3, 4}), None), Claim(frozenset({5, 6, 7}), 0)]
    found = shares(claims, cores)
    assert [share.cpus for share in found] == [(0, 1), (2, 3, 4), (5, 6, 7)]
    assert [share.threads for share in found] == [2, 3, 3]
    assert not any(share.binds for share in found)
    assert str(found[1]) == "3 threads, not bound: CPUs 2-4 from its launcher"


def test_ranks_with_less_than_two_cores_are_not_bound():
    cores = box(nodes=1, cores=2)
    found = shares(ranks(2, cores), cores)
    assert all(share.cpus == (0, 1) and share.threads == 1 and not share.binds for share in found)
    assert str(found[0]) == "1 thread, not bound: 2 ranks share 2 cores"
    cores = box(nodes=2, cores=3)
    assert not any(share.binds for share in shares(ranks(4, cores), cores))


def test_a_rank_alone_is_left_as_it_is():
    before = own_mask(), torch.get_num_threads()
    share = take_cores(Communicator(torch.device("cpu")))
    assert (own_mask(), torch.get_num_threads()) == before
    assert not share.binds
    assert share.threads == before[1]
    assert "alone on this machine" in str(share)


def test_the_topology_is_read_from_sys(tmp_path):
    def write(path, text):
        path = tmp_path / "sys/devices/system" / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    for cpu in range(8):
        write(f"cpu/cpu{cpu}/topology/{'core_cpus_list' if cpu % 2 else 'thread_siblings_list'}", f"{cpu % 4},{cpu % 4 + 4}")
    write("node/node0/cpulist", "0-1,4-5")
    write("node/node1/cpulist", "2-3,6-7")
    all_ = [Core(0, (0, 4)), Core(0, (1, 5)), Core(1, (2, 6)), Core(1, (3, 7))]
    assert find_cores(frozenset(range(8)), tmp_path) == all_
    assert find_cores(frozenset({1, 3, 7}), tmp_path) == [Core(0, (1,)), Core(1, (3, 7))]
    assert find_cores(frozenset({2, 9}), tmp_path / "nothing") == [Core(0, (2,)), Core(0, (9,))]

    device = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    for text, node in (("1", 1), ("-1", None), ("", None)):
        (device / "numa_node").write_text(text + "\n")
        assert node_of_pci(0, 0x3B, 0, tmp_path) == node
    assert node_of_pci(0, 0x3C, 0, tmp_path) is None


def bound():
    """Bind a process with a thread that is there already; return what both, and one that comes later, may use."""
    seen, go = {}, threading.Event()

    def early():
        go.wait(30 * PATIENCE)
        seen["early"] = sorted(os.sched_getaffinity(0))

    thread = threading.Thread(target=early)
    thread.start()
    cpu = min(os.sched_getaffinity(0))
    assert bind(Affinity(1, (cpu,), (0,), binds=True))
    go.set()
    thread.join(30 * PATIENCE)
    later = threading.Thread(target=lambda: seen.update(later=sorted(os.sched_getaffinity(0))))
    later.start()
    later.join(30 * PATIENCE)
    return [cpu], seen["early"], seen["later"], sorted(os.sched_getaffinity(0))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_every_thread_of_the_process_is_bound():
    world = World(1)  # of its own: it stays bound
    try:
        [(cpus, *seen)] = world.run(bound)
    finally:
        world.close()
    assert seen == [cpus] * 3


def taken(environ):
    """Take cores on a box of 2 nodes x 4 cores, with a `bind` that does nothing."""
    cores, bound_to = box(nodes=2, cores=4), []
    mask = frozenset(range(8))
    with (
        mock.patch.dict(os.environ, environ),
        mock.patch("ftkit.engine.memory.affinity.own_mask", return_value=mask),
        mock.patch("ftkit.engine.memory.affinity.divide", lambda claims, rank: divide(claims, rank, of(cores))),
        mock.patch("ftkit.engine.memory.affinity.bind", lambda share: bound_to.append(share.cpus) or True),
    ):
        if not environ:
            os.environ.pop("OMP_NUM_THREADS", None)
        torch.set_num_threads(1)
        share = take_cores(Communicator(torch.device("cpu")))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    return share.threads, threads, bound_to


def test_ranks_of_a_node_divide_its_cores(worlds):
    assert worlds[2].run(taken, {}) == [(4, 4, [(0, 1, 2, 3)]), (4, 4, [(4, 5, 6, 7)])]
    assert worlds[3].run(taken, {}) == [(2, 2, [(0, 1)]), (3, 3, [(2, 3, 4)]), (3, 3, [(5, 6, 7)])]
    own = {"OMP_NUM_THREADS": "7", "FTKIT_NUM_THREADS": "7"}
    assert [told[:2] for told in worlds[2].run(taken, own)] == [(4, 4)] * 2, "what the launcher set is not the user's word"


def test_what_the_user_said_stays(worlds):
    said = worlds[2].run(taken, {"OMP_NUM_THREADS": "3"})
    assert said == [(1, 1, [(0, 1, 2, 3)]), (1, 1, [(4, 5, 6, 7)])]
    placed = worlds[2].run(taken, {"OMP_PLACES": "cores"})
    assert placed == [(1, 1, []), (1, 1, [])]


def pinned():
    """Pin the asking thread alone, as OpenMP does; return whether `own_mask` is still the process's mask."""
    before, done = os.sched_getaffinity(0), threading.Event()
    other = threading.Thread(target=done.wait, args=(60 * PATIENCE,))
    other.start()
    try:
        os.sched_setaffinity(0, {min(before)})
        return own_mask() == before
    finally:
        os.sched_setaffinity(0, before)
        done.set()
        other.join(60 * PATIENCE)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_a_pinned_thread_is_not_the_process():
    assert pinned()
