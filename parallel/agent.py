"""Starts and watches this host's ranks with torch's elastic agent, and agrees with the launchers of other hosts.

The agent is what torchrun runs. Ours differs in what it makes of exit codes and of signals: 2 (wrong input) and 75
(stopped after saving) are never tried again, a rank that ends with 75 leaves the others time to do so, and after a
failure all ranks of all hosts are gone within seconds. Restarts are therefore made here, not by torch's agent.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from typing import Callable, List, Optional

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

from parallel.hosts import Hosts, interface_towards
from parallel.parent_death import bound_to_parent
from parallel.rendezvous import MasterLost, Others, Outcome, Rendezvous, Stopped
from parallel.signals import Signals, kill
from recipe.errors import DONE, FAILED, STOPPED, WRONG_INPUT

_END_SECONDS = 5.0  # from SIGTERM to SIGKILL


def run(
    hosts: Hosts, local: int, shape: str, command: List[str], max_restarts: int, signals: Signals, silence: float
) -> int:
    """Runs `local` ranks of `command` on each of `hosts`; returns the exit code once they are gone.

    Args:
        shape: replicas and stages in words; must be the same on all hosts.
        max_restarts: times to start again after a failure.
        silence: seconds after which a launcher of another host that says nothing is lost.

    Raises:
        UserError: the hosts do not come together.
    """
    if "LOGLEVEL" not in os.environ:  # torch's own variable, for who wants to read what its agent says
        logging.disable(logging.CRITICAL)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # leaves the others to `signals`
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # as many ranks on each host: their numbers need no store
    os.environ["POD_LAUNCHER"] = "1"
    secret = os.environ.pop("POD_TOKEN", "")  # not for the ranks
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // local)))
    try:
        others = Others(hosts, f"{shape} over {hosts.number} hosts", signals, silence, secret)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")[: 1 if hosts.number == 1 else 2]:
            interface = interface_towards(others.address)
            if interface:
                os.environ.setdefault(name, interface)
        for attempt in range(max_restarts + 1):
            outcome = others.settle(_once(others, attempt, local, command, signals))
            if outcome.line:
                print(outcome.line, file=sys.stderr, flush=True)
            if outcome.code != FAILED or outcome.last or attempt == max_restarts:
                break
            text = f"restart {attempt + 1} of {max_restarts}: the run goes on from its last checkpoint"
            print(text, file=sys.stderr, flush=True)
        return outcome.code
    except Stopped:
        print("stopped while no rank was running; the same command goes on", file=sys.stderr)
        return STOPPED
    except MasterLost as lost:
        print(lost, file=sys.stderr)
        return FAILED


def _once(others: Others, attempt: int, local: int, command: List[str], signals: Signals) -> Outcome:
    python, *arguments = bound_to_parent([sys.executable, "-u", *command], ignores_interrupts=True)
    spec = WorkerSpec(
        role="rank",
        local_world_size=local,
        entrypoint=python,
        args=tuple(part.replace("$", "$$") for part in arguments),  # which torch's agent reads as templates
        rdzv_handler=Rendezvous(others, attempt),
        max_restarts=0,
        monitor_interval=0.05,
    )
    ranks = _Ranks(spec, signals, others.news)
    try:
        ranks.run()
    except SignalException:  # SIGQUIT
        return Outcome(FAILED, "ended at once by SIGQUIT; the same command goes on from the last checkpoint", last=True)
    return ranks.outcome()


class _Ranks(LocalElasticAgent):
    """torch's agent with other views on when to end ranks. `news`: what another host says of its ranks' end."""

    def __init__(self, spec: WorkerSpec, signals: Signals, news: Callable[[], Optional[Outcome]]):
        super().__init__(spec, logs_specs=DefaultLogsSpecs(log_dir=os.devnull))
        self._signals, self._ask = signals, news
        self._ended_by: Optional[Outcome] = None
        self._first: Optional[tuple] = None  # rank and exit code of the first to fail

    def outcome(self) -> Outcome:
        """Outcome of the ranks, once `run` has returned."""
        if self._signals.hurry:
            text = "ended at once by a second signal; the same command goes on from the last checkpoint"
            return Outcome(FAILED, text, last=True, abrupt=True)
        if self._ended_by:
            return self._ended_by
        if not self._first:
            stopped = STOPPED in (process.poll() for process in self._processes().values())
            return Outcome(STOPPED if stopped else DONE)
        rank, code = self._first
        if code == WRONG_INPUT:
            return Outcome(WRONG_INPUT, abrupt=True)
        if code == -signal.SIGUSR1:  # asked to save before it had begun: there is nothing to save
            return Outcome(STOPPED, abrupt=True)
        host = socket.gethostname()
        if code < 0:
            text = f"rank {rank} (host {host}) was ended by signal {-code} ({_signal_name(-code)}); all ranks are gone"
        else:
            text = f"rank {rank} failed with exit code {code} (host {host}); all ranks are gone"
        return Outcome(FAILED, text, last=self._signals.stopping, abrupt=True)

    def _processes(self) -> dict:
        """The process of each rank, by its number in the world."""
        handlers = self._pcontext.subprocess_handlers
        return {worker.global_rank: handlers[worker.local_rank].proc for worker in self._worker_group.workers}

    def _start_workers(self, worker_group: WorkerGroup) -> dict:
        started = super()._start_workers(worker_group)
        self._signals.watch(self._processes())
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = {rank: process.poll() for rank, process in self._processes().items()}
        failed = [(rank, code) for rank, code in codes.items() if code not in (None, DONE, STOPPED)]
        if failed:
            self._first = min(failed, key=_blame)
            self._end()
        elif None in codes.values():
            # One that has ended with 0 or 75 leaves the others the time that they need.
            self._ended_by = self._ask()
            if not self._ended_by:
                return RunResult(state=WorkerState.HEALTHY)
            self._end()
        return super()._monitor_workers(worker_group)

    def _end(self) -> None:
        """Ends all ranks and what they have started."""
        processes = self._processes()
        kill(processes, signal.SIGTERM)
        end = time.monotonic() + _END_SECONDS
        while time.monotonic() < end and any(process.poll() is None for process in processes.values()):
            time.sleep(0.02)
        kill(processes, signal.SIGKILL)
        for process in processes.values():
            process.wait()

    def _exit_barrier(self) -> None:
        """Waiting for other hosts is `Others.settle`, after every kind of end."""


def _blame(failure: tuple) -> tuple:
    """Sort key of ranks that failed in the same moment: first one that complained or was killed, then those that lost a
    peer by it."""
    rank, code = failure
    return (code != WRONG_INPUT, code >= 0 or code == -signal.SIGTERM, rank)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"
