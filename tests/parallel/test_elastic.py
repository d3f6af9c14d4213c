"""How the processes of a generation meet. Replicas are lost in tests/training/test_elastic.py."""

import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

pytest.importorskip("torch.distributed.elastic", exc_type=ImportError)

from parallel import elastic
from parallel.elastic import Elastic
from parallel.generations import LeftOut, Member, TooFew
from parallel.topology import Topology


@pytest.mark.parametrize(
    ("number", "connects", "is_over"), [(1, False, True), (1, True, False), (0, False, False)]
)
def test_a_generation_whose_processes_do_not_connect_is_over(
    monkeypatch, number, connects, is_over
):
    """But for the first, whose processes begin one after the other."""
    ended = threading.Event()
    monkeypatch.setattr(elastic, "_MEET_SECONDS", 0.1)
    waiting = Elastic.__new__(Elastic)
    waiting._given = Topology(2, 1, 0)
    members = Member(0, 0), Member(1, 0)
    waiting._membership = SimpleNamespace(
        number=number, members=members, member=members[0], end=ended.set
    )
    with waiting.meeting():
        if not connects:
            ended.wait(5.0 if is_over else 0.3)
    if connects:
        ended.wait(0.3)
    assert ended.is_set() == is_over


@pytest.mark.parametrize(("fault", "calls"), [(TooFew, ["close", "leave"]), (LeftOut, ["leave"])])
def test_what_is_open_is_closed_where_no_process_goes_on_and_given_up_at_once_where_others_do(
    monkeypatch, fault, calls
):
    """An upload to the mirror is waited for; the others wait for the lock of the run folder."""
    called = []
    monkeypatch.setattr(elastic.ending, "leave", lambda *_: called.append("leave"))
    leaving = Elastic.__new__(Elastic)
    leaving._given = Topology(2, 1, 0)
    leaving._minimum = 2
    leaving._membership = SimpleNamespace(
        member=Member(0, 0), end=Mock(), follow=Mock(side_effect=fault), close=lambda close: close()
    )
    leaving._over = threading.Event()
    leaving._done = Mock()
    leaving._listener = Mock()
    leaving._cut = Mock()
    leaving._over.set()
    leaving.regroup(lambda: False, before_end=lambda: called.append("close"))
    assert called == calls
