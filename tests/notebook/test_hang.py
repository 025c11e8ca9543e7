"""Whether ranks wait in vain, by where they stand: certain, doubtful, and not at all."""

from ftkit.notebook.hang import Frame, Hangs

CELL = Frame("<cell 3>", 2, "<module>", "dist.barrier()", True)
ENGINE = Frame("/x/ftkit/engine/comm/communicator.py", 180, "barrier", "dist.barrier(group=self.group)", False)
WRAPPER = Frame("/x/torch/distributed/c10d_logger.py", 83, "wrapper", "return func(*args)", False)
BARRIER = Frame("/x/torch/distributed/distributed_c10d.py", 5000, "barrier", "work.wait()", False)
REDUCE = Frame("/x/torch/distributed/distributed_c10d.py", 3000, "all_reduce", "work.wait()", False)
SLEEP = Frame("<cell 3>", 5, "<module>", "time.sleep(100)", True)
WAITS, OTHER, ELSEWHERE = (CELL, WRAPPER, BARRIER), (CELL, WRAPPER, REDUCE), (SLEEP,)


def watched(seconds, **stands):
    """Note, each second, where ranks stand: rank0=(frames, CPU seconds a second)."""
    hangs = Hangs(10.0)
    for second in range(seconds + 1):
        for name, (frames, busy) in stands.items():
            hangs.note(int(name[4:]), frames, busy * second, float(second))
    return hangs


def test_a_rank_that_waits_for_one_that_has_ended_is_a_hang():
    rank, text = watched(10, rank0=(WAITS, 0.0)).hang({0}, {1: "has ended its cell"})
    assert rank == 0
    first = "rank 0 has waited for 10 s in barrier, and no other rank will come: rank 1 has ended its cell"
    assert text.splitlines()[0] == first
    assert text.splitlines()[1] == "  cell 3, line 2, in <module>: dist.barrier()"
    assert len(text.splitlines()) == 3


def test_ranks_that_wait_in_different_collectives_are_a_hang():
    _, text = watched(10, rank0=(WAITS, 0.0), rank1=(OTHER, 0.0)).hang({0, 1}, {})
    assert "rank 1 waits in all_reduce (cell 3, line 2: dist.barrier())" in text


def test_it_is_none_before_the_limit_and_where_something_goes_on():
    assert watched(9, rank0=(WAITS, 0.0)).hang({0}, {1: "has ended its cell"}) is None
    assert watched(9, rank0=(WAITS, 0.0)).hang({0}, {1: "raised"}, 5.0) is not None
    assert watched(20, rank0=(ELSEWHERE, 0.0)).hang({0}, {1: "has ended its cell"}) is None
    assert watched(20, rank0=(WAITS, 0.5)).hang({0}, {1: "has ended its cell"}) is None  # gathers something large
    assert watched(20, rank0=(WAITS, 0.0)).hang({0}, {}) is None  # one rank alone
    hangs = watched(20, rank0=(WAITS, 0.0))
    hangs.forget()
    assert hangs.hang({0}, {1: "has ended its cell"}) is None
    hangs.note(0, ELSEWHERE, 0.0, 40.0)
    hangs.note(0, WAITS, 0.0, 41.0)
    assert hangs.hang({0}, {1: "has ended its cell"}) is None


def test_a_rank_that_waits_while_another_is_elsewhere_is_a_doubt_and_no_hang():
    hangs = watched(10, rank0=((ENGINE, WRAPPER, BARRIER), 0.0), rank1=(ELSEWHERE, 0.0))
    assert hangs.hang({0, 1}, {}) is None
    told = hangs.doubt({0, 1})
    place = "ftkit/engine/comm/communicator.py, line 180: dist.barrier"
    assert told.startswith(f"rank 0 has waited for 10 s in barrier ({place}")
    assert "rank 1 is at cell 3, line 5: time.sleep(100)" in told
    assert watched(10, rank0=(ELSEWHERE, 0.0), rank1=(ELSEWHERE, 0.0)).doubt({0, 1}) is None
