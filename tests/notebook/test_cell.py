"""A cell on one rank: values, tracebacks of the user's frames alone, and what a value becomes on its way."""

import ast
import math

import pytest

from ftkit.errors import UserError
from ftkit.notebook.cell import failure_of, is_plain, run_cell, shown

WITH_HTML = "class Table:\n    def _repr_html_(self):\n        return '<b>3</b>'\nTable()"


def failed(source):
    with pytest.raises(BaseException) as caught:
        run_cell(source, "cell 3", {})
    return failure_of(caught.value)


def test_the_last_expression_is_the_value_and_names_stay():
    names = {}
    assert run_cell("x = 2\nx + 1", "cell 1", names) == 3
    assert run_cell("x * 10", "cell 2", names) == 20
    assert run_cell("x = 5", "cell 3", names) is None
    assert run_cell("x;", "cell 4", names) is None
    assert run_cell("# nothing", "cell 5", names) is None


@pytest.mark.parametrize("value", [None, 3, 2.5, "a\nb", b"a", [1, (2, {"a": {3}})], {}, ()])
def test_plain_data_comes_back_as_it_was(value):
    told = shown(value)
    back = ast.literal_eval(told["literal"])
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("value", [math.nan, [math.inf], set(), object(), {1: object()}, 1j, type("L", (list,), {})()])
def test_other_values_come_as_what_they_show(value):
    assert not is_plain(value)
    assert shown(value)["data"]["text/plain"] == repr(value)


def test_a_value_is_shown_richly_and_long_ones_are_cut():
    data = shown(run_cell(WITH_HTML, "cell 1", {"__name__": "__main__"}))["data"]
    assert data["text/html"] == "<b>3</b>"
    assert len(shown(type("Long", (), {"__repr__": lambda self: "x" * 100_000})())["data"]["text/plain"]) < 21_000


def test_an_exception_is_told_with_the_users_lines_alone():
    told = failed("def half(x):\n    return x / 0\n\nhalf(1)")
    assert (told["kind"], told["message"]) == ("ZeroDivisionError", "division by zero")
    assert told["lines"] == ["  cell 3, line 4, in <module>: half(1)", "  cell 3, line 2, in half: return x / 0"]


def test_an_exception_of_a_library_ends_with_the_call_that_raised():
    told = failed("import json\njson.loads('{')")
    assert told["kind"] == "JSONDecodeError"
    assert told["lines"][0] == "  cell 3, line 2, in <module>: json.loads('{')"
    assert len(told["lines"]) == 2
    assert "json/decoder.py" in told["lines"][1]


def test_a_refusal_is_told_as_one_and_a_long_message_is_cut():
    error = UserError("rows.jsonl:3: no text")
    assert (failure_of(error)["refused"], failure_of(error)["exit_code"]) == ("rows.jsonl:3: no text", 2)
    assert len(failure_of(ValueError("line\n" * 500))["message"].splitlines()) == 13


def test_an_error_within_the_engines_work_is_marked():
    told = failed("import ftkit.engine.comm.communicator\n1 / 0")
    assert "engine" not in told
    told = failed("from ftkit.engine.comm.communicator import Communicator\nCommunicator(None).all_gather(None, None)")
    assert told["engine"] is True
