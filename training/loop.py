"""The training loop: steps, evaluations and checkpoints in order, on an engine it knows nothing about.

The order within a step is update, log, evaluation, checkpoint; a checkpoint therefore holds everything that
was written before it, and a resumed run writes the rest as the undisturbed run would have.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Callable, Iterable, Iterator, NoReturn, Optional, Sequence, Type

import torch

from data.batches import MicroBatch
from engines.base import AVERAGES, Diverged, Engine, StepResult
from optim import schedule
from recipe import loading
from recipe.batch import Lengths, in_steps
from recipe.config import Recipe
from recipe.errors import DataError
from training import timeline
from training.checkpoint import CheckpointFolder
from training.evaluation import Scores, evaluate
from training.monitor import Clock, DataWait, Monitor, duration, pace, workers_needed
from training.stopping import StopSignals

_LINES_ABOVE_LIMIT = 3  # of the log in a row, after which a run has diverged
_NORMS = ("gradient", "weight", "update")
_INPUT_BOUND = 0.1  # share of the training time above which waiting for images is worth a word


class TrainingError(Exception):
    """The run cannot go on, by its own rules: one line with the reason and the remedy."""


class Stopped(Exception):
    """A signal asked the run to stop; it was saved and a rerun resumes it."""


@dataclass
class Progression:
    """Where a run is: all that the loop itself must remember. Saved in every checkpoint.

    step: updates done. metrics_bytes: length of metrics.jsonl. logged_checkpoint: whether the checkpoint's own
    event belongs behind it. loss, correct, images: sums since the last log line. paused, waited: those of `seconds`
    that were not spent training, and that a device waited for images. lines_above_limit: of the log, the last ones,
    in a row, whose loss is above run.loss_limit. scores: of the last evaluation.
    """

    step: int = 0
    metrics_bytes: int = 0
    logged_checkpoint: bool = False
    seconds: float = 0.0
    loss: float = 0.0
    correct: int = 0
    images: int = 0
    steps_in_window: int = 0
    unreadable: int = 0
    paused: float = 0.0
    waited: float = 0.0
    best_top1: float = 0.0
    lines_above_limit: int = 0
    images_digest: str = ""  # of the images that it is trained on; older checkpoints have none
    scores: dict = field(default_factory=dict)


class _Window:
    """Sums since the last log line, on the device so that nothing waits."""

    def __init__(self, progression: Progression, device: torch.device):
        self.loss = torch.tensor(progression.loss, dtype=torch.float64, device=device)
        self.correct = torch.tensor(progression.correct, dtype=torch.int64, device=device)
        self.images, self.steps = progression.images, progression.steps_in_window

    def empty(self) -> None:
        """Starts over, after a log line."""
        self.loss.zero_()
        self.correct.zero_()
        self.images = self.steps = 0

    def add(self, result: StepResult) -> None:
        self.loss += result.loss
        self.correct += result.correct
        self.images += result.images
        self.steps += 1


class Trainer:
    """One run from a step to its end."""

    def __init__(
        self,
        recipe: Recipe,
        lengths: Lengths,
        engine: Engine,
        evaluation_batches: Iterable[Optional[MicroBatch]],
        checkpoints: CheckpointFolder,
        monitor: Monitor,
        progression: Progression,
        flops_per_image: Callable[[int], float],
        classes: Sequence[str],
        trace_folder: Path,
    ):
        """
        Args:
            checkpoints, monitor: used on the main rank; those of other ranks write nothing.
            flops_per_image: from the epoch to those of forward and backward pass together, for the utilisation (MFU).
            classes: their names, which checkpoints carry along.
            trace_folder: for the timeline that `log.trace` asks for.
        """
        self._recipe, self._lengths, self._engine = recipe, lengths, engine
        self._evaluation_batches = evaluation_batches
        self._checkpoints, self._monitor = checkpoints, monitor
        self._progression, self._classes, self._trace_folder = progression, list(classes), trace_folder
        self._rate = schedule.create(recipe, lengths)
        self._evaluate_every = self._interval(recipe.evaluation.every_epochs)
        self._save_every = self._interval(recipe.checkpoint.every_epochs)
        self._flops_per_image = flops_per_image
        self._peak_flops = engine.peak_flops()
        self._steps_to_trace: Optional[int] = recipe.log.trace or None
        self._clock = Clock(progression.seconds, progression.paused)
        self._data_wait = DataWait(progression.waited)
        self._signal: Optional[int] = None
        self._last_unreadable = ""

    def run(self, micro_batches: Iterator[MicroBatch]) -> None:
        """Trains to the end.

        Args:
            micro_batches: of this replica, from the current step on.

        Raises:
            Stopped: after SIGTERM or SIGINT, once the step is done and saved.
            TrainingError: too many steps in a row without finite gradients, or weights that are lost.
            DataError: none of the images since the last log line could be read.
        """
        window = _Window(self._progression, self._engine.device)
        with StopSignals(self._note_signal):
            for step in range(self._progression.step, self._lengths.total):
                try:
                    self._step(micro_batches, step, window)
                except Diverged as error:
                    remedy = "start a new run with a lower schedule.peak (or peak_per_image) or precision.loss_scale"
                    self._raise(TrainingError, f"step {step + 1}: {error}; {remedy}")
        self._end()

    def _step(self, micro_batches: Iterator[MicroBatch], step: int, window: _Window) -> None:
        done, last = step + 1, step + 1 == self._lengths.total
        log = last or done % self._recipe.log.every_steps == 0
        result = self._engine.train_step(micro_batches, step, self._rate(step), measure=log)
        window.add(result)
        images = self._recipe.batch.global_  # also those that could not be read: they took their time
        self._clock.count(images, images * self._flops_per_image(step // self._lengths.steps_per_epoch))
        for message in result.unreadable:
            self._progression.unreadable += 1
            self._last_unreadable = message
            self._monitor.progress.say(f"left out: {message}")
        self._progression.step = done
        if done % self._lengths.steps_per_epoch == 0:
            self._engine.end_epoch()
        if log:
            self._log(result, step, window)
        self._monitor.progress.tick(done)
        start = time.monotonic()
        if last or done % self._evaluate_every == 0:
            self._evaluate(done)
        self._trace(last)
        self._clock.pause(time.monotonic() - start)
        start = time.monotonic()
        scheduled = last or done % self._save_every == 0
        stop = self._engine.processes.agree(self._signal or 0)
        if scheduled or stop:
            self._save(window, scheduled)
        self._clock.pause(time.monotonic() - start)
        if stop and not last:
            self._raise(Stopped, f"{signal.Signals(stop).name}: saved at step {done}; the same command resumes")

    def _log(self, result: StepResult, step: int, window: _Window) -> None:
        """One line about the steps since the last one. Here, and only here, the loop waits for the device."""
        in_row = result.skipped_in_row.item()
        if not window.images:
            self._raise(
                DataError,
                f"step {step + 1}: no image of the last {window.steps} steps can be read; the last: "
                f"{self._last_unreadable}; mend that, then rerun the same command",
            )
        values = {
            "epoch": self._epochs(step + 1),
            # Images that could not be read have no loss; in the sums of the steps they stand as 0.
            "loss": window.loss.item() / window.steps * (window.steps * self._recipe.batch.global_ / window.images),
            "top1": window.correct.item() / window.images,
            "lr": self._rate(step),
            # None where the update is made on a device that does not report them.
            **{f"{kind}_norm": getattr(result.norms, kind).item() for kind in _NORMS if result.norms is not None},
            "skipped_steps": result.skipped.item(),
            "unreadable_images": self._progression.unreadable,
            "loss_scale": result.loss_scale.item(),
            **self._pace(),
        }
        if self._recipe.log.trust_ratios and result.norms is not None:
            names = list(result.norms.trust)
            ratios = torch.stack(list(result.norms.trust.values())).tolist() if names else []
            values["trust"] = {name: float(f"{ratio:.6g}") for name, ratio in zip(names, ratios)}
        left = (self._lengths.total - step - 1) * self._recipe.batch.global_ / values["images_per_second"]
        text = (  # with the bar before it, it fits a terminal of 80 columns
            f"loss {values['loss']:.3f} top1 {values['top1']:.1%} {pace(values['images_per_second'])} "
            f"MFU {values['mfu']:.0%} wait {values['data_wait']:.0%} ETA {duration(left)}"
        )
        self._monitor.event("train", step + 1, values, "")
        self._monitor.progress.advance(step + 1, text)
        window.empty()
        self._check_loss(values["loss"], step)
        if in_row > self._recipe.precision.max_skipped_steps:
            self._raise(
                TrainingError,
                f"step {step + 1}: the last {in_row} updates had gradients that are not finite and were left out"
                f"{_where(self._engine)}; the weights are those of step {step + 1 - in_row}; "
                f"{self._remedy(values['loss_scale'])}",
            )

    def _remedy(self, loss_scale: float) -> str:
        if self._recipe.precision.dynamic_loss_scale:
            fallen = f"the loss scale has fallen to {loss_scale:g}, so it is not too high"
            return f"{fallen}; lower schedule.peak (or peak_per_image)"
        return "lower schedule.peak (or peak_per_image) or precision.loss_scale"

    def _check_loss(self, loss: float, step: int) -> None:
        """Raises TrainingError where the loss has been out of all reason for some lines of the log."""
        limit = self._recipe.run.loss_limit * math.log(self._recipe.model.classes)
        progression = self._progression
        progression.lines_above_limit = progression.lines_above_limit + 1 if loss > limit else 0
        if progression.lines_above_limit == _LINES_ABOVE_LIMIT:
            times, lines = self._recipe.run.loss_limit, _LINES_ABOVE_LIMIT
            self._raise(
                TrainingError,
                f"step {step + 1}: the training loss is {loss:.3g}, and was above {limit:.3g} ({times:g} times "
                f"that of guessing) in {lines} lines of the log in a row: the run has diverged; lower "
                "schedule.peak (or peak_per_image), or raise run.loss_limit",
            )

    def _raise(self, kind: Type[Exception], message: str) -> NoReturn:
        """Raises an error that all ranks raise; the main one alone with the message."""
        raise kind(message if self._engine.topology.is_main else "") from None

    def _pace(self) -> dict:
        length, rate, flops = self._clock.lap()
        return {
            "images_per_second": rate,
            "mfu": flops / self._peak_flops,
            "data_wait": self._data_wait.lap(max(self._engine.processes.gather(self._engine.data_wait())), length),
            "seconds": self._clock.seconds(),
        }

    def _trace(self, last: bool) -> None:
        """Writes the timeline, once the steps after the session's first that are to be traced are done."""
        if self._steps_to_trace is None:
            return
        self._steps_to_trace -= 1
        if self._steps_to_trace >= 0 and not last:
            return
        self._steps_to_trace = None
        spans = self._engine.recorder.collect() if self._engine.recorder else []
        if spans:
            self._monitor.metrics.check()
            text = timeline.write(
                self._trace_folder,
                spans,
                micro_batches=self._engine.batch.accumulation,
                stages=self._engine.topology.stages,
                virtual=self._recipe.parallel.virtual_stages or 1 if self._engine.topology.stages > 1 else 1,
            )
            self._monitor.progress.say(text)

    def _evaluate(self, step: int) -> None:
        """Scores the weights, and beside them the averages that there are so far."""
        scores: Scores = evaluate(self._engine, self._evaluation_batches)
        values, text = scores._asdict(), f"top1 {scores.top1:.2%}  top5 {scores.top5:.2%}  loss {scores.loss:.4f}"
        for name in self._engine.averages():
            with self._engine.using(name):
                average = evaluate(self._engine, self._evaluation_batches)
            values[name] = {"top1": average.top1, "top5": average.top5, "loss": average.loss}
            text += f"  {name.replace('_', ' ')} {average.top1:.2%}"
        self._progression.scores = values
        self._progression.best_top1 = max(self._progression.best_top1, scores.top1)
        left_out = f"; {scores.unreadable} unreadable left out" if scores.unreadable else ""
        self._monitor.event(
            "eval",
            step,
            {"epoch": self._epochs(step), **values},
            f"evaluation after epoch {self._epochs(step):.2f}: {text}  ({scores.images} images){left_out}",
        )

    def _save(self, window: _Window, scheduled: bool) -> None:
        """Saves the run. Only scheduled checkpoints leave an event: a signal must not show in the metrics."""
        progression = self._progression
        progression.metrics_bytes = self._monitor.metrics.position()
        progression.logged_checkpoint = scheduled
        progression.seconds, progression.paused = self._clock.seconds(), self._clock.paused()
        progression.waited = self._data_wait.seconds()
        progression.loss, progression.correct = window.loss.item(), int(window.correct.item())
        progression.images, progression.steps_in_window = window.images, window.steps
        content = {
            "recipe": loading.dump(self._recipe),
            "engine": self._engine.state_dict(),
            "progression": asdict(progression),
            "classes": self._classes,
        }
        replica_states = self._engine.replica_states()
        if not self._engine.topology.is_main:
            for _ in replica_states:
                pass  # what this rank has goes to the main one
            return
        evaluated = progression.step % self._evaluate_every == 0 or progression.step == self._lengths.total
        top1 = progression.scores["top1"] if evaluated else None
        self._monitor.metrics.check()
        self._checkpoints.save(progression.step, content, top1, replica_states)
        if scheduled:
            note_checkpoint(self._monitor, progression)

    def _end(self) -> None:
        scores, progression = self._progression.scores, self._progression
        images = self._lengths.total * self._recipe.batch.global_
        seconds = self._clock.seconds()
        waited = self._data_wait.seconds() / max(seconds - self._clock.paused(), 1e-9)
        workers = workers_needed(self._recipe.data.workers, waited) if waited > _INPUT_BOUND else None
        values = {
            "top1": scores["top1"],
            "top5": scores["top5"],
            "best_top1": progression.best_top1,
            **{name: scores[name] for name in AVERAGES if name in scores},
            "images": images,
            "images_per_second": images / seconds,
            "seconds": seconds,
            "data_wait": waited,
            "input_bound": workers is not None,
            "workers_needed": workers,
        }
        text = (
            f"done: top1 {scores['top1']:.2%}  top5 {scores['top5']:.2%}  best top1 {progression.best_top1:.2%}  "
            + "".join(f"{name.replace('_', ' ')} {scores[name]['top1']:.2%}  " for name in AVERAGES if name in scores)
            + f"{duration(seconds)}, {pace(images / seconds)} with evaluation and checkpoints"
        )
        if workers is not None:
            text += (
                f"\ninput-bound: {waited:.0%} of the training time went to waiting for images; data.workers={workers} "
                f"would keep up instead of {self._recipe.data.workers}, given a core for each (here: {os.cpu_count()})"
            )
        self._monitor.event("end", self._lengths.total, values, text)

    def _epochs(self, step: int) -> float:
        return step / self._lengths.steps_per_epoch

    def _interval(self, epochs: float) -> int:
        steps = in_steps(epochs, None, None, self._lengths.steps_per_epoch, self._recipe.batch.global_)
        return max(1, steps)

    def _note_signal(self, number: int, frame: object) -> None:
        if self._signal is None:
            self._signal = number
            with contextlib.suppress(RuntimeError):  # the signal came in the midst of printing
                self._monitor.progress.say(f"{signal.Signals(number).name}: finishing this step, then saving")
        elif number == signal.SIGINT:  # asked again by hand: leave at once, the last checkpoint stands
            raise KeyboardInterrupt


def _where(engine: Engine) -> str:
    """Which parameters' gradients are not finite. Going backwards, they spoil all those before them."""
    found = {name for own in engine.processes.gather(engine.not_finite()) for name in own}
    names = [name for name in engine.shapes if name in found]
    if not names:
        return ""
    return (
        f" (that of {names[-1]} and of {len(names) - 1} parameters before it)" if len(names) > 1 else f" ({names[0]})"
    )


def note_checkpoint(monitor: Monitor, progression: Progression) -> None:
    """The event of a scheduled checkpoint, written once it is on the disk, or when a run resumes from it."""
    monitor.event("checkpoint", progression.step, {"file": f"checkpoints/step-{progression.step:08d}.pt"}, "")
