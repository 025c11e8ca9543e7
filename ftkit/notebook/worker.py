"""One worker: a fresh process that is one rank and lives across cells; `crew` starts `python -m ftkit.notebook.worker`.

The main thread does what the kernel asks for, one thing at a time; another thread listens meanwhile, says where the main
thread is, hands on the wish to stop, and ends the process when the kernel is gone, however it went: its end of the pair of
sockets closes with it, and where somebody else holds that open, the parent's number changes. Should this process be stopped
then, Linux wakes it.

An error goes to the kernel and the worker lives on.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn

from ftkit.errors import UserError
from ftkit.notebook.cell import failure_of, frames_of
from ftkit.notebook.channel import Channel, Message
from ftkit.notebook.output import Output

LOOK_SECONDS = 1.0
"""Between two looks at whether the parent is still there."""
TIDY_SECONDS = 5.0
"""That the main thread has to end in order once the kernel is gone."""
_PR_SET_PDEATHSIG = 1


class Listener:
    """The thread that listens to the kernel.

    Args:
        channel: The channel to the kernel.
        kernel: The kernel's process number.

    Attributes:
        asked: What the main thread is to do, in order; None means to end.
    """

    def __init__(self, channel: Channel, kernel: int) -> None:
        self.channel, self.kernel = channel, kernel
        self.asked: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.stop: Any = None  # of the run, once there is one
        self.in_cell = False  # whether an interrupt is for the user's code
        self._main = threading.main_thread()
        threading.Thread(target=self._listen, name="ftkit listener", daemon=True).start()

    def _listen(self) -> None:
        while True:
            if not self.channel.is_readable(LOOK_SECONDS):
                if os.getppid() != self.kernel:
                    break
                continue
            message = self.channel.receive()
            if message is None:
                break
            if "where" in message:
                self._tell_where(message["where"])
            elif "interrupt" in message:
                self._interrupt()
            else:
                if self.stop is not None:
                    self.stop.asked = False  # an interrupt that came after the last answer is not for this request
                self.asked.put(message)
        self.asked.put(None)
        time.sleep(TIDY_SECONDS)  # the main thread ends the process in order, unless it is busy
        os._exit(1)

    def _tell_where(self, number: int) -> None:
        stack = []
        with suppress(Exception):  # it runs while it is looked at; this thread must not end of that
            frame = sys._current_frames().get(self._main.ident or 0)
            stack = frames_of(traceback.walk_stack(frame))[::-1] if frame is not None else []
        # Of the whole process: a backend computes its collectives in threads of its own.
        told = {"where": number, "frames": [asdict(each) for each in stack], "cpu_s": time.process_time()}
        with suppress(OSError):
            self.channel.send(told)

    def _interrupt(self) -> None:
        if self.stop is not None:
            self.stop.asked = True
        if self.in_cell:
            signal.pthread_kill(self._main.ident or 0, signal.SIGINT)


def main() -> None:
    """Be a worker until the kernel asks to end, or ends."""
    handle = int(sys.argv[1])
    os.set_inheritable(handle, False)  # what a cell starts must not hold it
    channel = Channel(socket.socket(fileno=handle))
    kernel, rank, ranks = int(sys.argv[2]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sys.argv[:] = ["ftkit.notebook"]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = Listener(channel, kernel)
    first = listener.asked.get()
    if first is None:
        return
    sys.path[:] = first["path"]
    if rank == 0:
        sys.stdout, sys.stderr = Output(channel.send, "stdout"), Output(channel.send, "stderr")
    try:
        session = _join(listener, rank, ranks)
    except Exception as error:
        _answer(channel, {"failed": failure_of(error), "number": 0})
        return
    _answer(channel, {"done": {"device": str(session.device)}, "number": 0})
    while (asked := listener.asked.get()) is not None:
        answer = _obey(listener, session, asked)
        listener.in_cell = False  # again: an interrupt may have come in the middle of `_obey`'s own
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _answer(channel, {**answer, "number": asked["number"]})
    with suppress(Exception):  # whatever it is, nobody is there to be told
        session.close()


def _join(listener: Listener, rank: int, ranks: int) -> Any:
    """Meet the other ranks, and make what this one keeps."""
    import torch  # here: these take seconds, and the kernel must be heard meanwhile
    from accelerate import PartialState

    from ftkit.engine.comm.communicator import GROUP_TIMEOUT
    from ftkit.notebook.session import Session

    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=GROUP_TIMEOUT)  # makes the process group
    device = state.device if state.device.type == "cuda" else torch.device("cpu")
    listener.stop = _stop(listener.channel, rank)
    return Session(listener.stop, ranks, device, listener.channel.send)


def _stop(channel: Channel, rank: int) -> Any:
    from ftkit.launch.ranks import Stop  # here, as in `_join`

    class WorkerStop(Stop):
        """A `Stop` that sends its last error to the kernel."""

        def leave(self, error: BaseException) -> NoReturn:
            """End this process at once, from any thread, and show the error to the user."""
            code = error.exit_code if isinstance(error, UserError) else 1
            with suppress(OSError):
                channel.send({"left": str(error), "exit_code": code})
            os._exit(code)

    return WorkerStop(rank=rank)


def _obey(listener: Listener, session: Any, asked: Message) -> Message:
    """Do one thing that the kernel asked for; returns the answer."""
    verb = asked["do"]
    try:
        try:
            os.chdir(asked["cwd"])
            if verb == "cell":
                signal.signal(signal.SIGINT, signal.default_int_handler)
                listener.in_cell = True
            return {"done": session.verbs[verb](**asked["with"])}
        finally:  # within the outer try: the interrupt may come when the cell has just ended
            listener.in_cell = False
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except BaseException as error:  # sys.exit of a cell among them: the worker lives on
        return {"failed": failure_of(error)}


def _answer(channel: Channel, answer: Message) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(OSError):  # the kernel is gone: the listener ends this process
        channel.send(answer)


if __name__ == "__main__":
    main()
