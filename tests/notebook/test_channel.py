"""The channel between kernel and worker: whole messages, also where an interrupt comes in the middle of one."""

import signal
import socket
import threading
import time

import pytest

from ftkit.notebook.channel import Channel


@pytest.fixture
def ends():
    one, other = Channel.pair()
    ends = one, Channel(other)
    yield ends
    for end in ends:
        end.close()


def test_an_interrupt_in_the_middle_of_a_message_leaves_it_whole(ends):
    """The buffer is full when the interrupt comes: a part of the message is on its way."""
    ours, theirs = ends
    got = []

    def press():
        time.sleep(0.3)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.3)
        got.extend([theirs.receive(), theirs.receive()])

    reader = threading.Thread(target=press, daemon=True)
    reader.start()
    with pytest.raises(KeyboardInterrupt):
        ours.send({"long": "x" * 4_000_000})
    ours.send({"next": 1})
    reader.join(10)
    assert [len(got[0]["long"]), *got[1:]] == [4_000_000, {"next": 1}]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_what_is_no_message_ends_the_channel():
    one, other = socket.socketpair()
    channel = Channel(one)
    with other:
        other.sendall(b"\x00\x00\x00\x03abc")
        assert channel.receive() is None
    channel.close()
