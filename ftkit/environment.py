"""The environment variables of ftkit that a library call reads.

A Trainer script has no command line of ours, so a switch for a trial run is a variable. The door (cli.py) reads the
variables of launchers.
"""

from __future__ import annotations

import os

from ftkit.errors import UserError

STRICT = "FTKIT_STRICT"
"""Set to 1: a small model is sharded as a large one would be."""


def is_strict() -> bool:
    """Return whether `FTKIT_STRICT` asks for a trial under the conditions of a large model.

    Raises:
        UserError: for a value that is neither empty, 0 nor 1.
    """
    value = os.environ.get(STRICT, "")
    if value not in ("", "0", "1"):
        raise UserError(f"{STRICT}={value!r}: 1 or 0 is needed")
    return value == "1"
