"""The training loop, on any engine. The order within a step is update, log, evaluation, checkpoint.

A checkpoint therefore covers everything written before it, and a resumed run writes the rest as an
undisturbed one.
"""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    Mapping,
    NoReturn,
    Optional,
    Sequence,
    Type,
)

import torch

from common import progress
from common.errors import DataError
from common.text import count
from data.batches import MicroBatch
from engines import losses
from engines.base import Diverged, Engine, StepResult
from optim import schedule
from parallel.generations import Regroup
from recipe import loading
from recipe.batch import Lengths, in_steps, rate_factor
from recipe.config import Recipe
from recipe.course import Course, Update
from training import ending, log_line, timeline
from training.checkpoint import CheckpointFolder
from training.continuation import Continuation
from training.monitor import Clock, Monitor
from training.profiling import Recordings
from training.progression import Progression
from training.scoring import accuracy, evaluate
from training.stopping import StopSignals, name_of
from training.weights import TRAINED, best_of, top1_by_weights

_LINES_ABOVE_LIMIT = 3  # of the log in a row, after which a run has diverged
_LOWER_THE_PEAK = "start a new run with a lower schedule.peak (or peak_per_image)"


class TrainingError(Exception):
    """The run cannot go on: one line with the reason and the remedy."""


class Stopped(Exception):
    """A signal stopped the run; it was saved and a rerun resumes it."""


@dataclass
class Trainer:
    """One run from a step to its end.

    evaluation_batches: this process's share of the validation images.
    checkpoints, monitor: those of other ranks than the main one write nothing.
    flops_per_image: of forward and backward pass, by epoch.
    classes: names, for checkpoints.
    trace_folder: for the timeline of `log.trace`.
    recordings: of torch's profilers.
    continuation: remembers the steps of an elastic run.
    """

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
    continuation: Continuation

    def __post_init__(self) -> None:
        recipe = self.recipe
        progression = self.progression
        per_epoch = self.lengths.steps_per_epoch
        self._recipe_text = loading.dump(recipe)  # for checkpoints
        self._rate = schedule.create(recipe, self.lengths)
        self._evaluate_every = self._interval(recipe.evaluation.every_epochs)
        self._save_every = self._interval(recipe.checkpoint.every_epochs)
        # Measured before the clock starts: it is no part of the run.
        self._peak_flops = self.engine.peak_flops()
        self._clock = Clock(progression.seconds, progression.paused, progression.waited)
        self._own_wait = 0.0  # of this process for images, up to the last log line
        # On the device, so that nothing waits. The loss in double precision, as a window may have
        # thousands of steps.
        device = self.engine.device
        self._loss = torch.tensor(progression.loss, dtype=torch.float64, device=device)
        self._correct = torch.tensor(progression.correct, dtype=torch.int64, device=device)
        self._course = Course(recipe, per_epoch, self.lengths.total, progression.growth)
        # Counted once: with other images the course would count those before them otherwise.
        if progression.updates is None:
            progression.updates = len(self._course.done(progression.step))
        self._updates = 0  # of this session
        # A checkpoint has the steps since the last log line, from which their updates follow.
        begin = progression.step - progression.steps_in_window
        done = self._course.done(progression.step)
        self._updates_in_window = sum(update.step >= begin for update in done)
        self._signal: Optional[int] = self.continuation.signal
        self._last_unreadable = ""
        self._activity = "training"

    def _interval(self, epochs: float) -> int:
        """Return an interval in steps, at least one."""
        per_epoch = self.lengths.steps_per_epoch
        return max(1, in_steps(epochs, None, None, per_epoch, self.recipe.batch.global_))

    def run(self, micro_batches: Iterator[MicroBatch]) -> None:
        """Train to the end.

        Args:
            micro_batches: of this replica, from the current step on.

        Raises:
            Stopped: after a signal, once the step is saved.
            Regroup: an elastic run goes on with other replicas.
            TrainingError: weights or loss are beyond reason.
            DataError: no image since the last log line could be read.
        """
        # Before the first update: a replica may be lost within it.
        self._remember()
        shown = progress.lines(self._progress, self._share, elsewhere=False)
        with contextlib.closing(self.recordings), StopSignals(self._note_signal), shown:
            self._stop_between_generations()
            for update in self._course.updates(self.progression.step, self.progression.updates):
                # Also of a resumed run, which may have been killed before it could report its end.
                if self._lost_patience():
                    break
                try:
                    self._step(micro_batches, update)
                except Diverged as error:
                    self._fail(
                        f"step {update.end}: {error}; start a new run with a lower schedule.peak "
                        "(or peak_per_image) or precision.loss_scale"
                    )
            self._score_if_complete()
        self._end()

    def _score_if_complete(self) -> None:
        """Score and save a run that has no step left, but no scores of its images either.

        Other images have made it complete (`take_images` in training/resuming.py).
        """
        if self.progression.scores:
            return
        step = self.progression.step
        done = f"step {step:,} of {self.lengths.total:,} is done with these images"
        self.monitor.say(f"{done}: the run ends with an evaluation")
        with self._pause():
            self._activity = "evaluating"
            self._evaluate(step)
            # As at every end: the file has the scores by which --best chooses.
            self._save(scheduled=True, evaluated=True)
        self._remember()

    def _step(self, micro_batches: Iterator[MicroBatch], update: Update) -> None:
        """Make an update with all that belongs to it: log line, scores, checkpoint."""
        # Else images would be trained on as those of other steps: the loader goes on from there.
        assert update.step == self.progression.step, (update, self.progression.step)
        last = update.end == self.lengths.total
        log = last or update.reaches(self.recipe.log.every_steps)
        with self.recordings.update(update.step):
            rate = self._rate_of(update)
            result = self.engine.train_step(micro_batches, update, rate, measure=log)
        # Before anything is noted of the update, which an elastic run may have to make again.
        self.continuation.check(self.engine)
        self._count(result, update)
        # Before the evaluation, which also scores the average over epochs.
        if update.end % self.lengths.steps_per_epoch == 0:
            self.engine.end_epoch()
        if log:
            self._log(result, update)
        # Between two updates: replicas may compute other shares of the next one.
        if log and not last:
            self._balance(update.end)
        # Before the save: a resumed run must have grown, too.
        self._grow(update.end)
        # No training time: a rate, and the share that was waited for images, would be too low.
        evaluated = last or update.reaches(self._evaluate_every)
        with self._pause():
            self.recordings.after_update(last)
            if evaluated:
                self._activity = "evaluating"
                self._evaluate(update.end)
                self._activity = "training"
            # The scores decide on all ranks alike, as they are sums over ranks.
            last = last or self._lost_patience()
            self._trace(last)
        # An early end is known by the scores alone: the steps since the last line have theirs now.
        if last and not log:
            self._log(result, update)
        scheduled = last or update.reaches(self._save_every)
        self._save_or_stop(update.end, last=last, scheduled=scheduled, evaluated=evaluated)

    def _progress(self) -> str:
        """Return the live line of a terminal. Another thread calls it: nothing waits for a device."""
        return f"{self._activity}: step {self.progression.step:,} of {self.lengths.total:,}"

    def _share(self) -> float:
        """Return the share of the run's steps that are done."""
        # Other images may have made the run shorter than what is done.
        return min(1.0, self.progression.step / self.lengths.total)

    def _count(self, result: StepResult, update: Update) -> None:
        """Add an update to the sums since the last log line. Nothing waits for the device."""
        progression = self.progression
        self._loss += result.loss * update.steps
        self._correct += result.correct
        progression.images += result.images
        progression.steps_in_window += update.steps
        # With unreadable images, which took time, too.
        images = self.recipe.batch.global_ * update.steps
        epoch = update.step // self.lengths.steps_per_epoch
        self._clock.images += images
        self._clock.operations += images * self.flops_per_image(epoch)
        for message in result.unreadable:
            progression.unreadable += 1
            self._last_unreadable = message
            self.monitor.say(f"left out: {message}")
        progression.step = update.end
        progression.updates = update.index + 1
        self._updates += 1
        self._updates_in_window += 1

    def _lost_patience(self) -> bool:
        """Return whether so many evaluations found nothing better that the run ends."""
        return self.progression.has_lost_patience(self.recipe.evaluation.patience)

    def _is_best(self) -> bool:
        """Return whether the last evaluation is to be kept, as the best so far.

        Its scores are sums over ranks, so all ranks decide alike.
        """
        return self.recipe.checkpoint.keep_best and self.progression.without_better == 0

    def _save_or_stop(self, done: int, *, last: bool, scheduled: bool, evaluated: bool) -> None:
        """Save the run if it is time, and leave the loop if a signal or a replica asks for it."""
        processes = self.engine.processes
        elastic = processes.elastic
        with self._pause():
            # One message: the strongest signal of all ranks, and whether the main one regroups.
            # With several ranks it is that of the update before, so that none waits for it.
            waits = elastic is not None and self.engine.topology.is_main and elastic.wants()
            stop, regroup = divmod(processes.agree_late(2 * (self._signal or 0) + waits), 2)
            if scheduled or stop:
                self._save(scheduled, evaluated)
            elif evaluated and self._is_best():
                # Else its weights would be lost: a checkpoint may be due less often.
                self._save(scheduled, evaluated, only_best=True)
        # Last: a step counts as done only with its scores and its checkpoint.
        self._remember()
        # A run that has come to its end reports that, whoever asked it to stop.
        if last:
            return
        if stop:
            self._stop(stop, f"saved at step {done}; the same command resumes")
        if regroup:
            processes.wait_for_all()  # else the first to go would end what others still do
            raise Regroup

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        """Count the time of a block as not spent training."""
        start = time.monotonic()
        yield
        self._clock.paused += time.monotonic() - start

    def _rate_of(self, update: Update) -> float:
        """Return the learning rate of an update, which may follow its batch (batch.rate_rule)."""
        return self._rate(update.step) * rate_factor(self.recipe.batch.rate_rule, update.steps)

    # Stopping ---------------------------------------------------------------------------------

    def _stop_between_generations(self) -> None:
        """End an elastic run that was asked to stop before this generation has begun.

        A step of it may take long, as replicas were lost. Raises Stopped, once what the generations
        before have learned is saved.
        """
        processes = self.engine.processes
        if processes.elastic is None:
            return
        # Any rank's signal counts: a scheduler may have signalled only one host.
        stop = max(processes.gather(self._signal or 0))
        step = self.progression.step
        if not stop or step >= self.lengths.total:
            return
        # The step's own checkpoint may have been written, with the scores of its evaluation.
        saved = processes.from_main(
            lambda: [manifest.step for manifest in self.checkpoints.manifests(self.monitor.say)]
        )
        if step and step not in saved:
            self._save(scheduled=False, evaluated=False)
        if step:
            self._stop(stop, f"saved at step {step}; the same command resumes")
        self._stop(stop, "the same command begins")

    def _stop(self, number: int, text: str) -> NoReturn:
        """Raise Stopped, once the run is saved, for the signal of this number."""
        elastic = self.engine.processes.elastic
        if elastic is not None and self.engine.topology.is_main:
            elastic.note_saved()
        self._raise(Stopped, f"{name_of(number)}: {text}")

    def _note_signal(self, number: int, frame: object) -> None:
        """Remember a signal until the update is done; a second Ctrl-C ends the run at once."""
        # Only noted: an update that is broken off could not be saved.
        if self._signal is None:
            self._signal = number
            self.continuation.signal = number
            with contextlib.suppress(RuntimeError):  # the signal came in the midst of printing
                self.monitor.say(f"{name_of(number)}: finishing this step, then saving")
        elif number == signal.SIGINT:
            # Asked again by hand: leave at once, the last checkpoint stands.
            raise KeyboardInterrupt

    def _fail(self, message: str) -> NoReturn:
        """Raise TrainingError."""
        self._raise(TrainingError, message)

    def _raise(self, kind: Type[Exception], message: str) -> NoReturn:
        """Raise an error that all ranks raise; only the main one has the message."""
        raise kind(message if self.engine.topology.is_main else "") from None

    # Log lines --------------------------------------------------------------------------------

    def _log(self, result: StepResult, update: Update) -> None:
        """Report the steps since the last log line. Waits for the device.

        Between two log lines the loop waits for scores and checkpoints only, and at the end of an
        epoch where the batch may grow; an elastic run waits in each update, to remember it.
        """
        done = update.end
        self._check_readable(done)
        skipped_in_row = int(result.skipped_in_row.item())
        # The slowest rank's, as the others wait for it.
        own_wait = self.engine.data_wait()
        lap = self._clock.lap(max(self.engine.processes.gather(own_wait)))
        self._own_wait = own_wait
        values = log_line.values_of(
            self._window(update),
            result,
            lap,
            peak_flops=self._peak_flops,
            with_trust_ratios=self.recipe.log.trust_ratios,
        )
        self.progression.skipped = values["skipped_steps"]
        # Seconds, at the pace of this window: evaluations and checkpoints to come are left out.
        left = (self.lengths.total - done) * self.recipe.batch.global_ / lap.images
        text = log_line.text_of(values, done, self.lengths.total, left)
        text += self._add_noise(values)
        self.monitor.event("train", done, values, text)
        self._begin_window()
        # After the line is written: it shows what ended the run.
        self._check_loss(values["loss"], done)
        self._check_skipped(skipped_in_row, values["loss_scale"], done)

    def _check_readable(self, done: int) -> None:
        """Raise DataError where no image since the last log line could be read."""
        progression = self.progression
        if progression.images:
            return
        skipped = count(progression.steps_in_window, "step")
        fault = f"no image of the last {skipped} can be read"
        self._raise(
            DataError,
            f"step {done}: {fault}; the last: {self._last_unreadable}; mend that, then rerun the same command",
        )

    def _add_noise(self, values: Dict[str, Any]) -> str:
        """Add the noise scale to the values of an event; return its words, empty where unknown."""
        whole, layers = self.engine.noise_scale()
        if whole is None:
            return ""
        values["noise_scale"] = whole._asdict()
        if layers:
            values["noise_scale_by_layer"] = log_line.by_layer(layers)
        return f" noise {whole}"

    def _window(self, update: Update) -> log_line.Window:
        """Return the sums since the last log line. Waits for the device."""
        progression = self.progression
        batch = update.steps * self.recipe.batch.global_
        return log_line.Window(
            epoch=self._epochs(update.end),
            loss=self._loss.item(),
            correct=int(self._correct.item()),
            steps=progression.steps_in_window,
            updates=self._updates_in_window,
            images=progression.images,
            global_batch=self.recipe.batch.global_,
            lr=self._rate_of(update),
            batch=batch if self.recipe.batch.schedule else None,
            unreadable=progression.unreadable,
            seconds=self._clock.seconds(),
        )

    def _begin_window(self) -> None:
        """Begin new sums, once a log line has reported the old ones."""
        self._loss.zero_()
        self._correct.zero_()
        self.progression.images = 0
        self.progression.steps_in_window = 0
        self._updates_in_window = 0

    def _check_loss(self, loss: float, done: int) -> None:
        """Raise TrainingError where the loss was above run.loss_limit in some lines in a row."""
        # Written so that a loss of NaN does not count, which max_skipped_steps is for.
        times = self.recipe.run.loss_limit
        limit = times * losses.of_guessing(self.recipe.data, self.recipe.model.classes)
        progression = self.progression
        if not loss > limit:
            progression.lines_above_limit = 0
            return
        progression.lines_above_limit += 1
        if progression.lines_above_limit == _LINES_ABOVE_LIMIT:
            self._fail(
                f"step {done}: the training loss is {loss:.3g}, and was above {limit:.3g} "
                f"({times:g} times that of guessing) in {_LINES_ABOVE_LIMIT} lines of the log in a "
                f"row: the run has diverged; {_LOWER_THE_PEAK}, or raise run.loss_limit"
            )

    def _check_skipped(self, in_row: int, loss_scale: float, done: int) -> None:
        """Raise TrainingError where too many updates in a row were left out."""
        # A few are usual with a dynamic loss scale, which looks for its limit.
        if in_row <= self.recipe.precision.max_skipped_steps:
            return
        # Not the last steps: with a batch schedule an update may be several.
        left_out = self._course.done(done)[-in_row:]
        remedy = "start a new run with a lower precision.loss_scale or schedule.peak"
        if self.recipe.precision.dynamic_loss_scale:
            remedy = f"the loss scale has fallen to {loss_scale:g}, so start a new run with a lower schedule.peak"
        self._fail(
            f"step {done}: the last {count(in_row, 'update')} had gradients that are not finite "
            f"and were left out{self._not_finite()}; the weights are those of step "
            f"{left_out[0].step}; {remedy} (or peak_per_image)"
        )

    def _not_finite(self) -> str:
        """Name the parameter nearest to the loss whose gradient is not finite.

        It spoils all those before it.
        """
        # Gradients flow from the loss back, so the last spoilt parameter is the nearest to it.
        by_rank = self.engine.processes.gather(self.engine.not_finite())
        spoilt = {name for rank_names in by_rank for name in rank_names}
        names = [name for name in self.engine.shapes if name in spoilt]
        if not names:
            return ""
        if len(names) == 1:
            return f" ({names[0]})"
        others = count(len(names) - 1, "parameter")
        return f" (that of {names[-1]} and of {others} before it)"

    # Between updates --------------------------------------------------------------------------

    def _grow(self, done: int) -> None:
        """Make the batch larger where the schedule and the noise scale allow it."""
        if not self._course.may_grow(done):
            return
        # Ranks have the same estimate, so all of them grow in the same update.
        noise, _ = self.engine.noise_scale()
        if noise is None:
            return
        batch = self._course.grow(done, noise.images, noise.error)
        if batch is not None:
            self.progression.growth = [list(change) for change in self._course.growth]
            scale = f"noise scale {noise.images:,.0f} ± {noise.error:,.0f}"
            self.monitor.say(f"batch {batch:,} from epoch {self._epochs(done):g} on: {scale}")

    def _balance(self, done: int) -> None:
        """Divide the next updates among the replicas by their speeds, where these are measured."""
        for line in self.engine.balance(done):
            self.monitor.say(line)

    def _trace(self, last: bool) -> None:
        """Write the timeline once the steps to trace, which follow the first, are done."""
        traced = self.recipe.log.trace
        if not traced:
            return
        end = 1 + traced
        if self._updates != end and not (last and self._updates < end):
            return
        # The spans of all ranks; only the main one has any then.
        recorder = self.engine.recorder
        spans = recorder.collect() if recorder else []
        if not spans:
            return
        # Nothing is written into a folder that was replaced meanwhile.
        self.monitor.check()
        stages = self.engine.topology.stages
        virtual = self.recipe.parallel.virtual_stages or 1
        line = timeline.write(
            self.trace_folder,
            spans,
            stages,
            virtual if stages > 1 else 1,
        )
        self.monitor.say(line)

    # Scores -----------------------------------------------------------------------------------

    def _evaluate(self, step: int) -> None:
        """Score the weights and the averages that exist so far, and report the scores."""
        scores = self._scores()
        # Kept for the checkpoint: by these --best chooses among its weights.
        self.progression.scores = scores
        self._note_best(scores["top1"], scores)
        epochs = self._epochs(step)
        details = {"epoch": epochs, **scores}
        # Only scores of the same validation images are compared.
        if self.progression.validation_set:
            details["validation_set"] = self.progression.validation_set
        text = f"evaluation after epoch {epochs:.2f}: {self._text_of(scores)}"
        self.monitor.event("eval", step, details, text)

    def _scores(self) -> Dict[str, Any]:
        """Return the scores of the trained weights, and those of each average by its name."""
        with self.engine.using(TRAINED):
            scores = evaluate(self.engine, self.evaluation_batches)._asdict()
        for name in ("calibration_error", "confusion"):  # of evaluate.py only
            del scores[name]
        for name in self.engine.averages():
            with self.engine.using(name):
                average = evaluate(self.engine, self.evaluation_batches)
            scores[name] = {"top1": average.top1, "top5": average.top5, "loss": average.loss}
        return scores

    def _text_of(self, scores: Mapping[str, Any]) -> str:
        """Return an evaluation's scores as the terminal shows them."""
        top = accuracy(scores["top1"], scores["top5"], self.recipe.model.classes)
        text = f"{top}  loss {scores['loss']:.4f}"
        for name in self.engine.averages():
            text += f"  {name.replace('_', ' ')} {scores[name]['top1']:.2%}"
        text += f"  ({count(scores['images'], 'image')})"
        if scores["unreadable"]:
            text += f"; {scores['unreadable']} unreadable left out"
        return text

    def _note_best(self, trained: float, scores: Mapping[str, Any]) -> None:
        """Keep the best top-1 of the trained weights, and of all weights; at a tie the earlier."""
        # best_top1 is what metrics report, best_of_all what --best chooses.
        progression = self.progression
        # A checkpoint of an older version has no best of all, only that of the trained weights.
        if progression.best_of_all < progression.best_top1:
            progression.best_of_all = progression.best_top1
            progression.best_weights = TRAINED
        progression.best_top1 = max(progression.best_top1, trained)
        name = best_of(scores)
        top1 = top1_by_weights(scores)[name]
        better = top1 > progression.best_of_all
        if better:
            progression.best_of_all = top1
            progression.best_weights = name
        progression.without_better = 0 if better else progression.without_better + 1

    def _note_whose_best(self) -> None:
        """Keep whose the best top-1 is where a checkpoint repeats it: --best takes the newest."""
        progression = self.progression
        name = best_of(progression.scores)
        if top1_by_weights(progression.scores)[name] == progression.best_of_all:
            progression.best_weights = name

    # Saving -----------------------------------------------------------------------------------

    def _remember(self) -> None:
        """Keep what an elastic run goes on with if a replica is lost."""
        if self.engine.processes.elastic is not None:
            self._note_sums()
        self.continuation.keep(self.engine, self.progression)

    def _note_sums(self) -> None:
        """Copy the sums of the loop into the state that is saved. Waits for the device."""
        progression = self.progression
        progression.seconds = self._clock.seconds()
        progression.paused = self._clock.paused
        # Since the last log line by this process alone: asking all would hold up each update of an
        # elastic run.
        progression.waited = self._clock.waited + self.engine.data_wait() - self._own_wait
        progression.loss = self._loss.item()
        progression.correct = int(self._correct.item())

    def _save(self, scheduled: bool, evaluated: bool, only_best: bool = False) -> None:
        """Save the run.

        Only scheduled checkpoints leave an event: a signal must not show in the metrics.

        Args:
            scheduled: whether a checkpoint is due.
            evaluated: whether the scores are those of this step.
            only_best: whether it is saved for its score alone.
        """
        progression = self.progression
        progression.metrics_bytes = self.monitor.position()
        progression.logged_checkpoint = scheduled
        if evaluated:
            self._note_whose_best()
        self._note_sums()
        # Every rank takes part: states of other stages are sent to the main one, which writes.
        content = {
            "recipe": self._recipe_text,
            "engine": self.engine.state_dict(),
            "progression": asdict(progression),
            "classes": list(self.classes),
        }
        # A generator: one replica's state at a time is in memory.
        replica_states = self.engine.replica_states()
        if not self.engine.topology.is_main:
            for _ in replica_states:
                pass  # sends this rank's to the main one
            return
        # Scores of an earlier step are not this checkpoint's.
        top1 = max(top1_by_weights(progression.scores).values()) if evaluated else None
        self.monitor.check()
        self.checkpoints.save(
            progression.step,
            content,
            top1,
            replica_states,
            only_best=only_best,
            validation_set=progression.validation_set,
        )
        if scheduled:
            note_checkpoint(self.monitor, progression)

    # The end ----------------------------------------------------------------------------------

    def _end(self) -> None:
        """Report the run as a whole."""
        self._note_sums()
        done = self.progression.step
        made = self.progression.updates
        assert made is not None, "counted as the loop began"
        ended = ending.Ending(
            recipe=self.recipe,
            progression=self.progression,
            updates=made,
            total=self.lengths.total,
        )
        self.monitor.event("end", done, ending.values_of(ended), "\n".join(ending.lines(ended)))

    def _epochs(self, step: int) -> float:
        """Return how many epochs so many steps are."""
        return step / self.lengths.steps_per_epoch


def note_checkpoint(monitor: Monitor, progression: Progression) -> None:
    """Report a scheduled checkpoint, once it is on the disk, or when a run resumes from it.

    Args:
        monitor: gets the event.
        progression: as it was saved.
    """
    file = f"checkpoints/step-{progression.step:08d}.pt"
    monitor.event("checkpoint", progression.step, {"file": file}, "")
