"""What the launcher makes of the exit codes of its ranks, and of signals; processes are doubles."""

import os
import signal
import socket
from types import SimpleNamespace

import pytest

from common.errors import UserError
from parallel import agent
from parallel.board import Outcome

HOST = socket.gethostname()
KILLED = -signal.SIGKILL
TERMINATED = -signal.SIGTERM
ASKED = -signal.SIGUSR1
DONE = 0
FAILED = 1
WRONG_INPUT = 2
STOPPED = 75


class Process:
    """A rank: `code` is None while it runs. sent: the signals that it was given."""

    def __init__(self, code=None):
        self.code = code
        self.sent = []

    def poll(self):
        return self.code

    def send_signal(self, number):
        self.sent.append(number)


@pytest.fixture
def signals(monkeypatch):
    """The launcher's signals, without handlers; `signals.written`: what they wrote."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    written = []
    monkeypatch.setattr(os, "write", lambda file, text: written.append((file, text.decode())))
    found = agent.Signals()
    found.written = written
    return found


@pytest.mark.parametrize(
    ("failed", "expected"),
    [
        ([(3, 1)], (FAILED, f"rank 3 failed with exit code 1 (host {HOST}); all ranks stopped")),
        # Of several the one that others followed: killed before it lost a peer, complaining before
        # all.
        (
            [(0, 1), (2, KILLED), (1, 7)],
            (FAILED, f"rank 2 (host {HOST}) was killed (SIGKILL); all ranks stopped; rerun to resume"),
        ),
        (
            [(0, TERMINATED), (1, -signal.SIGSEGV)],
            (FAILED, f"rank 1 (host {HOST}) was ended (SIGSEGV); all ranks stopped; rerun to resume"),
        ),
        (
            [(1, 9), (0, TERMINATED)],
            (FAILED, f"rank 0 (host {HOST}) was ended (SIGTERM); all ranks stopped; rerun to resume"),
        ),
        ([(0, KILLED), (4, WRONG_INPUT)], (WRONG_INPUT, "")),
        ([(0, 1), (1, ASKED)], (FAILED, f"rank 0 failed with exit code 1 (host {HOST}); all ranks stopped")),
        ([(1, ASKED)], (STOPPED, "")),
        ([(5, 1), (2, 1)], (FAILED, f"rank 2 failed with exit code 1 (host {HOST}); all ranks stopped")),
    ],
)  # fmt: skip
def test_the_rank_that_the_others_followed_is_named(failed, expected, signals):
    code, line = expected
    assert agent._failure(failed, signals) == Outcome(code, line, last=False, abrupt=True)


def test_a_failure_after_a_stop_was_asked_for_is_not_tried_again(signals):
    signals.stopping = True
    assert agent._failure([(0, 1)], signals).last
    assert not agent._failure([(0, WRONG_INPUT)], signals).last


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([KILLED, DONE, STOPPED], Outcome(DONE)),
        ([KILLED, STOPPED], Outcome(STOPPED, abrupt=True)),
        (
            [KILLED, 1],
            Outcome(
                FAILED,
                "ended at once by a second signal; the same command goes on from the last checkpoint",
                last=True,
                abrupt=True,
            ),
        ),
    ],
)
def test_a_second_signal_leaves_the_code_of_ranks_that_had_ended(codes, expected):
    """A rank ends by itself only once all have finished the run, or saved it."""
    assert agent._hurried({rank: Process(code) for rank, code in enumerate(codes)}) == expected


def test_the_first_signal_asks_the_ranks_and_a_later_second_one_ends_them(signals, monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(agent.time, "monotonic", lambda: now.seconds)
    killed = []
    monkeypatch.setattr(agent, "kill", lambda ranks, number: killed.append((sorted(ranks), number)))
    ranks = {0: Process(), 1: Process()}
    signals.watch(ranks)
    assert not ranks[0].sent
    signals._receive(signal.SIGTERM, None)
    asked = (
        "SIGTERM: the ranks finish their step, save and end; a second signal ends them at once\n"
    )
    assert signals.written == [(2, asked)]
    assert signals.stopping and not signals.hurry
    assert [rank.sent for rank in ranks.values()] == [[signal.SIGUSR1]] * 2
    now.seconds += 0.5  # some deliver one signal twice
    signals._receive(signal.SIGTERM, None)
    now.seconds += 10
    signals._receive(signal.SIGUSR1, None)  # SLURM sends it to launcher and ranks alike
    assert not signals.hurry and not killed
    signals._receive(signal.SIGINT, None)
    assert signals.hurry and killed == [([0, 1], signal.SIGKILL)]
    late = {2: Process()}
    signals.watch(late)
    assert killed[1:] == [([2], signal.SIGKILL)] and not late[2].sent


def test_ranks_that_start_after_a_stop_was_asked_for_are_asked_too(signals):
    signals.request("a rank was asked to stop before it could listen")
    late = {0: Process()}
    signals.watch(late)
    assert late[0].sent == [signal.SIGUSR1]
    signals.watch({})
    assert late[0].sent == [signal.SIGUSR1]


def test_a_host_that_cannot_come_back_has_failed(signals, monkeypatch, capfd):
    """Its input was right before: 2 would tell a scheduler to give up."""
    lost = SimpleNamespace(
        lost_master=True,
        hosts=SimpleNamespace(this=1),
        agree_on_end=lambda outcome: outcome,
        attempt=0,
    )
    meetings = [lost, UserError("cannot reach the master")]

    def meet():
        met = meetings.pop(0)
        if isinstance(met, UserError):
            raise met
        return met

    monkeypatch.setattr(
        agent, "_attempt", lambda *_: Outcome(FAILED, "the master is gone", last=True)
    )
    program = agent._Program([], local=1, stages=1)
    assert agent._run_attempts(program, meet, 3, signals) == FAILED
    assert (
        capfd.readouterr().err
        == "the master is gone; trying to come back\ncannot reach the master\n"
    )


def test_restarts_are_counted_from_the_attempt_that_the_master_has_come_to(signals, monkeypatch):
    others = SimpleNamespace(
        lost_master=False,
        hosts=SimpleNamespace(this=1),
        agree_on_end=lambda outcome: outcome,
        attempt=0,
    )
    asked = []

    def attempt(program, others, number, signals):
        asked.append(number)
        others.attempt = max(2, number)
        return Outcome(FAILED)

    monkeypatch.setattr(agent, "_attempt", attempt)
    assert agent._run_attempts(agent._Program([], 1, None), lambda: others, 3, signals) == FAILED
    assert asked == [0, 3]


def test_the_others_hear_of_a_launcher_that_is_stopped_before_its_ranks_start(signals):
    said = []

    def gather(attempt):
        raise agent.Stopped

    others = SimpleNamespace(gather=gather, withdraw=lambda: said.append("withdrawn"))
    with pytest.raises(agent.Stopped):
        agent._attempt(agent._Program([], 1, None), others, 0, signals)
    assert said == ["withdrawn"]
