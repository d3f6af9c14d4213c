"""The benchmark of elastic runs: whom it strikes, and what it takes a strike to cost."""

import random
import signal
from types import SimpleNamespace

import pytest

from benchmarks.elastic import strikes, uneven
from benchmarks.elastic.__main__ import _claims
from benchmarks.elastic.strikes import Strike, Struck
from benchmarks.elastic.uneven import Turn
from benchmarks.faults.site import Topology


@pytest.fixture
def struck(monkeypatch):
    """kind, topology, ranks there, lines, ranks that do not run -> the kind, and ranks that were sent a signal."""

    def strike(kind, topology, running, said, seed=0, stopped=()):
        sent = []
        monkeypatch.setattr(strikes, "runs", lambda process: process not in stopped)
        monkeypatch.setattr(strikes, "_MEETING", 0.0)
        monkeypatch.setattr(strikes.os, "kill", lambda process, number: sent.append((process, number)))
        session = SimpleNamespace(said=lambda: said, ranks=lambda: {rank: rank for rank in running})
        called, ranks = strikes._strike(kind, topology, session, random.Random(seed))
        assert [process for process, _ in sent] == list(ranks)
        last = signal.SIGSTOP if kind in ("stop", "meeting") else signal.SIGKILL
        first = signal.SIGKILL if kind == "meeting" else last
        assert [number for _, number in sent] == [first, last][: len(sent)]
        return called, ranks

    return strike


@pytest.mark.parametrize("seed", range(8))
def test_one_replica_that_has_the_state_is_left(struck, seed):
    last = "generation 2: going on at step 9 of 300 with replicas 2, 0\n"
    called, (victim,) = struck("kill", Topology(3, 1), (0, 1, 2), last, seed)
    assert victim in (0, 2) and called == "while another joins"
    called, (first, second) = struck("two", Topology(3, 2), range(6), "", seed)
    assert first // 2 != second // 2 and called == "two"  # of two replicas
    assert struck("stop", Topology(3, 1), (0, 1, 2), last.replace("2, 0", "2"), seed) == ("stop", ())
    joining = struck("kill", Topology(2, 1), (0, 1), last.replace("2, 0", "0"), seed)
    assert joining == ("while another joins", (1,))  # itself on its way back
    called, (first, second) = struck("meeting", Topology(3, 1), (0, 1, 2), "", seed)
    assert first != second and called == "meeting"
    for kind in ("kill", "stop", "two", "meeting"):  # nobody has noticed yet that rank 2 was stopped
        assert struck(kind, Topology(3, 1), (0, 1, 2), last, seed, stopped=(2,))[1] in ((), (1,))


def test_a_change_costs_the_time_between_the_steps_around_it():
    watch = strikes._Watch(None, None)
    watch.times = [(1.0, 1), (2.0, 2), (5.0, 3), (5.5, 2), (6.0, 3), (7.0, 4)]
    watch.changes = [4.0]
    assert watch.around_changes() == [3.0]
    assert watch.after(2.5, 3) == 7.0 and watch.after(2.5, 2) == 5.0 and watch.after(8.0, 1) is None


def test_what_differs_and_what_restarts_is_claimed():
    made = [Strike("kill", (0,), 5, 0.5), Strike("stop", (1,), 9, 3.5), Strike("kill", (0,), 15, 0.7)]
    good = Struck("3x1", made, True, 0, 0, 4, 12.0, "")
    bad = good._replace(same=False, wrong_steps=2, restarts=1)
    found = {each["name"]: each["value"] for each in _claims([good, bad])}
    assert found["strikes"] == 6 and found["runs_with_the_undisturbed_bits"] == 0.5
    assert (found["steps_with_images_lost_or_repeated"], found["restarts_from_checkpoint"]) == (2, 1)
    assert found["median_seconds_lost"] == 0.7
    assert found["effective_time"] == pytest.approx(1 - 4 / 60)


def test_rates_add_up():
    """8 and 16 micro batches in a second of passes are 24 a second; a step of 24 in 1.25 s is 80 % of that."""
    assert uneven.over_sum((Turn(1.25, 1.0, 8), Turn(1.25, 1.0, 16))) == pytest.approx(24 / 1.25 / 24)
