"""The folder of a run: what lies where, whose each file is, and how one takes the place of another."""
