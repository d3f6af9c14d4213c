"""The harness that strikes runs with faults: a small part of it, and that it notices what did not
survive."""

import os
import random
import re
import shutil
import signal
import threading
from types import SimpleNamespace

import pytest

from benchmarks.faults import __main__ as command
from benchmarks.faults import hosts, trial
from benchmarks.faults.kinds import KINDS, ONE, STEPS, Kind
from benchmarks.faults.site import Ending, Result, Session, Topology
from benchmarks.faults.trial import Bench, Trial

ONE_OF_EACH = {each.kind: each for each in command.plan()}  # the benchmark tries all
BEFORE_ITS_FIRST_STEP = ("run killed", "clock jumps")  # may strike a run then, too


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    return Bench(tmp_path_factory.mktemp("faults"))


@pytest.mark.slow  # minutes of sessions; tests/training has fast tests of these faults
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("kind", "topology", "number"),
    [
        pytest.param(
            *each, marks=[pytest.mark.netns, pytest.mark.clock] if KINDS[each.kind].hosts else ()
        )
        for each in ONE_OF_EACH.values()
    ],
)
def test_a_run_survives(bench, kind, topology, number):
    if (KINDS[kind].disk or KINDS[kind].hosts) and os.geteuid():
        pytest.skip("a small disk can be mounted, and hosts be made, by root only")
    found = bench.trial(kind, topology, random.Random(f"{kind} {topology} {number}"))
    assert (found.wrong, found.lost, found.repeated) == ("", 0, 0)
    assert found.step > 0 or kind in BEFORE_ITS_FIRST_STEP
    assert found.step <= STEPS and found.code in KINDS[kind].codes


class Sessions:
    """A run whose sessions end in this order, with this result."""

    def __init__(self, endings, result):
        self.run = None
        self._endings = iter(endings)
        self.start = lambda: self
        self.steps = lambda: 1
        self.result = lambda: result
        self.reach, self.wait = lambda step, delay: True, lambda since: next(self._endings)


def test_what_does_not_survive_is_told(bench, monkeypatch):
    """The session that is struck, and those that resume the run, end with other codes and words
    than they must."""
    reference = Result("abc", [{"event": "train", "step": 1, "loss": 1.0}])
    monkeypatch.setattr(bench, "_undisturbed", {False: reference})

    def tried(*endings, result=reference):
        site = Sessions(endings, result)
        monkeypatch.setattr(trial, "Site", lambda *arguments: site)
        kind = Kind({}, (75,), lambda site, session, draws: None, "stopping", resumed="resuming")
        monkeypatch.setitem(KINDS, "forgery", kind)
        return bench.trial("forgery", Topology(1, 1), random.Random(0))

    stopped = Ending(75, 1.0, "stopping")
    resumed = Ending(0, 1.0, "resuming")
    assert tried(stopped, resumed).wrong == ""
    assert "exit code -9 instead of (75,)" in tried(Ending(-9, 1.0, "stopping"), resumed).wrong
    assert "not said: stopping" in tried(Ending(75, 1.0, "nothing"), resumed).wrong
    assert "not said: resuming" in tried(stopped, Ending(0, 1.0, "nothing")).wrong
    assert "it ended with 1" in tried(stopped, resumed._replace(code=1), resumed).wrong
    assert "other weights" in tried(stopped, resumed, result=reference._replace(digest="abd")).wrong
    assert "always ended before the fault" in tried(*[resumed] * 4).wrong


class Ended(Session):
    """A session that has ended, so that no rank is up."""

    def __init__(self):
        pass

    def ranks(self):
        return {}


@pytest.mark.parametrize("kind", ["rank killed", "rank stopped"])
def test_no_rank_is_struck_where_the_run_was_faster(kind):
    """The trial is tried again."""
    assert KINDS[kind].strike(None, Ended(), random.Random(0)) is None


def test_other_weights_events_and_steps_are_noticed():
    def events(*steps):
        return [{"event": "train", "step": step, "loss": float(step)} for step in steps]

    changed = [*events(1, 2), {"event": "train", "step": 3, "loss": 3.5}]
    cases = [
        ("abc", events(1, 2, 3), 0, 0, 0),
        ("abc", events(1, 2, 2, 3), 1, 0, 1),
        ("abd", events(1, 3), 0, 1, 2),
    ]
    for digest, found, repeated, lost, wrong in [*cases, ("abc", changed, 0, 1, 1)]:
        compared = trial._compared(Result(digest, found), Result("abc", events(1, 2, 3)))
        assert (*compared[:2], len(compared[2])) == (repeated, lost, wrong)


def test_one_fault_that_is_not_survived_fails_the_claim():
    good = Trial(
        "rank killed", "2x1", 5, code=1, detection=0.1, repeated=0, lost=0, wrong="", noticed=0.4
    )
    bad = good._replace(wrong="other weights", lost=2, detection=40.0, noticed=3.0)
    assert [each["holds"] for each in command._claims([good] * 500)] == [True] * 5
    found = command._claims([good] * 498 + [bad])
    assert [each["name"] for each in found if each["holds"]] == ["dead_rank_noticed"]
    assert found[0]["value"] == 0.4
    (row,) = command._rows([good, bad])
    assert (row["survived"], row["updates_lost"], row["longest_until_noticed_s"]) == (1, 2, 3.0)


def test_five_hundred_faults_are_tried_of_every_kind_over_all_topologies():
    planned = command.plan()
    assert len(planned) == len(set(planned)) >= 500
    assert all(sum(KINDS[kind].trials.values()) >= 10 for kind in KINDS)
    assert {topology for _, topology, _ in planned} == {(1, 1), (2, 1), (2, 2), (3, 1)}
    assert {each.kind for each in command._first_of_each(planned)} == set(KINDS)


@pytest.fixture
def tried(monkeypatch, tmp_path):
    """tried(*arguments): the exit code of the command over forged trials; those that it made.

    `tried.fails`: the number of the one that ends the command. `tried.wrong`: of all.
    """

    class Forged:
        def __init__(self, folder):
            pass

        def trial(self, name, topology, draws):
            made.append((name, topology))
            if len(made) == run.fails:
                raise KeyboardInterrupt
            return Trial(
                name, str(topology), 5, code=1, detection=0.1, repeated=0, lost=0, wrong=run.wrong
            )

    def run(*arguments):
        made.clear()
        monkeypatch.setattr("sys.argv", ["faults", *arguments])
        return command.main(), list(made)

    made = []
    run.fails = None
    run.wrong = ""
    monkeypatch.setenv("BENCHMARK_QUICK", "")  # so that what is set is undone
    monkeypatch.setattr(command, "CACHE", tmp_path)
    monkeypatch.setattr(command, "Bench", Forged)
    return run


def test_the_command_goes_on_where_it_was_stopped(tried, tmp_path):
    chosen = ("--kind", "rank killed")
    trials = sum(KINDS["rank killed"].trials.values())
    tried.fails = 11
    with pytest.raises(KeyboardInterrupt):
        tried(*chosen)
    tried.fails = None
    tried.wrong = "other weights"
    code, made = tried(*chosen)
    assert (code, len(made)) == (1, trials - 10)
    tried.wrong = ""
    assert tried(*chosen) == (1, [])  # what was not survived is not tried until it is
    assert len((tmp_path / "faults" / "trials.jsonl").read_text().splitlines()) == trials
    code, made = tried(*chosen, "--seed", "1")
    assert (code, len(made)) == (0, trials)


def test_trials_of_a_kind_that_has_changed_are_made_again(monkeypatch):
    """More of them change none that was made."""
    planned = command.Planned("rank killed", Topology(2, 1), 0)
    kind = KINDS["rank killed"]
    before = planned.key(0)
    keys = []
    for other in (
        {"trials": {}},
        {"codes": (2,)},
        {"said": "killed"},
        {"overrides": ("parallel.silence=9",)},
    ):
        monkeypatch.setitem(KINDS, "rank killed", kind._replace(**other))
        keys.append(planned.key(0))
    assert keys[0] == before and len(set(keys)) == 4


def test_quick_trials_are_not_kept(tried, tmp_path):
    code, made = tried("--quick")
    assert (code, {name for name, _ in made}) == (0, set(KINDS))
    assert tried("--quick")[1] == made and not list(tmp_path.iterdir())


def test_runs_of_one_process_are_tried_side_by_side_after_the_others(monkeypatch):
    both = threading.Barrier(2, timeout=30)
    began = []

    class Forged:
        def __init__(self, folder):
            pass

        def trial(self, name, topology, draws):
            began.append(topology)
            if topology == ONE:
                both.wait()
            return Trial(
                name, str(topology), 5, code=1, detection=0.1, repeated=0, lost=0, wrong=""
            )

    monkeypatch.setattr(command, "Bench", Forged)
    topologies = [ONE, Topology(2, 1), ONE, Topology(2, 2)]
    planned = [
        command.Planned("run killed", topology, number)
        for number, topology in enumerate(topologies)
    ]
    assert [each.number for each, _ in command._outcomes(planned, 0)] == [1, 3, 0, 2]
    assert began[2:] == [ONE, ONE]


def test_all_launchers_must_end_alike():
    def ended(*codes):
        launchers = hosts.Launchers.__new__(hosts.Launchers)
        endings = [Ending(code, 1.0, f"words {number}") for number, code in enumerate(codes)]
        launchers.sessions = [
            SimpleNamespace(running=False, wait=lambda since, end=end: end) for end in endings
        ]
        return launchers.wait(0.0)

    assert [ended(1, 1).code, ended(1, 0).code, ended(1, None).code] == [1, None, None]
    assert "host 1 ended with 0:\nwords 1" in ended(1, 0).said


class Cables:
    """A network that notes what is done to its cables."""

    def __init__(self, number):
        self.hosts = number
        self.done = []
        self.connect = self.limit = lambda *what: self.done.append(what)


def test_each_side_of_a_cut_link_must_say_so():
    site = SimpleNamespace(network=Cables(2))
    said = hosts.cut(site, None, random.Random(0)).said
    assert site.network.done == [(1, False)]
    silence = "rank {} (replica {}, stage 0): rank {} has said nothing for 4 s: it is stopped"
    own = silence.format(1, 1, 0)
    other = silence.format(0, 0, 1)
    master = "the launcher at the master 10.84.0.1:29500 has said nothing for 5 s"
    for first, second, right in [
        (other, own, True),
        (other, master, True),
        ("", own, False),
        (other, "", False),
    ]:
        text = f"host 0 ended with 1:\n{first}\n\nhost 1 ended with 1:\n{second}\n"
        assert bool(re.search(said, text, re.DOTALL)) == right


def test_a_cable_is_mended_and_a_host_goes_on(monkeypatch):
    network = Cables(3)
    sent = []
    site = SimpleNamespace(network=network)
    monkeypatch.setattr(hosts, "_MOMENT", (0.0, 0.01))
    monkeypatch.setattr(hosts, "_SLOW", (0.05, 0.05))
    monkeypatch.setattr(hosts, "_BURST", (0.0, 0.01))
    monkeypatch.setattr(hosts, "tree", lambda process: [process, process + 1])
    monkeypatch.setattr(hosts, "send", lambda *what: sent.append(what))
    hosts.cut_for_a_moment(site, None, random.Random(0))
    (host, pulled), (same, plugged) = network.done
    assert (pulled, plugged) == (False, True) and host == same > 0
    network.done.clear()
    hosts.slow_cable(site, None, random.Random(0))
    (host, rate), again = network.done
    assert rate <= 50_000_000 and again == (host, hosts.RATE)
    sessions = [SimpleNamespace(process=SimpleNamespace(pid=10 * number)) for number in range(3)]
    hosts.slow_down(site, SimpleNamespace(running=True, sessions=sessions), random.Random(0))
    processes = {process for process, _ in sent}
    assert len(processes) == 2 and len(sent) >= 8
    for process in processes:
        numbers = [number for each, number in sent if each == process]
        assert numbers == [signal.SIGSTOP, signal.SIGCONT] * (len(numbers) // 2)
