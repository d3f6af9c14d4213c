"""Runs the trials of a sweep as processes that train, and records how each ended.

One thread watches all of them: Linux ends a child when the thread that started it ends, not only
the process.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from common import additions, cores
from common.errors import DONE, STOPPED, WRONG_INPUT, ConfigError, UserError
from common.progress import lines
from common.text import count
from recipe.config import Recipe
from tools.reporting.run import in_use
from tools.sweeping.candidates import Candidates, as_text
from tools.sweeping.folder import SweepFolder
from tools.sweeping.trials import (
    COMPLETE,
    FAILED,
    IMPOSSIBLE,
    PRUNED,
    RUNNING,
    Progress,
    Record,
    progress,
)
from tools.training_process import StopRequest, TrainingProcess

if TYPE_CHECKING:
    from tools.sweeping.study import Study

_POLL_SECONDS = 0.2
_MAX_STARTS = 3  # of a process that is killed from outside, before its trial has failed
_NOTHING = Progress()


@dataclass(eq=False)
class Trial:
    """A trial that is under way, and how much of its metrics was read.

    number: in the study.
    recipe: that it trains.
    process: that trains it.
    reported: evaluations that the study has, and by which it was decided whether to prune.
    pruned: it was asked to end early.
    """

    number: int
    recipe: Recipe
    process: TrainingProcess
    reported: int
    pruned: bool = False
    _metrics_status: Optional[Tuple[int, int]] = None

    def new_metrics(self, metrics: Path) -> bool:
        """Return whether a file has changed since the last call.

        Args:
            metrics: path of the trial's metrics.jsonl, which may not be there yet.
        """
        before = self._metrics_status
        self._metrics_status = None
        if metrics.exists():
            status = metrics.stat()
            self._metrics_status = (status.st_size, status.st_mtime_ns)
        return self._metrics_status != before


class _PutOff(NamedTuple):
    """A trial that ended because its input is wrong, not yet recorded as failed.

    number: in the study.
    reached: how far it came.
    line: the last one of its output.
    """

    number: int
    reached: Progress
    line: str


@dataclass(eq=False)
class Scheduler:
    """Begins trials, resumes those that were cut off, and records how each ended.

    candidates: recipes of the trials.
    study: their records.
    folder: of the sweep.
    workers: trials at once.
    trainer: the program that trains, as Python is given it.
    request: noted signals.
    changed: takes a line, and the record of a trial that has ended.
    """

    candidates: Candidates
    study: Study
    folder: SweepFolder
    workers: int
    trainer: Sequence[str]
    request: StopRequest
    changed: Callable[[str, Optional[Record]], None]

    def __post_init__(self) -> None:
        self._metric = self.candidates.sweep.definition.metric
        self._threads = max(1, cores.available() // self.workers)  # of OpenMP, of each trial
        self._running: List[Trial] = []
        # Trials would take each other's checkpoints for their own.
        is_mirrored = self.candidates.base.checkpoint.mirror is not None
        self._unmirrored = ["checkpoint.mirror=null"] if is_mirrored else []
        self._ended = 0  # trials of all sessions
        # Trials whose input is wrong, while none was complete: by the line without the trial's own
        # folder.
        self._put_off: Dict[str, _PutOff] = {}
        self._input_fault = ""  # that two trials met

    def run(self, trials: int) -> None:
        """Run trials until enough have ended, or after a signal until all processes have.

        Args:
            trials: how many are to end.

        Raises:
            UserError: two trials ended with the same complaint about the input, and none was ever
                complete.
        """
        records = self.study.records()
        self._ended = sum(1 for record in records if record.state != RUNNING)

        def text() -> str:
            """Return the live line of a terminal."""
            return f"{self._ended} of {trials} trials have ended, {len(self._running)} run"

        try:
            with lines(text, lambda: self._ended / trials, elsewhere=False):
                self._run_until_all_ended(trials)
        finally:
            # An error here must leave no process behind.
            for trial in self._running:
                trial.process.stop(at_once=True)
        # After a signal, trials that were put off run again in the next session.
        if self._input_fault:
            raise UserError(self._input_fault)
        if not self.request.name:
            self._fail_put_off()

    def _run_until_all_ended(self, trials: int) -> None:
        """Begin and watch trials until none runs and none is to begin."""
        # Trials that an earlier session began go first.
        cut_off = self.study.cut_off()
        announced = False
        while True:
            self._fill(cut_off, trials)
            if self._ending() and self._running and not announced:
                announced = True
                self._stop_all()
            if not self._running:
                break
            # A copy: trials that end leave the list.
            for trial in list(self._running):
                if self.request.at_once:
                    trial.process.stop(at_once=True)
                self._watch(trial)
            time.sleep(_POLL_SECONDS)

    def _fill(self, cut_off: List[int], trials: int) -> None:
        """Begin trials until all workers have one, first those of an earlier session."""
        while not self._ending() and len(self._running) < self.workers:
            if cut_off:
                self._begin(cut_off.pop(0), "goes on")
            elif len(self.study.records()) < trials:
                self._begin(self.study.begin(), "begins")
            else:
                return

    def _stop_all(self) -> None:
        """Let all processes save and end, and say why."""
        why = self.request.name or "the input is wrong"
        self.changed(f"{why}: the trials that run finish their step, save and end", None)
        for trial in self._running:
            trial.process.stop()

    def _ending(self) -> bool:
        """Return whether no more trials begin."""
        return bool(self.request.name or self._input_fault)

    def _begin(self, number: int, verb: str) -> None:
        """Begin a trial, or record that no run of it can begin."""
        parameters = self.study.records()[number].parameters
        name = f"{self.candidates.sweep.word}-{number:04d}"
        overrides = [
            *self.candidates.overrides(parameters),
            f"run.output={as_text(str(self.folder.trial(number)))}",
            f"run.name={as_text(name)}",
            # A trial that was cut off goes on, also of a recipe that always begins anew.
            "run.resume=auto",
            *self._unmirrored,
        ]
        try:
            recipe = self.candidates.recipe(overrides)
        except ConfigError as error:
            # No fault of the sweep: some combinations of values make no recipe.
            self._end(number, IMPOSSIBLE, reason=str(error))
            return
        # Its process starts once no other one holds the run folder: see `_watch`.
        process = TrainingProcess(self._command(overrides), self.folder.log(number))
        # By the newest evaluation it is decided once more: what came of it may be lost.
        reported = self.study.newest(number)
        self._running.append(Trial(number, recipe, process, reported))
        text = " ".join(f"{key}={as_text(value)}" for key, value in parameters.items())
        self.changed(f"trial {number} {verb}: {text}", None)

    def _command(self, overrides: Sequence[str]) -> List[str]:
        """Return the command line that trains the sweep's recipe with some overrides."""
        # The full path, because the log shows the command to be repeated anywhere.
        config = str(self.candidates.sweep.recipe.resolve())
        # Unbuffered: the last line of the log is the reason of a failure.
        program = [sys.executable, "-u", *self.trainer, *additions.words()]
        return [*program, "--config", config, *overrides]

    def _watch(self, trial: Trial) -> None:
        """Look at a trial once: how far it is, whether its process runs, and what its end means."""
        run = self.folder.trial(trial.number)
        # Before the metrics are read: those of a process that has ended are complete.
        code = trial.process.poll()
        if trial.new_metrics(run / "metrics.jsonl") or code is not None:
            reached = progress(run, self._metric, trial.recipe)
            if not trial.pruned and self._report(trial, reached):
                trial.pruned = True
                trial.process.stop()
            if code is not None:
                self._process_ended(trial, code, reached)
                return
            # An earlier session was cut off before it recorded how the run ended.
            if not trial.process.is_there and (trial.pruned or reached.ended):
                self._conclude(trial, reached)
                return
        if trial.process.is_there:
            return
        # A process of an earlier session may still hold the run folder.
        if self._ending():
            self._running.remove(trial)
        elif not in_use(run):
            trial.process.start(self._threads)

    def _report(self, trial: Trial, reached: Progress) -> bool:
        """Report new evaluations to the study; return whether to prune the trial.

        It is never pruned by the last evaluation of a run: ending it would save nothing, and
        whether it is seen before the run ends is a matter of time.
        """
        first = trial.reported
        last = len(reached.values) - 1
        for evaluation in range(first, last + 1):
            trial.reported = evaluation + 1
            value = reached.values[evaluation]
            # Optuna's pruner ends a trial at its first NaN, from which it may recover.
            if not math.isfinite(value):
                continue
            is_bad = self.study.report(trial.number, evaluation, value)
            if is_bad and not (evaluation == last and reached.last_is_final):
                return True
        if first <= last:
            self.changed("", None)
        return False

    def _process_ended(self, trial: Trial, code: int, reached: Progress) -> None:
        """Decide what the end of a trial's process means: see common/errors.py for exit codes."""
        number = trial.number
        # A pruned trial was asked to end, and may do so by any code.
        if trial.pruned or (code == DONE and reached.ended):
            self._conclude(trial, reached)
        elif self._ending() and (code == STOPPED or code < 0):
            self._running.remove(trial)  # goes on when the same command is given again
        elif code == STOPPED or (code < 0 and trial.process.starts < _MAX_STARTS):
            why = f"was ended by signal {-code}" if code < 0 else "was stopped from outside"
            self.changed(f"trial {number} {why}; it goes on from its last checkpoint", None)
            trial.process.forget()
        elif code < 0:
            reason = f"was ended by signal {-code} {_MAX_STARTS} times"
            self._end(number, FAILED, reached, reason)
        else:
            self._failed(trial, code, reached)

    def _failed(self, trial: Trial, code: int, reached: Progress) -> None:
        """Record a trial whose process failed, or put it off."""
        # Commands end with the reason in one line.
        line = trial.process.last_line()
        if code == WRONG_INPUT and line and not self._any_complete():
            self._refuse(trial, reached, line)
            return
        reason = line or f"{self.folder.log(trial.number)} is empty"
        if code == DONE:
            reason = f"ended without an end event: {reason}"
        self._end(trial.number, FAILED, reached, reason)

    def _any_complete(self) -> bool:
        """Return whether a trial is complete."""
        return any(record.state == COMPLETE for record in self.study.records())

    def _refuse(self, trial: Trial, reached: Progress, line: str) -> None:
        """Put off a trial whose input is wrong while none is complete.

        A second one with that line stops the sweep.
        """
        self._running.remove(trial)
        self.changed(f"trial {trial.number} is put off: {line}", None)
        # The same fault in two trials names two folders.
        shared = line.replace(str(self.folder.trial(trial.number)), "")
        if shared in self._put_off:
            # One trial may have drawn a value that no run can have; two with the same complaint
            # have not.
            first, second = sorted((self._put_off[shared].number, trial.number))
            self._input_fault = (
                f"trials {first} and {second}: {line}; then repeat the command: they run again"
            )
        self._put_off[shared] = _PutOff(trial.number, reached, line)

    def _fail_put_off(self) -> None:
        """Record the trials that were put off as failed."""
        for trial in self._put_off.values():
            self._end(trial.number, FAILED, trial.reached, trial.line)
        self._put_off.clear()

    def _conclude(self, trial: Trial, reached: Progress) -> None:
        """Record a run that is finished or pruned."""
        number = trial.number
        value = reached.values[-1] if reached.values else math.nan
        # A pruned run has a last value, too, but not that of its end.
        if trial.pruned:
            evaluations = count(trial.reported, "evaluation")
            self._end(number, PRUNED, reached, f"worse than the median after {evaluations}")
        elif not math.isfinite(value):
            reason = f"the run ended without a finite {self._metric}"
            self._end(number, FAILED, reached, reason)
        else:
            self._end(number, COMPLETE, reached, value=value)
            if not self._input_fault:  # the input is right: what others complained about is theirs
                self._fail_put_off()

    def _end(
        self,
        number: int,
        state: str,
        reached: Progress = _NOTHING,
        reason: str = "",
        value: Optional[float] = None,
    ) -> None:
        """Record how a trial ended, and say it.

        Args:
            number: of the trial.
            state: see `Record`.
            reached: how far it came.
            reason: why it is not complete.
            value: of the metric; for complete ones only.
        """
        self._running = [trial for trial in self._running if trial.number != number]
        self._ended += 1
        # First into the study, from which the report makes its files.
        record = self.study.end(
            number,
            state,
            value,
            epochs=reached.epochs,
            seconds=reached.seconds,
            reason=reason or None,
        )
        if value is not None:
            length = f"{reached.epochs:.4g} epochs, {reached.seconds:.1f} s"
            reason = f"{self._metric} {value:.6g} after {length}"
        verb = "" if state == FAILED else "is "
        self.changed(f"trial {number} {verb}{state}: {reason}", record)
