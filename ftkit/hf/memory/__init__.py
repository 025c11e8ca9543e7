"""Sizes of models and the memory of this machine, for the plan."""
