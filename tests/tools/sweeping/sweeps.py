"""A sweep as tests run it: its command, its files, and the double of train.py that trains its trials."""

import json
import os
import sqlite3
import subprocess
import sys
import time

from parallel.parent_death import bound_to_parent
from tests.conftest import QUICKSTART, ROOT
from tests.tools.sweeping import double
from tools import sweep

DONE, FAILED, WRONG_INPUT, STOPPED = 0, 1, 2, 75
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
# What `python -m tools.sweep` runs, but for the program that trains.
DRIVE = "import sys\nfrom tools import sweep\nsys.exit(sweep.main(sys.argv[2:], trainer=[sys.argv[1]]))\n"


class Sweep:
    """A sweep file and its folder."""

    def __init__(self, path, capfd):
        self.folder, self.file, self._capfd = path / "found", path / "some.yaml", capfd
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

    def start(self, *more, **environment):
        """The command in a process of its own."""
        return subprocess.Popen(
            bound_to_parent([sys.executable, "-c", DRIVE, DOUBLE, *self.arguments(*more)]),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def killed_at(self, trial, evaluations):
        """The command is killed when a trial has that many evaluations; then the trial's process is gone, too."""
        process = self.start(DOUBLE_SLOW=str(trial), DOUBLE_SECONDS="1")
        wait_for(lambda: self.evaluations(trial) >= evaluations)
        process.kill()
        process.communicate()
        pid = self.starts()[trial][-1]["pid"]
        wait_for(lambda: is_gone(pid), seconds=5)
        assert self.evaluations(trial) < double.EPOCHS, "it died with the sweep, not because it was done"

    def run(self, number):
        return self.folder / "trials" / f"{number:04d}"

    def starts(self):
        """Trial -> what each process that trained it noted as it began."""
        paths = sorted(self.folder.glob("trials/*/starts"))
        return {int(path.parent.name): [json.loads(line) for line in path.read_text().splitlines()] for path in paths}

    def evaluations(self, number):
        path = self.run(number) / "metrics.jsonl"
        return path.read_text().count('"eval"') if path.exists() else 0

    def stored(self):
        """The trials as SQLite has them, read without Optuna: number -> state, value, parameters."""
        with sqlite3.connect(self.folder / "study.db") as database:
            states = dict(database.execute("select number, state from trials"))
            values = dict(database.execute("select number, value from trials join trial_values using (trial_id)"))
            parameters = database.execute(
                "select number, param_name, param_value from trials join trial_params using (trial_id)"
            )
            found = {number: {} for number in states}
            for number, name, value in parameters:
                found[number][name] = value
        database.close()
        return {number: (states[number], values.get(number), found[number]) for number in states}


def wait_for(condition, seconds=240):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def is_gone(pid):
    """Whether a process has ended; one that nobody has waited for yet has."""
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def reached(parameters):
    return double.top1(parameters["optimizer.momentum"], parameters["schedule.peak"], double.EPOCHS)
