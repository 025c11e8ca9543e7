"""Kernels are proved by Triton's interpreter, which a process has from its beginning or not at all: `make test` starts one
for this folder. Other sessions leave it out, as kernels would run interpreted wherever they are used.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
