"""The launchers' board: what is written is read, by and from those who share the secret, and nobody waits for it."""

import json
import socket
import struct
import threading
import time

import pytest

from parallel.board import Board, MastersBoard, _checked, _exactly, _send

SECRET = "shared"
ENDED = {"code": 1, "line": "rank 1 failed", "last": False, "abrupt": True}


@pytest.fixture
def master():
    listening = socket.create_server(("127.0.0.1", 0))
    board = MastersBoard(listening, 3, SECRET)
    board.port = listening.getsockname()[1]
    board.write(0, shape="3 replicas", port=7)
    return board


def eventually(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_hosts_read_what_each_has_written(master):
    boards = [master, *(Board("127.0.0.1", master.port, host, 3, SECRET) for host in (1, 2))]
    for host, board in enumerate(boards[1:], 1):
        board.write(0, shape=f"from {host}")
    boards[2].write(0, news=ENDED)
    for board in boards:
        eventually(lambda board=board: "news" in board.read(0).get(2, {}))
        eventually(lambda board=board: 1 in board.read(0))
        there = board.read(0)
        assert [there[host]["shape"] for host in range(3)] == ["3 replicas", "from 1", "from 2"]
        assert (there[0]["port"], there[2]["news"]) == (7, ENDED)
        assert max(board.silent(host) for host in range(3)) < 30
    boards[1].write(1, shape="again")
    eventually(lambda: boards[1].read(1))
    assert boards[1].read(0) == {}


def test_what_is_written_stays(master):
    boards = [Board("127.0.0.1", master.port, 1, 3, SECRET) for _ in range(2)]
    boards[0].write(0, shape="first")
    eventually(lambda: 1 in boards[0].read(0))
    boards[1].write(0, shape="second")
    eventually(lambda: 1 in boards[1].read(0))
    assert boards[1].read(0)[1] == {"who": boards[0].who, "shape": "first"}


def test_without_the_secret_nothing_is_written_or_read(master):
    stranger = Board("127.0.0.1", master.port, 1, 3, "guessed")
    stranger.write(0, news=ENDED)
    eventually(lambda: stranger.refused)
    assert (list(master.read(0)), stranger.read(0)) == ([0], {})
    assert master.silent(1) == float("inf")


def test_a_message_that_was_overheard_is_worth_nothing(master):
    with socket.create_connection(("127.0.0.1", master.port)) as connection:
        challenge, heard = _exactly(connection, 16, time.monotonic() + 30), Recorder()
        message = {"host": 1, "attempt": 0, "challenge": "x", "entries": {"news": ENDED}}
        _send(heard, SECRET.encode(), challenge + b"ask", message, time.monotonic() + 30)
    with socket.create_connection(("127.0.0.1", master.port)) as connection:
        _exactly(connection, 16, time.monotonic() + 30)
        connection.sendall(heard.sent)
        assert connection.recv(1) == b""
    assert list(master.read(0)) == [0]


class Recorder:
    sent = b""

    def settimeout(self, seconds):
        pass

    def sendall(self, data):
        self.sent += data


@pytest.mark.parametrize(
    "words",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, struct.pack(">I", 10) + bytes(42), struct.pack(">I", 1 << 31)],
)
def test_what_is_no_message_changes_nothing(master, words):
    with socket.create_connection(("127.0.0.1", master.port)) as connection:
        connection.sendall(words)
    asks_and_sleeps = [socket.create_connection(("127.0.0.1", master.port)) for _ in range(20)]
    board = Board("127.0.0.1", master.port, 2, 3, SECRET)
    board.write(0, shape="heard")
    eventually(lambda: 2 in board.read(0))
    for connection in asks_and_sleeps:
        connection.close()


def test_nobody_waits_for_a_master_that_never_answers():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        board = Board(*silent.getsockname(), 1, 2, SECRET)
        silent.settimeout(30)
        board.write(0, shape="mine")
        with silent.accept()[0]:
            assert (board.read(0), board.gone, board.refused) == ({}, False, False)
            before = board.silent(0)
            time.sleep(0.2)
            assert board.silent(0) >= before + 0.2


def test_a_master_that_is_gone_is_known_at_once(master):
    board = Board("127.0.0.1", free_port(), 1, 2, SECRET)
    board.write(0, shape="mine")
    eventually(lambda: board.gone)


def test_somebody_in_the_place_of_the_master_is_not_believed():
    """It has no secret, and plays back."""
    with socket.create_server(("127.0.0.1", 0)) as false:

        def answer():
            connection, _ = false.accept()
            with connection:
                connection.sendall(bytes(16))
                connection.sendall(connection.recv(1 << 16))

        threading.Thread(target=answer, daemon=True).start()
        board = Board(*false.getsockname(), 1, 2, SECRET)
        board.write(0, shape="mine")
        eventually(lambda: board.refused)
        assert board.read(0) == {}


@pytest.mark.parametrize(
    "entries",
    [
        {"news": {**ENDED, "code": 0}},
        {"news": {**ENDED, "code": True}},
        {"news": {**ENDED, "code": 3}},
        {"news": {**ENDED, "code": [1]}},
        {"news": {**ENDED, "line": "x" * 1001}},
        {"news": {**ENDED, "more": 1}},
        {"end": {"code": 0}},
        {"end": {**ENDED, "last": 1}},
        {"end": "0"},
        {"port": 0},
        {"port": 65536},
        {"port": "80"},
        {"shape": ["a"]},
        {"shape": "x" * 1001},
        {"read": 1},
        {"unknown": "x"},
    ],
)
def test_what_is_not_as_it_should_be_is_left_out(entries):
    assert _checked({**entries, "who": "kept"}) == {"who": "kept"}
    assert json.loads(json.dumps(_checked({"end": {**ENDED, "code": 0}}))) == {"end": {**ENDED, "code": 0}}
    assert _checked([entries]) == {}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
