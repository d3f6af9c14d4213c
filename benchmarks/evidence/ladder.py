"""The batch ladder: which optimizer holds its accuracy from a batch of 768 to 6144?"""

from __future__ import annotations

import functools
import itertools
import math
import os
from pathlib import Path
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from benchmarks import ROOT
from benchmarks.evidence import page
from benchmarks.evidence.experiment import SEEDS, Climb, Experiment, Series, standard_errors
from benchmarks.evidence.runs import RECIPE, Run, curve
from recipe import loading
from recipe.batch import steps_per_epoch
from recipe.config import Recipe
from recipe.errors import UserError

BATCHES = (768, 1536, 3072, 6144)
SMALLEST, LARGEST = BATCHES[0], BATCHES[-1]
FACTOR = 2.0  # between two peaks that are tried
LINEAR, RMSPROP, SGD, LARS, LARS_MOMENTUM = "RMSprop, linear", "RMSprop", "SGD", "LARS gradient", "LARS momentum"
K = 1.75  # of docs/results/lars_forms.md: by how much the gradient form steps farther
CLEAR = 3.0  # standard errors; between three seeds and three, chance exceeds this once in 25 times


class Rule(NamedTuple):
    """An optimizer of the ladder: its overrides, and the peak rates that the search begins with, by batch."""

    overrides: Tuple[str, ...]
    guesses: Mapping[int, float]


RULES: Dict[str, Rule] = {
    RMSPROP: Rule(("optimizer.name=rmsprop", "optimizer.weight_decay=2.5e-6"), {SMALLEST: 0.016, LARGEST: 0.008}),
    SGD: Rule(("optimizer.name=sgd", "optimizer.weight_decay=2.5e-6"), {SMALLEST: 0.1, LARGEST: 0.1}),
    LARS: Rule(("optimizer.trust=gradient", "optimizer.momentum=0.885"), {SMALLEST: 4.0, LARGEST: 8.0}),
}
_MOMENTUM_FORM = ("optimizer.trust=momentum", "optimizer.momentum=0.885", f"optimizer.trust_coefficient={0.001 * K:g}")


class Ladder(Experiment):
    """On the CPU, with the recipe as it is."""

    name = "ladder"
    question = "From a batch of 768 to 6144 at equal epochs: which optimizer holds its accuracy?"
    base: Tuple[str, ...] = ("evaluation.every_epochs=0.5",)
    target = 50.0  # percent of the validation images, of which it is told after how many updates they are right

    def at(self, optimizer: str, batch: int) -> Tuple[str, ...]:
        """Overrides without the peak rate. RMSprop's average spans as many images at every batch, as published."""
        span = (f"optimizer.alpha={1 - batch / 2**14:g}",) if optimizer == RMSPROP else ()
        own = _MOMENTUM_FORM if optimizer == LARS_MOMENTUM else RULES[optimizer].overrides
        return (*self.base, *own, *span, f"batch.global={batch}")

    def climb(self, optimizer: str, batch: int) -> Climb:
        """The search for the peak rate of an optimizer at one of the two ends, with the first seed."""
        guessing = math.log(_recipe(self.base).model.classes)
        guess = RULES[optimizer].guesses[batch]
        return Climb(guess, FACTOR, self.at(optimizer, batch), "schedule.peak", SEEDS[0], guessing)

    def climbs(self) -> Dict[Tuple[str, int], Climb]:
        """All searches, by optimizer and batch."""
        return {at: self.climb(*at) for at in itertools.product(RULES, (SMALLEST, LARGEST))}

    def trials(self) -> Iterable[Run]:
        for climb in self.climbs().values():
            yield from climb.runs()

    def peak(self, optimizer: str, batch: int) -> Optional[float]:
        """The best peak rate at the ends; between them, on the straight line of logarithms. None until it is known."""
        low, high = (self.climb(optimizer, end).best() for end in (SMALLEST, LARGEST))
        if batch in (SMALLEST, LARGEST):
            return low if batch == SMALLEST else high
        if low is None or high is None:
            return None
        share = math.log(batch / SMALLEST) / math.log(LARGEST / SMALLEST)
        return float(f"{low ** (1 - share) * high**share:.3g}")

    def tuned(self, optimizer: str, batch: int) -> Optional[Series]:
        """With the best peak; the momentum form has that of the gradient form, which is what its coefficient is for."""
        return self._series(optimizer, batch, self.peak(LARS if optimizer == LARS_MOMENTUM else optimizer, batch))

    def linear(self, batch: int) -> Optional[Series]:
        """RMSprop with the peak found at the smallest batch, in proportion to the batch."""
        best = self.peak(RMSPROP, SMALLEST)
        return self._series(LINEAR, batch, None if best is None else float(f"{best * batch / SMALLEST:.6g}"))

    def series(self) -> List[Series]:
        found = [self.linear(batch) for batch in BATCHES]
        found += [self.tuned(*at) for at in itertools.product((*RULES, LARS_MOMENTUM), BATCHES)]
        return [each for each in found if each is not None]

    def _series(self, optimizer: str, batch: int, peak: Optional[float]) -> Optional[Series]:
        if peak is None:
            return None
        overrides = (*self.at(RMSPROP if optimizer == LINEAR else optimizer, batch), f"schedule.peak={peak:g}")
        return Series({"optimizer": optimizer, "batch": batch, "peak": peak}, overrides)

    def rows(self) -> List[dict]:
        """With the updates after which half of the seeds had reached the target."""
        rows = super().rows()
        for row, series in zip(rows, self.series()):
            row["updates_to_target"] = self._updates(series)
        return rows

    def _updates(self, series: Series) -> Optional[int]:
        """Median over the seeds; None where it was not reached by half of them."""
        found = sorted(self._reached(run) for run in series.runs)
        middle = found[len(found) // 2]
        return None if middle == float("inf") else int(middle)

    def _reached(self, run: Run) -> float:
        for epoch, top1 in zip(*curve(run, "eval", "top1")):
            if 100 * top1 >= self.target:
                recipe = run.recipe()
                return round(epoch * steps_per_epoch(recipe.data.train_images, recipe.batch.global_))
        return float("inf")

    @property
    def about(self) -> str:
        recipe = _recipe(self.base)
        data, images = recipe.data, round(recipe.run.epochs * recipe.data.train_images)
        searched = sum(len(climb.losses()) for climb in self.climbs().values())
        return f"""An EfficientNet-B0 G16 of width {recipe.model.width:g} and depth {recipe.model.depth:g} at \
{recipe.model.image_size} px; {data.train_images:,} training and {data.validation_images:,} validation images of \
{recipe.model.classes} kinds of glyphs at difficulty {data.glyph_difficulty:g}. Every run sees {images:,} images \
({recipe.run.epochs:g} epochs): {images // SMALLEST} updates at {SMALLEST}, {images // LARGEST} at {LARGEST}. \
Linear warm-up over {recipe.schedule.warmup_epochs:g} epochs, then decay with power {recipe.schedule.power:g}, for all \
optimizers; float32. Seeds {", ".join(map(str, SEEDS))}; mean ± standard deviation.

The peak rate of each optimizer is searched at the smallest and at the largest batch, in steps of {FACTOR:g}, by the \
validation loss of the first seed, until both neighbours are worse: {searched} runs. Between the two it is \
interpolated. "{LINEAR}" has the peak found at {SMALLEST}, in proportion to the batch. RMSprop's average of squares \
spans as many images at every batch (alpha 1 − 2⁻¹⁴ × batch, the published rule). The momentum form of LARS has the \
peak of the gradient form and a trust coefficient of {K} × 0.001. "Updates to target": after how many half of the \
seeds had {self.target:g} % of the validation images right, looked at twice an epoch."""

    published = (
        "EfficientNets on ImageNet. RMSprop with the rate in proportion to the batch is as good at 16,384 as at 4,096 "
        "(B2: 80.1 to 79.9 %), LARS was used from 16,384 to 65,536 (B5: 83.3 to 83.0 %; Wongpanich et al., 2011.00071, "
        "table values recalled, not confirmed). Graphcore (2022): B4 G16 with LARS loses nothing from 768 to 6144 "
        "(82.54 ± 0.13 %)."
    )

    findings = (
        "What the figures show beside that:\n\n"
        "- At equal epochs every optimizer loses most of its accuracy on the way to the largest batch, with its best "
        "rate, too: an eighth of the updates is too few at this length. Pod recipes have 350 epochs, not ten.\n"
        "- What breaks RMSprop is the linear rule, not the batch: its best peak is the same at both ends. So it is for "
        "SGD and LARS, to the factor of two that was searched.\n"
        "- LARS is at no batch the best here, and its rate was chosen by the first seed, which is above the others at "
        "every batch: the best peak lies close to one at which nothing is learned. Trust ratios are for layers whose "
        "scales differ; whether so small a model has any was not looked at.\n"
        "- The momentum form is below the gradient form at every batch, and one seed of it learns nothing at 1536. Its "
        "coefficient fits a steady rate; a run with a warm-up of 15 to 120 updates may have none. Its own peak was not "
        "searched."
    )

    def draw(self, rows: Sequence[dict], path: Path) -> None:
        lines: Dict[str, list] = {}
        losses: Dict[str, list] = {}
        for row in rows:
            lines.setdefault(row["optimizer"], []).append((row["batch"], row["top1_mean"], row["top1_sd"]))
            if row["loss_mean"] is not None:
                losses.setdefault(row["optimizer"], []).append((row["batch"], row["loss_mean"], row["loss_sd"]))
        panels = {"validation top-1 (%)": lines, "validation loss": losses}
        page.draw(panels, path, x="global batch", y="mean ± standard deviation over seeds", log_x=True)

    def more(self, rows: Sequence[dict]) -> str:
        lines = [
            "The search: validation loss of the first seed at each peak rate that was tried.",
            "",
            "| optimizer | batch | peak: loss |",
            "| --- | --- | --- |",
        ]
        for (optimizer, batch), climb in self.climbs().items():
            tried = ", ".join(
                f"**{value:g}: {loss:.3f}**" if value == climb.best() else f"{value:g}: {loss:.3f}"
                for value, loss in climb.losses().items()
            )
            lines.append(f"| {optimizer} | {batch} | {tried} |")
        return "\n".join(lines)

    def verdict(self, rows: Sequence[dict]) -> str:
        at = {(row["optimizer"], row["batch"]): row for row in rows}
        behind = {name: self._falls(at, name) for name in (LINEAR, RMSPROP)}
        loses = standard_errors(at[LARS, SMALLEST], at[LARS, LARGEST]) > CLEAR
        if all(batch is None for batch in behind.values()):
            word = "Did not reproduce"
        else:
            word = "Reproduced in part" if loses else "Reproduced"
        said = "; ".join(
            f"{name} {f'is clearly behind LARS from {batch} on' if batch else 'is never clearly behind LARS'}"
            for name, batch in behind.items()
        )
        lost = ", ".join(
            f"{name} {at[name, SMALLEST]['top1_mean'] - at[name, LARGEST]['top1_mean']:.1f}"
            for name in (LINEAR, *RULES, LARS_MOMENTUM)
        )
        best = max((name for name, batch in at if batch == LARGEST), key=lambda name: at[name, LARGEST]["top1_mean"])
        return (
            f"{word}: {said}; LARS itself {'loses clearly' if loses else 'loses nothing clearly'}; points lost from "
            f"{SMALLEST} to {LARGEST}: {lost}; best at {LARGEST}: {best}."
        )

    @staticmethod
    def _falls(at: Dict[Tuple[str, int], dict], optimizer: str) -> Optional[int]:
        """The batch from which on LARS is better than an optimizer by more than chance explains."""
        behind = [standard_errors(at[LARS, batch], at[optimizer, batch]) > CLEAR for batch in BATCHES]
        while behind and not all(behind):
            behind = behind[1:]
        return BATCHES[-len(behind)] if behind else None


@functools.lru_cache(maxsize=None)
def _recipe(overrides: Tuple[str, ...]) -> Recipe:
    return loading.load(ROOT / RECIPE, overrides)


class LadderOnGpu(Ladder):
    """With a larger model, larger images and more of them, where there is a GPU."""

    name = "ladder_gpu"
    question = "The batch ladder on a GPU: B0 G16 at 64 px"
    base = (
        "run.device=cuda", "evaluation.every_epochs=1", "model.width=1", "model.depth=1", "model.image_size=64",
        "model.classes=200", "data.glyph_size=64", "data.train_images=122880", "data.validation_images=10000",
        "data.workers=8", "precision.compute=bfloat16", "engine.memory_format=auto",
    )  # fmt: skip

    def at_once(self) -> int:
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the other check would leave forked processes without CUDA
        if not torch.cuda.is_available():
            raise UserError(
                "ladder_gpu: no CUDA device here; the ladder for CPUs is python -m benchmarks.evidence ladder"
            )
        return 1
