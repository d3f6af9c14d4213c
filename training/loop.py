"""The training loop, on any engine. The order within a step is update, log, evaluation, checkpoint.

A checkpoint therefore covers everything written before it, and a resumed run writes the rest as an undisturbed one.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Mapping, NoReturn, Optional, Sequence, Type

import torch

from common import cores
from common.errors import DataError
from common.text import count
from data.batches import MicroBatch
from engines.base import AVERAGES, Diverged, Engine, StepResult
from optim import schedule
from parallel.generations import Regroup
from recipe import loading
from recipe.batch import Lengths, in_steps, rate_factor
from recipe.config import Recipe
from recipe.course import Course, Update
from training import timeline
from training.checkpoint import CheckpointFolder
from training.monitor import Clock, Monitor, duration, pace, workers_needed
from training.profiling import Recordings
from training.scoring import accuracy, evaluate
from training.stopping import StopSignals, name_of
from training.weights import TRAINED, top1_by_weights

if TYPE_CHECKING:
    from training.elastic import Memory

_LINES_ABOVE_LIMIT = 3  # of the log in a row, after which a run has diverged
_NORMS = ("gradient", "weight", "update")
_INPUT_BOUND = 0.1  # share of the training time above which waiting for images is worth a word


class TrainingError(Exception):
    """The run cannot go on: one line with the reason and the remedy."""


class Stopped(Exception):
    """A signal stopped the run; it was saved and a rerun resumes it."""


@dataclass
class Progression:
    """State of the loop itself, saved in every checkpoint.

    step: updates done. metrics_bytes: length of metrics.jsonl. logged_checkpoint: whether the checkpoint's own
    event follows. loss, correct, images, steps_in_window: sums since the last log line. seconds: of all sessions;
    paused: those not spent training; waited: those a device waited for images. lines_above_limit: the last log lines
    in a row whose loss is above run.loss_limit. skipped: updates left out until the last log line. scores: of the last
    evaluation. growth: see Course.
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
    best_top1: float = 0.0  # of the trained weights
    best_of_all: float = 0.0  # of these and the averages, among which --best chooses
    best_weights: str = TRAINED  # whose that is
    lines_above_limit: int = 0
    images_digest: str = ""  # of the images that it is trained on; older checkpoints have none
    rounding: int = 1  # version of the random bits that round weights; older checkpoints have none
    skipped: int = 0  # older checkpoints have none
    scores: dict = field(default_factory=dict)
    growth: list = field(default_factory=list)


@dataclass
class Trainer:
    """One run from a step to its end.
    checkpoints, monitor: those of other ranks than the main one write nothing. flops_per_image: of forward and
    backward pass, by epoch. classes: names, for checkpoints. trace_folder: for the timeline of `log.trace`.
    recordings: of torch's profilers. memory: of an elastic run."""

    recipe: Recipe
    lengths: Lengths
    engine: Engine
    evaluation_batches: Iterable[Optional[MicroBatch]]
    checkpoints: CheckpointFolder
    monitor: Monitor
    progression: Progression
    flops_per_image: Callable[[int], float]
    classes: Sequence[str]
    trace_folder: Path
    recordings: Recordings
    memory: Optional[Memory] = None

    def __post_init__(self) -> None:
        recipe, progression = self.recipe, self.progression
        self._rate = schedule.create(recipe, self.lengths)
        sizes = self.lengths.steps_per_epoch, recipe.batch.global_
        intervals = (in_steps(each.every_epochs, None, None, *sizes) for each in (recipe.evaluation, recipe.checkpoint))
        self._evaluate_every, self._save_every = (max(1, steps) for steps in intervals)
        self._peak_flops = self.engine.peak_flops()
        self._clock = Clock(progression.seconds, progression.paused, progression.waited)
        # On the device, so that nothing waits.
        self._loss = torch.tensor(progression.loss, dtype=torch.float64, device=self.engine.device)
        self._correct = torch.tensor(progression.correct, dtype=torch.int64, device=self.engine.device)
        self._course = Course(recipe, self.lengths.steps_per_epoch, self.lengths.total, progression.growth)
        self._updates = 0  # of this session
        self._signal: Optional[int] = None if self.memory is None else self.memory.signal
        self._last_unreadable = ""

    def run(self, micro_batches: Iterator[MicroBatch]) -> None:
        """Train to the end. Args: micro_batches: of this replica, from the current step on.
        Raises Stopped after a signal, once the step is saved; TrainingError: weights or loss are beyond reason;
        DataError: no image since the last log line could be read."""
        self._remember()
        with contextlib.closing(self.recordings), StopSignals(self._note_signal):
            self._stop_between_generations()
            for update in self._course.updates(self.progression.step):
                try:
                    self._step(micro_batches, update)
                except Diverged as error:
                    remedy = "start a new run with a lower schedule.peak (or peak_per_image) or precision.loss_scale"
                    self._raise(TrainingError, f"step {update.end}: {error}; {remedy}")
        self._end()

    def _step(self, micro_batches: Iterator[MicroBatch], update: Update) -> None:
        progression, step, done = self.progression, update.step, update.end
        last = done == self.lengths.total
        log = last or update.reaches(self.recipe.log.every_steps)
        with self.recordings.update(step):
            result = self.engine.train_step(micro_batches, update, self._rate_of(update), measure=log)
        if self.memory is not None:
            self.memory.check(self.engine)
        self._loss += result.loss * update.steps
        self._correct += result.correct
        progression.images += result.images
        progression.steps_in_window += update.steps
        images = self.recipe.batch.global_ * update.steps  # with unreadable ones, which took time, too
        self._clock.images += images
        self._clock.operations += images * self.flops_per_image(step // self.lengths.steps_per_epoch)
        for message in result.unreadable:
            progression.unreadable += 1
            self._last_unreadable = message
            self.monitor.say(f"left out: {message}")
        progression.step = done
        self._updates += 1
        if done % self.lengths.steps_per_epoch == 0:
            self.engine.end_epoch()
        if log:
            self._log(result, update)
        self._grow(done)
        start = time.monotonic()
        self.recordings.after_update(last)
        evaluated = last or update.reaches(self._evaluate_every)
        if evaluated:
            self._evaluate(done)
        self._trace(last)
        self._clock.paused += time.monotonic() - start
        start = time.monotonic()
        scheduled = last or update.reaches(self._save_every)
        processes, elastic = self.engine.processes, self.engine.processes.elastic
        waits = elastic is not None and self.engine.topology.is_main and elastic.wants()
        stop, regroup = divmod(processes.agree(2 * (self._signal or 0) + waits), 2)
        if scheduled or stop:
            self._save(scheduled, evaluated)
        self._clock.paused += time.monotonic() - start
        self._remember()
        if regroup and not stop and not last:
            processes.wait_for_all()  # else the first to go would end what others still do
            raise Regroup
        if stop and not last:
            self._stop(stop, f"saved at step {done}; the same command resumes")

    def _rate_of(self, update: Update) -> float:
        """Return the learning rate of an update, which may follow its batch where that grows (`batch.rate_rule`)."""
        return self._rate(update.step) * rate_factor(self.recipe.batch.rate_rule, update.steps)

    def _stop_between_generations(self) -> None:
        """End an elastic run that was asked to stop before this generation has begun: a step of it may take long, as
        replicas were lost. Raises Stopped, once what the generations before have learned is saved."""
        if self.memory is None:
            return
        stop = max(self.engine.processes.gather(self._signal or 0))
        step = self.progression.step
        if not stop or step == self.lengths.total:
            return
        # The step's own checkpoint may have been written, with the scores of its evaluation.
        saved = self.engine.processes.from_main(
            lambda: [manifest.step for manifest in self.checkpoints.manifests(self.monitor.say)]
        )
        if step and step not in saved:
            self._save(scheduled=False, evaluated=False)
        self._stop(stop, f"saved at step {step}; the same command resumes" if step else "the same command begins")

    def _stop(self, number: int, text: str) -> NoReturn:
        """Raises Stopped, once the run is saved. Args: number: of the signal that asked for it."""
        elastic = self.engine.processes.elastic
        if elastic is not None and self.engine.topology.is_main:
            elastic.note_saved()
        self._raise(Stopped, f"{name_of(number)}: {text}")

    def _log(self, result: StepResult, update: Update) -> None:
        """Report the steps since the last log line. Here, and only here, the loop waits for the device."""
        done, progression, recipe = update.end, self.progression, self.recipe
        images, steps, in_row = progression.images, progression.steps_in_window, result.skipped_in_row.item()
        if not images:
            fault = f"no image of the last {count(steps, 'step')} can be read; the last: {self._last_unreadable}"
            self._raise(DataError, f"step {done}: {fault}; mend that, then rerun the same command")
        skipped = progression.skipped = result.skipped.item()
        rate, flops, waiting = self._clock.lap(max(self.engine.processes.gather(self.engine.data_wait())))
        values = {
            "epoch": self._epochs(done),
            "loss": self._loss.item() / steps * (steps * recipe.batch.global_ / images),  # unreadable images added 0
            "top1": self._correct.item() / images,
            "lr": self._rate_of(update),
            **({"batch": update.steps * recipe.batch.global_} if recipe.batch.schedule else {}),
            # None where the update is made on a device that does not report them.
            **{f"{kind}_norm": getattr(result.norms, kind).item() for kind in _NORMS if result.norms is not None},
            "skipped_steps": skipped,
            "unreadable_images": progression.unreadable,
            "loss_scale": result.loss_scale.item(),
            "images_per_second": rate,
            "mfu": flops / self._peak_flops,
            "data_wait": waiting,
            "seconds": self._clock.seconds(),
        }
        if recipe.log.trust_ratios and result.norms is not None:
            trust = result.norms.trust
            ratios = torch.stack(list(trust.values())).tolist() if trust else []
            values["trust"] = {name: float(f"{ratio:.6g}") for name, ratio in zip(trust, ratios)}
        left = (self.lengths.total - done) * recipe.batch.global_ / rate
        text = (
            f"step {done}/{self.lengths.total}  loss {values['loss']:.3f} top1 {values['top1']:.1%} {pace(rate)} "
            f"MFU {values['mfu']:.0%} wait {waiting:.0%} ETA {duration(left)}"
        )
        if skipped:
            text += f" {self._skipped_of(done)}"
        whole, layers = self.engine.noise_scale()
        if whole is not None:
            values["noise_scale"] = whole._asdict()
            text += f" noise {whole}"
            if layers:
                values["noise_scale_by_layer"] = {name: float(f"{each.images:.6g}") for name, each in layers.items()}
        self.monitor.event("train", done, values, text)
        self._loss.zero_()
        self._correct.zero_()
        progression.images = progression.steps_in_window = 0
        if done < self.lengths.total:
            for line in self.engine.balance(done):
                self.monitor.say(line)
        self._check_loss(values["loss"], done)
        if in_row > recipe.precision.max_skipped_steps:
            remedy = "lower precision.loss_scale or schedule.peak"
            if recipe.precision.dynamic_loss_scale:
                remedy = f"the loss scale has fallen to {values['loss_scale']:g}, so lower schedule.peak"
            skipped = count(in_row, "update")
            fault = f"the last {skipped} had gradients that are not finite and were left out{self._not_finite()}"
            weights = f"the weights are those of step {done - in_row}"
            self._raise(TrainingError, f"step {done}: {fault}; {weights}; {remedy} (or peak_per_image)")

    def _not_finite(self) -> str:
        """Name the parameter nearest to the loss whose gradient is not finite; it spoils all those before it."""
        found = {name for own in self.engine.processes.gather(self.engine.not_finite()) for name in own}
        names = [name for name in self.engine.shapes if name in found]
        if len(names) > 1:
            return f" (that of {names[-1]} and of {count(len(names) - 1, 'parameter')} before it)"
        return f" ({names[0]})" if names else ""

    def _grow(self, done: int) -> None:
        """Make the batch larger where the schedule and the noise scale allow it."""
        noise = self.engine.noise_scale()[0] if self._course.may_grow(done) else None
        batch = self._course.grow(done, noise.images, noise.error) if noise is not None else None
        if batch is not None:
            self.progression.growth = [list(each) for each in self._course.growth]
            scale = f"noise scale {noise.images:,.0f} ± {noise.error:,.0f}"
            self.monitor.say(f"batch {batch:,} from epoch {self._epochs(done):g} on: {scale}")

    def _check_loss(self, loss: float, done: int) -> None:
        """Raises TrainingError where the loss was above run.loss_limit in some log lines in a row."""
        times, progression = self.recipe.run.loss_limit, self.progression
        limit = times * math.log(self.recipe.model.classes)
        progression.lines_above_limit = progression.lines_above_limit + 1 if loss > limit else 0
        if progression.lines_above_limit == _LINES_ABOVE_LIMIT:
            fault = (
                f"the training loss is {loss:.3g}, and was above {limit:.3g} ({times:g} times that of guessing) in "
                f"{_LINES_ABOVE_LIMIT} lines of the log in a row: the run has diverged"
            )
            remedy = "lower schedule.peak (or peak_per_image), or raise run.loss_limit"
            self._raise(TrainingError, f"step {done}: {fault}; {remedy}")

    def _raise(self, kind: Type[Exception], message: str) -> NoReturn:
        """Raises an error that all ranks raise; only the main one has the message."""
        raise kind(message if self.engine.topology.is_main else "") from None

    def _trace(self, last: bool) -> None:
        """Write the timeline once the steps to trace, which follow the session's first, are done."""
        end = 1 + self.recipe.log.trace
        if end > 1 and (self._updates == end or (last and self._updates < end)):
            spans = self.engine.recorder.collect() if self.engine.recorder else []
            if spans:
                self.monitor.check()
                stages = self.engine.topology.stages
                virtual = self.recipe.parallel.virtual_stages or 1 if stages > 1 else 1
                micro_batches = self.engine.batch.accumulation
                self.monitor.say(timeline.write(self.trace_folder, spans, micro_batches, stages, virtual))

    def _evaluate(self, step: int) -> None:
        """Score the weights and the averages that exist so far."""
        with self.engine.using(TRAINED):
            scores = evaluate(self.engine, self.evaluation_batches)
        values = scores._asdict()
        del values["confusion"]
        text = f"{accuracy(scores.top1, scores.top5, self.recipe.model.classes)}  loss {scores.loss:.4f}"
        for name in self.engine.averages():
            with self.engine.using(name):
                average = evaluate(self.engine, self.evaluation_batches)
            values[name] = {"top1": average.top1, "top5": average.top5, "loss": average.loss}
            text += f"  {name.replace('_', ' ')} {average.top1:.2%}"
        self.progression.scores = values
        self._note_best(scores.top1, values)
        left_out = f"; {scores.unreadable} unreadable left out" if scores.unreadable else ""
        text = f"evaluation after epoch {self._epochs(step):.2f}: {text}  ({count(scores.images, 'image')}){left_out}"
        self.monitor.event("eval", step, {"epoch": self._epochs(step), **values}, text)

    def _note_best(self, trained: float, scores: Mapping[str, Any]) -> None:
        """Keep the best top-1 of the trained weights, and the best of all weights; at a tie the earlier one."""
        progression = self.progression
        progression.best_top1 = max(progression.best_top1, trained)
        if progression.best_of_all < progression.best_top1:
            progression.best_of_all = progression.best_top1
            progression.best_weights = TRAINED
        for name, top1 in top1_by_weights(scores).items():
            if top1 > progression.best_of_all:
                progression.best_of_all = top1
                progression.best_weights = name

    def _remember(self) -> None:
        """Keep what the run goes on with if a replica is lost."""
        if self.memory is not None:
            self._note_sums()
            self.memory.keep(self.engine, self.progression)

    def _note_sums(self) -> None:
        progression, clock = self.progression, self._clock
        progression.seconds, progression.paused, progression.waited = clock.seconds(), clock.paused, clock.waited
        progression.loss, progression.correct = self._loss.item(), int(self._correct.item())

    def _save(self, scheduled: bool, evaluated: bool) -> None:
        """Save the run. Only scheduled checkpoints leave an event: a signal must not show in the metrics."""
        progression = self.progression
        progression.metrics_bytes = self.monitor.position()
        progression.logged_checkpoint = scheduled
        self._note_sums()
        content = {
            "recipe": loading.dump(self.recipe),
            "engine": self.engine.state_dict(),
            "progression": asdict(progression),
            "classes": list(self.classes),
        }
        replica_states = self.engine.replica_states()
        if not self.engine.topology.is_main:
            for _ in replica_states:
                pass  # sends this rank's to the main one
            return
        top1 = max(top1_by_weights(progression.scores).values()) if evaluated else None
        self.monitor.check()
        self.checkpoints.save(progression.step, content, top1, replica_states)
        if scheduled:
            note_checkpoint(self.monitor, progression)

    def _end(self) -> None:
        scores, best, seconds = self.progression.scores, self.progression.best_top1, self._clock.seconds()
        images = self.lengths.total * self.recipe.batch.global_
        waited = self._clock.waited / max(seconds - self._clock.paused, 1e-9)
        workers = workers_needed(self.recipe.data.workers, waited) if waited > _INPUT_BOUND else None
        averages = {name: scores[name] for name in AVERAGES if name in scores}
        values = {
            **{"top1": scores["top1"], "top5": scores["top5"], "best_top1": best, **averages},
            **{"images": images, "images_per_second": images / seconds, "seconds": seconds},
            **{"data_wait": waited, "input_bound": workers is not None, "workers_needed": workers},
        }
        own = "".join(f"{name.replace('_', ' ')} {each['top1']:.2%}  " for name, each in averages.items())
        which = self.progression.best_weights
        whose = "trained weights" if which == TRAINED else which.replace("_", " ")
        best_of_all = f"{self.progression.best_of_all:.2%} ({whose})"
        text = (
            f"done: {accuracy(scores['top1'], scores['top5'], self.recipe.model.classes)}  "
            f"best top1 {best_of_all}  {own}"
            f"{duration(seconds)}, {pace(images / seconds)} with evaluation and checkpoints"
        )
        skipped = self.progression.skipped
        if skipped:
            text += f"  {self._skipped_of(self.lengths.total)}"
        if 2 * skipped > self.lengths.total:
            text += (
                "\nmost updates were skipped: their gradients were not finite, and only the others changed "
                "the weights; start a new run with a lower schedule.peak (or peak_per_image) or precision.loss_scale"
            )
        if workers is not None:
            here = cores.available()
            text += (
                f"\ninput-bound: {waited:.0%} of the training time went to waiting for images; data.workers={workers} "
                f"would keep up instead of {self.recipe.data.workers}, given a core for each (here: {here})"
            )
        self.monitor.event("end", self.lengths.total, values, text)

    def _skipped_of(self, done: int) -> str:
        """How many updates were left out until step `done`; with a batch schedule an update may be several steps."""
        of_all = "" if self.recipe.batch.schedule else f" of {done}"
        return f"{self.progression.skipped}{of_all} updates skipped"

    def _epochs(self, step: int) -> float:
        return step / self.lengths.steps_per_epoch

    def _note_signal(self, number: int, frame: object) -> None:
        if self._signal is None:
            self._signal = number
            if self.memory is not None:
                self.memory.signal = number
            with contextlib.suppress(RuntimeError):  # the signal came in the midst of printing
                self.monitor.say(f"{name_of(number)}: finishing this step, then saving")
        elif number == signal.SIGINT:  # asked again by hand: leave at once, the last checkpoint stands
            raise KeyboardInterrupt


def note_checkpoint(monitor: Monitor, progression: Progression) -> None:
    """Report a scheduled checkpoint, once it is on the disk, or when a run resumes from it."""
    monitor.event("checkpoint", progression.step, {"file": f"checkpoints/step-{progression.step:08d}.pt"}, "")
