"""Weights between folders and shards: read and written by ranges, exported, merged."""
