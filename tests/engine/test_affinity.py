"""Which cores a rank gets: as a pure function of masks and topology, and as the system has it afterwards."""

from __future__ import annotations

import os
import threading
from unittest import mock

import torch

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.memory.affinity import Affinity, Core, bind, divide, find_cores, node_of_pci, take_cores
from tests.worlds import PATIENCE, World


def machine(nodes, cores, threads=1):
    """Return the cores of a machine whose second hardware threads are numbered after all first ones, as Linux does."""
    total = nodes * cores
    return [
        Core(node, tuple(node * cores + core + total * thread for thread in range(threads)))
        for node in range(nodes)
        for core in range(cores)
    ]


def nodes_of(share):
    return tuple(sorted({core.node for core in share.cores}))


def shares(cores, ranks=0, nodes=None):
    nodes = nodes or [None] * ranks
    return [divide(cores, nodes, rank) for rank in range(len(nodes))]


def test_eight_ranks_on_two_nodes_get_cores_of_their_own():
    cores = machine(nodes=2, cores=24, threads=2)
    found = shares(cores, 8)
    assert [nodes_of(share) for share in found] == [(0,)] * 4 + [(1,)] * 4
    assert all(share.threads == 6 and len(share.cpus) == 12 and not share.reason for share in found)
    assert sorted(cpu for share in found for cpu in share.cpus) == list(range(96))
    assert found[0].cpus == [*range(6), *range(48, 54)], "a core comes with both of its hardware threads"
    assert str(found[1]) == "6 threads on 6 cores of NUMA node 0"


def test_a_rank_goes_to_the_node_of_its_device():
    cores = machine(nodes=2, cores=8)
    found = shares(cores, nodes=[1, 0, 1, 0])
    assert [nodes_of(share) for share in found] == [(1,), (0,), (1,), (0,)]
    assert [share.cpus for share in found] == [[8, 9, 10, 11], [0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7]]


def test_devices_that_leave_a_node_idle_do_not_crowd_the_ranks_on_the_other():
    cores = machine(nodes=2, cores=8)
    found = shares(cores, nodes=[0, 0, 0, 0])
    assert [len(share.cpus) for share in found] == [4] * 4
    assert sorted(cpu for share in found for cpu in share.cpus) == list(range(16))


def test_fewer_ranks_than_nodes_take_all_of_them():
    cores = machine(nodes=4, cores=16)
    found = shares(cores, 2)
    assert [nodes_of(share) for share in found] == [(0, 1), (2, 3)]
    assert [share.threads for share in found] == [32, 32]
    assert "of NUMA nodes 0, 1" in str(found[0])


def test_uneven_cores_are_all_used():
    cores = machine(nodes=1, cores=11)
    found = shares(cores, 3)
    assert [len(share.cpus) for share in found] == [3, 4, 4]
    assert sorted(cpu for share in found for cpu in share.cpus) == list(range(11))
    cores = machine(nodes=2, cores=8)
    assert [share.threads for share in shares(cores, 3)] == [5, 5, 6]


def test_ranks_with_less_than_two_cores_are_not_bound():
    cores = machine(nodes=1, cores=2)
    found = shares(cores, 2)
    assert all(share.cpus == [0, 1] and share.threads == 1 and share.reason for share in found)
    assert str(found[0]) == "1 thread, not bound: less than 2 cores per rank"
    cores = machine(nodes=2, cores=3)
    assert all(share.reason for share in shares(cores, 4))


def test_a_rank_alone_is_left_as_it_is():
    before = os.sched_getaffinity(0), torch.get_num_threads()
    share = take_cores(Communicator(torch.device("cpu")))
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before
    assert share.reason
    assert share.threads == before[1]
    assert "alone on this machine" in str(share)


def test_the_topology_is_read_from_sys(tmp_path):
    def found(*mask, root=tmp_path):
        with mock.patch("os.sched_getaffinity", return_value=set(mask)):
            return find_cores(root)

    def write(path, text):
        path = tmp_path / "sys/devices/system" / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    for cpu in range(8):
        write(f"cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}")
    write("node/node0/cpulist", "0-1,4-5")
    write("node/node1/cpulist", "2-3,6-7")
    all_ = [Core(0, (0, 4)), Core(0, (1, 5)), Core(1, (2, 6)), Core(1, (3, 7))]
    assert found(*range(8)) == all_
    assert found(1, 3, 7) == [Core(0, (1,)), Core(1, (3, 7))]
    assert found(2, 9, root=tmp_path / "nothing") == [Core(0, (2,)), Core(0, (9,))]

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
    bind(Affinity(1, (Core(0, (cpu,)),)))
    go.set()
    thread.join(30 * PATIENCE)
    later = threading.Thread(target=lambda: seen.update(later=sorted(os.sched_getaffinity(0))))
    later.start()
    later.join(30 * PATIENCE)
    return [cpu], seen["early"], seen["later"], sorted(os.sched_getaffinity(0))


def test_every_thread_of_the_process_is_bound():
    world = World(1)  # of its own: it stays bound
    try:
        [(cpus, *seen)] = world.run(bound)
    finally:
        world.close()
    assert seen == [cpus] * 3


def taken(environ, masks=None):
    """Take cores on a machine of 2 nodes x 4 cores, with a `bind` that does nothing. `masks` are those of a launcher."""
    comm, bound_to = Communicator(torch.device("cpu")), []
    mask = frozenset(range(8)) if masks is None else masks[comm.rank]
    cores = [core for core in machine(nodes=2, cores=4) if mask.issuperset(core.cpus)]
    with (
        mock.patch.dict(os.environ, environ),
        mock.patch("os.sched_getaffinity", return_value=mask),
        mock.patch("ftkit.engine.memory.affinity.find_cores", return_value=cores),
        mock.patch("ftkit.engine.memory.affinity.bind", lambda share: bound_to.append(share.cpus)),
    ):
        if not environ:
            os.environ.pop("OMP_NUM_THREADS", None)
        torch.set_num_threads(1)
        share = take_cores(comm)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    return share.threads, threads, bound_to


def test_ranks_of_a_node_divide_its_cores(worlds):
    assert worlds[2].run(taken, {}) == [(4, 4, [[0, 1, 2, 3]]), (4, 4, [[4, 5, 6, 7]])]
    assert worlds[3].run(taken, {}) == [(2, 2, [[0, 1]]), (3, 3, [[2, 3, 4]]), (3, 3, [[5, 6, 7]])]
    own = {"OMP_NUM_THREADS": "7", "FTKIT_NUM_THREADS": "7"}
    assert [found[:2] for found in worlds[2].run(taken, own)] == [(4, 4)] * 2, "the launcher set it, not the user"


def test_ranks_that_their_launcher_bound_stay_where_they_are(worlds):
    masks = [frozenset({0, 1}), frozenset({2, 3, 4})]
    assert worlds[2].run(taken, {}, masks) == [(2, 2, []), (3, 3, [])]


def test_threads_set_by_the_user_stay(worlds):
    found = worlds[2].run(taken, {"OMP_NUM_THREADS": "3"})
    assert found == [(1, 1, [[0, 1, 2, 3]]), (1, 1, [[4, 5, 6, 7]])]
