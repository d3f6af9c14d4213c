"""A sweep as tests run it: its command, its files, and the double of train.py that trains its
trials."""

import contextlib
import json
import multiprocessing
import os
import signal
import sqlite3
import sys

from tests.conftest import QUICKSTART, ROOT
from tests.tools.sweeping import double
from tests.waiting import wait_until
from tools import sweep
from tools.sweeping import report, scheduler

DONE = 0
FAILED = 1
WRONG_INPUT = 2
STOPPED = 75
DOUBLE = str(ROOT / "tests" / "tools" / "sweeping" / "double.py")
FILE = """
recipe: {recipe}
overrides: [run.epochs=4, schedule.warmup_epochs=1]
trials: 4
seed: 3
metric: {metric}
{more}
space:
  optimizer.momentum: {{low: 0.8, high: 0.95}}
  schedule.peak: {{low: 0.5, high: 8, log: true}}
"""
# Processes are forked from one that has imported Optuna.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["tests.tools.sweeping.conftest", "tools.sweeping.report", "tools.sweeping.study"]
)


def _command(arguments, environment, output):
    scheduler._POLL_SECONDS = 0.02
    report.draw_picture = lambda *arguments: None
    os.environ.update(environment)
    with open(output, "w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.exit(sweep.main(arguments, trainer=[DOUBLE]))


class Sweep:
    """A sweep file and its folder."""

    def __init__(self, path, capfd):
        self.folder = path / "found"
        self.file = path / "some.yaml"
        self._capfd = capfd
        self.output = path / "output"  # of a process
        self.define()

    def define(self, more="", metric="top1", text=FILE):
        self.file.write_text(text.format(recipe=QUICKSTART, metric=metric, more=more))

    def arguments(self, *more):
        return ["--config", str(self.file), "--output", str(self.folder), *more]

    def __call__(self, *more):
        """Exit code, lines of stdout, lines of stderr of the command in this process."""
        self._capfd.readouterr()
        code = sweep.main(self.arguments(*more), trainer=[DOUBLE])
        captured = self._capfd.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    def data(self, *more):
        """Exit code and JSON of the command in this process, which has no errors."""
        code, out, err = self("--json", *more)
        assert err == []
        return code, json.loads(out[-1])

    def start(self, *more, **environment):
        """The command in a process of its own."""
        process = _CONTEXT.Process(
            target=_command, args=(self.arguments(*more), environment, self.output), daemon=True
        )
        process.start()
        return process

    def killed_at(self, trial, evaluations):
        """The command is killed when a trial has that many evaluations; then the trial's process is
        gone, too."""
        process = self.start(DOUBLE_SLOW=str(trial), DOUBLE_SECONDS="1")
        wait_until(lambda: self.evaluations(trial) >= evaluations)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        pid = self.starts()[trial][-1]["pid"]
        wait_until(lambda: is_gone(pid), 5)
        assert self.evaluations(trial) < double.EPOCHS, (
            "it died with the sweep, not because it was done"
        )

    def run(self, number):
        return self.folder / "trials" / f"{number:04d}"

    def starts(self):
        """Trial -> what each process that trained it noted as it began."""
        paths = sorted(self.folder.glob("trials/*/starts"))
        return {
            int(path.parent.name): [json.loads(line) for line in path.read_text().splitlines()]
            for path in paths
        }

    def processes(self):
        """The number of processes that trained each trial."""
        return [len(each) for each in self.starts().values()]

    def evaluations(self, number):
        path = self.run(number) / "metrics.jsonl"
        return path.read_text().count('"eval"') if path.exists() else 0

    def stored(self):
        """The trials as SQLite has them, read without Optuna: number -> state, value,
        parameters."""
        query = """select number, state, value, param_name, param_value
            from trials join trial_params using (trial_id) left join trial_values using (trial_id) order by number"""
        found = {}
        with contextlib.closing(sqlite3.connect(self.folder / "study.db")) as database:
            for number, state, value, name, parameter in database.execute(query):
                found.setdefault(number, (state, value, {}))[2][name] = parameter
        return found

    def states(self):
        return [state for state, _, _ in self.stored().values()]


def is_gone(pid):
    """Whether a process has ended; one that nobody has waited for yet has."""
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def reached(parameters):
    return double.top1(parameters["optimizer.momentum"], parameters["schedule.peak"], double.EPOCHS)
