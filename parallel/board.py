"""The board on which the launchers of all hosts write how their ranks do.

The master's launcher serves it, and all read it.

A host writes entries of its own only, once each, and for one attempt to run. Every message is
authenticated by HMAC-SHA256 with a secret that the hosts share over a challenge made for it, so
nobody else can write, answer or replay one. A message that does not fit `_Question` or `_Answer` is
ignored. No method waits for the network: threads do.
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
from typing import Annotated, BinaryIO, Dict, Optional, Tuple, Union

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, with_config
from typing_extensions import Required, TypedDict, Unpack

from common.errors import DONE, FAILED, STOPPED, WRONG_INPUT, UserError
from common.text import printable
from parallel.hosts import HostLost, Hosts, listen

_POLL_SECONDS = 1.0
_CONNECT_SECONDS = 0.2  # between two attempts to reach a master that does not listen yet
_ANSWER_SECONDS = 5.0  # that one side waits for the other to send
_WAITING_SECONDS = 10.0  # launchers that wait for others poll once a second: this one is gone
_BYTES = 1 << 16  # of all that one host writes
LONGEST = 1000  # characters of a text
_CHALLENGE = 16  # bytes
_MAC = 64  # hexadecimal digits
_STRICT = ConfigDict(strict=True, extra="forbid")

_Text = Annotated[str, Field(max_length=LONGEST)]


@with_config(_STRICT)
@dataclass(frozen=True)
class Outcome:
    """End of the ranks of a host.

    code: as train.py's.
    line: for the user.
    last: there is no next attempt.
    abrupt: the ranks of the other hosts may wait for some that are gone.
    """

    code: int
    line: _Text = ""
    last: bool = False
    abrupt: bool = False


def _received(outcome: Outcome) -> Outcome:
    """Return an outcome of another host with a line that does not steer the terminal.

    Raises ValueError: it is no outcome of ranks.
    """
    is_code = outcome.code in (DONE, FAILED, WRONG_INPUT, STOPPED)
    if not is_code or (outcome.abrupt and outcome.code == DONE):
        raise ValueError("no outcome of ranks")
    return replace(outcome, line=printable(outcome.line)[:LONGEST])


class News(TypedDict, total=False):
    """Entries that a host writes at a time.

    shape: what it starts.
    port: where the ranks meet.
    end: how its ranks ended.
    read: it has read what it needs.
    returned: written by the master: the run had begun with an earlier launcher of this host.
    """

    shape: _Text
    port: Annotated[int, Field(ge=1, lt=1 << 16)]
    end: Annotated[Outcome, AfterValidator(_received)]
    read: bool
    returned: bool


@with_config(_STRICT)
class Entries(News, total=False):
    """The entries that a host has written.

    who: a name that a launcher makes for itself.
    """

    who: Required[_Text]


class _Question(BaseModel, strict=True, extra="forbid"):
    """A message to the master with all entries of a host in an attempt.

    The answer has those of all hosts.
    """

    host: Annotated[int, Field(ge=1)]
    attempt: Annotated[int, Field(ge=0)]
    challenge: _Text
    entries: Entries


class _Answer(BaseModel, strict=True, extra="forbid"):
    """A message of the master.

    attempt: its newest.
    hosts: of each host the seconds of silence, and its entries in the attempt of the question.
    """

    attempt: Annotated[int, Field(ge=0)]
    hosts: Dict[int, Tuple[float, Entries]]


class _Board:
    """The entries of all hosts as this one knows them.

    who: a name of this launcher.
    gone: nothing listens at the master any more.
    refused: what listens there closes the connection, as a launcher with another secret does.
    fault: of the last attempt to reach it.
    address: the master's, once it has answered this host.
    newest: the master's newest attempt, as far as it has answered.
    """

    def __init__(self, hosts: Hosts, secret: str):
        """
        Args:
            hosts: of the run.
            secret: shared by all hosts; without one ("") anybody may write.
        """
        self._hosts = hosts
        self._key = secret.encode()
        self._attempt = 0  # the newest of this host
        self._attempts: Dict[int, Dict[int, Entries]] = {}  # attempt -> host -> entries
        # The master's silence begins with this board: it may not listen yet.
        self._heard = {0: time.monotonic()}  # host -> when it last polled or answered
        self._lock = threading.Lock()
        self.who = secrets.token_hex(8)
        self.gone = False
        self.refused = False
        self.fault = ""
        self.address = ""
        self.newest = 0

    def read(self, attempt: int) -> Dict[int, Entries]:
        """Return the entries of each host that has written any in this `attempt`."""
        with self._lock:
            hosts = self._attempts.get(attempt, {})
            return {host: entries.copy() for host, entries in hosts.items()}

    def silent(self, host: int) -> float:
        """Return the seconds since the launcher of a `host` polled, or the master answered.

        For this host's own number: of whichever launcher polled under it last.
        """
        with self._lock:
            # The master does not poll itself.
            if host == self._hosts.this == 0:
                return 0.0
            # A host that was never heard has been silent for ever.
            return time.monotonic() - self._heard.get(host, -math.inf)


class MastersBoard(_Board):
    """The board itself, which answers other hosts once it has an `address`.

    error: why it cannot listen.
    succeeded: after so many seconds of silence another launcher may say that it is the same host of
        a run that has begun.
    """

    error: Optional[Union[UserError, HostLost]] = None
    succeeded = math.inf

    def __init__(self, hosts: Hosts, secret: str):
        """Begin to listen, unless there are no other hosts. See _Board: `hosts`, `secret`."""
        super().__init__(hosts, secret)
        if hosts.number == 1:
            self.address = hosts.master
        else:
            threading.Thread(target=self._listen, name="board", daemon=True).start()

    def write(self, attempt: int, **news: Unpack[News]) -> None:
        """Add entries of this host, `news`, in an `attempt`."""
        self._attempt = attempt
        self._post(0, attempt, {"who": self.who, **news})

    def _post(self, host: int, attempt: int, entries: Entries) -> None:
        """Add entries of a host, which stay as they were first written."""
        with self._lock:
            hosts = self._attempts.setdefault(attempt, {})
            # Nobody acts on what is written before all have come.
            has_begun = len(hosts) == self._hosts.number
            if not has_begun:
                self._drop_lost(hosts, host)
            written = hosts.get(host, entries)
            # The first launcher that said so is this host, until it is silent for long enough.
            if written["who"] != entries["who"]:
                limit = self.succeeded if has_begun else min(self.succeeded, _WAITING_SECONDS)
                silence = time.monotonic() - self._heard.get(host, -math.inf)
                # In an attempt that is over nobody is followed: the place of its ranks is gone.
                if silence < limit or attempt < self._attempt:
                    # A second launcher claims to be this host; it finds the first one's name.
                    return
                written = {"who": entries["who"], "returned": has_begun}
            self._heard[host] = time.monotonic()
            # What was written first stays: others may have read it, and acted on it.
            hosts[host] = {**entries, **written}
            # A host that is stopped before all have come has not come: its successor may. Not where
            # the master has ended: it waits for what its end makes others write.
            is_stopped = "end" in entries and entries["end"].code == STOPPED
            if host and not has_begun and is_stopped and "end" not in hosts.get(0, {}):
                del hosts[host]

    def _drop_lost(self, hosts: Dict[int, Entries], asking: int) -> None:
        """Forget hosts whose launchers wait no more: ranks would start, and wait for theirs in vain.

        Args:
            hosts: entries of an attempt in which not all have come.
            asking: a host that is there.
        """
        since = time.monotonic() - _WAITING_SECONDS
        lost = [host for host in hosts if self._heard.get(host, -math.inf) < since]
        for host in lost:
            if host not in (0, asking):  # the master does not poll
                del hosts[host]

    def _listen(self) -> None:
        """Serve each connection for some seconds at most, in a thread of its own."""
        try:
            listening = listen(self._hosts)
        except (UserError, HostLost) as error:
            self.error = error
            return
        self.address = listening.getsockname()[0]
        while True:
            try:
                # Each in a thread: who connects and sends nothing keeps nobody waiting.
                connection, _ = listening.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):  # too many files or threads
                time.sleep(0.1)

    def _serve(self, connection: socket.socket) -> None:
        """Answer the question of one connection, if it is one of a host of this run."""
        with connection, contextlib.suppress(OSError, EOFError, ValueError):
            connection.settimeout(_ANSWER_SECONDS)
            # The question must be signed over a challenge made for this connection.
            challenge = secrets.token_bytes(_CHALLENGE)
            connection.sendall(challenge)
            stream = connection.makefile("rb")
            text = _receive(stream, self._key, challenge + b"ask", limit=_BYTES)
            question = _Question.model_validate_json(text)
            # An attempt is at most one ahead of this host's.
            if question.host < self._hosts.number and question.attempt < self._attempt + 2:
                self._post(question.host, question.attempt, question.entries)
                answer = self._answer(question.attempt)
                _send(connection, self._key, question.challenge.encode() + b"answer", answer)

    def _answer(self, attempt: int) -> dict:
        """Return an `_Answer`, to be sent."""
        written = self.read(attempt)
        hosts = {host: (self.silent(host), entries) for host, entries in written.items()}
        return {"attempt": self._attempt, "hosts": hosts}


class Board(_Board):
    """The master's board as another host sees it."""

    def __init__(self, hosts: Hosts, secret: str):
        """Begin to poll the master. See _Board: `hosts`, `secret`."""
        super().__init__(hosts, secret)
        self._place = (hosts.master, hosts.port)
        # Of this host, in its newest attempt; None before the first.
        self._entries: Optional[Entries] = None
        self._delivered: Optional[Entries] = None
        self._wake = threading.Event()
        threading.Thread(target=self._poll, name="board", daemon=True).start()

    def write(self, attempt: int, **news: Unpack[News]) -> None:
        """Add entries of this host, `news`, in an `attempt`.

        They are on the board once `read` returns them.
        """
        with self._lock:
            entries: Entries = {"who": self.who}
            # What was read in an earlier attempt says nothing about this one.
            if attempt != self._attempt:
                self._attempt = attempt
                self._attempts = {}
            elif self._entries is not None:
                entries = self._entries
            self._entries = {**entries, **news}
        self._wake.set()

    @property
    def delivered(self) -> bool:
        """Return whether the master has answered all that was written."""
        with self._lock:
            return self._delivered is self._entries

    def _poll(self) -> None:
        """Ask the master again and again, sooner if there is something new, or no way to it yet."""
        while not self.gone:
            with self._lock:
                attempt = self._attempt
                # `write` makes new ones, so that these stay as they are.
                entries = self._entries
            if entries is not None:
                self._ask_once(attempt, entries)
            # `write` ends this wait.
            self._wake.wait(_POLL_SECONDS if self.address else _CONNECT_SECONDS)
            self._wake.clear()

    def _ask_once(self, attempt: int, entries: Entries) -> None:
        """Ask the master, and take note of its answer or of the fault."""
        try:
            answer = self._ask(attempt, entries)
            self._note(attempt, answer)
            self._delivered = entries
        except (OSError, UnicodeError) as error:
            # There is no way to the master, which may come back, or its name is none.
            self.fault = getattr(error, "strerror", None) or str(error)
            self.gone = bool(self.address) and isinstance(error, ConnectionRefusedError)
        except (EOFError, ValueError):
            self.fault = "what listens there does not answer as a launcher with this POD_TOKEN"
            self.refused = True

    def _note(self, attempt: int, answer: _Answer) -> None:
        """Take over what the master has answered in an attempt."""
        with self._lock:
            now = time.monotonic()
            self.refused = False
            for host, (silence, _) in answer.hosts.items():
                self._heard[host] = now - silence
            self._heard[0] = now
            self.newest = answer.attempt
            # This host may have gone on to another attempt since it asked.
            if attempt == self._attempt:
                hosts = answer.hosts.items()
                self._attempts = {attempt: {host: entries for host, (_, entries) in hosts}}

    def _ask(self, attempt: int, entries: Entries) -> _Answer:
        """Send this host's entries to the master; return its answer.

        Raises OSError, EOFError or ValueError.
        """
        with socket.create_connection(self._place, timeout=_ANSWER_SECONDS) as connection:
            address = connection.getpeername()[0]
            stream = connection.makefile("rb")
            challenge = stream.read(_CHALLENGE)
            # A proxy may listen in the place of a master that has not begun to.
            if not challenge:
                raise ConnectionAbortedError("what listens there closes the connection")
            # Each side signs over the challenge of the other: nobody can replay a message.
            our_challenge = secrets.token_hex(_CHALLENGE)
            question = {
                "host": self._hosts.this,
                "attempt": attempt,
                "challenge": our_challenge,
                "entries": entries,
            }
            _send(connection, self._key, challenge + b"ask", question)
            # An answer has the entries of all hosts.
            limit = self._hosts.number * _BYTES
            answer = _receive(stream, self._key, our_challenge.encode() + b"answer", limit)
        # The master is there: before, anything may have listened, at the address of an earlier host
        # of this name. From here on a name server is not asked any more.
        self.address = address
        self._place = (address, self._place[1])
        return _Answer.model_validate_json(answer)


def _send(connection: socket.socket, key: bytes, challenge: bytes, message: dict) -> None:
    """Send a message as a line: its HMAC in hexadecimal digits, then JSON."""
    body = json.dumps(message, default=vars).encode()
    connection.sendall(_mac(key, challenge, body) + body + b"\n")


def _receive(stream: BinaryIO, key: bytes, challenge: bytes, limit: int) -> bytes:
    """Return the JSON of a message of at most `limit` bytes.

    Raises:
        OSError, EOFError: none comes.
        ValueError: it is from somebody without the secret.
    """
    # No more is read of a message that has no end.
    line = stream.readline(limit)
    if not line.endswith(b"\n"):
        raise EOFError
    mac = line[:_MAC]
    body = line[_MAC:-1]
    # In constant time, which tells nobody how many digits were right.
    if not hmac.compare_digest(mac, _mac(key, challenge, body)):
        raise ValueError("from somebody without the secret")
    return body


def _mac(key: bytes, challenge: bytes, body: bytes) -> bytes:
    """Return the HMAC-SHA256 of a message that answers a challenge, in hexadecimal digits."""
    return hmac.digest(key, challenge + body, "sha256").hex().encode()
