"""Update rules on the host, compiled by numba."""
