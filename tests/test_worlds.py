"""The worlds of ranks themselves: answers in rank order, and failures that name the rank."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from ftkit.data.batches import StepOrder
from tests.worlds import RankFailure, World


def rank_and_sum(number):
    total = torch.tensor(float(dist.get_rank() + number))
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), torch.get_num_threads(), os.getpid()


def raise_on_rank_1():
    if dist.get_rank() == 1:
        raise KeyError("a word to find")


def hang_on_rank_1():
    if dist.get_rank() == 1:
        time.sleep(100)


def leave_on_rank_1():
    if dist.get_rank() == 1:
        os._exit(7)


def test_answers_come_in_rank_order_from_processes_that_stay(world2):
    first = world2.run(rank_and_sum, 1)
    assert [answer[:3] for answer in first] == [(0, 3.0, 1), (1, 3.0, 1)]
    assert [answer[3] for answer in world2.run(rank_and_sum, 1)] == [answer[3] for answer in first]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (raise_on_rank_1, "rank 1 of 2: .*raise_on_rank_1.*KeyError: 'a word to find'"),
        (hang_on_rank_1, "rank 1 of 2: no answer.*in hang_on_rank_1"),
        (leave_on_rank_1, "rank 1 of 2: died with exit code 7"),
    ],
)
def test_a_failure_names_its_rank_and_the_next_case_runs(case, words):
    world = World(2)
    try:
        world.run(rank_and_sum, 0)
        with pytest.raises(RankFailure, match="(?s)" + words):
            world.run(case, seconds=1.0)
        assert world.run(rank_and_sum, 0)[1][1] == 1.0
    finally:
        world.close()


def samples():
    return [list(StepOrder(50, seed=3)), list(StepOrder(50, seed=3, sources=[0, 1] * 25, weights=[1, 3]))]


def test_the_order_of_samples_knows_no_world(worlds):
    orders = [order for world in (1, 2, 3) for order in worlds[world].run(samples)]
    assert orders == [samples()] * 6
