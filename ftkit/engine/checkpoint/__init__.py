"""Checkpoints: written by ranges beside training, every piece with a checksum, read on any number of ranks."""
