"""Which faults a run with a time limit takes: the changed ones first, the others in turn, none for ever left out."""

from __future__ import annotations

import pytest

from tests.mutants.__main__ import USUAL_SECONDS, WORKERS, fitting, main
from tests.mutants.fault import Fault, fault
from tests.mutants.faults import collect
from tests.mutants.selection import Green, digest, in_order

FAULTS = [fault(f"fault {n}", f"ftkit/{n}.py", "a", "b", f"tests/test_{n % 3}.py::test") for n in range(9)]


def green_of(faults: list[Fault]) -> Green:
    return Green("c0ffee", {each.name: digest(each) for each in faults}, {each.name: 5.0 for each in faults})


@pytest.mark.parametrize(
    "files, first",
    [({"ftkit/4.py"}, [4]), ({"tests/test_1.py"}, [1, 4, 7]), ({"README.md"}, []), (None, list(range(9)))],
    ids=["its file", "a file of its tests", "another file", "the commit is unknown"],
)
def test_changed_faults_come_first(files, first):
    ordered, changed = in_order(FAULTS, green_of(FAULTS), files, commits=5)
    assert changed == len(first)
    assert sorted(each.name for each in ordered[:changed]) == [FAULTS[n].name for n in first]
    assert sorted(ordered, key=repr) == FAULTS


def test_a_new_fault_and_one_with_other_text_have_changed():
    others = green_of([*FAULTS[1:8], fault("fault 8", "ftkit/8.py", "a", "c", "tests/test_2.py::test")])
    ordered, changed = in_order(FAULTS, others, set(), commits=0)
    assert {each.name for each in ordered[:changed]} == {"fault 0", "fault 8"}


def test_all_faults_take_their_turn():
    starts = {in_order(FAULTS, green_of(FAULTS), set(), commits)[0][0].name for commits in range(9)}
    assert len(starts) == 9


def test_a_limited_run_takes_as_many_as_fit():
    room = 4.5 * USUAL_SECONDS / WORKERS
    taken, skipped = fitting(FAULTS, room)
    assert len(taken) >= 4
    assert taken + skipped == FAULTS


def test_names_of_faults_are_unique():
    names = [each.name for each in collect()]
    assert len(names) == len(set(names))


def test_words_that_choose_no_fault_are_told(capsys):
    with pytest.raises(SystemExit):
        main(["nothing that a fault is called"])
    assert "no fault has one of these in its name: nothing that a fault is called" in capsys.readouterr().err
