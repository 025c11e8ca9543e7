"""The simulation of events against what can be worked out by hand."""

from __future__ import annotations

import pytest

from ftkit.plan.events import Script, simulate

RATES = {"flops": 100.0, "bytes": 10.0}


def ends(script: Script) -> list[float]:
    return [round(end, 9) for end in simulate(script.events, RATES).ends]


def test_a_stream_does_one_after_the_other_and_streams_run_together() -> None:
    script = Script()
    script.add("a", "one", {"flops": 200})
    script.add("b", "one", {"flops": 100})
    script.add("c", "two", {"bytes": 25})
    assert ends(script) == [2, 3, 2.5]


def test_an_event_waits_for_those_it_names() -> None:
    script = Script()
    first = script.add("a", "one", {"flops": 200})
    second = script.add("b", "two", {"bytes": 10}, [first])
    script.add("c", "one", {"flops": 100}, [second, None])
    assert ends(script) == [2, 3, 4]


def test_those_that_share_a_resource_slow_down_while_they_do() -> None:
    script = Script()
    script.add("a", "one", {"bytes": 10})
    script.add("b", "two", {"bytes": 30})
    assert ends(script) == [2, 4]  # half the rate each until the first is done


def test_the_slowest_resource_of_an_event_is_its_time() -> None:
    script = Script()
    script.add("a", "one", {"flops": 100, "bytes": 40}, latency_s=0.5)
    script.add("b", "two", {"flops": 50}, latency_s=0.0)
    first, second = ends(script)
    assert first == pytest.approx(4.5, rel=0.05)
    assert second < 1, "what asks little of a resource leaves the rest of it"


def test_events_of_no_time() -> None:
    script = Script()
    first = script.add("a", "one", {})
    second = script.add("b", "two", {}, [first])
    third = script.add("c", "one", {"flops": 100}, [second])
    script.add("d", "two", {}, [third])
    assert ends(script) == [0, 0, 1, 1]


def test_how_busy_a_stream_is() -> None:
    script = Script()
    first = script.add("a", "one", {"flops": 200})
    script.add("b", "two", {"bytes": 20}, [first])
    timeline = simulate(script.events, RATES)
    assert timeline.busy(1, 3) == {"one": 0.5, "two": 0.5}
