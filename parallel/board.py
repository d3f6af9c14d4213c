"""The board on which the launchers of all hosts write how their ranks do: the master's launcher serves it, all read it.

A host writes entries of its own only, once each, and for one attempt to run. Every message is authenticated by
HMAC-SHA256 with a secret that the hosts share over a challenge made for it, so nobody else can write, answer or replay
one. A message that does not fit `_Question` or `_ANSWER` is ignored. No method waits for the network: threads do.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import secrets
import socket
import threading
import time
from dataclasses import dataclass, replace
from typing import Annotated, BinaryIO, Dict, Optional, Tuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import Required, TypedDict

from parallel.hosts import Hosts, listen
from recipe.errors import DONE, FAILED, STOPPED, WRONG_INPUT, UserError, printable

_POLL_SECONDS = 1.0
_CONNECT_SECONDS = 0.2  # between two attempts to reach a master that does not listen yet
_ANSWER_SECONDS = 5.0  # that one side waits for the other to send
_BYTES = 1 << 16  # of all that one host writes
LONGEST = 1000  # characters of a text
_CHALLENGE, _MAC = 16, 64  # bytes, hexadecimal digits
_STRICT = ConfigDict(strict=True, extra="forbid")

_Text = Annotated[str, Field(max_length=LONGEST)]


@with_config(_STRICT)
@dataclass(frozen=True)
class Outcome:
    """End of the ranks of a host: `code` as train.py's, `line` for the user, `last` if there is no next attempt."""

    code: int
    line: _Text = ""
    last: bool = False
    abrupt: bool = False  # the ranks of the other hosts may wait for some that are gone


def _received(outcome: Outcome) -> Outcome:
    """An outcome of another host; its line does not steer the terminal. Raises ValueError: no outcome of ranks."""
    if outcome.code not in (DONE, FAILED, WRONG_INPUT, STOPPED) or (outcome.abrupt and outcome.code == DONE):
        raise ValueError("no outcome of ranks")
    return replace(outcome, line=printable(outcome.line)[:LONGEST])


@with_config(_STRICT)
class Entries(TypedDict, total=False):
    """What a host has written."""

    who: Required[_Text]  # a name that a launcher makes for itself
    shape: _Text  # what it starts
    port: Annotated[int, Field(ge=1, lt=1 << 16)]  # where the ranks meet
    end: Annotated[Outcome, AfterValidator(_received)]  # how its ranks ended
    read: bool  # it has read what it needs
    returned: bool  # written by the master: the run had begun with an earlier launcher of this host


class _Question(BaseModel, strict=True, extra="forbid"):
    host: Annotated[int, Field(ge=1)]
    attempt: Annotated[int, Field(ge=0)]
    challenge: _Text
    entries: Entries


_ANSWER = TypeAdapter(Dict[int, Tuple[float, Entries]])  # host -> seconds of silence, entries


class _Board:
    """The entries of all hosts as this one knows them.

    who: a name of this launcher. gone: nothing listens at the master any more. refused: what listens there closes the
    connection, as a launcher with another secret does. fault: of the last attempt to reach it. address: the master's,
    once this host has reached it.
    """

    def __init__(self, hosts: Hosts, secret: str):
        """Args: secret: shared by all hosts; without one ("") anybody may write."""
        self._hosts, self._key = hosts, secret.encode()
        self._attempt = 0  # the newest of this host
        self._attempts: Dict[int, Dict[int, Entries]] = {}
        self._heard = {0: time.monotonic()}
        self._lock = threading.Lock()
        self.who, self.gone, self.refused, self.fault, self.address = secrets.token_hex(8), False, False, "", ""

    def read(self, attempt: int) -> Dict[int, Entries]:
        """The entries of each host that has written any."""
        with self._lock:
            return {host: dict(entries) for host, entries in self._attempts.get(attempt, {}).items()}

    def silent(self, host: int) -> float:
        """Seconds since the launcher of a host last polled, or the master last answered."""
        with self._lock:
            return 0.0 if host == self._hosts.this else time.monotonic() - self._heard.get(host, -math.inf)


class MastersBoard(_Board):
    """The board itself, which answers other hosts once it has an `address`. error: it cannot listen. succeeded: after
    so many seconds of silence another launcher may say that it is this host."""

    error: Optional[UserError] = None
    succeeded = math.inf

    def __init__(self, hosts: Hosts, secret: str):
        super().__init__(hosts, secret)
        if hosts.number == 1:
            self.address = hosts.master
        else:
            threading.Thread(target=self._listen, name="board", daemon=True).start()

    def write(self, attempt: int, **entries: object) -> None:
        """Add entries of this host."""
        self._attempt = attempt
        self._post(0, attempt, {"who": self.who, **entries})

    def _post(self, host: int, attempt: int, entries: Entries) -> None:
        with self._lock:
            hosts = self._attempts.setdefault(attempt, {})
            there = hosts.setdefault(host, {})
            if there.setdefault("who", entries["who"]) != entries["who"]:
                if time.monotonic() - self._heard.get(host, -math.inf) < self.succeeded:
                    return  # a second launcher claims to be this host; it finds the other's name
                there.clear()
                there["returned"] = len(hosts) == self._hosts.number
            self._heard[host] = time.monotonic()
            for name, value in entries.items():
                there.setdefault(name, value)

    def _listen(self) -> None:
        """Serve each connection for some seconds at most, in a thread of its own."""
        try:
            listening = listen(self._hosts)
        except UserError as error:
            self.error = error
            return
        self.address = listening.getsockname()[0]
        while True:
            try:
                connection, _ = listening.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):  # too many files or threads
                time.sleep(0.1)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError, ValueError):
            connection.settimeout(_ANSWER_SECONDS)
            challenge = secrets.token_bytes(_CHALLENGE)
            connection.sendall(challenge)
            asked = _receive(connection.makefile("rb"), self._key, challenge + b"ask", _BYTES)
            message = _Question.model_validate_json(asked)
            host, attempt = message.host, message.attempt
            if host < self._hosts.number and attempt < self._attempt + 2:
                self._post(host, attempt, message.entries)
                answer = {each: (self.silent(each), entries) for each, entries in self.read(attempt).items()}
                _send(connection, self._key, message.challenge.encode() + b"answer", answer)


class Board(_Board):
    """The master's board as another host sees it."""

    def __init__(self, hosts: Hosts, secret: str):
        super().__init__(hosts, secret)
        self._place, self._entries, self._wake = (hosts.master, hosts.port), {}, threading.Event()
        threading.Thread(target=self._poll, name="board", daemon=True).start()

    def write(self, attempt: int, **entries: object) -> None:
        """Add entries of this host; they are on the board once `read` returns them."""
        with self._lock:
            if attempt != self._attempt:
                self._attempt, self._entries, self._attempts = attempt, {}, {}
            self._entries = {"who": self.who, **self._entries, **entries}
        self._wake.set()

    def _poll(self) -> None:
        while not self.gone:
            with self._lock:
                attempt, entries = self._attempt, dict(self._entries)
            if entries:
                try:
                    answer = self._ask(attempt, entries)
                    with self._lock:
                        now, self.refused = time.monotonic(), False
                        self._heard.update({host: now - seconds for host, (seconds, _) in answer.items()})
                        self._heard[0] = now
                        if attempt == self._attempt:
                            self._attempts = {attempt: {host: found for host, (_, found) in answer.items()}}
                except (OSError, UnicodeError) as error:  # no way there, which may come back, or no name
                    self.fault = getattr(error, "strerror", None) or str(error)
                    self.gone = bool(self.address) and isinstance(error, ConnectionRefusedError)
                except (EOFError, ValueError):
                    self.fault = "what listens there does not answer as a launcher with this POD_TOKEN"
                    self.refused = True
            self._wake.wait(_POLL_SECONDS if self.address else _CONNECT_SECONDS)
            self._wake.clear()

    def _ask(self, attempt: int, entries: Entries) -> Dict[int, Tuple[float, Entries]]:
        with socket.create_connection(self._place, timeout=_ANSWER_SECONDS) as connection:
            self.address = connection.getpeername()[0]
            self._place = (self.address, self._place[1])  # a name server is asked once
            stream, again = connection.makefile("rb"), secrets.token_hex(_CHALLENGE)
            challenge = stream.read(_CHALLENGE)
            if not challenge:
                raise EOFError
            message = {"host": self._hosts.this, "attempt": attempt, "challenge": again, "entries": entries}
            _send(connection, self._key, challenge + b"ask", message)
            answer = _receive(stream, self._key, again.encode() + b"answer", self._hosts.number * _BYTES)
        return _ANSWER.validate_json(answer)


def _send(connection: socket.socket, key: bytes, challenge: bytes, message: dict) -> None:
    """A message is a line: its HMAC in hexadecimal digits, then JSON."""
    body = json.dumps(message, default=vars).encode()
    connection.sendall(_mac(key, challenge, body) + body + b"\n")


def _receive(stream: BinaryIO, key: bytes, challenge: bytes, limit: int) -> bytes:
    """A message; OSError or EOFError if none comes, ValueError if it is from somebody without the secret."""
    line = stream.readline(limit)
    if not line.endswith(b"\n"):
        raise EOFError
    if not hmac.compare_digest(line[:_MAC], _mac(key, challenge, line[_MAC:-1])):
        raise ValueError("from somebody without the secret")
    return line[_MAC:-1]


def _mac(key: bytes, challenge: bytes, body: bytes) -> bytes:
    return hmac.digest(key, challenge + body, "sha256").hex().encode()
