"""The end of calls that wait: which connections are cut, and that NCCL's communicators end
together.

That gloo's calls end by it: tests/training/test_elastic.py, where replicas are lost.
"""

import contextlib
import socket
import sys
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from parallel import cutting


@pytest.fixture
def connect():
    """A function that returns both ends of a new TCP connection."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def new():
            ours = stack.enter_context(socket.create_connection(listening.getsockname()))
            theirs, _ = listening.accept()
            return ours, stack.enter_context(theirs)

        yield new


def is_open(ends):
    """Whether a word gets through, both ways; a connection that was cut has ended instead."""
    for sender, receiver in (ends, reversed(ends)):
        try:
            sender.sendall(b"word")
        except BrokenPipeError:
            return False
        if receiver.recv(4) != b"word":
            return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("noted", [False, True])
def test_connections_of_a_generation_are_cut_and_others_are_left(connect, noted):
    """Those that are opened later are cut only while the generation connects; its listening socket
    goes on."""
    earlier = connect()
    connections = cutting.Connections()
    own = connect()
    if noted:
        connections.note_open()
    later = connect()
    assert is_open(own) and is_open(later)
    connections.cut()
    assert is_open(earlier) and not is_open(own) and is_open(later) == noted
    assert is_open(connect())


class Communicator:
    """Of NCCL: it ends once all are told to, as what one does may wait for another."""

    def __init__(self, meet):
        self._meet = meet

    def abort(self):
        self._meet.wait(5.0)
        raise RuntimeError("aborted by the other side before")


def test_communicators_of_nccl_are_aborted_together_and_groups_of_gloo_are_left(monkeypatch):
    meet = threading.Barrier(3)
    groups = [Mock(spec=ProcessGroup) for _ in range(3)]
    groups[0]._get_backend.side_effect = RuntimeError("no backend for cuda")
    for group in groups[1:]:
        group._get_backend.return_value = Communicator(meet)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(
        dist.distributed_c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(groups))
    )
    waiting = threading.Thread(target=meet.wait, args=(5.0,))
    waiting.start()
    cutting.abort_nccl()
    waiting.join()
    assert meet.n_waiting == 0 and not meet.broken
