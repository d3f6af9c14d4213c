"""Photographs at the batches of configs/ablation: six optimizers with equal tuning, and what closes
the gap.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import (
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
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
from benchmarks.evidence.runs import Run
from benchmarks.evidence.tuning import FourRates, rounded
from recipe.batch import lengths
from recipe.config import Recipe
from recipe.course import Course
from tools.planning import machine, scaling, workload

BATCHES = (768, 1536, 3072, 6144)
SMALLEST = BATCHES[0]
LARGEST = BATCHES[-1]
CLASSES = 10
IMAGES = 60_000
STEPS = IMAGES // SMALLEST  # of the smallest batch in an epoch
# Images of a micro batch. Smaller ones take longer: what a layer costs apart from arithmetic counts
# then.
MICRO = SMALLEST
EPOCHS = 67  # 603 updates of the largest batch
WARMUP = 7
TRIAL_EPOCHS = 22
TRIAL_SEEDS = (0,)
SEEDS = (2, 3, 4)
LOCAL_REPLICAS = 4
LOCAL_STEPS = LARGEST // (LOCAL_REPLICAS * SMALLEST)
PLANNED_ON = "dgx_a100"
PLANNED_REPLICAS = 64

# Kinds of rows.
EQUAL = "equal epochs"
GROWING = "growing batch"
LOCAL = "local steps"
FINAL = "final part at 768"
LONGER = "longer warm-up"
ROOT_RATE = "rate by square root"
NESTEROV = "Nesterov momentum"
FEW = "as few updates, 768"

# Optimizers.
LARS = "LARS"
RMSPROP = "RMSprop"
LAMB = "LAMB"
ADAMW = "AdamW"
SGD = "SGD, Nesterov"
MUON = "Muon"

# Overrides of all runs.
_BASE = (
    "data.source=torchvision",
    "data.dataset=FashionMNIST",
    f"data.train_images={IMAGES}",
    "data.validation_images=10000",
    "data.crop_area=[0.7,1]",
    "data.flip=0.5",
    f"model.classes={CLASSES}",
    "model.width=0.25",
    "model.image_size=16",
    "evaluation.every_epochs=10",
    "log.noise_scale=false",
    "log.every_steps=78",
)


class Rule(NamedTuple):
    """How an optimizer is used.

    overrides: the keys of its published recipe.
    guess: the peak rate in the middle of its first three trials.
    batches: at which it is trained to the end; it is tuned at the smallest and the largest.
    """

    overrides: Tuple[str, ...]
    guess: float
    batches: Tuple[int, ...] = (SMALLEST, LARGEST)


# In the order of the table, and of training.
RULES: Dict[str, Rule] = {
    LARS: Rule(
        ("optimizer.trust=gradient", "optimizer.momentum=0.885"),
        guess=4,
        batches=BATCHES,
    ),
    RMSPROP: Rule(
        ("optimizer.name=rmsprop", "optimizer.weight_decay=1e-5"),
        guess=0.008,
        batches=BATCHES,
    ),
    LAMB: Rule(("optimizer.name=lamb", "optimizer.weight_decay=0.01"), guess=0.02),
    ADAMW: Rule(("optimizer.name=adamw", "optimizer.weight_decay=0.05"), guess=0.004),
    MUON: Rule(("optimizer.name=muon",), guess=0.004),
    SGD: Rule(
        ("optimizer.name=sgd", "optimizer.nesterov=true", "optimizer.weight_decay=2.5e-6"),
        guess=0.3,
    ),
}

# Parts of a batch that grows, and of a large one whose final part is small.
_GROWTH = (Part(0.0, 1), Part(0.4, 2), Part(0.6, 4), Part(0.8, 8))
_SHRINKING = (Part(0.0, 8), Part(0.8, 1))


class Photographs(Experiment):
    """Fashion-MNIST: 60,000 photographs to train on, 10,000 to validate with, 28 x 28 pixels, ten
    classes. An EfficientNet-B0 G16 of width 0.25 and depth 0.1 at 16 px; crops of 70 to 100 % of
    the area, mirrored or not. 67 epochs: 5,226 updates at 768 and 603 at 6144. 7 epochs are
    warm-up, then the rate decays with power 2.

    The rule of tuning, written before the runs: for every optimizer, at 768 and 6144, four peak
    rates, each with seed 0 over 22 epochs: a third of a guess, the guess and three times it, then
    one beside the best (by √3 towards its better neighbour, or by 3 beyond the end). The lowest
    validation loss wins; a run that diverges counts as guessing. At 1536 and 3072 the rate is
    interpolated geometrically. All other keys are those of the published recipes; the average of
    RMSprop spans as many images at every batch. Then seeds 2, 3, 4 at full length: mean ± standard
    deviation; "lost" is against the same optimizer at 768, "interval" its 95 % interval (Student's
    t). "seconds": on 64 replicas of a DGX A100, by the plan, which counts arithmetic and messages
    and not the launches of kernels: of so small a model the messages decide.

    "growing batch": `batch.schedule` with 768 images at first, 1536, 3072 and 6144 from 40, 60 and
    80 % of the images on, at the rate of 768. "local steps": 4 replicas with batches of 768 and
    means of their weights after 2 steps, so that as many images lie between two exchanges as in an
    update of 6144. At the rate of 6144: "longer warm-up", of 20 epochs; "Nesterov momentum"; "final
    part at 768", after 80 % of the images. "rate by square root": the rate of 768 times √8, without
    tuning at 6144.

    "as few updates, 768" asks whether the batch costs accuracy, or that there are fewer updates of
    it: the rate of 768 and as many updates as the whole run at 6144 has, so an eighth of the
    images.
    """

    name = "photographs"
    question = (
        "Photographs from a batch of 768 to 6144: what does a large batch cost, and what avoids it?"
    )
    takes = "ten hours, less for cached runs"
    columns = (("top1", "top-1 (%)", 2), *Experiment.columns[1:])

    def trials(self) -> Iterable[Run]:
        """Return the runs that tune, one optimizer after the other."""
        for optimizer in RULES:
            yield from _trials(optimizer)

    def wanted(self) -> List[Run]:
        """Return all runs that are known by now: one optimizer after the other."""
        all_series = self.series()
        runs: List[Run] = []
        for optimizer in RULES:
            runs += _trials(optimizer)
            for series in all_series:
                if series.labels["optimizer"] == optimizer:
                    runs += series.runs
        return runs

    def series(self) -> List[Series]:
        """Return the series whose rates are known by now: of equal epochs, then the other ways."""
        series = list(self._equal_epochs())
        for kind, way in WAYS.items():
            series += _series_of_way(kind, way)
        return series

    def _equal_epochs(self) -> Iterator[Series]:
        """Yield the series of one batch throughout."""
        for optimizer, rule in RULES.items():
            for batch in rule.batches:
                peak = peak_of(optimizer, batch)
                if peak is not None:
                    sizes = _batch(batch, optimizer)
                    yield _series(EQUAL, optimizer, batch, peak=peak, overrides=sizes)

    def rows(self) -> List[dict]:
        """Return rows with points lost against 768 and the 95 % interval, updates, and seconds by
        the plan.
        """
        rows = super().rows()
        smallest_rows = {
            row["optimizer"]: row
            for row in rows
            if row["kind"] == EQUAL and row["batch"] == SMALLEST
        }
        for row, series in zip(rows, self.series()):
            recipe = series.runs[0].recipe()
            row["updates"] = sum(1 for _ in _batches_of(recipe))
            row["lost"] = None
            row["interval"] = None
            smallest = smallest_rows[row["optimizer"]]
            if row is not smallest:
                row["lost"] = round(smallest["top1_mean"] - row["top1_mean"], 2)
                row["interval"] = round(_interval(smallest, row), 2)
            # The plan knows one batch over all replicas, and local steps have one on each.
            row["seconds"] = None
            if series.replicas == 1:
                row["seconds"] = round(_planned_seconds(recipe), 2)
        return rows

    def quick(self) -> List[Series]:
        """Return the first run, with eight updates: a data set of this kind is read as a whole."""
        first = self.wanted()[0]
        labels = {"run": "the first, shortened"}
        series = Series(labels, first.overrides, (first.seed,))
        return [series.shortened("run.steps=8", "schedule.warmup_steps=2")]

    def more(self, rows: Sequence[dict]) -> str:
        """Return the trials and the claims in Markdown, whatever the `rows` are."""
        searches = {}
        for optimizer in RULES:
            for batch in (SMALLEST, LARGEST):
                searches[optimizer, batch] = trials_of(optimizer, batch)
        return f"""Tuning: peak rate and validation loss of seed 0 after {TRIAL_EPOCHS} epochs.

{search_table(searches)}

{claims.claims_table(self.claims(), "{:.2f}")}"""

    def draw(self, rows: Sequence[dict], path: Path) -> None:
        """Draw top-1 by batch at equal epochs, and by updates for the optimizers with other ways.

        Args:
            rows: of the table.
            path: of the PNG file.
        """
        equal = [row for row in rows if row["kind"] == EQUAL]
        panels = {"top-1 by batch, equal epochs": page.lines(equal, "optimizer", "batch")}
        for optimizer in (LARS, MUON):
            # Without the rate that scatters seeds over the whole range, so that the others can be
            # told apart.
            drawn = [
                row for row in rows if row["optimizer"] == optimizer and row["kind"] != ROOT_RATE
            ]
            panels[f"{optimizer}: top-1 by updates"] = page.lines(drawn, "kind", "updates")
        page.draw(panels, path, x="global batch; updates", y="validation top-1 (%)")

    def verdict(self, rows: Sequence[dict]) -> str:
        """Return the points that each optimizer loses from 768 to 6144, and the recipe that loses
        least.

        Args:
            rows: of the table.
        """
        points = [f"{row['optimizer']} {_with_interval(row)}" for row in _at_largest(rows, EQUAL)]
        lost = ", ".join(points)
        best = best_recipe(rows)
        growing = best_growing(rows)
        return (
            f"Points lost from {SMALLEST} to {LARGEST} at equal epochs: {lost}. "
            f"Least of all recipes that begin at {LARGEST}: {best['optimizer']}, {best['kind']}, "
            f"{_with_interval(best)}, {best['top1_mean']:.2f} % top-1. "
            f"A batch that grows to {LARGEST} loses {_with_interval(growing)} with {growing['optimizer']}."
        )

    def claims(self) -> List[dict]:
        """Return claims about the points lost by the best recipes, and about the updates of the one
        whose batch grows.
        """
        rows = self.rows()
        growing = best_growing(rows)
        smallest = next(
            row
            for row in rows
            if row["kind"] == EQUAL
            and row["optimizer"] == growing["optimizer"]
            and row["batch"] == SMALLEST
        )
        share = growing["updates"] / smallest["updates"]
        return [
            _loss_claim("top1_loss_best_recipe_6144", best_recipe(rows)),
            _loss_claim("top1_loss_growing_batch_6144", growing),
            claims.claim("updates_of_growing_batch", [share], "of updates", "<= 0.6"),
        ]


# The rates ----------------------------------------------------------------------------------------


def trials_of(optimizer: str, batch: int) -> FourRates:
    """Return the trials of an optimizer, over a third of the epochs with a third of the warm-up.

    Args:
        optimizer: one of RULES.
        batch: at which it is tuned.
    """
    warmup = WARMUP * TRIAL_EPOCHS / EPOCHS
    rule = RULES[optimizer]
    overrides = (
        *rule.overrides,
        *_batch(batch, optimizer),
        f"run.epochs={TRIAL_EPOCHS}",
        f"schedule.warmup_epochs={warmup:.2g}",
    )
    return FourRates(changed(_BASE, overrides), TRIAL_SEEDS, guess=rule.guess, classes=CLASSES)


def _trials(optimizer: str) -> Iterator[Run]:
    """Yield the runs that tune an optimizer."""
    for batch in (LARGEST, SMALLEST):
        yield from trials_of(optimizer, batch).runs()


def peak_of(optimizer: str, batch: int) -> Optional[float]:
    """Return the best peak rate of the trials, interpolated between the tuned batches.

    Args:
        optimizer: one of RULES.
        batch: from the smallest to the largest.

    Returns:
        The rate; None until it is known.
    """
    if batch in (SMALLEST, LARGEST):
        return trials_of(optimizer, batch).best()
    low = trials_of(optimizer, SMALLEST).best()
    high = trials_of(optimizer, LARGEST).best()
    if low is None or high is None:
        return None
    # On a line between the ends, where batches and rates are on logarithmic axes.
    place = math.log(batch / SMALLEST) / math.log(LARGEST / SMALLEST)
    return rounded(low ** (1 - place) * high**place)


# The best rows ------------------------------------------------------------------------------------


def best_recipe(rows: Sequence[dict]) -> dict:
    """Return the row that loses least of those whose updates have 6144 images from the beginning.

    Args:
        rows: of the table.
    """
    candidates = [row for row in rows if row["batch"] == LARGEST and row["kind"] != GROWING]
    return min(candidates, key=lambda row: row["lost"])


def best_growing(rows: Sequence[dict]) -> dict:
    """Return the row that loses least of those `rows` whose batch grows."""
    return min(_at_largest(rows, GROWING), key=lambda row: row["lost"])


# The overrides of a series ------------------------------------------------------------------------


def _series_of_way(kind: str, way: Way) -> Iterator[Series]:
    """Yield the series of a way for those of its optimizers whose rates are known by now."""
    for optimizer in way.optimizers:
        peak = peak_of(optimizer, way.tuned_at)
        if peak is None:
            continue
        series = _series(
            kind,
            optimizer,
            way.batch,
            peak=rounded(peak * way.rate),
            overrides=way.overrides(optimizer),
            replicas=way.replicas,
        )
        if way.length:
            series = series.shortened(*way.length, seeds=len(SEEDS))
        yield series


def _series(
    kind: str,
    optimizer: str,
    batch: int,
    *,
    peak: float,
    overrides: Sequence[str],
    replicas: int = 1,
) -> Series:
    """Return a row of the table, at full length.

    Args:
        kind: EQUAL, or one of WAYS.
        optimizer: one of RULES.
        batch: of the row.
        peak: the peak rate.
        overrides: of this row; they come last.
        replicas: that train it.
    """
    labels: Dict[str, Label] = {
        "kind": kind,
        "optimizer": optimizer,
        "batch": batch,
        "peak": peak,
    }
    whole = (
        *_BASE,
        *RULES[optimizer].overrides,
        f"schedule.peak={peak:g}",
        f"run.epochs={EPOCHS}",
        f"schedule.warmup_epochs={WARMUP}",
    )
    return Series(labels, changed(whole, overrides), SEEDS, replicas=replicas)


def _batch(batch: int, optimizer: str) -> Tuple[str, ...]:
    """Return the overrides of one batch throughout."""
    sizes = (f"batch.global={batch}", f"batch.micro={MICRO}")
    if optimizer != RMSPROP:
        return sizes
    # As in configs/ablation: the average of squared gradients spans as many images at every batch.
    return (*sizes, f"optimizer.alpha={1 - batch / 2**14:g}")


# The other ways: each gives the overrides of an optimizer.


def _growing(optimizer: str) -> Tuple[str, ...]:
    """Return the overrides of a batch that grows."""
    return (*_batch(SMALLEST, optimizer), _schedule(_GROWTH))


def _local(optimizer: str) -> Tuple[str, ...]:
    """Return the overrides of local steps."""
    whole = _batch(LOCAL_REPLICAS * SMALLEST, optimizer)
    return (*whole, "exchange.method=local", f"exchange.local_steps={LOCAL_STEPS}")


def _final(optimizer: str) -> Tuple[str, ...]:
    """Return the overrides of a run at the largest batch, whose final part is at the smallest."""
    return (*_batch(SMALLEST, optimizer), _schedule(_SHRINKING))


def _longer(optimizer: str) -> Tuple[str, ...]:
    """Return the overrides of the largest batch with a longer warm-up."""
    return (*_batch(LARGEST, optimizer), "schedule.warmup_epochs=20")


def _nesterov(optimizer: str) -> Tuple[str, ...]:
    """Return the overrides of the largest batch with Nesterov momentum."""
    return (*_batch(LARGEST, optimizer), "optimizer.nesterov=true")


def _smallest(optimizer: str) -> Tuple[str, ...]:
    """Return the overrides of the smallest batch."""
    return _batch(SMALLEST, optimizer)


def _largest(optimizer: str) -> Tuple[str, ...]:
    """Return the overrides of the largest batch."""
    return _batch(LARGEST, optimizer)


class Way(NamedTuple):
    """Another way than equal epochs with one batch.

    overrides: the keys of an optimizer.
    optimizers: with which it is tried.
    tuned_at: the batch whose best peak rate is taken, times `rate`.
    rate: see `tuned_at`.
    batch: of the row, on each replica.
    replicas: that train it.
    length: keys in the place of 67 epochs with 7 of warm-up.
    """

    overrides: Callable[[str], Tuple[str, ...]]
    optimizers: Tuple[str, ...] = (LARS,)
    tuned_at: int = LARGEST
    rate: float = 1.0
    batch: int = LARGEST
    replicas: int = 1
    length: Tuple[str, ...] = ()


_STEPS_OF_LARGEST = IMAGES // LARGEST  # in an epoch
WAYS: Dict[str, Way] = {
    GROWING: Way(_growing, (LARS, LAMB, MUON), tuned_at=SMALLEST),
    LOCAL: Way(_local, tuned_at=SMALLEST, batch=SMALLEST, replicas=LOCAL_REPLICAS),
    FINAL: Way(_final, (LARS, MUON)),
    LONGER: Way(_longer),
    ROOT_RATE: Way(_largest, tuned_at=SMALLEST, rate=(LARGEST / SMALLEST) ** 0.5),
    NESTEROV: Way(_nesterov),
    FEW: Way(
        _smallest,
        (LARS, MUON),
        tuned_at=SMALLEST,
        batch=SMALLEST,
        length=(
            f"run.steps={EPOCHS * _STEPS_OF_LARGEST}",
            f"schedule.warmup_steps={WARMUP * _STEPS_OF_LARGEST}",
        ),
    ),
}


def _schedule(parts: Sequence[Part]) -> str:
    """Return the override of a batch that changes."""
    images = STEPS * SMALLEST * EPOCHS
    return batch_schedule(parts, images, smallest=SMALLEST)


# Figures of a row ---------------------------------------------------------------------------------


def _batches_of(recipe: Recipe) -> Iterator[int]:
    """Yield the images of each update of a run."""
    length = lengths(recipe, IMAGES)
    course = Course(recipe, length.steps_per_epoch, length.total)
    for update in course.updates():
        yield update.steps * recipe.batch.global_


def _planned_seconds(recipe: Recipe) -> float:
    """Return the seconds that a run's updates would take on 64 replicas, one micro batch each where
    that is enough.
    """
    place = machine.load(PLANNED_ON)
    micro = SMALLEST // PLANNED_REPLICAS
    # Thousands of updates have a few batches: each is planned once.
    seconds: Dict[int, float] = {}
    total = 0.0
    for batch in _batches_of(recipe):
        if batch not in seconds:
            plan = workload.changed(recipe, "batch", global_=batch, micro=micro, schedule=None)
            row = scaling.predict(plan, place, PLANNED_REPLICAS, workload.of(plan))
            seconds[batch] = row.seconds
        total += seconds[batch]
    return total


def _interval(row: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Return half of the 95 % interval of the difference of two rows' top-1."""
    variance = row["top1_sd"] ** 2 + other["top1_sd"] ** 2
    return claims.interval_of_difference(variance / len(SEEDS))


def _at_largest(rows: Sequence[dict], kind: str) -> List[dict]:
    """Return the rows of a kind whose batch is, or grows to, the largest."""
    return [row for row in rows if row["kind"] == kind and row["batch"] == LARGEST]


def _with_interval(row: dict) -> str:
    """Return the points that a row loses with their interval, as text."""
    return f"{row['lost']:.2f} ± {row['interval']:.2f}"


def _loss_claim(name: str, row: dict) -> dict:
    """Return the claim that a row loses little; its spread is the 95 % interval."""
    lost = row["lost"]
    interval = row["interval"]
    claim = claims.claim(name, [lost], "points", "<= 0.3")
    claim["spread"] = [lost - interval, lost + interval]
    return claim
