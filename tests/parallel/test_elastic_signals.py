"""Each cell of the table in docs/reliability.md: what a signal does in a phase of an elastic
run."""

import functools
import re
import signal
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from parallel import agent, replacements
from parallel.board import Outcome
from parallel.replacements import Replacements
from tests.conftest import ROOT
from tests.parallel.elastic_run import Run
from tests.parallel.store import Shared
from tests.waiting import wait_until

pytestmark = pytest.mark.multiprocess  # threads that wait for each other

PAGE = (ROOT / "docs/reliability.md").read_text()
SECTION = PAGE.partition("## Signals and losses in an elastic run")[2].partition("\n## ")[0]
HEAD, _, *BODY = [row.split(" | ") for row in re.findall(r"^\| (.+) \|$", SECTION, re.M)]
MAIN = 0
TO_LAUNCHER = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def loading(start):
    """The others have begun."""
    run = start(held={(1, "loading")})
    run.reach(1, "loading")
    run.reach(MAIN, "meeting")
    return run


def meeting(start):
    run = start(held={(1, "meeting")})
    run.reach(1, "meeting")
    return run


def training(start, held=()):
    run = start(held=held)
    wait_until(lambda: run.step() > 2)
    run.held.add((1, "training"))
    run.reach(1, "training")
    return run


def regrouping(start):
    run = start()
    wait_until(lambda: run.step() > 2)
    run.held |= {(1, "loading"), (2, "regrouping")}
    run.ranks[1].send_signal(signal.SIGKILL)
    run.reach(2, "regrouping")
    return run


def replaced(start, phase, takes_in=False):
    """A run whose replica 1 was lost and comes back: it is at that phase."""
    run = start()
    wait_until(lambda: run.step() > 2)
    run.held |= {(1, phase)}
    run.takes_in = takes_in
    lost = run.ranks[1]
    lost.send_signal(signal.SIGKILL)
    run.reach(1, phase, life=1)
    before = run.step()
    if not takes_in:
        wait_until(lambda: run.step() > before)  # the others go on
    return run


def saving(start):
    run = training(start, held={(MAIN, "saving")})
    run.signal(signal.SIGTERM)
    run.held.discard((1, "training"))
    run.reach(MAIN, "saving")
    return run


def saved(start):
    run = training(start, held={(1, "saved")})
    run.signal(signal.SIGTERM)
    run.held.discard((1, "training"))
    run.reach(1, "saved")
    wait_until(lambda: run.saved is not None)
    return run


def leaving(start):
    run = training(start, held={(1, "leaving")})
    run.signal(signal.SIGTERM)
    run.held.discard((1, "training"))
    run.reach(1, "leaving")
    wait_until(lambda: run.ranks[2].poll() == 75)
    return run


def ended(start):
    run = start(held={(1, "ended")}, total=5)
    run.reach(1, "ended")
    wait_until(lambda: run.ranks[2].poll() == 0)
    run.saved = run.total
    return run


PHASES = {
    "a process loads its libraries": loading,
    "the first generation meets": meeting,
    "training": training,
    "a loss is noticed, the others regroup": regrouping,
    "a replacement loads its libraries": lambda start: replaced(start, "loading"),
    "a replacement waits to be taken in": lambda start: replaced(start, "waiting"),
    "a replacement is taken in": lambda start: replaced(start, "joining", takes_in=True),
    "saving after a first signal": saving,
    "it is saved, no process has ended yet": saved,
    "it is saved, some processes have ended": leaving,
    "the last step is done, some processes have ended": ended,
}


def strike(run, phase, column, number):
    first = not run.signals.stopping
    if column == 1 and (first or number == signal.SIGUSR1):  # which is never a second one
        run.signal(number)
    elif column == 2:
        if first:
            run.signal(signal.SIGTERM)
        run.signal(number)
    elif column > 2:
        victim = MAIN if column == 5 else 2 if "regroup" in phase else 1
        run.ranks[victim].send_signal(number)


NUMBERS = {
    1: TO_LAUNCHER,
    2: TO_LAUNCHER[:2],
    3: (signal.SIGUSR1,),
    4: (signal.SIGKILL, signal.SIGTERM),
    5: (signal.SIGKILL,),
}
CELLS = [
    pytest.param(row[0], column, number, row[column], id=f"{row[0]}-{HEAD[column]}-{number.name}")
    for row in BODY
    for column, numbers in NUMBERS.items()
    for number in numbers
]


@pytest.fixture
def start(monkeypatch):
    made = []

    def started(**options):
        made.append(Run(monkeypatch, **options))
        return made[-1]

    yield started
    for run in made:
        run.held.clear()
        for rank in run.every.values():
            rank.send_signal(signal.SIGKILL)


def test_the_table_has_every_phase():
    assert [row[0] for row in BODY] == list(PHASES) and len(HEAD) == 6


@pytest.mark.parametrize(("phase", "column", "number", "cell"), CELLS)
def test_a_signal_in_a_phase(start, phase, column, number, cell):
    run = PHASES[phase](start)
    before = run.step()
    strike(run, phase, column, number)
    run.held.clear()
    run.takes_in = True
    if cell == "goes on":
        wait_until(lambda: run.step() > before + 3 and len(run.ranks) == 3 and all_train(run))
        before = run.step()
        run.signal(signal.SIGTERM)
        cell = "75, saved"
    outcome = run.end()
    code, what = cell.split(", ")
    assert outcome.code == int(code), outcome
    if what == "saved":
        assert run.saved >= before > 0
    else:
        assert run.saved is None


def all_train(run):
    return all(rank.phase == "training" for rank in list(run.ranks.values()))


@pytest.mark.parametrize(
    ("phase", "code"),
    [
        ("a process loads its libraries", 1),
        ("training", 1),
        ("a loss is noticed, the others regroup", 1),
        ("it is saved, no process has ended yet", 75),
        ("it is saved, some processes have ended", 75),
    ],
)
def test_all_replicas_lost_at_once_end_the_run(start, phase, code):
    """Also where none has begun, if it happens again and again."""
    run = PHASES[phase](start)
    while run.outcome is None:
        for rank in list(run.ranks.values()):
            rank.send_signal(signal.SIGKILL)
    assert run.end().code == code


def test_too_few_replicas_save_as_they_are_told_to_stop(start):
    """They do not wait for others, which nobody starts."""
    run = start(minimum=3)
    wait_until(lambda: run.step() > 2)
    run.held |= {(1, "loading"), (2, "regrouping")}
    run.ranks[1].send_signal(signal.SIGKILL)
    run.reach(2, "regrouping")
    run.signal(signal.SIGTERM)
    run.held.clear()
    assert run.end().code == 75 and run.saved > 2


class OtherHost:
    """The launcher of a host whose replica has died, and is not started again yet."""

    def __init__(self, run):
        ranks = {}
        self.signals = agent.Signals()
        self.others = SimpleNamespace(
            finished=lambda: False, news=lambda: None, all_silent=lambda: False
        )
        check = functools.partial(agent._check_others, self.others, self.signals)
        self.replacements = Replacements(
            ranks, ("", 0), 1, start=lambda rank, life: None, numbers=range(3, 3), check=check
        )
        self._watch = functools.partial(
            agent._watch, ranks, self.others, self.signals, lambda: self.replacements
        )

    def end(self):
        return self._watch()


def test_a_run_is_told_to_stop_by_a_host_that_has_no_ranks_just_then(start):
    """Nobody there could pass the stop on, and the others trained to the end."""
    run = start()
    wait_until(lambda: run.step() > 2)
    other = OtherHost(run)
    other.signals._receive(signal.SIGTERM, None)
    assert other.end().code == 75
    assert run.end().code == 75 and run.saved > 2


def test_a_first_signal_after_another_host_was_asked_ends_nothing_at_once(start):
    """SLURM's scancel reaches the hosts one after another; the next signal is the second one."""
    run = training(start)
    OtherHost(run).replacements.ask_all_to_stop()
    wait_until(lambda: run.signals.stopping)
    time.sleep(0.01)
    run.signal(signal.SIGTERM)
    assert not run.signals.hurry
    time.sleep(0.01)
    run.signal(signal.SIGTERM)
    assert run.signals.hurry and run.end().code == 1


@pytest.mark.parametrize(
    "news", [Outcome(75), Outcome(1, "the launcher at the master is gone", last=True)]
)
def test_a_launcher_whose_store_is_gone_ends_as_the_board_says(start, monkeypatch, news):
    """The master's launcher had ended, after a second signal, and the others' did with a
    traceback."""
    run = start()
    other = OtherHost(run)
    said = iter([None, None, news])
    other.others.news = lambda: next(said)
    monkeypatch.setattr(
        run.store, "check", Mock(side_effect=RuntimeError("Failed to recv, got 0 bytes"))
    )
    assert other.end() == news


LOST = Outcome(1, "the launcher at the master has said nothing for 5 s", last=True)
KILLED = "ended at once by a second signal; the same command goes on from the last checkpoint"


@pytest.mark.parametrize(("struck", "end"), [
    (lambda other: setattr(other.others, "news", lambda: LOST), LOST),
    (lambda other: setattr(other.signals, "hurry", True), Outcome(1, KILLED, last=True, abrupt=True)),
])  # fmt: skip
def test_a_store_that_never_answers_keeps_no_launcher_from_its_end(start, monkeypatch, struck, end):
    """The master's launcher is stopped, or the way to it is cut: torch's store waits for ever."""
    monkeypatch.setattr(replacements, "_PATIENCE_SECONDS", 0.01)
    other = OtherHost(start())
    answered = threading.Event()
    stands_still = Shared()
    stands_still.check = lambda keys: answered.wait(60)
    other.replacements._generations._store = stands_still
    threading.Timer(0.1, struck, (other,)).start()
    before = time.monotonic()
    assert other.end() == end
    assert time.monotonic() - before < 30
    answered.set()


def test_a_store_that_is_gone_as_the_ranks_start_is_explained_by_the_news(start):
    """The first connection to it is as any other question."""
    other = OtherHost(start())
    other.others.news = lambda: LOST
    assert (
        agent._watch({}, other.others, other.signals, Mock(side_effect=RuntimeError("refused")))
        == LOST
    )


def test_a_fault_that_is_not_the_stores_is_shown(start, monkeypatch):
    monkeypatch.setattr(agent, "_LAST_WORD_SECONDS", 0.01)
    other = OtherHost(start())
    other.others.finished = Mock(side_effect=RuntimeError("a fault"))
    with pytest.raises(RuntimeError, match="a fault"):
        other.end()
