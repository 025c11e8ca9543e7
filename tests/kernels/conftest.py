"""These tests need Triton's interpreter, which a process uses from its start or not at all. `make test` starts a process
for this folder. Other sessions skip it, because all their kernels would run interpreted.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
