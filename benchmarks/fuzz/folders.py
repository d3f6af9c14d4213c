"""Damaged run folders and studies: one of their files each time, the others whole."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List
from unittest import mock

from benchmarks import QUICKSTART
from benchmarks.fuzz import commands
from common.errors import DataError
from recipe import loading
from tools import report
from tools.reporting import page
from tools.sweeping import report as sweep_report
from tools.sweeping.definition import SweepFile
from tools.sweeping.definition import read as read_definition
from training.metrics import read_events

if TYPE_CHECKING:
    from alembic.script import ScriptDirectory

    from tools.sweeping.study import Study

_RUN = "run"
_CONFIG = "config.yaml"
_METRICS = "metrics.jsonl"
_ENVIRONMENT = "environment.json"
_SWEEP = "sweep.yaml"
_SWEEP_TEXT = f"""\
recipe: {QUICKSTART}
metric: top1
trials: 9
space:
  batch.global: {{choices: [32, 64]}}
  optimizer.momentum: {{low: 0.1, high: 0.9}}
"""


def runs(folder: Path) -> List[bytes]:
    """Return the files of a run, each behind its name.

    Args:
        folder: to work in; the run itself is put there.
    """
    recipe = loading.load(QUICKSTART, ["run.epochs=null", "run.steps=60"])
    events = _events()
    unfinished = _as_lines(events[:-1])
    files = {
        _CONFIG: loading.dump(recipe),
        _METRICS: _as_lines(events),
        _ENVIRONMENT: json.dumps({"starts": _starts()}),
    }
    (folder / _RUN).mkdir()
    for name, text in files.items():
        (folder / _RUN / name).write_text(text)
    # The metrics stand there twice, and once as of a run that has not ended.
    seeds = [_with_name(name, text) for name, text in files.items()]
    seeds.append(_with_name(_METRICS, unfinished))
    seeds.append(_with_name(_METRICS, files[_METRICS]))
    return seeds


def _with_name(name: str, text: str) -> bytes:
    """Return a file of a run behind its name."""
    return f"{name}\n{text}".encode()


def _as_lines(events: List[Dict[str, Any]]) -> str:
    """Return events as they are written to a run's metrics."""
    return "".join(json.dumps(event) + "\n" for event in events)


def _events() -> List[Dict[str, Any]]:
    """Return the events of a whole run, of which the last is its end."""
    train = {
        "event": "train",
        "epoch": 0.5,
        "loss": 2.0,
        "top1": 0.5,
        "lr": 0.5,
        "gradient_norm": 0.5,
        "weight_norm": 0.5,
        "update_norm": 0.5,
        "loss_scale": 0.5,
        "images_per_second": 0.5,
        "mfu": 0.5,
        "data_wait": 0.5,
        "skipped_steps": 0,
        "unreadable_images": 0,
        "trust": {"blocks.0.conv.weight": 0.01},
    }
    scores = {"top1": 0.5, "top5": 0.9, "loss": 1.0}
    evaluation = {"event": "eval", "step": 30, "epoch": 0.5, **scores, "step_average": scores}
    checkpoint = {"event": "checkpoint", "step": 30, "path": "checkpoints/step-00000030.pt"}
    end = {
        "event": "end",
        "step": 60,
        **scores,
        "best_top1": 0.5,
        "images": 1440,
        "images_per_second": 48.0,
        "seconds": 31.0,
        "data_wait": 0.1,
        "input_bound": False,
        "workers_needed": None,
    }
    return [
        {**train, "step": 10, "seconds": 5.0},
        {**train, "step": 30, "seconds": 15.0},
        evaluation,
        checkpoint,
        {**train, "step": 60, "seconds": 30.0},
        end,
    ]


def _starts() -> List[Dict[str, Any]]:
    """Return the starts of a run that was continued once, as its environment lists them."""
    first = {
        "started": "2026-01-02T03:04:05+00:00",
        "command": ["train.py"],
        "revision": "abc",
        "python": "3.11.7",
        "torch": "2.14.1",
        "cpus": 2,
        "threads": 1,
        "devices": [],
        "step": 0,
        "replicas": 1,
    }
    return [first, {**first, "step": 30}]


def read_run(data: bytes, folder: Path) -> None:
    """Make a report of a run, and read its metrics as a sweep does.

    Args:
        data: a file of the run behind its name, which may be damaged.
        folder: that holds the run, which is whole again in the end.

    Raises:
        AssertionError: the report fails otherwise.
        DataError: the run is refused.
    """
    name, _, content = data.partition(b"\n")
    # A name that is damaged counts as that of the metrics.
    files = {_CONFIG.encode(): _CONFIG, _ENVIRONMENT.encode(): _ENVIRONMENT}
    path = folder / _RUN / files.get(name, _METRICS)
    whole = path.read_bytes()
    path.write_bytes(content)
    try:
        # Without the megabytes of JavaScript.
        with mock.patch.object(page, "_plotly", return_value=""):
            commands.output_of(report.main, [str(folder / _RUN), "--images", "0"])
        read_events(folder / _RUN)
    finally:
        path.write_bytes(whole)


def studies(folder: Path) -> List[bytes]:
    """Return a study as the SQL that makes it, and as SQLite's file.

    Nearly all damage to that file is damage to SQLite's own pages.

    Args:
        folder: to work in; the definition of the sweep is put there.
    """
    from tools.sweeping.study import Study

    (folder / _SWEEP).write_text(_SWEEP_TEXT)
    path = folder / "whole.db"
    study = Study(path, read_definition(folder / _SWEEP))
    for state in ("complete", "failed", "complete"):
        number = study.begin()
        study.report(number, evaluation=0, value=0.25)
        is_complete = state == "complete"
        study.end(
            number,
            state,
            value=0.5 if is_complete else None,
            epochs=1.0,
            seconds=2.0,
            reason=None if is_complete else "why",
        )
    # One more that was cut off.
    study.begin()
    study.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        sql = "\n".join(connection.iterdump())
    return [sql.encode(), path.read_bytes()]


def read_study(data: bytes, folder: Path) -> None:
    """Open a study, rank its trials, and go on with it for a trial.

    Args:
        data: SQLite's file or SQL, which may be damaged.
        folder: to work in, with the definition of the sweep.

    Raises:
        DataError: the study is refused.
    """
    from alembic.script import ScriptDirectory
    from optuna.storages._rdb.models import BaseModel

    from tools.sweeping.study import StorageError, Study

    path = folder / "damaged.db"
    path.unlink(missing_ok=True)
    if data.startswith(b"SQLite"):
        path.write_bytes(data)
    else:
        _execute(path, data.decode(errors="replace"))
    sweep = read_definition(folder / _SWEEP)
    study = None
    try:
        with mock.patch.object(ScriptDirectory, "from_config", return_value=_migrations()):
            study = Study(path, sweep)
        _use(study, sweep, folder / "leaderboard.csv")
    except StorageError as error:
        # The command says it in one line.
        raise DataError(str(error)) from None
    finally:
        if study is not None:
            study.close()
        # Mappers keep the statements of up to 150 studies, 12 MB and more: that would look like a
        # leak.
        for mapper in BaseModel.registry.mappers:
            mapper._compiled_cache.clear()


def _use(study: Study, sweep: SweepFile, leaderboard: Path) -> None:
    """Rank the trials of a study, end those that were cut off, and add another."""
    records = study.records()
    rows = sweep_report.ranked(records, sweep.definition)
    sweep_report.write_csv(leaderboard, rows, sweep.definition)
    sweep_report.table(rows, sweep.definition)
    for number in study.cut_off():
        study.end(number, "failed", reason="cut off")
    number = study.begin()
    study.report(number, evaluation=0, value=0.5)
    study.end(number, "complete", value=0.5)


@functools.lru_cache(maxsize=None)
def _migrations() -> ScriptDirectory:
    """Return the migrations of Optuna's tables.

    Optuna would import their ten modules anew for each study, which takes most of the time.
    """
    from alembic.script import ScriptDirectory
    from optuna.storages import _rdb

    return ScriptDirectory(os.path.join(os.path.dirname(_rdb.__file__), "alembic"))


def _execute(path: Path, sql: str) -> None:
    """Make a database of those statements that SQLite takes."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous=off")
        statement = ""
        for line in sql.splitlines(keepends=True):
            statement += line
            with contextlib.suppress(sqlite3.Error, ValueError, UnicodeError):
                if sqlite3.complete_statement(statement):
                    # Before it runs: the next one begins anew also where this one fails.
                    complete = statement
                    statement = ""
                    connection.execute(complete)
