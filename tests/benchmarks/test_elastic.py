"""The benchmark of elastic runs: whom it strikes, and what it takes a strike to cost."""

import contextlib
import json
import random
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.elastic import hosts, stops, strikes, uneven
from benchmarks.elastic.__main__ import _claims, _rows_of_stops
from benchmarks.elastic.stops import Stop, as_promised, phase, restarts
from benchmarks.elastic.strikes import Planned, Strike, Struck
from benchmarks.elastic.uneven import Turn
from benchmarks.faults import hosts as faults_hosts
from benchmarks.faults import site as faults_site
from benchmarks.faults.site import Ending, Result, Session, Topology

TRAINS = "training, or a loss is not noticed yet"
STRUCK_RUN = Struck(
    "3x1",
    [Strike("kill", (0,), 5, 0.5)],
    True,
    wrong_steps=0,
    restarts=0,
    generations=4,
    seconds=3.0,
    output="",
    stops=[],
)
STOPS = [
    Stop("SIGTERM", TRAINS, 75, 2.0, True),
    Stop("SIGINT, SIGTERM", "before the first step", 75, 4.0, True),
]
STOPPED_RUN = Struck(
    "3x1", [], True, wrong_steps=0, restarts=0, generations=0, seconds=0.0, output="", stops=STOPS
)


@pytest.fixture
def struck(monkeypatch):
    """kind, topology, ranks there, lines, ranks that do not run -> the kind, and ranks that were
    sent a signal."""

    def strike(kind, topology, running, said, seed=0, stopped=()):
        sent = []
        monkeypatch.setattr(strikes, "runs", lambda process: process not in stopped)
        monkeypatch.setattr(strikes, "_MEETING", 0.0)
        monkeypatch.setattr(
            strikes.os, "kill", lambda process, number: sent.append((process, number))
        )
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
    assert struck("stop", Topology(3, 1), (0, 1, 2), last.replace("2, 0", "2"), seed) == (
        "stop",
        (),
    )
    joining = struck("kill", Topology(2, 1), (0, 1), last.replace("2, 0", "0"), seed)
    assert joining == ("while another joins", (1,))  # itself on its way back
    called, (first, second) = struck("meeting", Topology(3, 1), (0, 1, 2), "", seed)
    assert first != second and called == "meeting"
    for kind in ("kill", "stop", "two", "meeting"):
        # nobody has noticed yet that rank 2 was stopped
        assert struck(kind, Topology(3, 1), (0, 1, 2), last, seed, stopped=(2,))[1] in ((), (1,))


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """code and seconds of each host's launcher, real processes -> how the run ended."""
    monkeypatch.setattr(faults_site, "_LEAVING_SECONDS", 0.2)
    site = SimpleNamespace(folder=tmp_path, topology=Topology(3, 1))
    environment = {faults_site._MARK: str(tmp_path)}

    def end(*launchers):
        run = hosts.Hosts.__new__(hosts.Hosts)
        run._earlier = []
        run._returning = []
        run._lock = threading.Lock()
        ends = [
            f"import sys, time; time.sleep({seconds}); sys.exit({code})"
            for code, seconds in launchers
        ]
        run.sessions = [Session(site, [sys.executable, "-c", text], environment) for text in ends]
        return run.wait(0.0)

    return end


def test_a_host_that_is_away_when_the_run_ends_looks_for_it_in_vain_and_does_not_hang(ended):
    ending = ended((0, 0), (0, 0.1), (2, 2))
    assert ending.code == 0 and "host 2 ended with 2" in ending.said
    assert ended((1, 0), (0, 0)).code == 1


def test_a_launcher_that_never_ends_hangs(ended, monkeypatch):
    monkeypatch.setattr(faults_hosts, "SESSION_SECONDS", 0.5)
    assert ended((0, 0), (0, 60)).code is None


def test_any_host_may_tell_which_replicas_make_up_the_newest_generation():
    said = "generation {}: going on at step 9 of 300 with replicas {}\n"
    first = said.format(2, "0, 1, 2") + said.format(9, "0, 1")
    second = said.format(10, "1")
    assert hosts.members(first + second, 3) == hosts.members(second + first, 3) == [1]
    assert hosts.members("", 3) == [0, 1, 2]
    run = hosts.Hosts.__new__(hosts.Hosts)
    run._lock = threading.Lock()
    run._earlier = [SimpleNamespace(said=lambda: first)]
    run.sessions = [SimpleNamespace(said=lambda: second), SimpleNamespace(said=lambda: "")]
    assert hosts.members(run.said(), 3) == [1] and run.said().count("generation") == 3


def test_a_change_costs_the_time_between_the_steps_around_it():
    watch = strikes._Watch(None, None)
    watch.times = [(1.0, 1), (2.0, 2), (5.0, 3), (5.5, 2), (6.0, 3), (7.0, 4)]
    watch.changes = [4.0]
    assert watch.around_changes() == [3.0]
    assert watch.after(2.5, 3) == 7.0 and watch.after(2.5, 2) == 5.0 and watch.after(8.0, 1) is None


def test_a_strike_that_no_step_followed_costs_what_was_left_of_the_run(monkeypatch):
    watch = strikes._Watch(None, SimpleNamespace(running=False))
    monkeypatch.setattr(strikes.time, "monotonic", lambda: 8.0)
    watch.run()
    monkeypatch.setattr(strikes.time, "monotonic", lambda: 90.0)  # the session has been waited for
    assert (
        strikes._with_cost(strikes._Moment("kill", (0,), 4, 6.5), watch, usual=0.5).seconds == 1.0
    )


def test_no_host_comes_back_to_a_network_that_an_error_has_removed(monkeypatch, tmp_path):
    timer = threading.Timer(60, pytest.fail)
    timer.daemon = True  # so that a failure of this test does not wait for it

    def start(session, site, network):
        session._returning = [timer]
        timer.start()

    def fail(*arguments):
        raise RuntimeError("a line of the log is damaged")

    monkeypatch.setattr(hosts.Hosts, "__init__", start)
    monkeypatch.setattr(strikes, "Network", lambda hosts, rate: contextlib.nullcontext())
    monkeypatch.setattr(strikes, "_struck", fail)
    with pytest.raises(RuntimeError, match="damaged"):
        strikes.struck(Planned(Topology(3, 1), 0, on_hosts=True), Result("", []), tmp_path / "run")
    assert not timer.is_alive()


def test_what_differs_and_what_restarts_is_claimed():
    made = [
        Strike("kill", (0,), 5, 0.5),
        Strike("stop", (1,), 9, 3.5),
        Strike("kill", (0,), 15, 0.7),
    ]
    good = Struck(
        "3x1", made, True, wrong_steps=0, restarts=0, generations=4, seconds=12.0, output=""
    )
    bad = good._replace(same=False, wrong_steps=2, restarts=1)
    found = {
        each["name"]: each["value"]
        for each in _claims([good, bad, STOPPED_RUN._replace(same=False)])
    }
    assert found["strikes"] == 6 and found["runs_with_the_undisturbed_bits"] == pytest.approx(1 / 3)
    assert (found["steps_with_images_lost_or_repeated"], found["restarts_from_checkpoint"]) == (
        2,
        1,
    )
    assert found["median_seconds_lost"] == 0.7
    assert found["effective_time"] == pytest.approx(1 - 4 / 60)


def test_a_stop_resumed_if_it_ended_as_promised_and_the_run_came_to_the_undisturbed_bits():
    late = Stop("SIGTERM", TRAINS, 75, 31.0, False)
    runs = [STOPPED_RUN, STOPPED_RUN._replace(stops=[late, late]), STOPPED_RUN._replace(same=False)]
    found = {each["name"]: each["value"] for each in _claims([STRUCK_RUN, *runs])}
    assert found["stops_that_resumed"] == pytest.approx(2 / 6)
    # A stop and a start are no time that a strike takes.
    assert (found["strikes"], found["median_seconds_lost"], found["effective_time"]) == (
        1,
        0.5,
        0.95,
    )


def test_stops_are_listed_by_phase_signal_and_code():
    other = Stop("SIGTERM", TRAINS, None, 180.0, False)
    rows = _rows_of_stops([STRUCK_RUN, STOPPED_RUN, STOPPED_RUN._replace(stops=[other])])
    found = [
        (row["phase"], row["signal"], row["exit_code"], row["stops"], row["most"]) for row in rows
    ]
    assert found == [
        ("before the first step", "SIGINT, SIGTERM", "75", 1, 4.0),
        (TRAINS, "SIGTERM", "75", 1, 2.0),
        (TRAINS, "SIGTERM", "none", 1, 180.0),
    ]


LOST = "rank 1 (host a) was ended by signal SIGKILL: replica 1 is started anew, the others go on\n"
WITHOUT = "generation 1: going on at step 2 of 300 with replicas 0, 2\n"
WHOLE = "generation 2: going on at step 7 of 300 with replicas 0, 2, 1\n"
STEP = "step 7/300  loss 2.3\n"


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("300 steps = 60 epochs x 5 steps\nresuming at step 6 of 300\n", "before the first step"),
        (LOST, "before the first step, a rank is lost"),
        (STEP, TRAINS),
        (STEP + LOST, "a replacement starts or waits"),
        (STEP + LOST + WITHOUT, "a replacement starts or waits"),
        (STEP + LOST + WITHOUT + WHOLE, "a replacement has joined"),
    ],
)
def test_what_a_run_was_doing_is_read_from_its_output(said, found):
    assert phase(said, replicas=3) == found


@pytest.mark.parametrize(
    ("code", "said", "facts", "promised"),
    [
        (75, STEP, {"saved": 7, "events": 7}, True),
        (75, STEP, {"saved": 6, "events": 6}, True),  # a loss broke it off
        (75, STEP, {"saved": 3, "events": 3}, False),  # the last checkpoint is not enough
        (75, STEP, {"saved": 6, "events": 7}, False),  # metrics of a step that is not saved
        # an earlier session had logged more than it had saved
        (
            75,
            "",
            {"before": 0, "events": 2},
            True,
        ),
        (75, STEP, {"saved": 7, "events": 7, "seconds": 31.0}, False),
        (0, STEP, {"saved": 300, "events": 300}, True),
        (0, STEP, {"saved": 7, "events": 7}, False),
        (1, STEP + "ended at once by a second signal; the same command", {"signals": 2}, True),
        (1, STEP + "ended at once by a second signal; the same command", {}, False),
        (1, STEP + "no replica is left on any host", {"signals": 2}, False),
        (-15, STEP, {"saved": 7, "events": 7, "signals": 2}, False),
        (None, STEP, {"saved": 7, "events": 7}, False),
    ],
)
def test_how_a_stopped_session_must_end(code, said, facts, promised):
    facts = {"signals": 1, "before": 7, "saved": 0, "events": 0, **facts}
    ending = Ending(code, facts.pop("seconds", 2.0), said)
    assert as_promised(ending, 300, **facts) == promised


def test_a_session_after_a_stop_begins_from_a_checkpoint_and_no_other_does():
    told = ["", "resuming at step 3 of 9\n", "", "resuming at step 3 of 9\n" * 2]
    assert restarts([Ending(75, 1.0, said) for said in told]) == 1
    assert restarts([Ending(0, 1.0, told[1])]) == 1


class Sessions:
    """Stands for a site: sessions that end with a code each as soon as they get a signal, or at
    once without one."""

    def __init__(self, codes):
        self.codes = list(codes)
        self.sent = []
        self.topology = Topology(3, 1)
        self.started = 0

    def start(self):
        self.started += 1
        session = SimpleNamespace(
            running=True, process=SimpleNamespace(send_signal=lambda number: sent(number))
        )

        def sent(number):
            self.sent.append((self.started, number))

        session.ranks = lambda: dict.fromkeys(range(3), -self.started)
        session.said = lambda: STEP * 20 + LOST
        session.reach = lambda step, delay: None
        session.wait = lambda since: Ending(self.codes.pop(0), 1.0, session.said())
        return session

    def checkpoints(self):
        return [Path("step-00000007.pt")]

    def steps(self):
        return 7


@pytest.fixture
def killed(monkeypatch):
    found = []
    monkeypatch.setattr(stops, "send", lambda process, number: found.append(process))
    monkeypatch.setattr(stops.time, "sleep", lambda seconds: None)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_run_is_stopped_at_each_moment_and_the_same_command_ends_it(killed, seed):
    number = len(stops.MOMENTS) + 1
    site = Sessions([75] * number + [0])
    made, endings = stops.stopped(site, 300, random.Random(seed))
    assert len(made) == number and [ending.code for ending in endings] == [75] * number + [0]
    # Each session but the last got a signal first, and some a second one, SIGTERM, which the stop
    # names.
    for session, stop in enumerate(made, start=1):
        names = [signal.Signals(each).name for to, each in site.sent if to == session]
        assert ", ".join(names) == stop.signal and names[1:] in ([], ["SIGTERM"])
        assert stop.phase == "a replacement starts or waits" and stop.as_promised
    # One rank was killed in the sessions that are to lose one.
    assert (
        len(killed)
        == len(set(killed))
        == sum("loss" in each or each == "replacement" for each in stops.MOMENTS)
    )


def test_a_run_that_was_done_when_it_was_stopped_is_not_started_again(killed):
    site = Sessions([75, 0])
    made, endings = stops.stopped(site, 7, random.Random(0))
    assert site.started == len(made) == len(endings) == 2 and made[-1].as_promised


def test_steps_with_events_of_one_run_only_are_counted():
    expected = Result("", [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])
    result = Result(
        "", [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}, {"step": 3, "loss": 1.0}]
    )
    assert strikes._differing(expected, expected) == 0
    assert strikes._differing(expected, result) == strikes._differing(expected, None) == 2
    twice = Result("", [*expected.events, expected.events[1]])
    assert strikes._differing(expected, twice) == strikes._differing(twice, expected) == 1


def test_runs_with_stops_are_kept_beside_those_with_strikes(tmp_path, monkeypatch):
    """Also where the file is of a time without stops."""
    monkeypatch.setattr(strikes, "CACHE", tmp_path)
    monkeypatch.setattr(strikes, "undisturbed", lambda folder: Result("", []))
    monkeypatch.setattr(
        strikes, "struck", lambda each, *_: STOPPED_RUN if each.stops else STRUCK_RUN
    )
    planned = [Planned(Topology(3, 1), 0), Planned(Topology(3, 1), 0, stops=True)]
    made = strikes.all_runs(planned, lambda items, what: items)
    monkeypatch.setattr(strikes, "struck", None)
    again = strikes.all_runs(planned, lambda items, what: items)
    assert json.dumps(again) == json.dumps(made) and again[1].stops[0].signal == "SIGTERM"
    file = tmp_path / "elastic" / "strikes.jsonl"
    key, fields = json.loads(file.read_text().splitlines()[0])
    del fields["stops"]
    file.write_text(json.dumps([key, fields]) + "\n")
    assert json.dumps(strikes.all_runs(planned[:1], lambda items, what: items)) == json.dumps(
        made[:1]
    )


def test_runs_of_another_recipe_are_made_again(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(strikes, "CACHE", tmp_path)
    monkeypatch.setattr(strikes, "undisturbed", lambda folder: Result("", []))
    monkeypatch.setattr(strikes, "struck", lambda each, *_: made.append(each) or STRUCK_RUN)
    planned = [Planned(Topology(3, 1), 0)]
    for choices in (strikes._CHOICES, strikes._CHOICES, ("parallel.silence=3",)):
        monkeypatch.setattr(strikes, "_CHOICES", choices)
        strikes.all_runs(planned, lambda items, what: items)
    assert made == planned * 2


def test_rates_add_up():
    """8 and 16 micro batches in a second of passes are 24 a second; a step of 24 in 1.25 s is 80 %
    of that."""
    assert uneven.over_sum((Turn(1.25, 1.0, 8), Turn(1.25, 1.0, 16))) == pytest.approx(
        24 / 1.25 / 24
    )
