"""The plan ends soon, whatever numbers a recipe holds: what it tries and simulates is bounded."""

from dataclasses import replace

import pytest

from ftkit.config.recipe import load, split_batch
from ftkit.plan.candidates import MOST_MICRO_BATCHES, some_divisors
from ftkit.plan.catalog import find_hardware
from ftkit.plan.schedule import speed
from ftkit.plan.search import MOST_ROUNDS, speed_of
from ftkit.train.planning import ask


def test_a_batch_is_divided_without_a_walk_over_its_sequences():
    """A micro-batch is at most 4096 tokens; a walk over all sequences of the step would find a larger divisor."""
    facts = load("tiny-cpu", ["data.sequence_tokens=1000", "train.batch_tokens=1000000000000000"], check_files=False)
    assert split_batch(facts, 2) == (4, 125_000_000_000)


def test_of_many_divisors_some_are_tried_the_largest_and_one_among_them():
    tried = some_divisors(963761198400, 4096)
    assert len(tried) == MOST_MICRO_BATCHES
    assert (tried[0], tried[-1]) == (4095, 1)
    assert tried == sorted(set(tried), reverse=True)
    assert some_divisors(48, 16) == [16, 12, 8, 6, 4, 3, 2, 1], "few are all tried"


def test_divisors_are_all_found_on_both_sides_of_the_root():
    for number in (1, 2, 36, 48, 60, 97):
        for most in (1, 5, 6, 7, 1000):
            assert some_divisors(number, most) == [n for n in range(min(number, most), 0, -1) if number % n == 0]


@pytest.mark.slow
def test_rounds_that_are_counted_take_what_simulated_ones_take():
    facts = load(
        "llama-2-13b-full-8xv100-16gb", ["data.sequence_tokens=1024", "train.batch_tokens=262144"], check_files=False
    )
    made = ask(facts, 8, find_hardware("8xv100-16gb"))
    strategy = made.plan().strategy
    rounds = MOST_ROUNDS + 7
    whole = speed(made.shape, strategy, made.rates, rounds=rounds)
    counted = speed_of(made.shape, replace(strategy, accumulation=rounds), made.rates)
    assert counted.seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert (counted.tokens, counted.operations) == (whole.tokens, pytest.approx(whole.operations))
