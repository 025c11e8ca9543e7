"""Bytes and seconds of a run before anything is allocated. It knows no torch."""
