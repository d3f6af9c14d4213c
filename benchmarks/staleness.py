"""What does it cost to apply gradients some steps late, and what does momentum make of it?

    python -m benchmarks.staleness [--quick] [--json]

Trains the model, the digits and the glyphs of benchmarks/exchange_convergence.py in one process (how late a gradient is
does not depend on the number of replicas) with `exchange.delay` 0, 1, 4 and 16, by LARS and by SGD, with momentum 0.9
and with none, several seeds each, two runs at a time. Finished runs are kept. Beside it stands what linear theory says.
Writes docs/results/staleness.{md,csv,png}.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from training.command import run

    run(__file__)

import itertools
from pathlib import Path
from typing import List, NamedTuple

import numpy as np

from benchmarks import claims, experiments
from benchmarks.exchange_convergence import DIGITS, GLYPHS, MODEL

NAME = "staleness"
SEEDS = (0, 1, 2)
DELAYS = (0, 1, 4, 16)
MOMENTA = (0.0, 0.5, 0.9)  # of the theory
# Without momentum the peak is larger by about what momentum makes a step longer: 1 / (1 - 0.9) by SGD; by LARS, which
# scales each gradient before momentum adds it up, some 2 (docs/results/lars_forms.md).
SETTINGS = {
    "digits, LARS, momentum 0.9": DIGITS,
    "digits, LARS, no momentum": (*DIGITS, "optimizer.momentum=0", "schedule.peak=4"),
    "digits, SGD, momentum 0.9": (*DIGITS, "optimizer.name=sgd", "schedule.peak=0.01"),
    "glyphs, LARS, momentum 0.9": GLYPHS,
}

FINDINGS = """## What it shows

- A gradient one step late costs a point without momentum (digits), two (SGD) to eight points (LARS) with momentum 0.9,
  and nearly half of the accuracy on the harder glyphs. Four steps late a run with momentum 0.9 hardly learns, or not at
  all; without momentum it loses 6 points, and sixteen late 38. Peak rates are those of runs without delay: with a lower
  one more may be had, which was not tried.
- Theory says why momentum makes it worse: without delay it allows higher rates, with delay lower ones. One step late
  the largest stable rate falls to a half without momentum and to a fortieth with 0.9; so a rate that was in the middle
  of the stable range is far beyond it. LARS and the decay of the rate keep such a run from diverging; SGD's loss grows.
- This is why training in step won over asynchronous training: with replicas that are many steps apart, momentum and
  high rates, on which large batches depend, have to be given up.
- `exchange.delay: 1` is useful where the exchange takes about as long as the computation, with a lower rate or less
  momentum, both to be tuned anew. More than 1 hides nothing more, and is there to show this.
"""


class Run(NamedTuple):
    """One training run."""

    setting: str
    delay: int
    seed: int

    @property
    def folder(self) -> Path:
        words = self.setting.replace(",", "").replace(" ", "_")
        return experiments.kept(NAME) / f"{words}-delay{self.delay}-seed{self.seed}"

    @property
    def command(self) -> List[str]:
        how = ("batch.micro=64", f"exchange.delay={self.delay}", f"run.seed={self.seed}")
        return experiments.command(self.folder, [*MODEL, *SETTINGS[self.setting], *how])


def all_runs() -> List[Run]:
    """Seed by seed, so that what was cut off has something of all."""
    return [Run(setting, delay, seed) for seed, setting, delay in itertools.product(SEEDS, SETTINGS, DELAYS)]


def folders(setting: str, delay: int) -> List[Path]:
    return [Run(setting, delay, seed).folder for seed in SEEDS]


def largest_stable_rate(momentum: float, delay: int) -> float:
    """Learning rate times curvature up to which w' = w + momentum (w - w_before) - rate w_late does not grow.

    The roots of z**(delay+1) - (1 + momentum) z**delay + momentum z**(delay-1) + rate must lie in the unit circle, for
    delay 0 those of this times z.
    """
    low, high = 0.0, 2.0 * (1.0 + momentum)  # what holds without delay

    def stable(rate: float) -> bool:
        coefficients = np.zeros(delay + 3)
        coefficients[:3] = 1.0, -1.0 - momentum, momentum
        coefficients[delay + 1] += rate
        return bool(np.abs(np.roots(coefficients)).max() <= 1 + 1e-9)

    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if stable(middle) else (low, middle)
    return low


def summarise() -> List[dict]:
    """A row per setting and delay."""
    return [
        {"setting": setting, "delay": delay, **experiments.ends(folders(setting, delay))}
        for setting, delay in itertools.product(SETTINGS, DELAYS)
    ]


def draw(path: Path) -> None:
    experiments.draw(
        {setting: {f"delay {delay}": folders(setting, delay) for delay in DELAYS} for setting in SETTINGS}, path
    )


def _page(rows: List[dict]) -> str:
    about = claims.machine()
    table = [
        f"| {row['setting']} | {row['delay']} | {experiments.cell(row, 'top1', 1, 100)} "
        f"| {experiments.cell(row, 'train_loss', 3)} |"
        for row in rows
    ]
    theory = [
        f"| {delay} | " + " | ".join(f"{largest_stable_rate(momentum, delay):.3g}" for momentum in MOMENTA) + " |"
        for delay in DELAYS
    ]
    return f"""# Late gradients: what they cost, and what momentum makes of it

Measured on {about["date"]}, {about["cpu"]}, torch {about["torch"]}, by `python -m benchmarks.{NAME}`: model and data
of [exchange_convergence.md](exchange_convergence.md), a batch of 64 in one process; `exchange.delay` applies a
gradient so many steps after the one whose weights it was computed with. {len(SEEDS)} seeds, mean ± standard deviation.

| setting | delay | final top-1 (%) | final training loss |
| --- | --- | --- | --- |
{chr(10).join(table)}

![training loss and validation accuracy over epochs]({NAME}.png)

Linear theory: the largest learning rate times curvature with which a weight in a quadratic bowl does not swing ever
further, by the roots of its recurrence (`largest_stable_rate`, tested against closed forms and against the recurrence).

| delay | {" | ".join(f"momentum {momentum:g}" for momentum in MOMENTA)} |
| --- |{" --- |" * len(MOMENTA)}
{chr(10).join(theory)}

{FINDINGS}"""


def _quick(as_json: bool) -> None:
    """The first setting in short runs, with and without the longest delay. Writes no page."""
    setting, delays, seeds = next(iter(SETTINGS)), (DELAYS[0], DELAYS[-1]), SEEDS[:2]
    runs = {delay: [Run(setting, delay, seed) for seed in seeds] for delay in delays}
    experiments.train_all([run for each in runs.values() for run in each], at_once=2)
    rows = [
        {"setting": setting, "delay": delay, **experiments.ends([run.folder for run in runs[delay]])}
        for delay in delays
    ]
    claims.report(NAME, rows, [], as_json)


def main() -> None:
    as_json = claims.begin(__doc__, takes="an hour, less what is kept of runs before", quick="2 minutes").json
    if claims.quick():
        return _quick(as_json)
    experiments.train_all(all_runs(), at_once=2)
    rows = summarise()
    experiments.write(NAME, rows, _page(rows))
    draw(experiments.RESULTS / f"{NAME}.png")
    claims.report(NAME, rows, [], as_json)
