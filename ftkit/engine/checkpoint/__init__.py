"""Checkpoints: written by ranges in the background, with a checksum per piece, and read on any number of ranks."""
