"""Benchmarks: ftkit and its peers side by side, in one run."""
