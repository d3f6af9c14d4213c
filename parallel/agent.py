"""Starts and watches this host's ranks, and agrees with the launchers of other hosts.

Ranks get torchrun's environment. Exit codes 2 (wrong input) and 75 (stopped after saving) are never tried again, a rank
that ends with 75 leaves the others time to do so, and after a failure all ranks of all hosts are gone within seconds.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import time
from typing import List, Optional, Tuple

from parallel.board import Outcome
from parallel.generations import LIFE
from parallel.hosts import Hosts, interface_towards
from parallel.parent_death import bound_to_parent
from parallel.rendezvous import MasterLost, Others, Stopped
from parallel.replacements import Ranks, Replacements, kill, signal_name
from recipe import cores
from recipe.errors import DONE, FAILED, STOPPED, WRONG_INPUT

_WATCH_SECONDS = 0.05
_END_SECONDS = 5.0  # from SIGTERM to SIGKILL
_LAST_WORD_SECONDS = 10.0  # launchers poll once a second, and count as lost after five without a word
_SAME_SECONDS = 0.5  # timeout(1) and some terminals deliver one signal twice


class Signals:
    """Handles SIGINT, SIGTERM and SIGUSR1 from its creation on: the first asks the ranks to save and end.

    `stopping`: a stop was requested, which every wait looks at. `hurry`: a second time, which ends the ranks at once.
    SIGUSR1 never hurries: SLURM's --signal may send it to launcher and ranks alike. Nor does the first signal to this
    launcher if others asked before, as SLURM's scancel reaches the hosts one after another.
    """

    def __init__(self):
        self.stopping = self.hurry = False
        self._since: Optional[float] = None  # when the first signal came
        self._ranks: Ranks = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._receive)

    def watch(self, ranks: Ranks) -> None:
        """From now on these ranks get the signals, also one that came before."""
        self._ranks = ranks
        if self.hurry:
            kill(ranks, signal.SIGKILL)
        elif self.stopping:  # to the ranks alone: their workers would die of it
            for rank in ranks.values():
                rank.send_signal(signal.SIGUSR1)

    def request(self, name: str) -> None:
        """Ask the ranks to stop. Args: name: who or what asked."""
        self.stopping = True
        text = f"{name}: the ranks finish their step, save and end; a second signal ends them at once\n"
        os.write(2, text.encode())
        self.watch(self._ranks)

    def _receive(self, number: int, frame) -> None:
        if self._since is None:
            self._since = time.monotonic()
            if not self.stopping:
                self.request(signal.Signals(number).name)
        elif number != signal.SIGUSR1 and time.monotonic() - self._since > _SAME_SECONDS:
            self.hurry = True
            self.watch(self._ranks)


def run(
    hosts: Hosts,
    local: int,
    shape: str,
    command: List[str],
    max_restarts: int,
    signals: Signals,
    silence: float,
    stages: Optional[int] = None,
) -> int:
    """Runs `local` ranks of `command` on each of `hosts`; returns the exit code once they are gone.

    Args: shape: replicas and stages in words, the same on all hosts. max_restarts: times to start again after a
    failure. silence: seconds after which the launcher of another host counts as lost. stages: of a replica in an
    elastic run, None in others. Raises UserError: the hosts do not come together.
    """
    secret = os.environ.pop("POD_TOKEN", "")  # not for the ranks
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores.available() // local)))
    try:
        of_others = hosts, f"{shape} over {hosts.number} hosts", signals, silence, secret, stages is not None
        others = Others(*of_others)
        for attempt in range(max_restarts + 1):
            outcome = others.settle(_attempt(others, attempt, local, command, signals, stages))
            while others.lost_master and stages and hosts.this and not signals.stopping:
                print(f"{outcome.line}; trying to come back", file=sys.stderr, flush=True)
                others = Others(*of_others)
                outcome = others.settle(_attempt(others, 0, local, command, signals, stages))
            if outcome.line:
                print(outcome.line, file=sys.stderr, flush=True)
            if outcome.code != FAILED or outcome.last or attempt == max_restarts:
                return outcome.code
            place = "the run goes on from its last checkpoint"
            print(f"restart {attempt + 1} of {max_restarts}: {place}", file=sys.stderr, flush=True)
    except Stopped:
        print("stopped while no rank was running; the same command goes on", file=sys.stderr)
        return STOPPED
    except MasterLost as lost:
        print(lost, file=sys.stderr)
        return FAILED


def _attempt(
    others: Others, attempt: int, local: int, command: List[str], signals: Signals, stages: Optional[int]
) -> Outcome:
    """Starts the ranks of this host and watches them. None is left on return, nor after an exception."""
    port, ranks = others.gather(attempt), {}
    try:
        start = functools.partial(_start, ranks, others, port, local, command)
        numbers = range(others.hosts.this * local, (others.hosts.this + 1) * local)
        for number in () if others.returned else numbers:
            start(number, 0)
        signals.watch(ranks)
        elastic = Replacements(ranks, (others.address, port), stages, start, numbers) if stages else None
        return _watch(ranks, others, signals, elastic)
    except BaseException:
        kill(ranks, signal.SIGKILL)
        raise
    finally:
        signals.watch({})  # another process may have the number of one that is gone


def _start(ranks: Ranks, others: Others, port: int, local: int, command: List[str], rank: int, life: int) -> None:
    """Starts a rank of this host, in a session of its own; its store listens at `port` of the master."""
    hosts = others.hosts
    interface = interface_towards(others.address)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")[: 1 if hosts.number == 1 else 2]
    environment = {
        **{name: interface for name in names if interface},
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **os.environ,
        "POD_LAUNCHER": "1",
        LIFE: str(life),
        "MASTER_ADDR": others.address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % local),
        "WORLD_SIZE": str(hosts.number * local),
        "LOCAL_WORLD_SIZE": str(local),
    }
    arguments = bound_to_parent([sys.executable, "-u", *command], ignores_interrupts=True)
    ranks[rank] = subprocess.Popen(arguments, env=environment, start_new_session=True)


def _watch(ranks: Ranks, others: Others, signals: Signals, replacements: Optional[Replacements]) -> Outcome:
    """End of the ranks: by themselves, or since one of them failed, or because another host's are gone."""
    try:
        return _until_end(ranks, others, signals, replacements)
    except RuntimeError:
        # The store of an elastic run ends with the master's launcher. The board has its last word, or that it is gone.
        end = time.monotonic() + _LAST_WORD_SECONDS
        news = others.news()
        while news is None and time.monotonic() < end:
            time.sleep(_WATCH_SECONDS)
            news = others.news()
        if replacements is None or news is None:
            raise
        _end(ranks)
        return news


def _until_end(ranks: Ranks, others: Others, signals: Signals, replacements: Optional[Replacements]) -> Outcome:
    while True:
        elastic = None if signals.hurry else replacements
        if elastic:
            elastic.look(closing=signals.stopping or others.finished())
            # Ranks pass a stop on, but those of this host may be away, or not know it before they die.
            if signals.stopping:
                elastic.ask_all_to_stop()
            elif elastic.is_to_stop:
                signals.request("another host was asked to stop")
        codes = {rank: process.poll() for rank, process in ranks.items()}
        failed = [(rank, code) for rank, code in codes.items() if code not in (None, DONE, STOPPED)]
        if elastic and not signals.stopping and -signal.SIGUSR1 in codes.values():
            signals.request("a rank was asked to stop before it could listen")
            continue
        if elastic and failed and elastic.replace(failed):
            continue
        # One that has ended with 0 or 75 leaves the others the time that they need.
        waits = None in codes.values() or (elastic is not None and _waits_without_ranks(ranks, elastic, others))
        news = others.news() if waits and not failed else None
        if waits and not failed and not news:
            time.sleep(_WATCH_SECONDS)
            continue
        if failed or news:
            _end(ranks)
        if replacements and signals.stopping and failed and replacements.nothing_to_save:
            return Outcome(STOPPED, abrupt=True)
        if signals.hurry:
            return _hurried(ranks)
        if failed:
            return _failure(failed, signals)
        if news:
            return news
        if elastic and not codes and not elastic.closing:
            return Outcome(FAILED, "no replica is left on any host; rerun to resume", last=True, abrupt=True)
        stopped = STOPPED in codes.values() or (signals.stopping and not codes)
        return Outcome(STOPPED if stopped else DONE)


def _waits_without_ranks(ranks: Ranks, elastic: Replacements, others: Others) -> bool:
    """Whether there is something to wait for though no rank of this host runs: replicas that are to be started again
    later, or, if all of this host's are away, the end of the run on the others."""
    return elastic.waiting or not (ranks or elastic.closing or others.all_silent())


def _hurried(ranks: Ranks) -> Outcome:
    """The outcome where a second signal has ended the ranks: that of those that had already ended, if there are any,
    as a rank ends by itself only once all have finished the run, or saved it."""
    codes = [process.poll() for process in ranks.values()]
    for code in (DONE, STOPPED):
        if code in codes:
            return Outcome(code, abrupt=code != DONE)
    text = "ended at once by a second signal; the same command goes on from the last checkpoint"
    return Outcome(FAILED, text, last=True, abrupt=True)


def _end(ranks: Ranks) -> None:
    """Ends all ranks and what they have started."""
    kill(ranks, signal.SIGTERM)
    end = time.monotonic() + _END_SECONDS
    while time.monotonic() < end and any(process.poll() is None for process in ranks.values()):
        time.sleep(0.02)
    kill(ranks, signal.SIGKILL)
    for process in ranks.values():
        process.wait()


def _failure(failed: List[Tuple[int, int]], signals: Signals) -> Outcome:
    """The outcome where these ranks failed in the same moment. Args: failed: rank and exit code of each."""

    def order(each: Tuple[int, int]) -> tuple:
        """First one that complained or was killed, then those that lost a peer by it, then those asked to stop."""
        code = each[1]
        follows = code >= 0 or code == -signal.SIGTERM
        return code != WRONG_INPUT, code == -signal.SIGUSR1, follows, each

    rank, code = min(failed, key=order)
    if code == WRONG_INPUT:
        return Outcome(WRONG_INPUT, abrupt=True)
    if code == -signal.SIGUSR1:  # sent before it had begun: there is nothing to save
        return Outcome(STOPPED, abrupt=True)
    host = socket.gethostname()
    text = f"rank {rank} failed with exit code {code} (host {host}); all ranks stopped"
    if code < 0:
        name = signal_name(-code)
        ended = "killed" if code == -signal.SIGKILL else "ended"
        text = f"rank {rank} (host {host}) was {ended} ({name}); all ranks stopped; rerun to resume"
    return Outcome(FAILED, text, last=signals.stopping, abrupt=True)
