"""The order of samples does not depend on the number of ranks."""

from ftkit.data.batches import StepOrder


def samples():
    return [list(StepOrder(50, seed=3)), list(StepOrder(50, seed=3, sources=[0, 1] * 25, weights=[1, 3]))]


def test_the_order_of_samples_knows_no_world(worlds):
    orders = [order for world in (1, 2, 3) for order in worlds[world].run(samples)]
    assert orders == [samples()] * 6
