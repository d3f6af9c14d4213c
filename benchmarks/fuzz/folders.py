"""Damaged run folders and studies: one of their files each time, the others whole."""

import contextlib
import functools
import io
import json
import os
import sqlite3
from pathlib import Path
from typing import List
from unittest import mock

from benchmarks import QUICKSTART
from common.errors import DONE, WRONG_INPUT, DataError
from recipe import loading
from tools import report
from tools.reporting import page
from tools.sweeping import report as sweep_report
from tools.sweeping.definition import read as read_definition
from training.metrics import read_events

_METRICS = "metrics.jsonl"


def runs(folder: Path) -> List[bytes]:
    """The files of a run, each after its name; the run itself is put into the folder."""
    recipe = loading.load(QUICKSTART, ["run.epochs=null", "run.steps=60"])
    numbers = ("top1", "lr", "gradient_norm", "weight_norm", "update_norm", "loss_scale", "images_per_second", "mfu")
    train = {"event": "train", "epoch": 0.5, "loss": 2.0, **dict.fromkeys((*numbers, "data_wait"), 0.5)}
    train.update(skipped_steps=0, unreadable_images=0, trust={"blocks.0.conv.weight": 0.01})
    scores = {"top1": 0.5, "top5": 0.9, "loss": 1.0}
    events = [
        *({**train, "step": step, "seconds": step / 2} for step in (10, 30)),
        {"event": "eval", "step": 30, "epoch": 0.5, **scores, "step_average": scores},
        {"event": "checkpoint", "step": 30, "path": "checkpoints/step-00000030.pt"},
        {**train, "step": 60, "seconds": 30.0},
    ]
    last = {"event": "end", "step": 60, **scores, "best_top1": 0.5, "images": 1440, "images_per_second": 48.0}
    last.update(seconds=31.0, data_wait=0.1, input_bound=False, workers_needed=None)
    start = {"started": "2026-01-02T03:04:05+00:00", "command": ["train.py"], "revision": "abc", "python": "3.11.7"}
    start.update(torch="2.14.1", cpus=2, threads=1, devices=[], step=0, replicas=1)
    files = {
        "config.yaml": loading.dump(recipe),
        _METRICS: "".join(json.dumps(event) + "\n" for event in [*events, last]),
        "environment.json": json.dumps({"starts": [start, {**start, "step": 30}]}),
    }
    (folder / "run").mkdir()
    for name, text in files.items():
        (folder / "run" / name).write_text(text)
    unfinished = "".join(json.dumps(event) + "\n" for event in events)
    found = [f"{name}\n{text}".encode() for name, text in files.items()]
    return [*found, f"{_METRICS}\n{unfinished}".encode(), found[1]]


def read_run(data: bytes, folder: Path) -> None:
    """As a report without its megabytes of JavaScript, and what a sweep makes of its metrics."""
    name, _, content = data.partition(b"\n")
    path = folder / "run" / {b"config.yaml": "config.yaml", b"environment.json": "environment.json"}.get(name, _METRICS)
    whole = path.read_bytes()
    path.write_bytes(content)
    silent = io.StringIO()
    try:
        quiet = contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent)
        with quiet[0], quiet[1], mock.patch.object(page, "_plotly", return_value=""):
            code = report.main([str(folder / "run"), "--images", "0"])
        if code == WRONG_INPUT:
            raise DataError(silent.getvalue())
        assert code == DONE, silent.getvalue()
        read_events(folder / "run")
    finally:
        path.write_bytes(whole)


def studies(folder: Path) -> List[bytes]:
    """A study as the SQL that makes it: as a file of SQLite nearly all damage is to its pages."""
    from tools.sweeping.study import Study

    (folder / "sweep.yaml").write_text(
        f"recipe: {QUICKSTART}\nmetric: top1\ntrials: 9\nspace:\n"
        "  batch.global: {choices: [32, 64]}\n  optimizer.momentum: {low: 0.1, high: 0.9}\n"
    )
    study = Study(folder / "whole.db", read_definition(folder / "sweep.yaml"))
    for state in ("complete", "failed", "complete"):
        number = study.begin()
        study.report(number, 0, 0.25)
        study.end(number, state, 0.5 if state == "complete" else None, 1.0, 2.0, None if state == "complete" else "why")
    study.begin()
    study.close()
    with contextlib.closing(sqlite3.connect(folder / "whole.db")) as connection:
        return ["\n".join(connection.iterdump()).encode(), (folder / "whole.db").read_bytes()]


def read_study(data: bytes, folder: Path) -> None:
    """Opened, ranked, and gone on with for a trial."""
    from alembic.script import ScriptDirectory
    from optuna.storages._rdb.models import BaseModel

    from tools.sweeping.study import StorageError, Study

    path = folder / "damaged.db"
    path.unlink(missing_ok=True)
    if data.startswith(b"SQLite"):
        path.write_bytes(data)
    else:
        _executed(path, data.decode(errors="replace"))
    sweep = read_definition(folder / "sweep.yaml")
    study = None
    try:
        with mock.patch.object(ScriptDirectory, "from_config", return_value=_migrations()):
            study = Study(path, sweep)
        records = study.records()
        rows = sweep_report.ranked(records, sweep.definition)
        sweep_report.write_csv(folder / "leaderboard.csv", rows, sweep.definition)
        sweep_report.table(rows, sweep.definition)
        for number in study.cut_off():
            study.end(number, "failed", reason="cut off")
        number = study.begin()
        study.report(number, 0, 0.5)
        study.end(number, "complete", 0.5)
    except StorageError as error:  # said by tools.sweep in one line
        raise DataError(str(error)) from None
    finally:
        if study is not None:
            study.close()
        for mapper in BaseModel.registry.mappers:  # keep the statements of up to 150 studies, 12 MB and more
            mapper._compiled_cache.clear()


@functools.lru_cache(maxsize=None)
def _migrations():
    """Those of Optuna's tables, of which it would import the ten modules anew for each study, in most of the time."""
    from alembic.script import ScriptDirectory
    from optuna.storages import _rdb

    return ScriptDirectory(os.path.join(os.path.dirname(_rdb.__file__), "alembic"))


def _executed(path: Path, sql: str) -> None:
    """A database of those statements that SQLite takes."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous=off")
        statement = ""
        for line in sql.splitlines(keepends=True):
            statement += line
            with contextlib.suppress(sqlite3.Error, ValueError, UnicodeError):
                if sqlite3.complete_statement(statement):
                    now, statement = statement, ""
                    connection.execute(now)
