"""A Jupyter kernel for tests, which runs cells as a notebook does."""

import time

from jupyter_client.manager import KernelManager

from tests.worlds import PATIENCE

CELL_SECONDS = 100 * PATIENCE


class Kernel:
    """A kernel whose working directory is `folder`."""

    def __init__(self, folder, environ):
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(folder), env=environ)
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=CELL_SECONDS)
        self.pid = self.manager.provisioner.pid
        self.texts = {}

    def begin(self, source):
        """Start a cell, and return its id."""
        return self.client.execute(source)

    def read(self, seconds):
        """Collect output for at most so long, and return the id of a cell that ended, or None."""
        try:
            message = self.client.get_iopub_msg(timeout=seconds)
        except Exception:  # queue.Empty
            return None
        cell, content = message["parent_header"].get("msg_id"), message["content"]
        texts = self.texts.setdefault(cell, [])
        if message["msg_type"] == "stream":
            texts.append(content["text"])
        elif message["msg_type"] == "error":
            texts.append("\n".join(content["traceback"]))
        elif "data" in content:
            texts.append(content["data"].get("text/plain", ""))
        return cell if content.get("execution_state") == "idle" else None

    def end(self, cell, after=None, then=None):
        """Wait for the end of a cell, and return its text. Call `then` once `after` returns true."""
        deadline = time.monotonic() + CELL_SECONDS
        while self.read(0.1) != cell:
            assert time.monotonic() < deadline, "\n".join(self.texts.get(cell, []))
            if then is not None and after():
                then()
                then = None
        assert then is None, "\n".join(self.texts.get(cell, []))
        return "\n".join(self.texts.get(cell, []))

    def run(self, source):
        """Run a cell, and return its text."""
        return self.end(self.begin(source))

    def close(self):
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
