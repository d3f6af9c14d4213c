"""The second ladder: batches of 96 to 1536 with at least 600 updates, six optimizers, and equal
tuning for all.
"""

import itertools
import math
import statistics
from pathlib import Path
from typing import (
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    cast,
)

from benchmarks import claims
from benchmarks.evidence import page
from benchmarks.evidence.experiment import (
    Experiment,
    Label,
    Part,
    Series,
    batch_schedule,
    changed,
    search_table,
)
from benchmarks.evidence.runs import Run, curve, events_of
from benchmarks.evidence.tuning import FourRates, rounded
from optim import schedule
from recipe.batch import lengths, peak_learning_rate, steps_per_epoch
from recipe.config import Recipe
from recipe.course import Course, Update
from tools.planning import batches

CLASSES = 50
BATCHES = (96, 192, 384, 768, 1536)
TUNED = (96, 384, 1536)  # between them a rate is interpolated
SMALLEST = BATCHES[0]
LARGEST = BATCHES[-1]
IMAGES = 61440
EPOCHS = 15
WARMUP = 1.5  # epochs
TRIAL_EPOCHS = 5
TRIAL_SEEDS = (0, 1)
SEEDS = (2, 3, 4)
TARGET = 0.9  # of top-1, of which it is told after how many updates it is reached
# Local steps, on replicas with SMALLEST images each: between two means as many images as in an
# update of LARGEST.
REPLICAS = 4
LOCAL_STEPS = 4

# Kinds of rows.
EPOCHS_EQUAL = "equal epochs"
UPDATES_EQUAL = "equal updates"
GROWING = "growing batch"
LOCAL = "local steps"

# Optimizers that are named below.
NESTEROV = "SGD, Nesterov"
LARS = "LARS gradient"
LARS_MOMENTUM = "LARS momentum"

_GROWTH = (Part(0, 1), Part(0.4, 2), Part(0.6, 4), Part(0.8, 8))
# Overrides of all runs.
_BASE = (
    f"data.train_images={IMAGES}",
    "evaluation.every_epochs=0.5",
    f"schedule.warmup_epochs={WARMUP}",
    f"model.classes={CLASSES}",
    "data.glyph_difficulty=0.3",
    "log.noise_scale=false",
    "log.every_steps=20",
)


class Rule(NamedTuple):
    """How an optimizer is used.

    overrides: of all its runs.
    guess: the peak rate around which those of every batch are tried.
    """

    overrides: Tuple[str, ...]
    guess: float


# In the order of the table.
RULES: Dict[str, Rule] = {
    LARS: Rule(("optimizer.trust=gradient", "optimizer.momentum=0.885"), guess=4.0),
    LARS_MOMENTUM: Rule(("optimizer.trust=momentum", "optimizer.momentum=0.885"), guess=4.0),
    "LAMB": Rule(("optimizer.name=lamb", "optimizer.weight_decay=0.01"), guess=0.01),
    NESTEROV: Rule(
        ("optimizer.name=sgd", "optimizer.nesterov=true", "optimizer.weight_decay=2.5e-6"),
        guess=0.1,
    ),
    "RMSprop": Rule(("optimizer.name=rmsprop", "optimizer.weight_decay=2.5e-6"), guess=0.008),
    "AdamW": Rule(("optimizer.name=adamw", "optimizer.weight_decay=0.05"), guess=0.004),
}


class Trials(FourRates):
    """The trials of an optimizer at a batch, over a third of the epochs; a rate is judged by two
    seeds.
    """

    def __init__(self, optimizer: str, batch: int):
        """
        Args:
            optimizer: one of RULES.
            batch: one of TUNED.
        """
        self.batch = batch
        rule = RULES[optimizer]
        overrides = (
            *rule.overrides,
            *_batch(batch),
            f"schedule.warmup_epochs={WARMUP * TRIAL_EPOCHS / EPOCHS:g}",
            f"run.epochs={TRIAL_EPOCHS}",
        )
        super().__init__(
            changed(_BASE, overrides),
            TRIAL_SEEDS,
            guess=rule.guess,
            classes=CLASSES,
        )


def _all_trials() -> Dict[Tuple[str, int], Trials]:
    """Return the trials by optimizer and batch."""
    return {at: Trials(*at) for at in itertools.product(RULES, TUNED)}


class Prediction(NamedTuple):
    """Updates of a batch to the target.

    batch: in images.
    trained: the updates that it took; None where the target was not reached.
    predicted: those that the noise scale of a run at the smallest batch predicts; may be infinite.
    """

    batch: int
    trained: Optional[int]
    predicted: float


class Ladder2(Experiment):
    """An EfficientNet-B0 G16 of width 0.2 and depth 0.1 at 16 px; 61,440 training and 4,096
    validation images of 50 kinds of glyphs at difficulty 0.3. LARS learns 97.8 % at 96 and 94.1 %
    at 1536, and two seeds differ by 0.1 and 0.5; at 0.6, as in the first ladder, they are four
    points apart. "equal epochs": 15 epochs, 9,600 updates at 96 and 600 at 1536. "equal updates":
    600 updates at every batch, at the same rates. A tenth of a run is warm-up, then the rate decays
    with power 2.

    The rule of tuning, written before the runs: for every optimizer, at 96, 384 and 1536, four peak
    rates, each with seeds 0 and 1 over 5 epochs: a third of a guess, the guess and three times it,
    then one beside the best (by √3 towards its better neighbour, or by 3 beyond the end). The
    lowest mean validation loss wins; a run that diverges counts as guessing. At the batches
    between, the rate is the geometric mean of its neighbours'. All other keys are those of the
    recipes. Then seeds 2, 3, 4 at full length: mean ± standard deviation; "lost" is against the
    smallest batch at equal epochs, "interval" its 95 % interval (Student's t). "to target": updates
    until 90 % top-1, of the middle seed.

    "growing batch": `batch.schedule` with 96 images at first, twice, four and eight times as many
    from 40, 60 and 80 % of the images on. "local steps": 4 replicas with batches of 96 and means of
    their weights after 4 steps, so that as many images lie between two exchanges as in an update of
    1536.

    **Published elsewhere**: Nado et al. (2102.06356): Nesterov momentum and Adam match LARS and
    LAMB where all are tuned equally; ResNet-50 in 2,512 steps at 32,768. Graphcore (2022): B4 G16
    with LARS loses nothing from 768 to 6144.
    """

    name = "ladder2"
    question = "From a batch of 96 to 1536 with enough updates and equal tuning: what does a large batch cost?"
    takes = "five hours, less for cached runs"

    def trials(self) -> Iterable[Run]:
        """Return the runs that tune."""
        return [run for trials in _all_trials().values() for run in trials.runs()]

    def peak(self, optimizer: str, batch: int) -> Optional[float]:
        """Return the peak rate of an optimizer at a batch; None until it is known.

        Args:
            optimizer: one of RULES.
            batch: one of BATCHES. At one without trials the rate is the geometric mean of its
                neighbours'.
        """
        near = [batch] if batch in TUNED else [batch // 2, batch * 2]
        rates = [Trials(optimizer, tuned).best() for tuned in near]
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(rates):
            return None
        return rounded(statistics.geometric_mean(known))

    def series(self) -> List[Series]:
        """Return the series whose rates are known by now."""
        series = []
        for kind, optimizer, batch in itertools.product(
            (EPOCHS_EQUAL, UPDATES_EQUAL), RULES, BATCHES
        ):
            # At the largest batch the runs of equal updates are those of equal epochs.
            if kind == EPOCHS_EQUAL or batch != LARGEST:
                series.append(self._tuned(kind, optimizer, batch))
        for optimizer, kind in itertools.product((NESTEROV, LARS), (GROWING, LOCAL)):
            series.append(self._tuned(kind, optimizer, SMALLEST))
        return [known for known in series if known is not None]

    def _tuned(self, kind: str, optimizer: str, batch: int) -> Optional[Series]:
        """Return a row of the table; None until its peak rate is known."""
        peak = self.peak(optimizer, batch)
        if peak is None:
            return None
        labels: Dict[str, Label] = {
            "kind": kind,
            "optimizer": optimizer,
            "batch": batch,
            "peak": peak,
        }
        overrides = changed(_whole(optimizer, peak), _of_kind(kind, batch))
        replicas = REPLICAS if kind == LOCAL else 1
        return Series(labels, overrides, SEEDS, replicas=replicas)

    @staticmethod
    def metered(peak: float) -> Run:
        """Return a run of SGD at the smallest batch, in two micro batches so that it has a noise
        scale.

        Args:
            peak: the peak rate.
        """
        overrides = (
            "log.noise_scale=true",
            f"batch.global={SMALLEST}",
            f"batch.micro={SMALLEST // 2}",
        )
        return Run(changed(_whole(NESTEROV, peak), overrides), SEEDS[0])

    def wanted(self) -> List[Run]:
        """Return all runs that are known by now; last the one with a noise scale."""
        runs = super().wanted()
        peak = self.peak(NESTEROV, SMALLEST)
        if peak is not None:
            runs.append(self.metered(peak))
        return runs

    def rows(self) -> List[dict]:
        """Return rows with updates, the points lost against the smallest batch of the same
        optimizer with the 95 % interval, and the updates to the target of the middle seed.
        """
        rows = super().rows()
        by_place = _by_place(rows)
        for row, series in zip(rows, self.series()):
            row["updates"] = updates_of(series.runs[0])
            row["lost"] = None
            row["interval"] = None
            smallest = by_place[EPOCHS_EQUAL, row["optimizer"], SMALLEST]
            if row is not smallest:
                variance = (smallest["top1_sd"] ** 2 + row["top1_sd"] ** 2) / len(SEEDS)
                row["lost"] = round(smallest["top1_mean"] - row["top1_mean"], 3)
                row["interval"] = round(claims.interval_of_difference(variance), 3)
            reached = sorted(to_target(run) for run in series.runs)
            middle = reached[len(reached) // 2]
            row["to_target"] = None if middle == math.inf else round(middle)
        return rows

    def more(self, rows: Sequence[dict]) -> str:
        """Return the trials, and what the noise scale predicts, in Markdown.

        Args:
            rows: of the table.
        """
        predictions = [
            (prediction.batch, prediction.trained, f"{prediction.predicted:,.0f}")
            for prediction in self._predictions(rows)
        ]
        return f"""Tuning: peak rate and mean validation loss of two seeds.

{search_table(_all_trials())}

Updates of {NESTEROV} to the target, and those that the noise scale of one run at {SMALLEST} predicts (as \
`tools.batch`, but an update at a share s of the peak rate, as in the warm-up, does 2 s - s² of one at the peak):

{claims.markdown(("batch", "trained", "predicted"), predictions)}"""

    def _predictions(self, rows: Sequence[dict]) -> List[Prediction]:
        """Return the updates to the target as trained and as predicted from one run at the
        smallest batch, by batch.
        """
        tuned_peak = self.peak(NESTEROV, SMALLEST)
        assert tuned_peak is not None, "all runs are finished"
        run = self.metered(tuned_peak)
        recipe = run.recipe()
        until = until_target(events_of(run)["train"], to_target(run), recipe)
        whole = lengths(recipe, IMAGES)
        # A schedule is a formula of the step, which holds between two steps as well.
        rate = cast(Callable[[float], float], schedule.create(recipe, whole))
        peak = peak_learning_rate(recipe)

        def share(step: float) -> float:
            """Return the rate of a step of the smallest batch, as a share of the peak."""
            return rate(step) / peak if step < whole.total else 0.0

        return [
            Prediction(row["batch"], row["to_target"], predicted(until, share, row["batch"]))
            for row in rows
            if row["kind"] == EPOCHS_EQUAL and row["optimizer"] == NESTEROV
        ]

    def draw(self, rows: Sequence[dict], path: Path) -> None:
        """Draw top-1 by batch, at equal epochs and at equal updates.

        Args:
            rows: of the table.
            path: of the PNG file.
        """
        panels = {}
        for kind in (EPOCHS_EQUAL, UPDATES_EQUAL):
            drawn = [row for row in rows if row["kind"] == kind]
            panels[kind] = page.lines(drawn, "optimizer", "batch")
        page.draw(panels, path, x="global batch", y="validation top-1 (%)")

    def verdict(self, rows: Sequence[dict]) -> str:
        """Return the largest batch within a point of the smallest, by optimizer, and what the
        growing batch and local steps lose.

        Args:
            rows: of the table.
        """
        by_place = _by_place(rows)
        largest = ", ".join(f"{name} {largest_without_loss(rows, name)}" for name in RULES)
        best = max(RULES, key=lambda name: by_place[EPOCHS_EQUAL, name, LARGEST]["top1_mean"])
        losses = []
        for kind, name in itertools.product((GROWING, LOCAL), (NESTEROV, LARS)):
            lost = by_place[kind, name, SMALLEST]["lost"]
            losses.append(f"{kind} of {name} {lost:.1f}")
        return (
            f"Largest batch within a point of {SMALLEST} at equal epochs: {largest}. "
            f"Best at {LARGEST}: {best}. Points lost beside them: {', '.join(losses)}."
        )

    def claims(self) -> List[dict]:
        """Return claims about the growing batch, by the optimizer with which it loses least: points
        lost, and its share of updates.

        The updates that the noise scale predicts are a figure without a goal: it cannot know the
        curvature.
        """
        by_place = _by_place(self.rows())
        candidates = [by_place[GROWING, name, SMALLEST] for name in (NESTEROV, LARS)]
        growing = min(candidates, key=lambda row: row["lost"])
        lost = growing["lost"]
        interval = growing["interval"]
        loss_claim = claims.claim("top1_loss_growing_batch", [lost], "points", "<= 1")
        loss_claim["spread"] = [lost - interval, lost + interval]
        whole = by_place[EPOCHS_EQUAL, growing["optimizer"], SMALLEST]
        share = growing["updates"] / whole["updates"]
        return [
            loss_claim,
            claims.claim("updates_of_growing_batch", [share], "of updates", "<= 0.6"),
        ]


# Overrides ----------------------------------------------------------------------------------------


def _whole(optimizer: str, peak: float) -> Tuple[str, ...]:
    """Return the overrides of a run of full length, without its batch."""
    return (
        *_BASE,
        *RULES[optimizer].overrides,
        f"schedule.peak={peak:g}",
        f"run.epochs={EPOCHS}",
    )


def _batch(batch: int) -> Tuple[str, ...]:
    """Return the overrides of a batch."""
    return (f"batch.global={batch}", f"batch.micro={min(batch, 768)}")


def _of_kind(kind: str, batch: int) -> Tuple[str, ...]:
    """Return the overrides of a batch in a row of a kind."""
    if kind == UPDATES_EQUAL:
        # As many updates as the largest batch has, so a share of the epochs.
        share = batch / LARGEST
        return (
            *_batch(batch),
            f"run.epochs={share * EPOCHS:g}",
            f"schedule.warmup_epochs={share * WARMUP:g}",
            f"evaluation.every_epochs={share:g}",
        )
    if kind == GROWING:
        growth = batch_schedule(_GROWTH, images=IMAGES * EPOCHS, smallest=batch)
        return (*_batch(batch), growth)
    if kind == LOCAL:
        return (
            "exchange.method=local",
            f"exchange.local_steps={LOCAL_STEPS}",
            f"batch.micro={batch}",
            f"batch.global={REPLICAS * batch}",
        )
    return _batch(batch)


# Figures of rows and runs -------------------------------------------------------------------------


def _by_place(rows: Sequence[dict]) -> Dict[Tuple[str, str, int], dict]:
    """Return the rows by kind, optimizer and batch."""
    return {(row["kind"], row["optimizer"], row["batch"]): row for row in rows}


def largest_without_loss(rows: Sequence[dict], optimizer: str) -> int:
    """Return the largest batch up to which no batch loses more than a point at equal epochs.

    Args:
        rows: of the table, with batches in ascending order.
        optimizer: one of RULES.
    """
    largest = SMALLEST
    for row in rows:
        if row["kind"] != EPOCHS_EQUAL or row["optimizer"] != optimizer:
            continue
        # The smallest batch is what the others lose against.
        if row["batch"] != SMALLEST and row["lost"] > 1:
            break
        largest = row["batch"]
    return largest


def updates_of(run: Run) -> int:
    """Return how many updates a `run` has."""
    return sum(1 for _ in _updates(run.recipe()))


def _updates(recipe: Recipe) -> Iterator[Update]:
    """Return the updates of a run."""
    length = lengths(recipe, _train_images(recipe))
    course = Course(recipe, length.steps_per_epoch, length.total)
    return course.updates()


def _train_images(recipe: Recipe) -> int:
    """Return the training images of a recipe that draws glyphs."""
    images = recipe.data.images("train")
    assert images is not None, "the number of glyphs is known before they are drawn"
    return images


def to_target(run: Run) -> float:
    """Return the updates until top-1 is at the target, on the line between two evaluations.

    Args:
        run: that is finished.

    Returns:
        The updates; infinite if it never is there.
    """
    recipe = run.recipe()
    per_epoch = steps_per_epoch(_train_images(recipe), recipe.batch.global_)
    # The line begins with guessing.
    epoch_before = 0.0
    top1_before = 1 / recipe.model.classes
    epochs, values = curve(run, "eval", "top1")
    for epoch, top1 in zip(epochs, values):
        if top1 >= TARGET:
            share = (TARGET - top1_before) / (top1 - top1_before)
            steps = per_epoch * (epoch_before + share * (epoch - epoch_before))
            return _updates_in(recipe, steps)
        epoch_before = epoch
        top1_before = top1
    return math.inf


def _updates_in(recipe: Recipe, steps: float) -> float:
    """Return the updates in the first steps of a run, with a share of the one in which they end."""
    # With a batch that grows an update takes several steps.
    updates = 0.0
    for update in _updates(recipe):
        if steps <= update.end:
            return update.index + (steps - update.step) / update.steps
        updates = update.index + 1
    return updates


# Predictions from the noise scale -----------------------------------------------------------------


def until_target(train: Sequence[dict], left: float, recipe: Recipe) -> List[batches.Interval]:
    """Return the noise scales of a run's log over the updates that it takes to the target.

    Args:
        train: the run's `train` events.
        left: the updates that it takes.
        recipe: of the run.
    """
    parts = []
    for part in batches.intervals(train, recipe):
        updates = max(0.0, min(left, part.updates))
        parts.append(part._replace(updates=updates))
        left -= part.updates
    return parts


def predicted(
    until: Sequence[batches.Interval],
    share: Callable[[float], float],
    batch: int,
) -> float:
    """Return the updates with another batch to where `until` came with the smallest.

    The noise scale tells how much more an update does at the best rate. At a share s of that rate
    it does 2 s - s^2 as much (McCandless et al., 1812.06162, section 2.2: the loss falls by a
    parabola in the rate). The peak is taken for the best rate; what share of it a rate is depends
    on the images seen, with any batch.

    Args:
        until: noise scales over the updates with the smallest batch.
        share: the rate as a share of the peak, by the step of the smallest batch.
        batch: the other one, in images.

    Returns:
        The updates; infinite if the schedule ends before.
    """
    # What is to be done, in updates with the other batch at the peak.
    left = 0.0
    before = 0.0
    for part in until:
        middle = before + part.updates / 2
        left += _done(share(middle)) * batches.updates([part], batch)
        before += part.updates

    # Updates with the other batch, each in the middle of its images.
    made = 0.0
    while left > 0:
        done = _done(share((made + 0.5) * batch / SMALLEST))
        if done <= 0:
            return math.inf
        made += min(1.0, left / done)
        left -= done
    return made


def _done(share: float) -> float:
    """Return how much an update does at a share of the peak rate, of what one does at the peak."""
    return share * (2 - share)
