"""The process that computes the suite's sections, from both sides: it may be lost, what it has found is not."""

from __future__ import annotations

import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from typing import Any, Callable, Iterator, List, NamedTuple, Sequence

import torch

from benchmarks import claims, gpu_report
from benchmarks.gpu_measure import Clock, DeviceLost, Plan, Row, Session, free, is_lost, reason
from parallel.parent_death import die_with_parent

_PATIENCE = 120.0  # seconds for a process to begin: it loads libraries and the device


class Section(NamedTuple):
    """A part of the suite: `measure` gives its rows within about so many seconds."""

    name: str
    seconds: float
    measure: Callable[[Session], Iterator[Row]]


class Outcome(NamedTuple):
    """Rows of a section. finished: whether no more will come of it."""

    rows: List[Row]
    finished: bool


class Process:
    """A process that measures. machine: what it says about its device. alive: whether it can be asked for more."""

    def __init__(self, plan: Plan):
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, plan))
        self._process.start()
        other.close()
        if not self._connection.poll(_PATIENCE):
            self.end()
            raise RuntimeError(f"benchmarks.gpu_suite: no process began within {_PATIENCE:.0f} s")
        self.machine: dict = self._connection.recv()
        self.alive = True

    def run(self, section: Section, before: Sequence[Row], limit: float) -> Outcome:
        """The section's rows, which are told as they come.

        Args:
            before: rows of this section, which it then leaves out, and of others.
            limit: seconds after which the process is ended.
        """
        end, rows, current = time.monotonic() + limit, [], section.name
        told = set()

        def lost(why: str, finished: bool) -> Outcome:
            row = Row.missing(section.name, current, why)
            _say(row)
            self.end()
            return Outcome([*rows, row], finished)

        self._connection.send((section, list(before)))
        while True:
            if not self._connection.poll(max(0.0, end - time.monotonic())):
                return lost(f"not done after the {limit:.0f} s that were left to all of {section.name}", finished=True)
            try:
                kind, content = self._connection.recv()
            except EOFError:
                self._process.join()
                return lost(f"its process ended with exit code {self._process.exitcode}", finished=False)
            if kind == "now":
                current = content
                if content not in told:
                    print(f"  {section.name}: {content} ...", file=sys.stderr, flush=True)
                told.add(content)
            elif kind == "row":
                rows.append(content)
                _say(content)
            elif content == "finished":
                return Outcome(rows, finished=True)
            else:
                self.end()
                return Outcome(rows, finished=False)

    def end(self) -> None:
        self.alive = False
        self._process.kill()
        self._process.join()
        self._connection.close()


def _say(row: Row) -> None:
    value = f"{claims.cell(row.value)} {row.unit}, " if row.value is not None else ""
    print(f"  {row.section}: {row.what}: {value}{row.note}", file=sys.stderr, flush=True)


def _serve(connection: Connection, plan: Plan) -> None:
    die_with_parent()
    connection.send(gpu_report.about(torch.device(plan.device)))
    while True:
        try:
            section, before = connection.recv()
        except EOFError:
            return
        finished = perform(section, plan, before, lambda kind, content: connection.send((kind, content)))
        connection.send(("end", "finished" if finished else "lost"))
        if not finished:
            return


def perform(section: Section, plan: Plan, before: Sequence[Row], send: Callable[[str, Any], None]) -> bool:
    """Measures a section. Sends ("now", what) before and ("row", row) after; returns whether the device goes on.

    Whatever a section raises costs the rows that it has not given yet.
    """
    current = section.name

    def tell(what: str) -> None:
        nonlocal current
        current = what
        send("now", what)

    session = Session(section.name, plan, Clock(section.seconds), before, tell)
    try:
        for row in section.measure(session):
            send("row", row)
        return True
    except DeviceLost as error:
        current, why = error.what, error.why
    except Exception as error:
        why = reason(error)
    free(session.device)
    send("row", session.missing(current, why))
    return not is_lost(session.device)
