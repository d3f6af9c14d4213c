"""A launcher that waits for its entries on the board."""

from types import SimpleNamespace

import pytest

from common.errors import UserError
from parallel import rendezvous
from parallel.board import Outcome
from parallel.hosts import HostLost

LONG = rendezvous.REACH_SECONDS + 1


def waiting(entries, elastic=True, silent=0.0):
    """A launcher of host 1 that looks at these entries of the hosts."""
    found = object.__new__(rendezvous.Others)
    found.hosts = SimpleNamespace(this=1, place="10.0.0.1")
    found._board = SimpleNamespace(
        who="this one", refused=False, gone=False, fault="", silent=lambda host: silent
    )
    found._elastic = elastic
    found.attempt = 0
    found._entries = lambda: entries
    return found


def test_a_launcher_that_comes_back_early_waits_for_its_predecessor_to_be_silent():
    """The master answers it all the time, so that is not what is at fault."""
    assert waiting({1: {"who": "the one before"}})._has_joined(LONG) is False


def test_a_master_that_never_answers_is_named_and_may_only_be_late():
    assert waiting({})._has_joined(1.0) is False
    with pytest.raises(HostLost, match=r"cannot reach the master 10.0.0.1"):
        waiting({})._has_joined(LONG)


def test_a_master_with_another_secret_is_wrong_input():
    found = waiting({})
    found._board.refused = True
    with pytest.raises(UserError, match=r"POD_TOKEN are the same on all hosts"):
        found._has_joined(0.1)


def test_a_master_that_was_stopped_before_it_served_the_ranks_has_not_come():
    found = waiting({0: {"who": "the master", "end": Outcome(75)}})
    found.hosts.number = 2
    assert found._missing(joined=True) == [0]


def test_hosts_that_do_not_come_may_only_be_late():
    with pytest.raises(HostLost, match=r"^waited 600 s in vain for one; start all hosts"):
        waiting({})._check_time("one", [0], 601.0)


BEFORE = {1: {"who": "the one before"}}
STOPPED = {1: {"who": "the one before", "end": Outcome(75)}}


@pytest.mark.parametrize(("entries", "silent", "waited", "fault"), [
    (BEFORE, 5.0, 4.0, None),  # not heard since this one came: killed, perhaps
    (BEFORE, 1.0, 4.0, UserError),  # heard since: two hosts with one number
    (STOPPED, 1.0, 4.0, None),
    (STOPPED, 1.0, LONG, HostLost),
])  # fmt: skip
def test_an_earlier_launcher_of_this_host_is_no_other_host_with_its_number(
    entries, silent, waited, fault
):
    found = waiting(entries, elastic=False, silent=silent)
    if fault is None:
        assert found._has_joined(waited) is False
        return
    with pytest.raises(fault):
        found._has_joined(waited)


@pytest.mark.parametrize(("code", "is_limited"), [(0, False), (75, False), (1, True), (2, True)])
def test_after_a_success_or_a_stop_the_ends_of_hosts_that_answer_are_waited_for_without_a_limit(
    code, is_limited
):
    """One of them sends the run to its mirror: a launcher that left it would be made anew, and meet
    the old run."""
    found = waiting({1: {"who": "this one"}})
    limits = []
    found.hosts.number = 2
    found._silence = 300.0
    found._board.write = lambda attempt, **news: None
    found._wait_for = lambda name, hosts, seconds: limits.append(seconds)
    assert found.agree_on_end(Outcome(code)).code == code
    assert (limits[0] < 60) == is_limited
