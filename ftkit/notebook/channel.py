"""What the kernel and a worker say to each other: JSON objects over a pair of sockets that have no address.

The pair is made by the kernel and one end is inherited by the worker, so nobody else can open, join or imitate either
end: holding it is the proof. Nothing listens, and nothing is ever unpickled.

It refuses what JSON cannot hold. What it costs: a system call a message.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

Message = dict[str, Any]


class Channel:
    """One end of the pair; any thread may send, one receives.

    Args:
        end: An open socket, which this object owns from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._connection = Connection(os.dup(end.fileno()))
        self._sending = threading.Lock()

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Return an end to keep, and the socket of the other end, to be inherited."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    def send(self, message: Message) -> None:
        """Send an object; waits while the other end reads nothing and its buffer is full.

        Raises:
            OSError: The other end is gone.
        """
        data = json.dumps(message).encode()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:  # an interrupt between a message's length and its text would break all that follow
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
            with self._sending:
                self._connection.send_bytes(data)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def receive(self) -> Message | None:
        """Wait for the next object; None once the other end is gone, or broke off within one."""
        try:
            return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            return None

    def is_readable(self, seconds: float) -> bool:
        """Wait so long for an object, or for the other end to go; return whether there is one or it went."""
        return self._connection.poll(seconds)

    def close_sending(self) -> None:
        """Say that nothing more will come; what the other end still says can be read until it goes."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close this end; the thread that receives calls it, last."""
        self._connection.close()
        self._socket.close()
