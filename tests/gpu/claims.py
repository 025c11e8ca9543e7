"""The claims of the documentation that `make gpu` decides, and how results decide them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CONFIRMED, REFUTED, NOT_TRIED = "confirmed", "refuted", "not tried"
LEAST_OVERLAP = 0.5
README, LIMITS, PLAN_PAGE = "README.md", "docs/limits.md", "docs/plan.md"
PINNED, OFFLOADED, TIMED = "takes_it_for_pinned", "offloaded_state", "trace_times"
"""Parts of the names of tests that decide a claim by themselves."""


@dataclass
class Result:
    """Result of a part.

    Args:
        part: Its name.
        status: passed, failed or not tried.
        seconds: Time that it took.
        reason: Why it was not tried, or the end of its output if it failed.
        tests: Outcome of each test: passed, failed, skipped, or error where it did not run.
        figures: Measured values: the content of its JSON file.
    """

    part: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    tests: dict[str, str] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)


Check = Callable[[dict[str, Result], list[dict[str, Any]]], bool | None]
"""Takes the results by part and the cards. Returns whether the claim holds; None if that was not tried."""


@dataclass(frozen=True)
class Claim:
    """A claim.

    Args:
        text: The claim, in a few words.
        where: File that makes the claim, or says that it is not confirmed.
        quotation: Words of that file.
        check: Decides the claim. None: `make gpu` cannot.
    """

    text: str
    where: str
    quotation: str
    check: Check | None = None


def passed(*parts: str, name: str = "") -> Check:
    """Return a check: of each part's tests whose names contain `name`, some passed and the others were skipped."""

    def check(results: dict[str, Result], cards: list[dict[str, Any]]) -> bool | None:
        found = [{how for test, how in results[part].tests.items() if name in test} for part in parts]
        if any("failed" in outcomes for outcomes in found):
            return False
        return True if all("passed" in outcomes and "error" not in outcomes for outcomes in found) else None

    return check


def measured(part: str, holds: Callable[[dict[str, Any]], bool]) -> Check:
    """Return a check of a part's figures. The figures of a failed part can refute a claim but not confirm it."""

    def check(results: dict[str, Result], cards: list[dict[str, Any]]) -> bool | None:
        result = results[part]
        if not result.figures:
            return None
        right = holds(result.figures)
        return None if right and result.status != "passed" else right

    return check


def given(condition: Callable[[list[dict[str, Any]]], bool], check: Check) -> Check:
    """Return a check that is not tried unless the cards meet a condition."""
    return lambda results, cards: check(results, cards) if condition(cards) else None


def within_plan(cases: dict[str, Any]) -> bool:
    return all(case["allocated"] <= case["planned"] for case in cases.values())


def copies_overlap(seconds: dict[str, float]) -> bool:
    return overlapped(seconds) >= LEAST_OVERLAP


def overlapped(seconds: dict[str, float]) -> float:
    """Return the overlap as a share of the shorter total, copies or kernels."""
    return seconds["both_s"] / min(seconds["copies_s"], seconds["kernels_s"])


def is_v100(cards: list[dict[str, Any]]) -> bool:
    return bool(cards[0]["capability"] == [7, 0])


def several_cards(cards: list[dict[str, Any]]) -> bool:
    return len(cards) > 1


CLAIMS = (
    Claim(
        "stages 0-3 follow plain PyTorch on 1, 2 and 3 ranks",
        README,
        "do not change the trajectory of plain",
        passed("stages-1", "stages-2", "stages-3"),
    ),
    Claim(
        "runs with state, gradients, weights or activations on host follow plain PyTorch",
        PLAN_PAGE,
        "None of this changes the trajectory.",
        passed("host-1", "host-2", "host-3"),
    ),
    Claim(
        "runs with state, gradients, weights or activations on NVMe follow plain PyTorch",
        PLAN_PAGE,
        "None of this changes the trajectory.",
        passed("nvme-1", "nvme-2", "nvme-3"),
    ),
    Claim(
        "a sharded model gives the same answers on 1, 2 and 3 ranks",
        README,
        "with the same tokens on any number of ranks",
        passed("answers-1", "answers-2", "answers-3"),
    ),
    Claim(
        "ranks of a notebook train and answer on GPUs",
        README,
        "from a notebook, or from your Hugging Face",
        passed("notebook"),
    ),
    Claim("the host tier is pinned", PLAN_PAGE, "pinned on CUDA", passed("single", name=PINNED)),
    Claim(
        "state on the host takes no device memory",
        LIMITS,
        "test of device memory under offload",
        passed("single", name=OFFLOADED),
    ),
    Claim(
        "spans of the timeline are the work on the GPU",
        "docs/recipes.md",
        "time the work and not its launch",
        passed("single", name=TIMED),
    ),
    Claim("fused kernels are correct", README, "kernels were correct", passed("kernels")),
    Claim("PyTorch allocates no more than planned", README, "stayed within the plan", measured("peaks", within_plan)),
    Claim(
        "with everything on NVMe, PyTorch allocates no more than planned",
        "docs/benchmarks.md",
        "The same with everything on NVMe did not end",
        measured("peaks-nvme", within_plan),
    ),
    Claim(
        "copies between host and device overlap with computation, for at least half of the shorter of the two",
        PLAN_PAGE,
        "beside the computation",
        measured("overlap", copies_overlap),
    ),
    Claim(
        "the engine's collectives run over NCCL",
        LIMITS,
        "no collective of the engine has run over NCCL",
        given(several_cards, passed("stages-2", "host-2")),
    ),
    Claim("a V100 runs the engine", LIMITS, "No V100 has run this yet", given(is_v100, passed("stages-1", "host-1"))),
    Claim("fused kernels are correct on a V100", LIMITS, "No kernel has run on a V100", given(is_v100, passed("kernels"))),
    Claim("simulated seconds on V100s are right", LIMITS, "Seconds on V100 nodes are simulated"),
    Claim("models of 10B-16B train on 8 V100s", LIMITS, "No model of 10B-16B has been trained with it"),
    Claim("several nodes train one model", LIMITS, "no run has been made on several nodes"),
)


def verdicts(results: dict[str, Result], cards: list[dict[str, Any]]) -> list[str]:
    """Return the verdict on each claim of `CLAIMS`."""
    outcomes = [claim.check(results, cards) if claim.check and cards else None for claim in CLAIMS]
    return [NOT_TRIED if each is None else CONFIRMED if each else REFUTED for each in outcomes]
