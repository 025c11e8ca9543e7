"""The optimizer: parameter groups, loss scale, gradient norm, and the walk over the shards."""
