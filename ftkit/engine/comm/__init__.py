"""Collectives among ranks, over the process group and over shared memory."""
