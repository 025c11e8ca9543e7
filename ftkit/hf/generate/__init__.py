"""Generation and evaluation with a whole or sharded model."""
