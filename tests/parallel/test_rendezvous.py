"""A launcher that waits for its entries on the board."""

from types import SimpleNamespace

import pytest

from common.errors import UserError
from parallel import rendezvous
from parallel.hosts import HostLost

LONG = rendezvous.REACH_SECONDS + 1


def waiting(entries, elastic=True):
    """A launcher of host 1 that looks at these entries of the hosts."""
    found = object.__new__(rendezvous.Others)
    found.hosts = SimpleNamespace(this=1, place="10.0.0.1")
    found._board = SimpleNamespace(who="this one", refused=False, gone=False, fault="")
    found._elastic, found._attempt = elastic, 0
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


def test_hosts_that_do_not_come_may_only_be_late():
    with pytest.raises(HostLost, match=r"^waited 600 s in vain for one; start all hosts"):
        waiting({})._check_time("one", [0], 601.0)
