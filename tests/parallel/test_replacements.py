"""The launcher buries a replica that ends, and starts it again, unless the fault is the run's
own."""

import os
import shutil
import signal
import subprocess
from datetime import timedelta

import pytest
import torch.distributed as dist

from common.errors import DONE, FAILED, LEFT_OUT, STOPPED, WRONG_INPUT, ConfigError
from parallel import replacements
from parallel.elastic import Elastic
from parallel.generations import LIFE, Member, Membership
from parallel.parent_death import bound_to_parent
from parallel.replacements import Replacements
from parallel.topology import Topology
from recipe.distribution import Parallel
from tests.waiting import wait_until

pytestmark = pytest.mark.multiprocess
KILLED = -signal.SIGKILL


class Host:
    """Two replicas of two ranks, which sleep, or end with a code."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(replacements, "_LOOK_SECONDS", 0.0)
        monkeypatch.setattr(replacements, "_TOGETHER_SECONDS", 0.1)
        self.ranks = {}
        self.lives = []
        limit = timedelta(seconds=20)
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
        self.members = [
            Membership(self.store, Member(rank // 2, 0), rank % 2, stages=2, minimum=1, silence=1.0)
            for rank in range(4)
        ]
        self.member = self.members[0]
        for rank in range(4):
            self.start(rank, 0)
        self.replacements = Replacements(
            self.ranks, ("127.0.0.1", self.store.port), 2, self.start, range(4)
        )
        self.lives.clear()

    def begin(self):
        """All ranks of the first generation have begun."""
        for member in self.members:
            member.found(2)
        self.replacements.look()

    def start(self, rank, life):
        self.lives.append((rank, life))
        command = bound_to_parent([shutil.which("sleep"), "300"])
        self.ranks[rank] = subprocess.Popen(command, start_new_session=True)

    def end(self, rank, code):
        process = self.ranks[rank]
        process.send_signal(-code if code < 0 else signal.SIGKILL)
        process.wait()
        if code >= 0:
            self.ranks[rank] = process = subprocess.Popen(
                [shutil.which("sh"), "-c", f"exit {code}"]
            )
        process.wait()
        return rank, code

    def close(self):
        for process in self.ranks.values():
            process.kill()
            process.wait()


@pytest.fixture
def starting(monkeypatch):
    """A host whose ranks load their libraries."""
    host = Host(monkeypatch)
    yield host
    host.close()


@pytest.fixture
def host(starting):
    """A host whose ranks have begun."""
    starting.begin()
    return starting


def test_all_ranks_of_a_replica_end_and_begin_again_with_one_that_was_killed(host, capfd):
    other = host.ranks[3]
    assert host.replacements.replace([host.end(2, KILLED)])
    assert other.poll() == KILLED and host.member.is_over() and set(host.ranks) == {0, 1}
    assert (
        "was ended by signal SIGKILL: replica 1 is started anew, the others go on"
        in capfd.readouterr().err
    )
    host.replacements.look()
    assert host.lives == [(2, 1), (3, 1)] and set(host.ranks) == {0, 1, 2, 3}


def test_a_replica_that_dies_again_and_again_begins_later_and_later(host):
    for life in range(3):
        assert host.replacements.replace([host.end(2, KILLED)])
        host.replacements._replicas[1].due -= (0.0, 2.0, 4.0)[life]
        host.replacements.look()
        assert host.lives[-1] == (3, life + 1)
    host.replacements.replace([host.end(2, KILLED)])
    host.replacements.look()
    assert host.lives[-1] == (3, 3)


@pytest.mark.parametrize(("codes", "goes_on"), [
    ({0: WRONG_INPUT}, False),
    ({2: FAILED}, True),
    ({2: LEFT_OUT}, True),
    ({0: FAILED, 1: FAILED, 2: FAILED, 3: FAILED}, False),  # a fault that all have
    ({0: KILLED, 2: KILLED}, False),  # nobody is left who remembers the run
])  # fmt: skip
def test_the_run_goes_on_if_the_fault_is_not_its_own_and_a_replica_is_left(host, codes, goes_on):
    assert (
        host.replacements.replace([host.end(rank, code) for rank, code in codes.items()]) == goes_on
    )


def test_a_replica_that_has_not_begun_is_started_again_in_the_same_life(starting, capfd):
    """Nobody has met it: the others wait for it."""
    assert starting.replacements.replace([starting.end(2, KILLED)])
    assert "replica 1 is started anew, the others wait" in capfd.readouterr().err
    starting.replacements.look()
    assert starting.lives == [(2, 0), (3, 0)] and set(starting.ranks) == {0, 1, 2, 3}
    starting.begin()
    assert not starting.member.is_over()


def test_a_replica_of_which_one_process_has_begun_begins_a_new_life(starting):
    starting.members[3].found(2)
    assert starting.replacements.replace([starting.end(2, KILLED)])
    starting.replacements.look()
    assert starting.lives == [(2, 1), (3, 1)]
    starting.member.found(2)
    assert starting.member.is_over()


def test_a_run_that_cannot_begin_ends(starting, monkeypatch):
    monkeypatch.setattr(replacements, "_SHORT_SECONDS", 0.0)  # without pauses
    for _ in range(3):
        assert starting.replacements.replace([starting.end(2, KILLED)])
        starting.replacements.look()
    assert starting.lives == [(2, 0), (3, 0)] * 3
    assert not starting.replacements.replace([starting.end(3, KILLED)])


def test_there_is_nothing_to_save_until_all_have_begun_and_once_it_is_saved(starting):
    for member in starting.members[:3]:
        member.found(2)
    assert starting.replacements.nothing_to_save
    starting.begin()
    assert not starting.replacements.nothing_to_save
    starting.member.note_saved()
    assert wait_until(lambda: starting.replacements.nothing_to_save)


def test_a_run_that_is_to_stop_before_it_has_begun_does_not_wait_for_a_replica_that_died(starting):
    starting.replacements.look(closing=True)
    assert not starting.replacements.replace([starting.end(2, -signal.SIGUSR1)])


def test_while_the_run_stops_no_replica_is_started_but_the_others_go_on_without_it(host, capfd):
    host.replacements.look(closing=True)
    assert host.replacements.closing
    assert host.replacements.replace([host.end(2, KILLED)])
    assert host.member.is_over() and not host.replacements.waiting
    host.replacements.look(closing=True)
    assert set(host.ranks) == {0, 1} and not host.lives
    assert not capfd.readouterr().err
    assert not host.replacements.replace([host.end(0, KILLED)])  # nobody is left


def test_a_replica_that_is_starting_is_ended_as_the_run_is_told_to_stop(host):
    host.replacements.replace([host.end(2, KILLED)])
    host.replacements.look()
    new = host.ranks[2]
    host.replacements.look(closing=True)
    assert new.poll() == KILLED and set(host.ranks) == {0, 1}
    assert host.members[0].living() == [Member(0, 0)]
    host.replacements.look()
    assert not host.replacements.closing


def test_a_replica_that_is_due_later_is_not_started_once_the_run_is_told_to_stop(host):
    host.replacements.replace([host.end(2, KILLED)])
    assert host.replacements.waiting
    host.replacements.look(closing=True)
    assert not host.replacements.waiting and not host.lives


def test_an_error_of_a_new_replica_is_not_the_run_s_own_where_the_others_have_ended_well(host):
    host.replacements.replace([host.end(2, KILLED)])
    host.replacements.look()
    host.end(0, STOPPED)
    host.end(1, STOPPED)
    assert host.replacements.replace([host.end(2, FAILED), host.end(3, FAILED)])


def test_a_replica_that_is_refused_stays_away(host, capfd):
    host.replacements.replace([host.end(2, KILLED)])
    host.replacements.look()
    assert host.replacements.replace([host.end(2, WRONG_INPUT)])
    assert "replica 1 stays away, the others go on" in capfd.readouterr().err
    host.replacements.look()
    assert set(host.ranks) == {0, 1}


def test_a_stopped_replica_that_was_left_out_is_killed(host):
    stopped = host.ranks[2]
    stopped.send_signal(signal.SIGSTOP)
    stages = [
        Membership(host.store, Member(0, 0), stage, stages=2, minimum=1, silence=1.0)
        for stage in (0, 1)
    ]
    for each in stages:
        each.catch_up()
        each._report("here")
    stages[0].end()
    stages[0].follow()
    assert stages[0].members == (Member(0, 0),)
    host.replacements.look()
    assert wait_until(lambda: stopped.poll() == KILLED)


def test_new_replicas_that_wait_when_the_run_is_done_are_ended(host):
    host.replacements.replace([host.end(2, KILLED)])
    host.replacements.look()
    host.end(0, DONE)
    host.replacements.look()
    assert set(host.ranks) == {0, 1}


def test_a_newcomer_with_other_code_is_refused(host, monkeypatch):
    host.member.common("code/0", "ours")
    for name, value in (
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", str(host.store.port)),
        (LIFE, "1"),
    ):
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(
        ConfigError,
        match=r"^replica 1 has other code than the run that it would join; give its host",
    ):
        Elastic(Topology(2, 2, 2, 0), Parallel(stages=2, elastic=True), {"code": "other"})


def test_ranks_of_a_replica_that_fail_together_lengthen_the_pause_once(host):
    assert host.replacements.replace([host.end(2, KILLED), host.end(3, KILLED)])
    assert host.replacements._replicas[1].pause == 2.0


def test_a_replica_with_the_wrong_input_stays_away_whatever_its_other_ranks_end_with(host, capfd):
    host.replacements._replicas[1].life = 1  # in a first life it would be the run's own fault
    failed = [host.end(2, KILLED), host.end(3, WRONG_INPUT)]
    assert host.replacements.replace(failed)
    assert host.replacements._replicas[1].due is None
    assert capfd.readouterr().err.count("replica 1 stays away") == 1
