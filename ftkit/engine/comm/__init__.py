"""Collectives, and the watch over the ranks that take part in them."""
