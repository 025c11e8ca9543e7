"""The folder of a run."""
