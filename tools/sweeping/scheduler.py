"""Runs the trials of a sweep as processes that train into their own run folders, and records how each ended.

One thread watches all of them: Linux ends a child when the thread that started it ends, not only the process.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Dict, List, Optional, Sequence, Tuple

from common import cores
from common.errors import DONE, STOPPED, WRONG_INPUT, ConfigError, UserError
from common.text import count
from recipe.config import Recipe
from tools.reporting.run import in_use
from tools.sweeping.candidates import Candidates, as_text
from tools.sweeping.folder import SweepFolder
from tools.sweeping.trials import COMPLETE, FAILED, IMPOSSIBLE, PRUNED, Progress, Record, progress
from tools.training_process import StopRequest, TrainingProcess

if TYPE_CHECKING:
    from tools.sweeping.study import Study

_POLL_SECONDS = 0.2
_MAX_STARTS = 3  # of a process that is killed from outside, before its trial has failed
_NOTHING = Progress()


@dataclass(eq=False)
class Trial:
    """A trial that is under way, and how much of its metrics was read."""

    number: int
    recipe: Recipe
    process: TrainingProcess
    reported: int = 0  # evaluations that the study has
    pruned: bool = False
    _metrics_status: Optional[Tuple[int, int]] = None

    def new_metrics(self, metrics: Path) -> bool:
        """Whether metrics.jsonl has changed since the last call."""
        status = metrics.stat() if metrics.exists() else None
        before, self._metrics_status = self._metrics_status, status and (status.st_size, status.st_mtime_ns)
        return self._metrics_status != before


@dataclass(eq=False)
class Scheduler:
    """Begins trials, resumes those that were cut off, and records how each ended."""

    candidates: Candidates
    study: Study
    folder: SweepFolder
    workers: int  # trials at once
    trainer: Sequence[str]  # the program that trains, as Python is given it
    request: StopRequest
    changed: Callable[[str, Optional[Record]], None]  # takes a line, and the record of a trial that has ended

    def __post_init__(self) -> None:
        self._metric = self.candidates.sweep.definition.metric
        self._threads = max(1, cores.available() // self.workers)  # of OpenMP, of each trial
        self._running: List[Trial] = []
        # Trials that ended because the input is wrong, while none was complete: not yet recorded as failed.
        self._put_off: Dict[str, Tuple[int, Progress, str]] = {}  # by the line without the trial's own folder
        self._input_fault = ""  # that two trials met

    def run(self, trials: int) -> None:
        """Returns once `trials` trials have ended, or after a signal once all processes have. Raises UserError if two
        trials ended with the same complaint about the input, and none was ever complete."""
        cut_off = self.study.cut_off()
        announced = False
        try:
            while True:
                while not self._ending() and len(self._running) < self.workers:
                    if cut_off:
                        self._begin(cut_off.pop(0), "goes on")
                    elif len(self.study.records()) < trials:
                        self._begin(self.study.begin(), "begins")
                    else:
                        break
                if self._ending() and self._running and not announced:
                    announced = True
                    why = self.request.name or "the input is wrong"
                    self.changed(f"{why}: the trials that run finish their step, save and end", None)
                    for trial in self._running:
                        trial.process.stop()
                if not self._running:
                    break
                for trial in list(self._running):
                    if self.request.at_once:
                        trial.process.stop(at_once=True)
                    self._watch(trial)
                time.sleep(_POLL_SECONDS)
        finally:
            for trial in self._running:
                trial.process.stop(at_once=True)
        if self._input_fault:
            raise UserError(self._input_fault)
        if not self.request.name:
            self._fail_put_off()

    def _ending(self) -> bool:
        return bool(self.request.name or self._input_fault)

    def _begin(self, number: int, verb: str) -> None:
        parameters = self.study.records()[number].parameters
        overrides = [
            *self.candidates.overrides(parameters),
            f"run.output={as_text(str(self.folder.trial(number)))}",
            f"run.name={as_text(f'{self.candidates.sweep.word}-{number:04d}')}",
        ]
        try:
            recipe = self.candidates.recipe(overrides)
        except ConfigError as error:
            return self._end(number, IMPOSSIBLE, reason=str(error))
        place = str(self.candidates.sweep.recipe.resolve())
        command = [sys.executable, "-u", *self.trainer, "--config", place, *overrides]
        self._running.append(Trial(number, recipe, TrainingProcess(command, self.folder.log(number))))
        text = " ".join(f"{name}={as_text(value)}" for name, value in parameters.items())
        self.changed(f"trial {number} {verb}: {text}", None)

    def _watch(self, trial: Trial) -> None:
        """Look at a trial once: what it has reached, whether its process runs, and what its end means."""
        run = self.folder.trial(trial.number)
        code = trial.process.poll()
        if trial.new_metrics(run / "metrics.jsonl") or code is not None:
            reached = progress(run, self._metric, trial.recipe)
            if not trial.pruned and self._report(trial, reached):
                trial.pruned = True
                trial.process.stop()
            if code is not None:
                return self._process_ended(trial, code, reached)
            if not trial.process.is_there and (trial.pruned or reached.ended):
                return self._conclude(trial, reached)
        if not trial.process.is_there and self._ending():
            self._running.remove(trial)
        elif not trial.process.is_there and not in_use(run):
            trial.process.start(self._threads)

    def _report(self, trial: Trial, reached: Progress) -> bool:
        """Report new evaluations to the study; returns whether to prune the trial: never by the last evaluation of a
        run, as ending it would save nothing, and whether it is seen before the run ends is a matter of time."""
        first, last = trial.reported, len(reached.values) - 1
        for evaluation in range(first, last + 1):
            trial.reported = evaluation + 1
            value = reached.values[evaluation]
            bad = math.isfinite(value) and self.study.report(trial.number, evaluation, value)
            if bad and not (evaluation == last and reached.last_is_final):
                return True
        if first <= last:
            self.changed("", None)
        return False

    def _process_ended(self, trial: Trial, code: int, reached: Progress) -> None:
        signalled = f"was ended by signal {-code}"
        if trial.pruned or (code == DONE and reached.ended):
            self._conclude(trial, reached)
        elif self._ending() and (code == STOPPED or code < 0):
            self._running.remove(trial)  # goes on when the same command is given again
        elif code == STOPPED or (code < 0 and trial.process.starts < _MAX_STARTS):
            why = signalled if code < 0 else "was stopped from outside"
            self.changed(f"trial {trial.number} {why}; it goes on from its last checkpoint", None)
            trial.process.forget()
        elif code < 0:
            self._end(trial.number, FAILED, reached, f"{signalled} {_MAX_STARTS} times")
        else:
            line = trial.process.last_line()
            if code == WRONG_INPUT and line and all(each.state != COMPLETE for each in self.study.records()):
                return self._refused(trial, reached, line)
            line = line or f"{self.folder.log(trial.number)} is empty"
            self._end(trial.number, FAILED, reached, line if code else f"ended without an end event: {line}")

    def _refused(self, trial: Trial, reached: Progress, line: str) -> None:
        """Puts off a trial whose input is wrong while none is complete; a second with that line stops the sweep."""
        self._running.remove(trial)
        self.changed(f"trial {trial.number} is put off: {line}", None)
        shared = line.replace(str(self.folder.trial(trial.number)), "")
        if shared in self._put_off:
            first, second = sorted((self._put_off[shared][0], trial.number))
            self._input_fault = f"trials {first} and {second}: {line}; then repeat the command: they run again"
        self._put_off[shared] = (trial.number, reached, line)

    def _fail_put_off(self) -> None:
        for number, reached, line in self._put_off.values():
            self._end(number, FAILED, reached, line)
        self._put_off.clear()

    def _conclude(self, trial: Trial, reached: Progress) -> None:
        """Records a run that is finished or pruned."""
        value = reached.values[-1] if reached.values else math.nan
        if trial.pruned:
            evaluations = count(trial.reported, "evaluation")
            self._end(trial.number, PRUNED, reached, f"worse than the median after {evaluations}")
        elif not math.isfinite(value):
            self._end(trial.number, FAILED, reached, f"the run ended without a finite {self._metric}")
        else:
            self._end(trial.number, COMPLETE, reached, value=value)
            if not self._input_fault:  # the input is right: what the others complained about is their own
                self._fail_put_off()

    def _end(
        self, number: int, state: str, reached: Progress = _NOTHING, reason: str = "", value: Optional[float] = None
    ) -> None:
        self._running = [trial for trial in self._running if trial.number != number]
        record = self.study.end(number, state, value, reached.epochs, reached.seconds, reason or None)
        if value is not None:
            reason = f"{self._metric} {value:.6g} after {reached.epochs:.4g} epochs, {reached.seconds:.1f} s"
        self.changed(f"trial {number} {'' if state == FAILED else 'is '}{state}: {reason}", record)
