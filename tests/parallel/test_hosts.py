"""How a host finds the master: names that take their time, names that are none."""

import socket
import threading

import pytest

from parallel import hosts
from recipe.errors import UserError


class GivenUp(Exception):
    pass


def test_a_signal_ends_the_wait_for_a_name_server(monkeypatch):
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *names, **options: answered.wait(60) and [])
    asked = []

    def given_up():
        asked.append(None)
        if len(asked) > 2:
            raise GivenUp

    with pytest.raises(GivenUp):
        hosts.reach(hosts.Hosts(2, 1, "slow.example", 1), given_up)
    answered.set()


@pytest.mark.parametrize("name", ["a" * 64 + ".example", "no such name"])
def test_what_is_no_name_is_said(name):
    with pytest.raises(UserError, match=f"^--master {name}: .*; give a name or an address that exists$"):
        hosts.listen(hosts.Hosts(2, 0, name, 1))
