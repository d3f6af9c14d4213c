"""Rendezvous of all hosts' launchers: who is there, where ranks connect, how they ended."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Dict, Iterable, List, Optional, Sequence, Union

from common.errors import DONE, FAILED, STOPPED, WRONG_INPUT, UserError
from parallel.board import LONGEST, Board, Entries, MastersBoard, News, Outcome
from parallel.hosts import HostLost, Hosts, listen

if TYPE_CHECKING:
    from parallel.agent import Signals

REACH_SECONDS = 45.0  # for the master to listen
_TOGETHER_SECONDS = 600.0  # for all hosts to come
_SILENT_SECONDS = 30.0  # until the missing ones are named
_SETTLE_SECONDS = 15.0  # after a failure, for all hosts to report how they ended
_HURRY_SECONDS = 8.0  # after a second signal, for the others to hear of it and to end their ranks
_READ_SECONDS = 5.0  # for the others to read how all ended
_LEAST_SILENCE = 5.0  # launchers poll once a second
_BESIDE_SECONDS = 2.0  # in which another launcher of this host is heard if it still runs
_STORE_TIMEOUT = timedelta(seconds=15)
_LOOK_SECONDS = 0.05  # between two looks at the board


class Stopped(Exception):
    """A signal came, here or at the master, while no rank was running."""


class Others:
    """The launchers of the other hosts, through a board that the master serves at --master.

    None on a single host.

    hosts: of the run.
    attempt: that runs, or for which the hosts gather; the master may be ahead of the one asked for.
    returned: this launcher has returned to a run that began with an earlier one of its host.
    lost_master: the ranks of this host ended since there was no way to the master.
    """

    def __init__(
        self,
        hosts: Hosts,
        shape: str,
        signals: Signals,
        silence: float,
        secret: str,
        elastic: bool = False,
    ):
        """
        Args:
            hosts: of the run.
            shape: what this host starts, in words.
            signals: of this launcher.
            silence: seconds after which a launcher counts as lost.
            secret: see `parallel/board.py`.
            elastic: a host that was lost may come back.
        """
        self.hosts = hosts
        self.returned = False
        self.lost_master = False
        self._shape = shape[:LONGEST]
        self._signals = signals
        # With less a launcher would count as lost between two of its polls.
        self._silence = max(silence, _LEAST_SILENCE)
        self._elastic = elastic
        self.attempt = 0
        # The master has the board itself, the others see it.
        self._board: Union[Board, MastersBoard]
        if hosts.this == 0:
            self._board = MastersBoard(hosts, secret)
            if elastic:
                self._board.succeeded = self._silence
        else:
            self._board = Board(hosts, secret)
        # A single host does not listen, so that nobody else can write.
        if not secret and hosts.this == 0 and hosts.number > 1:
            print(
                f"POD_TOKEN is not set: whoever reaches {hosts.place} can end this run; "
                "on a network that you do not trust set the same secret on all hosts",
                file=sys.stderr,
            )

    @property
    def address(self) -> str:
        """Return the master's address; known once the hosts have gathered."""
        return self._board.address

    def gather(self, attempt: int) -> int:
        """Wait for all hosts.

        Args:
            attempt: to run, from 0.

        Returns:
            The port of the store for the ranks of this attempt, at the master.

        Raises:
            UserError: the hosts do not belong together.
            Stopped: by a signal.
            HostLost: the hosts do not come together.
        """
        # Before a signal is noticed: what is written then is of this attempt, not of the one before.
        self.attempt = attempt
        self._look_again()
        # Say what this host starts, and where the ranks meet if this is the master.
        news: News = {"shape": self._shape}
        if isinstance(self._board, MastersBoard):
            news["port"] = self._serve_ranks(self._board)
        self._board.write(attempt, **news)
        # All hosts must have come, and start the same.
        self._await_hosts()
        self._check_shapes()
        return self._entries()[0]["port"]

    def _check_shapes(self) -> None:
        """Check that all hosts start the same. Raises UserError."""
        hosts = self._entries().items()
        shapes = {host: entries["shape"] for host, entries in hosts if "shape" in entries}
        for host, shape in sorted(shapes.items()):
            if shape != shapes[0]:
                self._leave(shapes)
                raise UserError(
                    f"host 0 starts {shapes[0]}, but host {host} {shape}; "
                    "give all hosts the same --replicas and --stages"
                )

    def news(self) -> Optional[Outcome]:
        """Return the outcome of another host whose ranks are gone while ours may wait for them."""
        for outcome in self._outcomes().values():
            if outcome.abrupt:
                # Here nothing is left to wait for: this host's ranks are ended, too.
                return dataclasses.replace(outcome, abrupt=False)
        try:
            self._check_master()
        except HostLost as lost:
            self.lost_master = True
            # This ends the board's questions: this launcher may come back as another.
            self._board.gone = True
            return Outcome(FAILED, f"{lost}; all ranks here are gone, too", last=True)
        return None

    def finished(self) -> bool:
        """Return whether the ranks of another host have ended without a failure."""
        outcomes = self._outcomes().values()
        return any(outcome.code in (DONE, STOPPED) for outcome in outcomes)

    def all_silent(self) -> bool:
        """Return whether no launcher of another host is left."""
        hosts = range(self.hosts.number)
        return all(self._silent(host) for host in hosts if host != self.hosts.this)

    def agree_on_end(self, mine: Outcome) -> Outcome:
        """Agree with all hosts on the end of the ranks.

        Args:
            mine: of this host.

        Returns:
            An outcome with the same code on all hosts, and each host's own line.
        """
        # Report the end. Only the first abrupt one is reported as such: the others follow from it.
        is_first = not any(outcome.abrupt for outcome in self._outcomes().values())
        reported = dataclasses.replace(
            mine,
            line=mine.line[:LONGEST],
            abrupt=mine.abrupt and is_first,
        )
        self._board.write(self.attempt, end=reported)
        # Wait for the ends of all hosts that are still there. After a success or a stop those of
        # another may end much later: the main one sends the run to its mirror.
        hosts = range(self.hosts.number)
        limit = _SETTLE_SECONDS if mine.code in (FAILED, WRONG_INPUT) else math.inf
        try:
            self._wait_for("end", hosts, limit)
            ended = self._outcomes()
            is_last = mine.last or any(outcome.last for outcome in ended.values())
            is_last = is_last or any(self._silent(host) for host in hosts)
            self._leave(ended)
        except HostLost:
            return dataclasses.replace(mine, last=True)
        # The worst code is that of all.
        codes = {mine.code, *(outcome.code for outcome in ended.values())}
        code = next((code for code in (WRONG_INPUT, FAILED, STOPPED) if code in codes), DONE)
        return Outcome(code, mine.line, is_last)

    def withdraw(self) -> None:
        """Tell the other hosts that this one was stopped before its ranks were started.

        Else they would count on it.
        """
        self._board.write(self.attempt, end=Outcome(STOPPED, abrupt=True), read=True)
        end = time.monotonic() + _READ_SECONDS
        while not self._is_told() and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)

    def _is_told(self) -> bool:
        """Return whether whoever is there has heard what this host has written."""
        if isinstance(self._board, Board):
            # Who has never reached the master is not waited for.
            return not self._board.address or self._board.gone or self._board.delivered
        # All that can be there: a host that is on the way to this attempt has written nothing yet.
        others = range(1, self.hosts.number)
        return all(self._has_written(host, "read") or self._silent(host) for host in others)

    def _serve_ranks(self, board: MastersBoard) -> int:
        """Create a new store, which listens at the master's address and nowhere else.

        Return its port.

        Torch's store listens at all addresses, but takes the descriptor of a socket that listens,
        and closes it. Tried with torch 2.14.1. Were that to change, ranks would not find the store,
        and say so.
        """
        from torch.distributed import TCPStore

        # A thread of the board makes the master listen, or finds that it cannot.
        while not self.address:
            if board.error:
                raise board.error
            self._look_again()
        # A new one for each attempt: the store before has the keys of ranks that are gone.
        listening = listen(Hosts(master=self.address))
        address, port, *_ = listening.getsockname()
        # Held here: a store that Python collects stops listening.
        self._ranks_store = TCPStore(
            address,
            port,
            is_master=True,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        return port

    def _await_hosts(self) -> None:
        """Wait until this host's entries are on the board, and those of all others.

        Raises UserError, Stopped or HostLost; see `gather`.
        """
        start = time.monotonic()
        is_named = False
        while True:
            self._catch_up()
            waited = time.monotonic() - start
            joined = self._has_joined(waited)
            missing = self._missing(joined)
            if not missing:
                self.returned = self._entries()[self.hosts.this].get("returned", False)
                return
            # Wait on, as long as there is time; once tell the user for whom.
            which = (
                f"{len(missing)} of {self.hosts.number} hosts at {self.hosts.place} "
                f"(--node-rank {', '.join(map(str, missing))})"
            )
            self._check_time(which, missing, waited)
            if joined and waited > _SILENT_SECONDS and not is_named:
                print(f"waiting for {which}", file=sys.stderr, flush=True)
                is_named = True
            self._look_again()

    def _catch_up(self) -> None:
        """Go on to the master's attempt: it may have started all again without this launcher.

        Raises Stopped: it was stopped.
        """
        if self._board.newest > self.attempt:
            self.attempt = self._board.newest
            self._board.write(self.attempt, shape=self._shape)
        end = self._outcomes().get(0)
        if end is not None and end.code == STOPPED:
            raise Stopped

    def _has_joined(self, waited: float) -> bool:
        """Return whether this launcher's entries are on the board, after so many seconds.

        Raises:
            UserError: the master has another secret, or another launcher says that it is this host.
            HostLost: the master is gone, or not reached.
        """
        entries = self._entries().get(self.hosts.this)
        is_own = entries is not None and entries["who"] == self._board.who
        # Who has been on the board once has reached the master: from then on it can be lost.
        if is_own or self.attempt:
            self._check_master()
        elif (
            self._board.refused or self._board.gone or (entries is None and waited > REACH_SECONDS)
        ):
            text = (
                f"cannot reach the master {self.hosts.place} ({self._board.fault or 'no answer'}); "
                "check the firewall, that --node-rank 0 was started "
                "and that --master and POD_TOKEN are the same on all hosts"
            )
            # A host that is late or lost is no wrong input, another secret is.
            raise UserError(text) if self._board.refused else HostLost(text)
        # In an elastic run an earlier launcher of this host is not yet silent for long enough.
        if entries is not None and not is_own and not self._elastic:
            self._check_predecessor(entries, waited)
        return is_own

    def _check_predecessor(self, entries: Entries, waited: float) -> None:
        """Check that another launcher which said that it is this host is an earlier one.

        Args:
            entries: of the other one.
            waited: seconds.

        Raises:
            UserError: it runs beside this one.
            HostLost: the run goes on with it, though it has ended.
        """
        this = self.hosts.this
        # One that was heard since this one came, and goes on, is no earlier one.
        since = waited - _BESIDE_SECONDS
        if "end" not in entries and self._board.silent(this) < since:
            raise UserError(
                f"another host has said --node-rank {this} already; number the hosts from 0"
            )
        if waited > REACH_SECONDS:
            raise HostLost(
                f"the run at the master {self.hosts.place} has begun with an earlier launcher of host {this}; "
                "start again once it has ended"
            )

    def _missing(self, joined: bool) -> List[int]:
        """Return the hosts that are not on the board; `joined`: whether this one is."""
        written = self._entries()
        missing = []
        for host in range(self.hosts.number):
            # A master that was stopped early has written its end alone.
            has_come = host in written and "shape" in written[host]
            has_joined = joined if host == self.hosts.this else has_come
            if not has_joined:
                missing.append(host)
        return missing

    def _check_time(self, which: str, missing: Sequence[int], waited: float) -> None:
        """Check that there is time left to wait for hosts.

        Args:
            which: the hosts, in words.
            missing: their numbers.
            waited: seconds.

        Raises:
            HostLost: there is none.
        """
        if waited > _TOGETHER_SECONDS:
            raise HostLost(
                f"waited {_TOGETHER_SECONDS:.0f} s in vain for {which}; start all hosts, or lower --nnodes"
            )
        if self.attempt and all(self._silent(host) for host in missing):
            raise HostLost(f"have heard nothing for {self._silence:g} s of {which}")

    def _leave(self, readers: Iterable[int]) -> None:
        """Report that this host has read what it needs.

        The master, from which all read, waits for the others.
        """
        self._board.write(self.attempt, read=True)
        hosts = readers if self.hosts.this == 0 else [self.hosts.this]
        self._wait_for("read", hosts, _READ_SECONDS)

    def _wait_for(self, name: str, hosts: Iterable[int], seconds: float) -> None:
        """Wait until every host has written an entry or is silent.

        The wait also ends when the time is up, or a signal comes meanwhile.
        """
        start = time.monotonic()
        stopping = self._signals.stopping
        while any(not self._has_written(host, name) and not self._silent(host) for host in hosts):
            self._check_master()
            # Without a word of this one the others would wait for it, or end with another code.
            limit = min(seconds, _HURRY_SECONDS) if self._signals.hurry else seconds
            if self._signals.stopping != stopping or time.monotonic() > start + limit:
                return
            time.sleep(_LOOK_SECONDS)

    def _entries(self) -> Dict[int, Entries]:
        """Return the entries of each host that has written any in this attempt."""
        return self._board.read(self.attempt)

    def _outcomes(self) -> Dict[int, Outcome]:
        """Return how ranks have ended in this attempt, by host."""
        hosts = self._entries().items()
        return {host: entries["end"] for host, entries in hosts if "end" in entries}

    def _has_written(self, host: int, name: str) -> bool:
        """Return whether a host has written an entry of that name in this attempt."""
        entries = self._entries().get(host)
        return entries is not None and name in entries

    def _silent(self, host: int) -> bool:
        """Return whether the launcher of a host counts as lost."""
        return host != self.hosts.this and self._board.silent(host) > self._silence

    def _check_master(self) -> None:
        """Check that there is a way to the master. Raises HostLost."""
        name = f"the launcher at the master {self.hosts.place}"
        if self._board.gone:
            raise HostLost(f"{name} is gone")
        if self._silent(0):
            raise HostLost(
                f"{name} has said nothing for {self._silence:g} s: it is stopped, or its host or the way there is gone"
            )

    def _look_again(self) -> None:
        """Wait a moment. Raises Stopped if a signal has come."""
        if self._signals.stopping:
            raise Stopped
        time.sleep(_LOOK_SECONDS)
