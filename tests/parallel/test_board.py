"""The launchers' board: what is written is read, by and from those who share the secret, and nobody
waits for it."""

import contextlib
import json
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from pydantic import TypeAdapter

from common.errors import UserError
from parallel import board as boards
from parallel import hosts, rendezvous
from parallel.board import Board, Entries, MastersBoard, Outcome, _receive, _send
from parallel.hosts import HostLost, Hosts
from parallel.rendezvous import Others, Stopped
from tests.waiting import wait_until
from tests.world import _free_port

SECRET = "shared"
ENDED = {"code": 1, "line": "rank 1 failed", "last": False, "abrupt": True}


@pytest.fixture
def master():
    hosts = Hosts(3, port=_free_port())
    board = MastersBoard(hosts, SECRET)
    board.place = (hosts.master, hosts.port)
    wait_until(lambda: board.address)
    board.write(0, shape="3 replicas", port=7)
    return board


def written(place, shape, host=1, secret=SECRET):
    """The board as a host sees it that has written a shape."""
    board = Board(Hosts(3, host, *place), secret)
    board.write(0, shape=shape)
    return board


def test_hosts_read_what_each_has_written_and_it_stays(master):
    boards = [master, *(written(master.place, f"from {host}", host) for host in (1, 2))]
    boards[2].write(0, end=ENDED)
    for board in boards:
        wait_until(lambda board=board: "end" in board.read(0).get(2, {}) and 1 in board.read(0))
        there = board.read(0)
        assert [there[host]["shape"] for host in range(3)] == ["3 replicas", "from 1", "from 2"]
        assert (there[0]["port"], there[2]["end"]) == (7, Outcome(**ENDED))
        assert max(board.silent(host) for host in range(3)) < 30
    second = written(master.place, "second")
    wait_until(lambda: 1 in second.read(0))
    assert second.read(0)[1] == {"who": boards[1].who, "shape": "from 1"}
    boards[1].write(1, shape="again")
    wait_until(lambda: boards[1].read(1))
    assert boards[1].read(0) == {} and boards[1].silent(2) < 30, (
        "host 2 is not lost, though it has written nothing yet"
    )


@pytest.mark.parametrize("begun", [True, False])
def test_another_launcher_of_a_silent_host_has_returned_if_the_run_had_begun(master, begun):
    """Also where the first one is silent for long enough when the other comes, and is not seen by
    it."""
    first = written(master.place, "first")
    if begun:
        written(master.place, "another host", 2)
        wait_until(lambda: 2 in master.read(0))
    wait_until(lambda: 1 in master.read(0))
    master.succeeded = 0.0
    first.gone = True  # which ends its questions
    second = written(master.place, "second")
    wait_until(lambda: second.read(0).get(1, {}).get("who") == second.who)
    assert second.read(0)[1] == {"who": second.who, "shape": "second", "returned": begun}


def test_without_the_secret_nothing_is_written_or_read(master):
    stranger = written(master.place, "mine", secret="guessed")
    wait_until(lambda: stranger.refused)
    assert (list(master.read(0)), stranger.read(0)) == ([0], {})
    assert master.silent(1) == float("inf")


def signed(challenge, **changes):
    """A message of host 1 to a master that has given this challenge."""
    sent = []
    message = {
        "host": 1,
        "attempt": 0,
        "challenge": "x",
        "entries": {"who": "1", "end": ENDED},
        **changes,
    }
    _send(SimpleNamespace(sendall=sent.append), SECRET.encode(), challenge + b"ask", message)
    return sent[0]


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        b"0" * (1 << 17),
        bytes(64) + b"{}\n",
        signed(bytes(16)),  # overheard: of another challenge
        {"host": 0},
        {"host": 3},
        {"host": True},
        {"attempt": 2},
        {"attempt": -1},
        {"entries": []},
        {"more": 1},
        {"entries": {"who": "1", "shape": ["a"]}},
    ],
    ids=str,
)
def test_what_is_no_message_changes_nothing(master, words):
    with socket.create_connection(master.place) as connection:
        challenge = connection.recv(16, socket.MSG_WAITALL)
        connection.sendall(signed(challenge, **words) if isinstance(words, dict) else words)
        with contextlib.suppress(OSError):  # reset, where it is closed with words unread
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
    with contextlib.ExitStack() as silent:
        for _ in range(20):
            silent.enter_context(socket.create_connection(master.place))
        written(master.place, "heard", 2)
        wait_until(lambda: 2 in master.read(0))
        assert list(master.read(0)) == [0, 2]


def answer_once(server):
    """Be the master for one question."""
    challenge = bytes(16)
    key = SECRET.encode()
    with server.accept()[0] as connection:
        connection.sendall(challenge)
        question = json.loads(_receive(connection.makefile("rb"), key, challenge + b"ask", 1 << 16))
        _send(
            connection, key, question["challenge"].encode() + b"answer", {"attempt": 0, "hosts": {}}
        )


def test_what_listened_in_the_place_of_a_master_that_is_late_and_has_ended_is_no_master_that_is_gone():
    with socket.create_server(("127.0.0.1", 0)) as other:
        board = written(other.getsockname(), "mine")
        other.accept()[0].close()
    wait_until(lambda: board.fault == "Connection refused")
    assert not board.gone


def test_nobody_waits_for_a_master_that_never_answers_and_one_that_is_gone_is_noticed():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30)
        board = written(silent.getsockname(), "mine")
        with silent.accept()[0]:
            assert (board.read(0), board.gone, board.refused) == ({}, False, False)
            before = board.silent(0)
            time.sleep(0.2)
            assert board.silent(0) >= before + 0.2
        assert not board.address, "anything may listen"
        answer_once(silent)
        wait_until(lambda: board.address)
    wait_until(lambda: board.gone)


def test_somebody_in_the_place_of_the_master_is_not_believed():
    """It has no secret, and plays back."""
    with socket.create_server(("127.0.0.1", 0)) as false:

        def answer():
            connection, _ = false.accept()
            with connection:
                connection.sendall(bytes(16))
                connection.sendall(connection.recv(1 << 16))

        threading.Thread(target=answer, daemon=True).start()
        board = written(false.getsockname(), "mine")
        wait_until(lambda: board.refused)
        assert board.read(0) == {}


@pytest.mark.parametrize(
    "entries",
    [
        *({"end": {**ENDED, "code": code}} for code in (0, True, False, 3, [1], "0", None)),
        *(
            {"end": {**ENDED, **changes}}
            for changes in ({"line": "x" * 1001}, {"more": 1}, {"last": 1})
        ),
        {"end": "0"},
        {"port": 0},
        {"port": 65536},
        {"port": "80"},
        {"shape": ["a"]},
        {"shape": "x" * 1001},
        {"read": 1},
        {"unknown": "x"},
        {"who": 1},
        {"who": None},
    ],
    ids=str,
)
def test_entries_that_are_not_as_they_should_be_are_refused(entries):
    """An end that is to end other hosts' ranks is no success."""
    with pytest.raises(ValueError, match="validation error"):
        TypeAdapter(Entries).validate_json(json.dumps({"who": "1", **entries}))


def test_a_message_does_not_steer_the_terminal():
    given = {"who": "1", "end": {"code": 0, "line": "\x1b[2Jdone"}}
    assert TypeAdapter(Entries).validate_json(json.dumps(given)) == {
        "who": "1",
        "end": Outcome(0, "\\x1b[2Jdone"),
    }


@pytest.mark.parametrize("this", [0, 1])
def test_a_signal_ends_the_wait_for_a_name_server(monkeypatch, this):
    answered = threading.Event()
    signals = SimpleNamespace(stopping=False, hurry=False)

    def slow(*names, **options):
        answered.wait(60)
        raise OSError("no answer")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    threading.Timer(0.3, lambda: setattr(signals, "stopping", True)).start()
    with pytest.raises(Stopped):
        Others(Hosts(2, this, "slow.example", 1), "", signals, 5.0, SECRET).gather(0)
    answered.set()


@pytest.mark.parametrize(
    ("name", "fault"), [("a" * 64 + ".example", UserError), ("no such name", HostLost)]
)
def test_what_is_no_name_is_reported(monkeypatch, name, fault):
    monkeypatch.setattr(hosts, "NAME_SECONDS", 0.0)
    with pytest.raises(
        fault, match=f"^--master {name}: .*; give a name or an address that exists$"
    ):
        hosts.listen(Hosts(2, 0, name, 1))
    board = written((name, 1), "mine")
    wait_until(lambda: board.fault)
    assert not board.gone


# The second is that of an earlier host of the name.
@pytest.mark.parametrize("first", [OSError("not known"), "192.0.2.77"])
def test_a_name_that_a_name_server_learns_late_is_waited_for(monkeypatch, first):
    answers = [first, "127.0.0.1"]
    resolve = socket.getaddrinfo

    def late(name, *place, **options):
        if name != "pod-0.example":  # of another test's board
            return resolve(name, *place, **options)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return resolve(answer, *place, **options)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    monkeypatch.setattr(hosts, "_AGAIN_SECONDS", 0.01)
    with hosts.listen(Hosts(1, 0, "pod-0.example", 0)) as listening:
        assert listening.getsockname()[0] == "127.0.0.1" and not answers


def test_a_proxy_that_closes_the_connection_is_no_launcher_with_another_secret():
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        board = written(proxy.getsockname(), "mine")
        proxy.accept()[0].close()
        wait_until(lambda: board.fault)
    assert board.fault == "what listens there closes the connection" and not board.refused


class Launchers:
    """Launchers of one run, each with signals of its own, that gather in threads."""

    def __init__(self, number):
        self.number = number
        self.place = ("127.0.0.1", _free_port())

    def start(self, this, attempt=0):
        signals = SimpleNamespace(stopping=False, hurry=False)
        others = Others(Hosts(self.number, this, *self.place), "replicas", signals, 5.0, SECRET)
        return self.gather(SimpleNamespace(signals=signals, others=others), attempt)

    def gather(self, launcher, attempt):
        """Let it gather; `end` is the port, or what was raised."""
        launcher.end = None

        def gather():
            try:
                launcher.end = launcher.others.gather(attempt)
            except Exception as fault:
                launcher.end = fault
                if isinstance(fault, Stopped):
                    launcher.others.withdraw()

        launcher.thread = threading.Thread(target=gather, daemon=True)
        launcher.thread.start()
        return launcher


def end(launcher):
    launcher.thread.join(30)
    return launcher.end


def test_a_launcher_that_was_stopped_while_it_waited_is_followed_by_its_successor():
    """The others did not count on it meanwhile, nor took its successor for a host with a wrong
    number."""
    run = Launchers(3)
    master = run.start(0)
    first = run.start(1)
    board = master.others._board
    wait_until(lambda: 1 in board.read(0))
    first.signals.stopping = True
    assert isinstance(end(first), Stopped) and list(board.read(0)) == [0]
    last = run.start(2)
    wait_until(lambda: 2 in board.read(0))
    time.sleep(0.2)
    assert master.end is last.end is None
    second = run.start(1)
    assert end(second) == end(master) == end(last) > 0


def killed_while_it_waited(monkeypatch):
    """The launchers of three hosts, of which the second has died, and the first's.

    The third has not come.
    """
    run = Launchers(3)
    master = run.start(0)
    first = run.start(1)
    wait_until(lambda: 1 in master.others._board.read(0))
    first.others._board.gone = True  # which ends its questions
    monkeypatch.setattr(boards, "_WAITING_SECONDS", 0.1)
    time.sleep(0.2)
    return run, master


def test_a_launcher_that_was_killed_while_it_waited_is_followed_by_its_successor(monkeypatch):
    run, master = killed_while_it_waited(monkeypatch)
    board = master.others._board
    second = run.start(1)
    wait_until(lambda: board.read(0).get(1, {}).get("who") == second.others._board.who)
    monkeypatch.undo()  # more may lie between two questions of one that lives
    last = run.start(2)
    assert end(second) == end(master) == end(last) > 0


def test_a_launcher_that_was_killed_while_it_waited_has_not_come(monkeypatch):
    """The others started their ranks, which waited in vain for those of its host."""
    run, master = killed_while_it_waited(monkeypatch)
    board = master.others._board
    last = run.start(2)
    wait_until(lambda: 2 in board.read(0))
    monkeypatch.undo()  # more may lie between two questions of one that lives
    assert list(board.read(0)) == [0, 2] and master.end is last.end is None
    second = run.start(1)
    assert end(second) == end(master) == end(last) > 0


def test_the_launchers_that_wait_end_with_a_master_that_is_stopped():
    run = Launchers(3)
    master = run.start(0)
    other = run.start(1)
    wait_until(lambda: other.others._board.address and 1 in master.others._board.read(0))
    master.signals.stopping = True
    assert isinstance(end(other), Stopped) and isinstance(end(master), Stopped)


def test_a_master_that_is_stopped_between_two_attempts_ends_those_that_wait_in_the_next_one(
    monkeypatch,
):
    """Its word was of the attempt before, and it waited for nobody to read it."""
    monkeypatch.setattr(rendezvous, "_READ_SECONDS", 2.0)
    run = Launchers(3)
    master, other, lost = (run.start(host) for host in range(3))
    assert end(master) == end(other) == end(lost)
    lost.others._board.gone = True
    master.signals.stopping = True
    run.gather(other, attempt=1)
    run.gather(master, attempt=1)
    assert isinstance(end(master), Stopped)
    assert "read" in master.others._board.read(1)[1]
    assert isinstance(end(other), Stopped)


def test_a_launcher_that_comes_anew_begins_with_the_attempt_that_the_master_has_come_to():
    """The place of the ranks' store in an earlier one is gone."""
    run = Launchers(2)
    master = run.start(0)
    first = run.start(1)
    assert end(first) == end(master)
    first.others._board.gone = True
    run.gather(master, attempt=1)
    second = run.start(1)
    assert end(second) == end(master) != first.end
    assert (second.others.attempt, second.others.returned) == (1, False)


def test_a_launcher_that_is_told_twice_to_stop_ends_once_the_others_know():
    """It ended before its word was sent: the others waited for its ranks, or ended with another
    code."""
    place = ("127.0.0.1", _free_port())
    signals = [SimpleNamespace(stopping=False, hurry=False) for _ in range(2)]
    others = [
        Others(Hosts(2, this, *place), "2 replicas", signals[this], 5.0, SECRET) for this in (0, 1)
    ]
    master = threading.Thread(target=others[0].gather, args=(0,))
    master.start()
    others[1].gather(0)
    master.join()
    signals[1].stopping = signals[1].hurry = True
    found = []

    def end_of_the_master():
        wait_until(others[0].news)
        signals[0].stopping = True
        found.append(others[0].agree_on_end(Outcome(75)))

    master = threading.Thread(target=end_of_the_master)
    master.start()
    own = others[1].agree_on_end(Outcome(1, abrupt=True))
    assert others[1]._has_written(0, "end"), (
        "it has heard of the other, so the other has heard of it"
    )
    master.join()
    assert own.code == found[0].code == 1
