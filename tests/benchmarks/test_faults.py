"""The harness that strikes runs with faults: a small part of it, and that it notices what did not survive."""

import os
import random
import shutil

import pytest

from benchmarks.faults import __main__ as command
from benchmarks.faults import trial
from benchmarks.faults.kinds import KINDS, Kind
from benchmarks.faults.site import STEPS, Ending, Result, Topology
from benchmarks.faults.trial import Bench, Trial

ONE_OF_EACH = {trial[0]: trial for trial in command.plan()}  # the benchmark tries all
BEFORE_ITS_FIRST_STEP = ("run killed", "clock jumps")  # may strike a run then, too


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    return Bench(tmp_path_factory.mktemp("faults"))


@pytest.mark.slow  # minutes of sessions; tests/training has fast tests of these faults
@pytest.mark.multiprocess
@pytest.mark.parametrize(("kind", "topology", "number"), ONE_OF_EACH.values(), ids=str)
def test_a_run_survives(bench, kind, topology, number):
    if KINDS[kind].disk and os.geteuid():
        pytest.skip("a small disk can be mounted by root only")
    found = bench.trial(kind, topology, random.Random(f"{kind} {topology} {number}"))
    assert (found.wrong, found.lost, found.repeated) == ("", 0, 0)
    assert found.step > 0 or kind in BEFORE_ITS_FIRST_STEP
    assert found.step <= STEPS and found.code in KINDS[kind].codes


class Sessions:
    """A run whose sessions end in this order, with this result."""

    def __init__(self, endings, result):
        self.run, self._endings = None, iter(endings)
        self.start, self.steps, self.result = lambda: self, lambda: 1, lambda: result
        self.reach, self.wait = lambda step, delay: True, lambda since: next(self._endings)


def test_what_does_not_survive_is_told(bench, monkeypatch):
    """The session that is struck, and those that resume the run, end with other codes and words than they must."""
    reference = Result("abc", [{"event": "train", "step": 1, "loss": 1.0}])
    monkeypatch.setattr(bench, "_undisturbed", {False: reference})

    def tried(*endings, result=reference):
        site = Sessions(endings, result)
        monkeypatch.setattr(trial, "Site", lambda *arguments: site)
        kind = Kind({}, (75,), lambda site, session, draws: None, "stopping", resumed="resuming")
        monkeypatch.setitem(KINDS, "forgery", kind)
        return bench.trial("forgery", Topology(1, 1), random.Random(0))

    stopped, resumed = Ending(75, 1.0, "stopping"), Ending(0, 1.0, "resuming")
    assert tried(stopped, resumed).wrong == ""
    assert "exit code -9 instead of (75,)" in tried(Ending(-9, 1.0, "stopping"), resumed).wrong
    assert "not said: stopping" in tried(Ending(75, 1.0, "nothing"), resumed).wrong
    assert "not said: resuming" in tried(stopped, Ending(0, 1.0, "nothing")).wrong
    assert "it ended with 1" in tried(stopped, resumed._replace(code=1), resumed).wrong
    assert "other weights" in tried(stopped, resumed, result=reference._replace(digest="abd")).wrong
    assert "always ended before the fault" in tried(*[resumed] * 4).wrong


def test_other_weights_events_and_steps_are_noticed():
    def events(*steps):
        return [{"event": "train", "step": step, "loss": float(step)} for step in steps]

    changed = [*events(1, 2), {"event": "train", "step": 3, "loss": 3.5}]
    cases = [("abc", events(1, 2, 3), 0, 0, 0), ("abc", events(1, 2, 2, 3), 1, 0, 1), ("abd", events(1, 3), 0, 1, 2)]
    for digest, found, repeated, lost, wrong in [*cases, ("abc", changed, 0, 1, 1)]:
        compared = trial._compared(Result(digest, found), Result("abc", events(1, 2, 3)))
        assert (*compared[:2], len(compared[2])) == (repeated, lost, wrong)


def test_one_fault_that_is_not_survived_fails_the_claim():
    good = Trial("rank killed", "2x1", 5, 1, 0.1, 0, 0, "", 0.4)
    bad = good._replace(wrong="other weights", lost=2, detection=40.0, noticed=3.0)
    assert [each["holds"] for each in command._claims([good] * 50)] == [True] * 5
    found = command._claims([good] * 48 + [bad])
    assert [each["name"] for each in found if each["holds"]] == ["dead_rank_noticed"]
    assert found[0]["value"] == 0.4
    (row,) = command._rows([good, bad])
    assert (row["survived"], row["updates_lost"], row["longest_until_noticed_s"]) == (1, 2, 3.0)


def test_fifty_faults_are_tried_over_all_topologies():
    assert len(command.plan()) >= 50
    assert {topology for _, topology, _ in command.plan()} == {(1, 1), (2, 1), (2, 2)}
