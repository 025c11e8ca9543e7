"""The report of a run, a plan or a data set: pages that need no other file."""
