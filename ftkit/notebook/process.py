"""One process behind a notebook: `python -m ftkit.notebook.process controller|engine KERNEL FOLDER OPTIONS`.

It runs ipyparallel's controller or engine with OPTIONS and ends when the kernel, its parent, is gone, even by SIGKILL.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from importlib import import_module
from typing import NoReturn

from ftkit.launch.children import kill_children

POLL_SECONDS = 0.5


def main() -> None:
    """Run the controller or an engine."""
    role, kernel, folder = sys.argv[1:4]
    sys.argv[1:4] = []
    threading.Thread(target=end_with, args=(int(kernel), folder), daemon=True).start()
    import_module(f"ipyparallel.{role}.app").main()


def end_with(kernel: int, folder: str) -> NoReturn:
    """Wait for the end of the kernel; then remove the folder of connection files and end, with all children."""
    while os.getppid() == kernel:
        time.sleep(POLL_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    kill_children(os.getpid())
    os._exit(1)


if __name__ == "__main__":
    main()
