"""The board on which the launchers of all hosts write how their ranks do: the master's keeps it, all read it.

A host writes entries of its own only, once each, and for one attempt to run. Every message is authenticated by
HMAC-SHA256 with a secret that the hosts share over a challenge made for it, so nobody else can write, answer or replay
one. Whatever comes is checked for its type and length. No method waits for the network: a thread asks the master.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import secrets
import socket
import struct
import threading
import time
from typing import Dict

from recipe.errors import DONE, FAILED, STOPPED, WRONG_INPUT

_ASK_SECONDS = 1.0  # between two looks at the board
_ANSWER_SECONDS = 5.0  # for one message and its answer
_BYTES = 1 << 16  # of all that one host writes
LONGEST = 1000  # characters of a text
_CONNECTIONS = 1024  # at the same time; a host needs one
_CHALLENGE, _MAC = 16, hashlib.sha256().digest_size

Entries = Dict[str, object]


class MastersBoard:
    """The board itself, which answers at a listening socket from its creation on."""

    def __init__(self, listening: socket.socket, number: int, secret: str):
        """Args: number: hosts. secret: shared by all of them; without one ("") anybody may write."""
        self._listening, self._number, self._key = listening, number, secret.encode()
        self._attempt = 0  # the newest of the master
        self._attempts: Dict[int, Dict[int, Entries]] = {}
        self._heard: Dict[int, float] = {}
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(_CONNECTIONS)
        self.who, self.gone, self.refused = secrets.token_hex(8), False, False  # as of Board
        threading.Thread(target=self._listen, name="board", daemon=True).start()

    def write(self, attempt: int, **entries: object) -> None:
        """Adds entries of this host."""
        self._attempt = attempt
        self._post(0, attempt, {"who": self.who, **entries})

    def read(self, attempt: int) -> Dict[int, Entries]:
        """The entries of each host that has written any."""
        with self._lock:
            return {host: dict(entries) for host, entries in self._attempts.get(attempt, {}).items()}

    def silent(self, host: int) -> float:
        """Seconds since the launcher of a host last asked."""
        with self._lock:
            return 0.0 if host == 0 else time.monotonic() - self._heard.get(host, -math.inf)

    def _post(self, host: int, attempt: int, entries: Entries) -> None:
        with self._lock:
            there = self._attempts.setdefault(attempt, {}).setdefault(host, {})
            if there.setdefault("who", entries.get("who")) != entries.get("who"):
                return  # a second launcher says that it is this host; it finds the other's name
            self._heard[host] = time.monotonic()
            for name, value in entries.items():
                there.setdefault(name, value)

    def _listen(self) -> None:
        while True:
            self._free.acquire()
            try:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):  # too many files or threads
                self._free.release()
                time.sleep(0.1)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError, ValueError):
            try:
                end = time.monotonic() + _ANSWER_SECONDS
                challenge = secrets.token_bytes(_CHALLENGE)
                connection.sendall(challenge)
                message = _receive(connection, self._key, challenge + b"ask", _BYTES, end)
                host, attempt, again = message.get("host"), message.get("attempt"), message.get("challenge")
                if not (_whole(host, 1, self._number) and _whole(attempt, 0, self._attempt + 2) and _text(again)):
                    return
                self._post(host, attempt, _checked(message.get("entries")))
                answer = {str(host): [self.silent(host), entries] for host, entries in self.read(attempt).items()}
                _send(connection, self._key, again.encode() + b"answer", answer, end)
            finally:
                self._free.release()


class Board:
    """The master's board as another host sees it."""

    def __init__(self, address: str, port: int, host: int, number: int, secret: str):
        self._place, self._host, self._number, self._key = (address, port), host, number, secret.encode()
        self._attempt, self._entries = 0, {}
        self._answer: Dict[int, tuple] = {}  # of this attempt; host: (seconds of silence, entries)
        self._answered = time.monotonic()
        self._lock, self._wake = threading.Lock(), threading.Event()
        self.who = secrets.token_hex(8)
        self.gone = False  # nothing listens at the master any more
        self.refused = False  # what listens there ends the talk, as a launcher with another secret does
        threading.Thread(target=self._keep_asking, name="board", daemon=True).start()

    def write(self, attempt: int, **entries: object) -> None:
        """Adds entries of this host; they are on the board once `read` returns them."""
        with self._lock:
            if attempt != self._attempt:
                self._attempt, self._entries, self._answer = attempt, {}, {}
            self._entries = {"who": self.who, **self._entries, **entries}
        self._wake.set()

    def read(self, attempt: int) -> Dict[int, Entries]:
        """The entries of each host that has written any."""
        with self._lock:
            return {host: dict(entries) for host, (_, entries) in self._answer.items() if attempt == self._attempt}

    def silent(self, host: int) -> float:
        """Seconds since the launcher of a host last asked, or the master last answered."""
        with self._lock:
            since = time.monotonic() - self._answered
            return since if host == 0 else since + self._answer.get(host, (math.inf,))[0]

    def _keep_asking(self) -> None:
        while True:
            with self._lock:
                attempt, entries = self._attempt, dict(self._entries)
            if entries:
                try:
                    answer = self._ask(attempt, entries)
                    with self._lock:
                        self._answered, self.refused = time.monotonic(), False
                        if attempt == self._attempt:
                            self._answer = answer
                except ConnectionRefusedError:
                    self.gone = True
                    return
                except OSError:
                    pass  # the way there may come back
                except (EOFError, ValueError):
                    self.refused = True
            self._wake.wait(_ASK_SECONDS)
            self._wake.clear()

    def _ask(self, attempt: int, entries: Entries) -> Dict[int, tuple]:
        end = time.monotonic() + _ANSWER_SECONDS
        with socket.create_connection(self._place, timeout=_ANSWER_SECONDS) as connection:
            challenge, again = _exactly(connection, _CHALLENGE, end), secrets.token_hex(_CHALLENGE)
            message = {"host": self._host, "attempt": attempt, "challenge": again, "entries": entries}
            _send(connection, self._key, challenge + b"ask", message, end)
            answer = _receive(connection, self._key, again.encode() + b"answer", self._number * _BYTES, end)
        found = {}
        for host, value in answer.items():
            if host.isdecimal() and int(host) < self._number and isinstance(value, list) and len(value) == 2:
                seconds, written = value
                found[int(host)] = (seconds if isinstance(seconds, float) else math.inf, _checked(written))
        return found


def _send(connection: socket.socket, key: bytes, challenge: bytes, message: dict, end: float) -> None:
    body = json.dumps(message).encode()
    connection.settimeout(_left(end))
    connection.sendall(struct.pack(">I", len(body)) + hmac.digest(key, challenge + body, "sha256") + body)


def _receive(connection: socket.socket, key: bytes, challenge: bytes, limit: int, end: float) -> dict:
    """A message; OSError or EOFError if none comes, ValueError if it is from somebody without the secret."""
    (length,) = struct.unpack(">I", _exactly(connection, 4, end))
    if length > limit:
        raise ValueError("too long")
    code, body = _exactly(connection, _MAC, end), _exactly(connection, length, end)
    if not hmac.compare_digest(code, hmac.digest(key, challenge + body, "sha256")):
        raise ValueError("from somebody without the secret")
    try:
        message = json.loads(body)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("no message")
    return message


def _exactly(connection: socket.socket, length: int, end: float) -> bytes:
    """`length` bytes before the time `end`, however slowly they come."""
    got = bytearray()
    while len(got) < length:
        connection.settimeout(_left(end))
        more = connection.recv(min(length - len(got), 1 << 16))
        if not more:
            raise EOFError
        got += more
    return bytes(got)


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _checked(entries: object) -> Entries:
    """Those entries that are what they should be."""
    if not isinstance(entries, dict):
        return {}
    return {name: value for name, value in entries.items() if name in _ENTRIES and _ENTRIES[name](value)}


def _text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST


def _whole(value: object, least: int, end: int) -> bool:
    return type(value) is int and least <= value < end


def _end(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"code", "line", "last", "abrupt"}
        and value["code"] in (DONE, FAILED, WRONG_INPUT, STOPPED)
        and type(value["code"]) is int
        and _text(value["line"])
        and type(value["last"]) is type(value["abrupt"]) is bool
    )


_ENTRIES = {
    "who": _text,  # a name that a launcher makes for itself
    "shape": _text,  # what it starts
    "port": lambda value: _whole(value, 1, 1 << 16),  # where the ranks meet
    "news": lambda value: _end(value) and value["code"] != DONE,  # ranks are gone for which others may wait
    "end": _end,  # how its ranks ended
    "read": lambda value: value is True,  # it has read what it needs
}
