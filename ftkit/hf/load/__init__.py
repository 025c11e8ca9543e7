"""From a model folder to shards."""
