"""The second ladder: batches of 96 to 1536 with at least 600 updates, six optimizers, and equal tuning for all."""

import itertools
import math
import statistics
from pathlib import Path
from typing import Callable, Dict, Iterable, List, Optional, Sequence, Tuple

from benchmarks import claims
from benchmarks.evidence import page
from benchmarks.evidence.experiment import Experiment, Series, changed, search_table
from benchmarks.evidence.runs import Run, curve, events_of
from benchmarks.evidence.tuning import FourRates, rounded
from optim import schedule
from recipe.batch import lengths, peak_learning_rate, steps_per_epoch
from recipe.config import Recipe
from recipe.course import Course
from tools.planning import batches

CLASSES = 50
BATCHES = (96, 192, 384, 768, 1536)
TUNED = (96, 384, 1536)  # between them a rate is interpolated
SMALLEST, LARGEST = BATCHES[0], BATCHES[-1]
IMAGES, EPOCHS, TRIAL_EPOCHS = 61440, 15, 5
TRIAL_SEEDS, SEEDS = (0, 1), (2, 3, 4)
TARGET = 0.9  # of top-1, of which it is told after how many updates it is reached
STUDENT = 2.776  # two-sided 95 % of Student's t with 4 degrees of freedom: two means of three seeds
EPOCHS_EQUAL, UPDATES_EQUAL, GROWING, LOCAL = "equal epochs", "equal updates", "growing batch", "local steps"
NESTEROV, LARS, LARS_MOMENTUM = "SGD, Nesterov", "LARS gradient", "LARS momentum"
REPLICAS, LOCAL_STEPS = 4, 4  # of SMALLEST images each: between two means as many images as in an update of LARGEST
_SHARES = ((0, 1), (0.4, 2), (0.6, 4), (0.8, 8))  # of the growing batch: share of the images, times the smallest
_BASE = (
    f"data.train_images={IMAGES}", "evaluation.every_epochs=0.5", "schedule.warmup_epochs=1.5",
    f"model.classes={CLASSES}", "data.glyph_difficulty=0.3", "log.noise_scale=false", "log.every_steps=20",
)  # fmt: skip
# Optimizer -> its overrides, and the peak rate around which those of every batch are tried.
RULES: Dict[str, Tuple[Tuple[str, ...], float]] = {
    LARS: (("optimizer.trust=gradient", "optimizer.momentum=0.885"), 4.0),
    LARS_MOMENTUM: (("optimizer.trust=momentum", "optimizer.momentum=0.885"), 4.0),
    "LAMB": (("optimizer.name=lamb", "optimizer.weight_decay=0.01"), 0.01),
    NESTEROV: (("optimizer.name=sgd", "optimizer.nesterov=true", "optimizer.weight_decay=2.5e-6"), 0.1),
    "RMSprop": (("optimizer.name=rmsprop", "optimizer.weight_decay=2.5e-6"), 0.008),
    "AdamW": (("optimizer.name=adamw", "optimizer.weight_decay=0.05"), 0.004),
}


class Trials(FourRates):
    """The trials of an optimizer at a batch, over a third of the epochs; a rate is judged by two seeds."""

    def __init__(self, optimizer: str, batch: int):
        self.batch = batch
        own, guess = RULES[optimizer]
        short = (f"schedule.warmup_epochs={1.5 * TRIAL_EPOCHS / EPOCHS:g}", f"run.epochs={TRIAL_EPOCHS}")
        overrides = changed(_BASE, (*own, *_batch(batch), *short))
        super().__init__(overrides, TRIAL_SEEDS, guess=guess, classes=CLASSES)


class Ladder2(Experiment):
    """An EfficientNet-B0 G16 of width 0.2 and depth 0.1 at 16 px; 61,440 training and 4,096 validation images of 50
    kinds of glyphs at difficulty 0.3. LARS learns 97.8 % at 96 and 94.1 % at 1536, and two seeds differ by 0.1 and
    0.5; at 0.6, as in the first ladder, they are four points apart. "equal epochs": 15 epochs, 9,600 updates at 96 and
    600 at 1536. "equal updates": 600 updates at every batch, at the same rates. A tenth of a run is warm-up, then the
    rate decays with power 2.

    The rule of tuning, written before the runs: for every optimizer, at 96, 384 and 1536, four peak rates, each with
    seeds 0 and 1 over 5 epochs: a third of a guess, the guess and three times it, then one beside the best (by √3
    towards its better neighbour, or by 3 beyond the end). The lowest mean validation loss wins; a run that diverges
    counts as guessing. At the batches between, the rate is the geometric mean of its neighbours'. All other keys are
    those of the recipes. Then seeds 2, 3, 4 at full length: mean ± standard deviation; "lost" is against the smallest
    batch at equal epochs, "interval" its 95 % interval (Student's t). "to target": updates until 90 % top-1, of the
    middle seed.

    "growing batch": `batch.schedule` with 96 images at first, twice, four and eight times as many from 40, 60 and 80 %
    of the images on. "local steps": 4 replicas with batches of 96 and means of their weights after 4 steps, so that as
    many images lie between two exchanges as in an update of 1536.

    **Published elsewhere**: Nado et al. (2102.06356): Nesterov momentum and Adam match LARS and LAMB where all are
    tuned equally; ResNet-50 in 2,512 steps at 32,768. Graphcore (2022): B4 G16 with LARS loses nothing from 768 to
    6144.
    """

    name = "ladder2"
    question = "From a batch of 96 to 1536 with enough updates and equal tuning: what does a large batch cost?"
    takes = "five hours, less for cached runs"

    def trials(self) -> Iterable[Run]:
        return [run for at in itertools.product(RULES, TUNED) for run in Trials(*at).runs()]

    def peak(self, optimizer: str, batch: int) -> Optional[float]:
        """The best of the trials; at a batch without trials the geometric mean of its neighbours'."""
        near = [batch] if batch in TUNED else [batch // 2, batch * 2]
        rates = [Trials(optimizer, each).best() for each in near]
        return None if None in rates else rounded(statistics.geometric_mean(rates))

    def series(self) -> List[Series]:
        found = [
            self._tuned(optimizer, batch, kind)
            for kind, optimizer, batch in itertools.product((EPOCHS_EQUAL, UPDATES_EQUAL), RULES, BATCHES)
            if (kind, batch) != (UPDATES_EQUAL, LARGEST)  # the same runs
        ]
        found += [self._tuned(*at) for at in itertools.product((NESTEROV, LARS), (SMALLEST,), (GROWING, LOCAL))]
        return [each for each in found if each is not None]

    def _tuned(self, optimizer: str, batch: int, kind: str) -> Optional[Series]:
        peak = self.peak(optimizer, batch)
        if peak is None:
            return None
        own, share = _batch(batch), batch / LARGEST
        if kind == UPDATES_EQUAL:
            scaled = {"run.epochs": EPOCHS, "schedule.warmup_epochs": 1.5, "evaluation.every_epochs": 1}
            own += tuple(f"{key}={share * value:g}" for key, value in scaled.items())
        elif kind == GROWING:
            pairs = (f"[{round(part * IMAGES * EPOCHS)}, {times * batch}]" for part, times in _SHARES)
            own += (f"batch.schedule=[{', '.join(pairs)}]",)
        elif kind == LOCAL:
            local = ("exchange.method=local", f"exchange.local_steps={LOCAL_STEPS}")
            own = (*local, f"batch.micro={batch}", f"batch.global={REPLICAS * batch}")
        labels = {"kind": kind, "optimizer": optimizer, "batch": batch, "peak": peak}
        overrides = changed(_whole(optimizer, peak), own)
        return Series(labels, overrides, SEEDS, replicas=REPLICAS if kind == LOCAL else 1)

    @staticmethod
    def metered(peak: float) -> Run:
        """SGD at the smallest batch, in two micro batches so that it has a noise scale."""
        own = ("log.noise_scale=true", f"batch.global={SMALLEST}", f"batch.micro={SMALLEST // 2}")
        return Run(changed(_whole(NESTEROV, peak), own), SEEDS[0])

    def wanted(self) -> List[Run]:
        peak = self.peak(NESTEROV, SMALLEST)
        return [*super().wanted(), *([] if peak is None else [self.metered(peak)])]

    def rows(self) -> List[dict]:
        """With updates, the points lost against the smallest batch of the same optimizer with the 95 % interval, and
        the updates to the target of the middle seed."""
        rows = super().rows()
        at = {(row["kind"], row["optimizer"], row["batch"]): row for row in rows}
        for row, each in zip(rows, self.series()):
            first = at[EPOCHS_EQUAL, row["optimizer"], SMALLEST]
            error = ((first["top1_sd"] ** 2 + row["top1_sd"] ** 2) / len(SEEDS)) ** 0.5
            reached = sorted(to_target(run) for run in each.runs)[len(each.seeds) // 2]
            row["updates"] = updates_of(each.runs[0])
            row["lost"] = None if row is first else round(first["top1_mean"] - row["top1_mean"], 3)
            row["interval"] = None if row is first else round(STUDENT * error, 3)
            row["to_target"] = None if reached == math.inf else round(reached)
        return rows

    def more(self, rows: Sequence[dict]) -> str:
        predicted = [(batch, trained, f"{made:,.0f}") for batch, trained, made in self._predictions(rows)]
        return f"""Tuning: peak rate and mean validation loss of two seeds.

{search_table({at: Trials(*at) for at in itertools.product(RULES, TUNED)})}

Updates of {NESTEROV} to the target, and those that the noise scale of one run at {SMALLEST} predicts (as \
`tools.batch`, but an update at a share s of the peak rate, as in the warm-up, does 2 s - s² of one at the peak):

{claims.markdown(("batch", "trained", "predicted"), predicted)}"""

    def _predictions(self, rows: Sequence[dict]) -> List[Tuple[int, Optional[int], float]]:
        """Batches, and the updates to the target as trained and as predicted from one run at the smallest."""
        run = self.metered(self.peak(NESTEROV, SMALLEST))
        recipe = run.recipe()
        until = until_target(events_of(run)["train"], to_target(run), recipe)
        whole = lengths(recipe, IMAGES)
        rate, peak = schedule.create(recipe, whole), peak_learning_rate(recipe)

        def share(step: float) -> float:
            return rate(step) / peak if step < whole.total else 0.0

        own = [row for row in rows if (row["kind"], row["optimizer"]) == (EPOCHS_EQUAL, NESTEROV)]
        return [(row["batch"], row["to_target"], predicted(until, share, row["batch"])) for row in own]

    def draw(self, rows: Sequence[dict], path: Path) -> None:
        panels = {
            kind: page.lines([row for row in rows if row["kind"] == kind], "optimizer", "batch")
            for kind in (EPOCHS_EQUAL, UPDATES_EQUAL)
        }
        page.draw(panels, path, x="global batch", y="validation top-1 (%)")

    def verdict(self, rows: Sequence[dict]) -> str:
        """The largest batch within a point of the smallest, by optimizer, and what the growing batch loses."""
        largest = ", ".join(f"{name} {kept(rows, name)}" for name in RULES)
        at = {(row["kind"], row["optimizer"], row["batch"]): row for row in rows}
        best = max(RULES, key=lambda name: at[EPOCHS_EQUAL, name, LARGEST]["top1_mean"])
        beside = ", ".join(
            f"{kind} of {name} {at[kind, name, SMALLEST]['lost']:.1f}"
            for kind, name in itertools.product((GROWING, LOCAL), (NESTEROV, LARS))
        )
        return (
            f"Largest batch within a point of {SMALLEST} at equal epochs: {largest}. Best at {LARGEST}: {best}. "
            f"Points lost beside them: {beside}."
        )

    def claims(self) -> List[dict]:
        """The growing batch, by the optimizer with which it loses least: points lost, and its share of updates. The
        updates that the noise scale predicts are a figure without a goal: it cannot know the curvature."""
        rows = {(row["kind"], row["optimizer"], row["batch"]): row for row in self.rows()}
        growing = min((rows[GROWING, name, SMALLEST] for name in (NESTEROV, LARS)), key=lambda row: row["lost"])
        whole = rows[EPOCHS_EQUAL, growing["optimizer"], SMALLEST]
        interval = [growing["lost"] - growing["interval"], growing["lost"] + growing["interval"]]
        lost = claims.claim("top1_loss_growing_batch", [growing["lost"]], "points", "<= 1")
        share = growing["updates"] / whole["updates"]
        return [
            {**lost, "spread": interval},
            claims.claim("updates_of_growing_batch", [share], "of updates", "<= 0.6"),
        ]


def kept(rows: Sequence[dict], optimizer: str) -> int:
    """The largest batch up to which no batch loses more than a point at equal epochs."""
    own = [row for row in rows if (row["kind"], row["optimizer"]) == (EPOCHS_EQUAL, optimizer)]
    within = itertools.takewhile(lambda row: row["batch"] == SMALLEST or row["lost"] <= 1, own)
    return max(row["batch"] for row in within)


def updates_of(run: Run) -> int:
    recipe = run.recipe()
    length = lengths(recipe, recipe.data.train_images)
    return sum(1 for _ in Course(recipe, length.steps_per_epoch, length.total).updates())


def to_target(run: Run) -> float:
    """Updates until top-1 is at the target, on the line between two evaluations; infinite if it never is."""
    recipe = run.recipe()
    before = (0.0, 1 / recipe.model.classes)
    for epoch, top1 in zip(*curve(run, "eval", "top1")):
        if top1 >= TARGET:
            share = (TARGET - before[1]) / (top1 - before[1])
            each = steps_per_epoch(recipe.data.train_images, recipe.batch.global_)
            return each * (before[0] + share * (epoch - before[0]))
        before = (epoch, top1)
    return math.inf


def until_target(train: Sequence[dict], left: float, recipe: Recipe) -> List[batches.Interval]:
    """The noise scales of a run's log over the `left` updates that it takes to the target."""
    kept = []
    for each in batches.intervals(train, recipe):
        kept.append(each._replace(updates=max(0.0, min(left, each.updates))))
        left -= each.updates
    return kept


def predicted(until: Sequence[batches.Interval], share: Callable[[float], float], batch: int) -> float:
    """Updates with another batch to where `until` came with the smallest; infinite if the schedule ends before.

    The noise scale tells how much more an update does at the best rate. At a share s of that rate it does 2 s - s^2 as
    much (McCandless et al., 1812.06162, section 2.2: the loss falls by a parabola in the rate). The peak is taken for
    the best rate; what share of it a rate is depends on the images seen, with any batch.
    Args: share: by the step of the smallest batch.
    """
    left, before = 0.0, 0.0
    for each in until:
        left += _done(share(before + each.updates / 2)) * batches.updates([each], batch)
        before += each.updates
    made = 0.0
    while left > 0:
        now = _done(share((made + 0.5) * batch / SMALLEST))
        if now <= 0:
            return math.inf
        made += min(1.0, left / now)
        left -= now
    return made


def _done(share: float) -> float:
    return share * (2 - share)


def _whole(optimizer: str, peak: float) -> Tuple[str, ...]:
    return (*_BASE, *RULES[optimizer][0], f"schedule.peak={peak:g}", f"run.epochs={EPOCHS}")


def _batch(batch: int) -> Tuple[str, ...]:
    return f"batch.global={batch}", f"batch.micro={min(batch, 768)}"
