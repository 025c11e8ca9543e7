"""Bytes in files: safetensors and flat files read and written by ranges, in pieces with checksums."""
