"""How the processes of a generation meet, and NCCL's end. Replicas are lost in tests/training/test_elastic.py."""

import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

pytest.importorskip("torch.distributed.elastic", exc_type=ImportError)

from parallel import elastic
from parallel.elastic import Elastic
from parallel.generations import Member
from parallel.topology import Topology


@pytest.mark.parametrize(("number", "connects", "is_over"), [(1, False, True), (1, True, False), (0, False, False)])
def test_a_generation_whose_processes_do_not_connect_is_over(monkeypatch, number, connects, is_over):
    """But for the first, whose processes begin one after the other."""
    ended = threading.Event()
    monkeypatch.setattr(elastic, "_MEET_SECONDS", 0.1)
    waiting = Elastic.__new__(Elastic)
    waiting._given = Topology(2, 1, 0)
    members = Member(0, 0), Member(1, 0)
    waiting._membership = SimpleNamespace(number=number, members=members, member=members[0], end=ended.set)
    with waiting.meeting():
        if not connects:
            ended.wait(5.0 if is_over else 0.3)
    if connects:
        ended.wait(0.3)
    assert ended.is_set() == is_over


class Communicator:
    """Of NCCL: it ends once all are told to, as what one does may wait for another."""

    def __init__(self, meet):
        self._meet = meet

    def abort(self):
        self._meet.wait(5.0)
        raise RuntimeError("aborted by the other side before")


def test_communicators_of_nccl_are_aborted_together_and_groups_of_gloo_are_left(monkeypatch):
    meet, groups = threading.Barrier(3), [Mock(spec=ProcessGroup) for _ in range(3)]
    groups[0]._get_backend.side_effect = RuntimeError("no backend for cuda")
    for group in groups[1:]:
        group._get_backend.return_value = Communicator(meet)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(groups)))
    waiting = threading.Thread(target=meet.wait, args=(5.0,))
    waiting.start()
    elastic._abort_nccl()
    waiting.join()
    assert meet.n_waiting == 0 and not meet.broken
