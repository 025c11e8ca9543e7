"""The channel between kernel and worker: whole messages, also where an interrupt comes in the middle of one."""

import signal
import socket
from multiprocessing.connection import Connection

import pytest

from ftkit.notebook.channel import Channel


@pytest.fixture
def ends():
    one, other = Channel.pair()
    ends = one, Channel(other)
    yield ends
    for end in ends:
        end.close()


def test_an_interrupt_in_the_middle_of_a_message_leaves_it_whole(ends, monkeypatch):
    """The interrupt comes while the message is written; its handler runs once all of it is on its way."""
    ours, theirs = ends
    write, order = Connection.send_bytes, []

    def interrupted(connection, data):
        signal.raise_signal(signal.SIGINT)
        write(connection, data)
        order.append("written")

    monkeypatch.setattr(Connection, "send_bytes", interrupted)
    signal.signal(signal.SIGINT, lambda *_: order.append("interrupt"))  # the fixture of this folder restores it
    ours.send({"one": 1})
    assert order == ["written", "interrupt"]
    assert theirs.receive() == {"one": 1}
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_what_is_no_message_ends_the_channel():
    one, other = socket.socketpair()
    channel = Channel(one)
    with other:
        other.sendall(b"\x00\x00\x00\x03abc")
        assert channel.receive() is None
    channel.close()
