"""Answers and evaluation of a model, whole or sharded, with all ranks in step."""
