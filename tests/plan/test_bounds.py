"""The plan ends within seconds, whatever numbers a recipe holds."""

import contextlib
import time
from dataclasses import replace

import pytest

from ftkit.config.recipe import RecipeError, load, split_batch
from ftkit.errors import UserError
from ftkit.launch.local import MOST_CPU_RANKS, check_ranks
from ftkit.plan.candidates import MOST_MICRO_BATCHES, micro_batches, some_divisors
from ftkit.plan.hardware import box
from ftkit.plan.schedule import speed
from ftkit.plan.search import MOST_ROUNDS, speed_of
from ftkit.spec.strategy import OPEN
from ftkit.train.planning import ask

SECONDS = 40
"""Measured 4 to 9 on a quiet core; without the bounds none of these ends within the hour."""


def asked(*settings, ranks=8):
    facts = load("llama-2-13b-full-8xv100-16gb", list(settings), check_files=False)
    return ask(facts, ranks, box("8xv100-16gb"))


SLIPS = [
    ("data.sequence_tokens=2", "train.batch_tokens=963761198400", "engine.accumulation=2"),
    ("data.sequence_tokens=2147483647", "train.batch_tokens=17179869176"),
    *(
        pytest.param(each, marks=pytest.mark.slow)
        for each in [
            ("data.sequence_tokens=1024", "train.batch_tokens=1280000000000"),
            ("data.sequence_tokens=1024", "train.batch_tokens=1000000000000000"),
            ("data.sequence_tokens=2", "train.batch_tokens=963761198400"),
            ("train.batch_tokens=1280000000000", "data.sequence_tokens=1000", "engine.gradients=nvme", "memory.nvme_dir=."),
        ]
    ),
]


@pytest.mark.parametrize("settings", SLIPS)
def test_a_slip_of_the_pen_ends_within_seconds(settings):
    made, began = asked(*settings), time.process_time()
    with contextlib.suppress(UserError):  # that it does not fit is an answer
        assert made.plan().speed.seconds > 0
    assert time.process_time() - began < SECONDS


@pytest.mark.parametrize(
    "setting", ["train.batch_tokens=1e30", "train.epochs=1e308", "train.max_steps=1e20", "train.seed=4294967296"]
)
def test_numbers_beyond_all_use_are_refused_by_their_key(setting):
    key, _, number = setting.partition("=")
    with pytest.raises(RecipeError, match=key):
        load("tiny-cpu", [f"{key}={int(float(number))}"], check_files=False)


def test_a_batch_is_divided_without_a_walk_over_its_sequences():
    facts = load("tiny-cpu", ["data.sequence_tokens=1000", "train.batch_tokens=1000000000000000"], check_files=False)
    began = time.process_time()
    assert split_batch(facts, 2) == (4, 125_000_000_000)
    assert time.process_time() - began < 1


def test_more_ranks_than_a_box_can_start_are_refused():
    with pytest.raises(UserError, match="--nproc"):
        check_ranks(MOST_CPU_RANKS + 1, 0)
    check_ranks(MOST_CPU_RANKS, 0)


def test_of_many_divisors_some_are_tried_the_largest_and_one_among_them():
    tried = micro_batches(OPEN, 963761198400, 4096)
    assert len(tried) == MOST_MICRO_BATCHES
    assert (tried[0], tried[-1]) == (4095, 1)
    assert tried == sorted(set(tried), reverse=True)
    assert micro_batches(OPEN, 48, 16) == [16, 12, 8, 6, 4, 3, 2, 1], "few are all tried"


@pytest.mark.parametrize("number", [1, 2, 36, 48, 60, 97])
@pytest.mark.parametrize("most", [1, 5, 6, 7, 1000])
def test_divisors_are_all_found_on_both_sides_of_the_root(number, most):
    assert some_divisors(number, most) == [n for n in range(min(number, most), 0, -1) if number % n == 0]


@pytest.mark.slow
def test_rounds_that_are_counted_take_what_simulated_ones_take():
    made = asked("data.sequence_tokens=1024", "train.batch_tokens=262144")
    way = made.plan().strategy
    rounds = MOST_ROUNDS + 7
    whole = speed(made.shape, way, made.rates, rounds=rounds)
    counted = speed_of(made.shape, replace(way, accumulation=rounds), made.rates)
    assert counted.seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert (counted.tokens, counted.operations) == (whole.tokens, pytest.approx(whole.operations))
