"""The environment variables of ftkit that a library call reads.

A Trainer script has no command line of ours, so a switch for a trial run is a variable. The door (app.py) reads the
variables of launchers.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping

from ftkit.engine.memory.affinity import OWN_THREADS
from ftkit.errors import UserError

STRICT = "FTKIT_STRICT"
"""Set to 1: a small model is sharded as a large one would be."""

PREFIX = "FTKIT_"
LIKE_OURS, LIKE_ANY = 0.8, 0.9
"""How alike a name must be to one of ours: with our prefix, and without."""


def check_names(environ: Mapping[str, str]) -> None:
    """Refuse a variable that is nearly one of ours: nobody reads it.

    Raises:
        UserError: with the name that was meant.
    """
    known = {STRICT: STRICT, OWN_THREADS: "OMP_NUM_THREADS"}  # the second is a mark among processes of ftkit
    for name in sorted(environ):
        # A user's own FTKIT_RUNS is their business; a slip may be in the prefix, too.
        alike = LIKE_OURS if name.upper().startswith(PREFIX) else LIKE_ANY
        near = difflib.get_close_matches(name.upper(), known, 1, cutoff=alike)
        if near and name not in known:
            meant = known[near[0]]
            raise UserError(f"the environment has {name}, which is not read; did you mean {meant}? Rename or unset it")


def is_strict() -> bool:
    """Return whether `FTKIT_STRICT` asks for a trial under the conditions of a large model.

    Raises:
        UserError: for a value that is neither empty, 0 nor 1, and for a variable that is nearly `FTKIT_STRICT`.
    """
    check_names(os.environ)
    value = os.environ.get(STRICT, "")
    if value not in ("", "0", "1"):
        raise UserError(f"{STRICT}={value!r}: 1 or 0 is needed")
    return value == "1"
