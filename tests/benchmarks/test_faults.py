"""The harness that strikes runs with faults: a small part of it, and that it notices what did not survive."""

import os
import random
import shutil

import pytest

from benchmarks.faults import __main__ as command
from benchmarks.faults import trial
from benchmarks.faults.kinds import KINDS, Kind, Struck
from benchmarks.faults.site import STEPS, Result, Topology
from benchmarks.faults.trial import Bench, Trial

pytestmark = pytest.mark.multiprocess
QUICK = ("checkpoint's bit flipped", Topology(1, 1), 0)  # the others are slow
BEFORE_ITS_FIRST_STEP = ("run killed", "clock jumps")  # may strike a run then, too


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    return Bench(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize(
    ("kind", "topology", "number"),
    [pytest.param(*each, marks=() if each == QUICK else pytest.mark.slow) for each in command.plan()],
    ids=str,
)
def test_a_run_survives(bench, kind, topology, number):
    if KINDS[kind].disk and os.geteuid():
        pytest.skip("a small disk can be mounted by root only")
    found = bench.trial(kind, topology, random.Random(f"{kind} {topology} {number}"))
    assert (found.wrong, found.lost, found.repeated) == ("", 0, 0)
    assert found.step > 0 or kind in BEFORE_ITS_FIRST_STEP
    assert found.step <= STEPS and found.code in KINDS[kind].codes


@pytest.mark.slow  # minutes of sessions; the comparison itself is tested below
def test_what_does_not_survive_is_told(bench, monkeypatch):
    """A run whose step is another one after the fault, which ends with another code and says nothing."""

    def strike(site, session, draws):
        session.reach(1, delay=0.0)
        session.kill()
        ending = session.wait(0.0)
        site._overrides = ("run.seed=1",)
        shutil.rmtree(site.run)
        return Struck(1, ending, "not a word")

    monkeypatch.setitem(KINDS, "forgery", Kind({}, (75,), strike, resumed="resuming"))
    found = bench.trial("forgery", Topology(1, 1), random.Random(0))
    assert all(text in found.wrong for text in ("exit code -9 instead of 75", "not said: not a word", "when resumed"))


def test_other_weights_events_and_steps_are_noticed():
    def events(*steps):
        return [{"event": "train", "step": step, "loss": float(step)} for step in steps]

    reference = Result("abc", events(1, 2, 3))
    assert trial._compared(Result("abc", events(1, 2, 3)), reference) == (0, 0, [])
    assert trial._compared(Result("abc", events(1, 2, 2, 3)), reference)[:2] == (1, 0)
    repeated, lost, wrong = trial._compared(Result("abd", events(1, 3)), reference)
    assert (repeated, lost, len(wrong)) == (0, 1, 2)
    changed = [*events(1, 2), {"event": "train", "step": 3, "loss": 3.5}]
    assert trial._compared(Result("abc", changed), reference)[:2] == (0, 1)


def test_one_fault_that_is_not_survived_fails_the_claim():
    good = Trial("run killed", "1x1", 5, -9, 0.1, 0, 0, "")
    bad = good._replace(wrong="other weights", lost=2, detection=40.0)
    assert [each["holds"] for each in command._claims([good] * 50)] == [True] * 4
    held = {each["name"]: each["holds"] for each in command._claims([good] * 49 + [bad])}
    assert held == {
        "faults_tried": True, "faults_survived": False, "updates_lost_or_repeated": False, "longest_detection": False,
    }  # fmt: skip
    assert command._rows([good, bad])[0]["survived"] == 1
    dead = [good._replace(kind="rank killed", noticed=seconds) for seconds in (0.3, 0.4, 0.9)]
    assert command._claims(dead)[0]["name"] == "dead_rank_noticed" and command._claims(dead)[0]["value"] == 0.4
    assert command._rows(dead)[0]["longest_until_noticed_s"] == 0.9


def test_every_kind_and_topology_is_tried_and_fifty_are_at_least():
    assert sum(sum(kind.trials.values()) for kind in KINDS.values()) >= 50
    assert {topology for kind in KINDS.values() for topology in kind.trials} == {(1, 1), (2, 1), (2, 2)}
