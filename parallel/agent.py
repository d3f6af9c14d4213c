"""Starts and watches this host's ranks, and agrees with the launchers of other hosts.

Ranks get torchrun's environment. Exit codes 2 (wrong input) and 75 (stopped after saving) are never
tried again, a rank that ends with 75 leaves the others time to do so, and after a failure all ranks
of all hosts are gone within seconds.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import time
from types import FrameType
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from common import cores
from common.errors import DONE, FAILED, STOPPED, WRONG_INPUT, UserError
from parallel.board import Outcome
from parallel.generations import LIFE
from parallel.hosts import HostLost, Hosts, interface_towards
from parallel.launchers import STOPPED_EARLY
from parallel.parent_death import bound_to_parent
from parallel.rendezvous import Others, Stopped
from parallel.replacements import Ranks, Replacements, kill, signal_name

_WATCH_SECONDS = 0.05
_END_SECONDS = 5.0  # from SIGTERM to SIGKILL
# Launchers poll once a second, and count as lost after five without a word.
_LAST_WORD_SECONDS = 10.0
_SAME_SECONDS = 0.5  # timeout(1) and some terminals deliver one signal twice


class Signals:
    """Handles SIGINT, SIGTERM and SIGUSR1 from its creation on.

    The first asks the ranks to save and end, a second one ends them at once.

    stopping: a stop was requested, which every wait looks at.
    hurry: a second time, which ends the ranks at once.

    SIGUSR1 never hurries: SLURM's --signal may send it to launcher and ranks alike. Nor does the
    first signal to this launcher if others asked before, as SLURM's scancel reaches the hosts one
    after another.
    """

    def __init__(self) -> None:
        self.stopping = False
        self.hurry = False
        self._since: Optional[float] = None  # when the first signal came
        self._ranks: Ranks = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._receive)

    def watch(self, ranks: Ranks) -> None:
        """Pass signals on to these `ranks` from now on, also one that came before."""
        self._ranks = ranks
        if self.hurry:
            kill(ranks, signal.SIGKILL)
        elif self.stopping:
            # To the ranks alone: their workers would die of it.
            for rank in ranks.values():
                rank.send_signal(signal.SIGUSR1)

    def request(self, name: str) -> None:
        """Ask the ranks to stop.

        Args:
            name: who or what asked.
        """
        self.stopping = True
        text = f"{name}: the ranks finish their step, save and end; a second signal ends them at once\n"
        # A handler must not print: it may have come amid another print.
        os.write(2, text.encode())
        self.watch(self._ranks)

    def _receive(self, number: int, frame: Optional[FrameType]) -> None:
        """Handle a signal."""
        # The first signal may repeat what others asked before: then it says nothing new.
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
    """Run `local` ranks of a command on each of some hosts, until they are gone.

    Args:
        hosts: of the run.
        local: ranks of this host.
        shape: replicas and stages in words, the same on all hosts.
        command: of a rank, for this Python.
        max_restarts: times to start again after a failure.
        signals: of this launcher.
        silence: seconds after which the launcher of another host counts as lost.
        stages: of a replica in an elastic run, None in others.

    Returns:
        The exit code.

    Raises:
        UserError: the hosts do not belong together.
    """
    # The ranks inherit this environment, but the secret is not for them.
    secret = os.environ.pop("POD_TOKEN", "")
    # Torch would give each rank a thread for every core of the host.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores.available() // local)))
    program = _Program(command, local, stages)
    is_elastic = stages is not None
    shape = f"{shape} over {hosts.number} hosts"

    def meet() -> Others:
        return Others(hosts, shape, signals, silence, secret, elastic=is_elastic)

    try:
        return _run_attempts(program, meet, max_restarts, signals)
    except Stopped:
        _print(STOPPED_EARLY)
        return STOPPED
    except HostLost as lost:
        _print(str(lost))
        return FAILED


def _run_attempts(
    program: _Program,
    meet: Callable[[], Others],
    max_restarts: int,
    signals: Signals,
) -> int:
    """Start the ranks of this host again and again, until they are not to be started any more.

    Args:
        program: that they run.
        meet: returns the other hosts, to begin with or to come back to.
        max_restarts: after failures.
        signals: of this launcher.

    Returns:
        The exit code.
    """
    others = meet()
    attempt = 0
    while True:
        outcome = others.agree_on_end(_attempt(program, others, attempt, signals))
        # A host that has lost its way to the master of an elastic run tries to come back.
        is_elastic = program.stages is not None
        while others.lost_master and is_elastic and others.hosts.this and not signals.stopping:
            _print(f"{outcome.line}; trying to come back")
            try:
                others = meet()
                outcome = others.agree_on_end(_attempt(program, others, 0, signals))
            except UserError as error:
                # This host was taken in before, so its input was right: now another master is there.
                _print(str(error))
                return FAILED
        # The master had gone on to it before this launcher came.
        attempt = others.attempt
        if outcome.line:
            _print(outcome.line)
        # Only a failure is tried again: wrong input would fail alike, a stop is wanted.
        if outcome.code != FAILED or outcome.last or attempt >= max_restarts:
            return outcome.code
        attempt += 1
        which = f"{attempt} of {max_restarts}"
        _print(f"restart {which}: the run goes on from its last checkpoint")


class _Program(NamedTuple):
    """The ranks of this host.

    command: for this Python.
    local: how many there are.
    stages: of a replica in an elastic run; None in others.
    """

    command: List[str]
    local: int
    stages: Optional[int]


def _print(line: str) -> None:
    """Print a line for the user."""
    print(line, file=sys.stderr, flush=True)


def _attempt(program: _Program, others: Others, attempt: int, signals: Signals) -> Outcome:
    """Start the ranks of this host and watch them.

    None is left on return, nor after an exception.
    """
    # Waits for all hosts: ranks that start earlier would time out while others are missing.
    try:
        port = others.gather(attempt)
    except Stopped:
        others.withdraw()
        raise
    ranks: Ranks = {}
    start = functools.partial(_start, ranks, others, port, program)
    first = others.hosts.this * program.local
    numbers = range(first, first + program.local)
    try:
        # A launcher that has returned to a run starts its replicas as replacements.
        if not others.returned:
            for number in numbers:
                start(number, 0)
        # After the start, so that a signal that came meanwhile reaches all of them.
        signals.watch(ranks)
        elastic: Optional[Callable[[], Replacements]] = None
        if program.stages:
            elastic = functools.partial(
                Replacements,
                ranks,
                place=(others.address, port),
                stages=program.stages,
                start=start,
                numbers=numbers,
                check=functools.partial(_check_others, others, signals),
            )
        return _watch(ranks, others, signals, elastic)
    except BaseException:
        # Only Linux would end them with this launcher.
        kill(ranks, signal.SIGKILL)
        raise
    finally:
        # Another process may have the number of one that is gone.
        signals.watch({})


def _start(
    ranks: Ranks,
    others: Others,
    port: int,
    program: _Program,
    rank: int,
    life: int,
) -> None:
    """Start a rank of this host, in a session of its own.

    Args:
        ranks: by number, to which it is added.
        others: the other hosts.
        port: of the ranks' store, at the master.
        program: that it runs.
        rank: its number.
        life: of its replica.
    """
    hosts = others.hosts
    # The user's variables count more than the first ones, and less than the last ones.
    environment = {
        **_interfaces(others),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **os.environ,
        "POD_LAUNCHER": "1",
        LIFE: str(life),
        "MASTER_ADDR": others.address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % program.local),
        "WORLD_SIZE": str(hosts.number * program.local),
        "LOCAL_WORLD_SIZE": str(program.local),
    }
    command = [sys.executable, "-u", *program.command]
    # In a session of its own a rank can be killed with its workers, and Ctrl-C comes here alone.
    bound = bound_to_parent(command, ignores_interrupts=True)
    ranks[rank] = subprocess.Popen(bound, env=environment, start_new_session=True)


def _interfaces(others: Others) -> Dict[str, str]:
    """Return the variables that tell gloo and NCCL the network interface towards the master.

    If it is unknown there are none, and the libraries choose one.
    """
    interface = interface_towards(others.address)
    if not interface:
        return {}
    variables = {"GLOO_SOCKET_IFNAME": interface}
    # On one host NCCL does without.
    if others.hosts.number > 1:
        variables["NCCL_SOCKET_IFNAME"] = interface
    return variables


class _Over(Exception):
    """The run is over for this host, whose ranks may still run.

    news: why; None after a second signal.
    """

    def __init__(self, news: Optional[Outcome]):
        super().__init__()
        self.news = news


def _check_others(others: Others, signals: Signals) -> None:
    """Look, while the store does not answer, whether it is still to be waited for. Raises _Over."""
    news = others.news()
    if news or signals.hurry:
        raise _Over(news)


def _watch(
    ranks: Ranks,
    others: Others,
    signals: Signals,
    elastic: Optional[Callable[[], Replacements]],
) -> Outcome:
    """Wait for the end of the ranks.

    They end by themselves, or since one of them failed, or because another host's are gone.

    Args:
        ranks: of this host.
        others: the other hosts.
        signals: of this launcher.
        elastic: returns the replicas of this host in an elastic run; None in others.
    """
    try:
        replacements = elastic() if elastic else None
        return _until_end(ranks, others, signals, replacements)
    except _Over as over:
        _end(ranks)
        if signals.hurry or over.news is None:
            return _hurried(ranks)
        return over.news
    except RuntimeError:
        # The store of an elastic run ends with the master's launcher. The board has its last word,
        # or that it is gone.
        end = time.monotonic() + _LAST_WORD_SECONDS
        news = others.news()
        while news is None and time.monotonic() < end:
            time.sleep(_WATCH_SECONDS)
            news = others.news()
        if elastic is None or news is None:
            raise
        _end(ranks)
        return news


def _until_end(
    ranks: Ranks,
    others: Others,
    signals: Signals,
    replacements: Optional[Replacements],
) -> Outcome:
    """Look at the ranks again and again, until there is an outcome.

    Raises RuntimeError without a way to the store.
    """
    while True:
        # A second signal ends an elastic run as any other.
        elastic = None if signals.hurry else replacements
        if elastic:
            _look(elastic, others, signals)
        codes = {rank: process.poll() for rank, process in ranks.items()}
        failed = [(rank, code) for rank, code in codes.items() if code not in (None, DONE, STOPPED)]
        if elastic and _goes_on(elastic, codes, failed, signals):
            continue
        # One that has ended with 0 or 75 leaves the others the time that they need.
        waits = None in codes.values() or _waits_without_ranks(ranks, elastic, others)
        news = others.news() if waits and not failed else None
        if waits and not failed and not news:
            time.sleep(_WATCH_SECONDS)
            continue
        # The run ends, here or elsewhere: no rank is left, and one outcome explains why.
        if failed or news:
            _end(ranks)
        if replacements and signals.stopping and failed and replacements.nothing_to_save:
            return Outcome(STOPPED, abrupt=True)
        if signals.hurry:
            return _hurried(ranks)
        if failed:
            return _failure(failed, signals)
        return news or _good_end(list(codes.values()), signals, replacements)


def _goes_on(
    elastic: Replacements,
    codes: Mapping[int, Optional[int]],
    failed: List[Tuple[int, int]],
    signals: Signals,
) -> bool:
    """Return whether an elastic run goes on, after what happened to its ranks or to this launcher.

    Args:
        elastic: the replicas of this host, which are replaced where that is due.
        codes: exit codes of the ranks, by number; None for those that run.
        failed: number and exit code of those that failed.
        signals: of this launcher.
    """
    # A rank that was asked to stop by itself asks for all of them.
    if not signals.stopping and -signal.SIGUSR1 in codes.values():
        signals.request("a rank was asked to stop before it could listen")
        return True
    if not failed:
        return False
    # A stop may have come since the last look, and have ended them: then nothing is started anew.
    if signals.stopping and not elastic.closing:
        return True
    return elastic.replace(failed)


def _good_end(
    codes: Sequence[Optional[int]],
    signals: Signals,
    replacements: Optional[Replacements],
) -> Outcome:
    """Return the outcome where all ranks of this host have ended well, or there is none.

    Args:
        codes: DONE or STOPPED, of the ranks.
        signals: of this launcher.
        replacements: of an elastic run.
    """
    if replacements and not codes and not replacements.closing:
        text = "no replica is left on any host; rerun to resume"
        return Outcome(FAILED, text, last=True, abrupt=True)
    stopped = STOPPED in codes or (signals.stopping and not codes)
    return Outcome(STOPPED if stopped else DONE)


def _look(elastic: Replacements, others: Others, signals: Signals) -> None:
    """Look at the replicas of an elastic run, and pass on that it is to stop."""
    elastic.look(closing=signals.stopping or others.finished())
    # Ranks pass a stop on, but those of this host may be away, or not know it before they die.
    if signals.stopping:
        elastic.ask_all_to_stop()
    elif elastic.is_to_stop:
        signals.request("another host was asked to stop")


def _waits_without_ranks(ranks: Ranks, elastic: Optional[Replacements], others: Others) -> bool:
    """Return whether an elastic run has something to wait for though no rank of this host runs.

    That is replicas that are to be started again later, or, if all of this host's are away, the end
    of the run on the others.
    """
    if elastic is None:
        return False
    if elastic.waiting:
        return True
    return not ranks and not elastic.closing and not others.all_silent()


def _hurried(ranks: Ranks) -> Outcome:
    """Return the outcome where a second signal has ended the ranks.

    It is that of those that had already ended, if there are any, as a rank ends by itself only once
    all have finished the run, or saved it.
    """
    codes = [process.poll() for process in ranks.values()]
    if DONE in codes:
        return Outcome(DONE)
    if STOPPED in codes:
        return Outcome(STOPPED, abrupt=True)
    text = "ended at once by a second signal; the same command goes on from the last checkpoint"
    return Outcome(FAILED, text, last=True, abrupt=True)


def _end(ranks: Ranks) -> None:
    """End all ranks and what they have started."""
    # First let them end by themselves ...
    kill(ranks, signal.SIGTERM)
    end = time.monotonic() + _END_SECONDS
    while time.monotonic() < end and any(process.poll() is None for process in ranks.values()):
        time.sleep(0.02)
    # ... and then whatever is left, such as workers of a rank that has ended.
    kill(ranks, signal.SIGKILL)
    for process in ranks.values():
        process.wait()


def _failure(failed: List[Tuple[int, int]], signals: Signals) -> Outcome:
    """Return the outcome where ranks failed in the same moment.

    Args:
        failed: rank and exit code of each.
        signals: of this launcher.
    """
    rank, code = min(failed, key=_order_of_blame)
    if code == WRONG_INPUT:
        return Outcome(WRONG_INPUT, abrupt=True)
    # It was asked to stop before it had begun to listen: there is nothing to save.
    if code == -signal.SIGUSR1:
        return Outcome(STOPPED, abrupt=True)
    host = socket.gethostname()
    text = f"rank {rank} failed with exit code {code} (host {host}); all ranks stopped"
    if code < 0:
        ended = "killed" if code == -signal.SIGKILL else "ended"
        name = signal_name(-code)
        text = f"rank {rank} (host {host}) was {ended} ({name}); all ranks stopped; rerun to resume"
    return Outcome(FAILED, text, last=signals.stopping, abrupt=True)


def _order_of_blame(failed: Tuple[int, int]) -> Tuple[bool, bool, bool, Tuple[int, int]]:
    """Return the place of a rank, with its exit code, among several that failed.

    First one that complained or was killed, then those that lost a peer by it, then those asked to
    stop.
    """
    _, code = failed
    is_quiet = code != WRONG_INPUT
    was_asked = code == -signal.SIGUSR1
    follows = code >= 0 or code == -signal.SIGTERM
    return is_quiet, was_asked, follows, failed
