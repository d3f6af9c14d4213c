"""Runs the trials of a sweep, some at once, each as a process that trains into its own run folder.

One thread watches all of them: Linux ends a child when the thread that started it ends, not only the process.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Callable, List, NamedTuple, Optional, Sequence

from recipe import loading
from recipe.errors import DONE, STOPPED, WRONG_INPUT, UserError
from tools.sweeping.candidates import Candidates, as_text
from tools.sweeping.folder import SweepFolder, run_in_use
from tools.sweeping.process import StopRequest, Trial, threads_each
from tools.sweeping.trials import COMPLETE, FAILED, IMPOSSIBLE, PRUNED, Progress, Record, progress

if TYPE_CHECKING:
    from tools.sweeping.study import Study

_LOOK_SECONDS = 0.2
_STARTS = 3  # of a process that others kill, before its trial counts as failed


class _Refused(NamedTuple):
    """A trial that ended because the input is wrong, while none was complete; not yet recorded as failed.

    line: its last line, without its own folder's name; said: the whole line.
    """

    number: int
    line: str
    said: str
    reached: Progress


class Scheduler:
    """Begins trials, resumes those that were cut off, and records how each ended."""

    def __init__(
        self,
        found: Candidates,
        study: Study,
        folder: SweepFolder,
        workers: int,
        trainer: Sequence[str],
        changed: Callable[[str, Optional[Record]], None],
    ):
        """
        Args:
            workers: trials at once.
            trainer: the program that trains, as Python is given it.
            changed: called with a line for people (empty where a trial has a new evaluation), and the record of a trial
                that has ended.
        """
        self._found, self._study, self._folder = found, study, folder
        self._workers, self._trainer, self._changed = workers, trainer, changed
        self._running: List[Trial] = []
        self._refused: List[_Refused] = []
        self._fault = ""  # of the input, which two trials met

    def run(self, trials: int, stop: StopRequest) -> None:
        """Until `trials` trials have come to an end, or `stop` asks to leave and all processes have.

        Raises:
            UserError: two trials ended with the same complaint about the input, and none was ever complete; they and
                those that run go on when the same command is given again.
        """
        waiting = self._study.cut_off()
        begun = len(self._study.records())
        asked = False
        try:
            while True:
                while not self._ending(stop) and len(self._running) < self._workers and (waiting or begun < trials):
                    if waiting:
                        self._begin(waiting.pop(0), again=True)
                    else:
                        self._begin(self._study.begin(), again=False)
                        begun += 1
                if self._ending(stop) and not asked:
                    asked = True
                    if self._running:
                        why = stop.name or "the input is wrong"
                        self._changed(f"{why}: the trials that run finish their step, save and end", None)
                    for trial in self._running:
                        trial.ask_to_end()
                if not self._running:
                    return self._leave(stop)
                for trial in list(self._running):
                    if stop.hurry:
                        trial.kill()
                    self._watch(trial, stop)
                time.sleep(_LOOK_SECONDS)
        finally:
            for trial in self._running:
                trial.kill()

    def _ending(self, stop: StopRequest) -> bool:
        return stop.asked or bool(self._fault)

    def _leave(self, stop: StopRequest) -> None:
        """No trial runs any more."""
        if self._fault:
            raise UserError(self._fault)
        if not stop.asked:
            self._give_up_refused()

    def _give_up_refused(self) -> None:
        """They have failed: another trial shows that it is not the input that all trials have."""
        while self._refused:
            each = self._refused.pop(0)
            self._end(each.number, FAILED, None, each.reached.epochs, each.reached.seconds, each.said)

    def _refuse(self, trial: Trial, reached: Progress, said: str) -> None:
        """Puts off a trial whose input is wrong while none is complete; a second with that error stops the sweep."""
        self._running.remove(trial)
        line = said.replace(str(self._folder.trial(trial.number)), "")
        other = next((each for each in self._refused if each.line == line), None)
        self._refused.append(_Refused(trial.number, line, said, reached))
        self._changed(f"trial {trial.number} is put off: {said}", None)
        if other and not self._fault:
            first, second = sorted((other.number, trial.number))
            self._fault = f"trials {first} and {second}: {said}; then repeat the command: they run again"

    def _begin(self, number: int, again: bool) -> None:
        parameters = self._study.record(number).parameters
        text = " ".join(f"{name}={as_text(value)}" for name, value in parameters.items())
        place = (
            f"run.output={as_text(str(self._folder.trial(number)))}",
            f"run.name={as_text(f'{self._found.sweep.word}-{number:04d}')}",
        )
        fault = self._found.fault(parameters, place)
        if fault:
            self._end(number, IMPOSSIBLE, reason=fault)
            return
        overrides = [*self._found.overrides(parameters), *place]
        recipe = loading.load(self._found.sweep.recipe, overrides)
        command = [*self._trainer, "--config", str(self._found.sweep.recipe.resolve()), *overrides]
        self._running.append(Trial(number, recipe, command, self._folder.log(number)))
        self._changed(f"trial {number} {'goes on' if again else 'begins'}: {text}", None)

    def _watch(self, trial: Trial, stop: StopRequest) -> None:
        """One look at a trial: what it has reached, whether its process runs, and what its end means."""
        code = trial.poll()
        if code is None and not trial.new_metrics(self._folder.trial(trial.number) / "metrics.jsonl"):
            if trial.process is None:
                self._start(trial, stop)
            return
        try:
            reached = progress(self._folder.trial(trial.number), self._found.sweep.definition.metric, trial.recipe)
        except UserError as error:
            trial.kill()
            return self._end_of(trial, FAILED, Progress([], False, False, None, None), str(error))
        if not trial.pruned and self._report(trial, reached):
            trial.pruned = True
            trial.ask_to_end()
        if trial.process is None:
            # Whether there is still something to do is known before a process is started for it.
            if trial.pruned or reached.ended:
                self._conclude(trial, reached)
            else:
                self._start(trial, stop)
        elif code is not None:
            self._after(trial, code, reached, stop)

    def _start(self, trial: Trial, stop: StopRequest) -> None:
        if self._ending(stop):
            self._running.remove(trial)
        elif not run_in_use(self._folder.trial(trial.number)):
            trial.start(threads_each(self._workers))

    def _report(self, trial: Trial, reached: Progress) -> bool:
        """Tells the study of the evaluations that are new; returns whether the trial is to be pruned.

        The last evaluation of a run saves nothing any more, so the pruner is not asked: else it would depend on the
        moment at which it is seen.
        """
        last = len(reached.values) - 1
        new = trial.reported <= last
        for evaluation in range(trial.reported, len(reached.values)):
            trial.reported = evaluation + 1
            value = reached.values[evaluation]
            if value is None:
                continue
            bad = self._study.report(trial.number, evaluation, value)
            if bad and not (evaluation == last and reached.last_is_final):
                return True
        if new:
            self._changed("", None)
        return False

    def _after(self, trial: Trial, code: int, reached: Progress, stop: StopRequest) -> None:
        """Acts on the end of a trial's process."""
        if trial.pruned or (code == DONE and reached.ended):
            self._conclude(trial, reached)
        elif self._ending(stop) and (code == STOPPED or code < 0):
            self._running.remove(trial)  # goes on when the same command is given again
        elif code == STOPPED or (code < 0 and trial.starts < _STARTS):
            why = f"was ended by signal {-code}" if code < 0 else "was stopped from outside"
            self._changed(f"trial {trial.number} {why}; it goes on from its last checkpoint", None)
            trial.process = None
        elif code < 0:
            self._end_of(trial, FAILED, reached, f"was ended by signal {-code} {_STARTS} times")
        else:
            line = trial.last_line()
            if code == WRONG_INPUT and line and not self._any_complete():
                return self._refuse(trial, reached, line)
            said = line or f"{self._folder.log(trial.number)} is empty"
            self._end_of(trial, FAILED, reached, said if code else f"ended without an end event: {said}")

    def _conclude(self, trial: Trial, reached: Progress) -> None:
        """Records a run that is finished or pruned."""
        value = reached.values[-1] if reached.values else None
        if trial.pruned:
            count = trial.reported
            evaluations = "1 evaluation" if count == 1 else f"{count} evaluations"
            self._end_of(trial, PRUNED, reached, f"worse than the median after {evaluations}")
        elif value is None or not math.isfinite(value):
            metric = self._found.sweep.definition.metric
            self._end_of(trial, FAILED, reached, f"the run ended without a finite {metric}")
        else:
            self._end_of(trial, COMPLETE, reached, None, value)
            self._give_up_refused()

    def _any_complete(self) -> bool:
        return any(each.state == COMPLETE for each in self._study.records())

    def _end_of(
        self, trial: Trial, state: str, reached: Progress, reason: Optional[str], value: Optional[float] = None
    ) -> None:
        self._running.remove(trial)
        self._end(trial.number, state, value, reached.epochs, reached.seconds, reason)

    def _end(
        self,
        number: int,
        state: str,
        value: Optional[float] = None,
        epochs: Optional[float] = None,
        seconds: Optional[float] = None,
        reason: Optional[str] = None,
    ) -> None:
        record = self._study.end(number, state, value, epochs, seconds, reason)
        text = f"trial {number} {'' if state == FAILED else 'is '}{state}"
        if value is not None:
            text += f": {self._found.sweep.definition.metric} {value:.6g} after {epochs:.4g} epochs, {seconds:.1f} s"
        self._changed(text + (f": {reason}" if reason else ""), record)
