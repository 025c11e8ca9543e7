"""Starts ranks, joins those that a launcher started, and watches them."""
