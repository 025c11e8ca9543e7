"""stdout and stderr of rank 0, as streams whose text goes to the kernel, line by line, in order with its answers.

Cost: a message a line.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable

from ftkit.notebook.channel import Message

MOST_HELD = 4096
"""Characters without a line break that are held back."""

Tell = Callable[[Message], None]


class Output(io.TextIOBase):
    """A stream of text that goes to the kernel, line by line.

    Args:
        tell: Sends a message.
        name: "stdout" or "stderr".
    """

    encoding = "utf-8"

    def __init__(self, tell: Tell, name: str) -> None:
        self._tell, self._name = tell, name
        self._held: list[str] = []
        self._size = 0
        self._lock = threading.RLock()

    def writable(self) -> bool:
        """Say that it may be written to."""
        return True

    def write(self, text: str) -> int:
        """Take text."""
        with self._lock:
            self._held.append(text)
            self._size += len(text)
            if "\n" in text or self._size > MOST_HELD:
                self.flush()
        return len(text)

    def flush(self) -> None:
        """Send what is held."""
        with self._lock:
            text, self._held, self._size = "".join(self._held), [], 0
            if text:
                self._tell({"out": text, "stream": self._name})
