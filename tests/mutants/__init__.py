"""Faults that the tests must notice: `python -m tests.mutants`."""
