"""By which factor K is a step of LARS longer in the gradient form than in the momentum form, and does K even them out?

    python -m benchmarks.lars_forms [--quick] [--json]

Trains a narrow EfficientNet-B0 G16 on digits and on glyphs. Runs of the gradient form measure K; runs of the momentum
form with the trust coefficient times 1, K and multiples of it show what that is worth. One run at a time, on one
thread; finished runs are kept. Writes docs/results/lars_forms.{md,csv,png}.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from training.command import run

    run(__file__)

import contextlib
import csv
import io
import json
import shutil
import statistics
from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence, Tuple

import torch

from benchmarks import claims
from benchmarks.lars_ratio import Recorder
from recipe import loading
from tools.curves import read_events
from training.run import run as train

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "benchmarks" / "cache" / "lars_forms"
RESULTS = ROOT / "docs" / "results"
MOMENTUM, COEFFICIENT = 0.885, 0.001  # of the pod recipes
UNRELATED, ALIGNED = (1 - MOMENTUM**2) ** -0.5, 1 / (1 - MOMENTUM)
PHASES = {"warmup": (0.0, 0.2), "early_decay": (0.2, 0.6), "late_decay": (0.6, 1.0)}  # shares of the run
DATA = {
    "digits": ("model.image_size=28", "model.classes=10"),
    "glyphs": (
        "model.image_size=32", "model.classes=20", "data.train_images=4000", "data.validation_images=1000",
        "data.glyph_difficulty=0.2",
    ),
}  # fmt: skip
SEEDS = (0, 1)


class Setting(NamedTuple):
    """What the two forms are compared on. The peak is the schedule's."""

    data: str
    batch: int
    micro: int
    peak: int
    epochs: int
    depth: float = 0.3

    def __str__(self) -> str:
        return f"{self.data}, batch {self.batch}, peak {self.peak}, {self.epochs} epochs, depth {self.depth}"


SETTINGS = (
    Setting("digits", 64, 64, 2, 20),
    Setting("digits", 256, 128, 8, 30),
    Setting("glyphs", 96, 96, 2, 7),
    Setting("glyphs", 384, 128, 8, 10),
)
# Only measured, with one seed: the batch at one peak, up to nearly all images; the peak at one batch; a longer run;
# and the depth of B4, which at peak 8 does not learn in a run so short.
MEASURED = (
    Setting("digits", 64, 64, 8, 40),
    Setting("digits", 256, 128, 2, 30),
    Setting("digits", 256, 128, 8, 80),
    Setting("digits", 1408, 128, 8, 60),
    Setting("glyphs", 384, 128, 2, 7, depth=1.8),
)
# Multiples of K that the momentum form is also tried with.
MULTIPLES = {SETTINGS[0]: (0.5, 2.0), SETTINGS[1]: (0.5, 2.0)}
NOISE = "gradient x 1.01"  # how far apart runs come to be that hardly differ


class Run(NamedTuple):
    """One training run, with the published trust coefficient times `factor`."""

    setting: Setting
    seed: int
    trust: str = "gradient"
    factor: float = 1.0

    @property
    def folder(self) -> Path:
        setting, form = self.setting, f"{self.trust}{self.factor:g}"
        what = f"{setting.data}{setting.batch}-peak{setting.peak}-epochs{setting.epochs}-depth{setting.depth:g}"
        return RUNS / f"{what}-{form}-seed{self.seed}"

    @property
    def overrides(self) -> List[str]:
        setting = self.setting
        form = (f"optimizer.trust={self.trust}", f"optimizer.trust_coefficient={COEFFICIENT * self.factor:.6g}")
        return [
            *("model.width=0.35", f"model.depth={setting.depth}", f"data.source={setting.data}", *DATA[setting.data]),
            *(f"batch.global={setting.batch}", f"batch.micro={setting.micro}", "precision.weights=float32"),
            *(*form, f"optimizer.momentum={MOMENTUM}", "optimizer.weight_decay=2.5e-6"),
            *(f"schedule.peak={setting.peak}", f"schedule.warmup_epochs={0.2 * setting.epochs}"),
            *(f"run.epochs={setting.epochs}", f"run.seed={self.seed}", f"run.output={self.folder}"),
            *("evaluation.every_epochs=1000", "log.every_steps=10", "log.tensorboard=false", "log.trust_ratios=false"),
        ]


def made(run: Run) -> dict:
    """The run's record, training first where there is none; what was cut off starts over."""
    path = run.folder / "step_ratio.json"
    if not path.exists():
        shutil.rmtree(run.folder, ignore_errors=True)
        recipe = loading.load(ROOT / "configs" / "quickstart.yaml", run.overrides)
        with Recorder() as recorder, contextlib.redirect_stdout(io.StringIO()):
            train(recipe)
        path.write_text(json.dumps(recorder.summary()))
        print(f"{run.folder.name} done", file=sys.stderr, flush=True)
    return {**json.loads(path.read_text()), **_outcome(run)}


def _outcome(run: Run) -> dict:
    """Training losses, each a mean over ten steps, and the final top-1."""
    events = read_events(run.folder)
    return {"losses": [event["loss"] for event in events["train"]], "top1": events["end"][-1]["top1"]}


def factor(records: Sequence[dict], kind: str = "scheduled") -> float:
    """K: median over the tensors of their averages over the run, averaged over the runs."""
    return statistics.mean(statistics.median(record[f"{kind}_tensors"]) for record in records)


def measure_all() -> Tuple[Dict[Setting, List[dict]], Dict[Tuple[Setting, str], List[dict]]]:
    """Records of the gradient form by setting, and by setting and form of what is compared with them."""
    measured = {setting: [made(Run(setting, seed)) for seed in SEEDS] for setting in SETTINGS}
    measured.update({setting: [made(Run(setting, SEEDS[0]))] for setting in MEASURED})
    compared = {}
    for setting in SETTINGS:
        own = round(factor(measured[setting]), 2)
        tried = {"1": 1.0, "K": own, **{f"{times:g} K": times * own for times in MULTIPLES.get(setting, ())}}
        for name, value in tried.items():
            compared[setting, f"momentum x {name}"] = [made(Run(setting, seed, "momentum", value)) for seed in SEEDS]
        compared[setting, NOISE] = [made(Run(setting, SEEDS[0], factor=1.01))]
    return measured, compared


def summarise(measured: Dict[Setting, List[dict]], compared: Dict[Tuple[Setting, str], List[dict]]) -> List[dict]:
    """A row per setting and form: K along those runs, and how they ended."""
    rows = [_row(setting, "gradient", records, records) for setting, records in measured.items()]
    rows += [_row(setting, form, records, measured[setting]) for (setting, form), records in compared.items()]
    return rows


def _row(setting: Setting, form: str, records: List[dict], reference: List[dict]) -> dict:
    """`path` and `distance`: to the gradient form's run of the same seed."""
    phases = {name: statistics.mean(_phase(record, *span) for record in records) for name, span in PHASES.items()}
    row = {key: getattr(setting, key) for key in ("data", "batch", "peak", "epochs", "depth")}
    row["form"] = form
    row.update(
        steps=records[0]["step"][-1] + 1, seeds=len(records), k=factor(records), k_steady=factor(records, "steady")
    )
    for name, place in (("low", 0), ("high", 2)):
        row[f"k_steady_{name}"] = statistics.mean(
            statistics.quantiles(record["steady_tensors"], n=4)[place] for record in records
        )
    row.update({f"k_{name}": value for name, value in phases.items()})
    for name, values in {
        "path": [_path(*pair) for pair in zip(records, reference)],
        "distance": [_distance(*pair) for pair in zip(records, reference)],
        "loss": [_final_loss(record) for record in records],
        "top1": [record["top1"] for record in records],
    }.items():
        row.update({name: statistics.mean(values), f"{name}_half_range": (max(values) - min(values)) / 2})
    return row


def _path(record: dict, other: dict) -> float:
    """Summed length of all updates relative to another run's."""
    return sum(record["update"]) / sum(other["update"])


def _distance(record: dict, other: dict) -> float:
    """How far apart two runs' training losses are, at the same steps: mean absolute difference."""
    return statistics.mean(abs(own - their) for own, their in zip(record["losses"], other["losses"]))


def _final_loss(record: dict) -> float:
    """Mean training loss over the last fifth of the run."""
    losses = record["losses"]
    return statistics.mean(losses[-max(1, len(losses) // 5) :])


def _phase(record: dict, start: float, end: float) -> float:
    """Steady K between two fractions of the run: median over the tensors, averaged with the rate as weight."""
    total = record["step"][-1] + 1
    steps = [number for number, step in enumerate(record["step"]) if start * total <= step < end * total]
    rates = [record["lr"][number] for number in steps]
    return sum(rate * record["steady"][number][1] for rate, number in zip(rates, steps)) / sum(rates)


def pod_factor(measured: Dict[Setting, List[dict]]) -> Tuple[float, float, float]:
    """K for the pod recipes, whose peak is 8.485: steady K of the settings at peak 8, (mean, lowest, highest)."""
    values = [factor(records, "steady") for setting, records in measured.items() if setting.peak == 8]
    return statistics.mean(values), min(values), max(values)


def verdicts(measured: Dict[Setting, List[dict]], compared: Dict[Tuple[Setting, str], List[dict]]) -> List[dict]:
    """Claims by setting, a value a seed: what K leaves of the distance at K = 1, and how far the paths still differ."""
    found = []
    for setting in SETTINGS:
        name, reference = f"{setting.data}{setting.batch}", measured[setting]
        scaled, plain = (list(zip(compared[setting, form], reference)) for form in ("momentum x K", "momentum x 1"))
        left = [_distance(*near) / _distance(*far) for near, far in zip(scaled, plain)]
        found.append(claims.claim(f"distance_left_{name}", left, "of that at K = 1", "<= 0.67"))
        paths = [abs(_path(*pair) - 1) for pair in scaled]
        found.append(claims.claim(f"path_difference_{name}", paths, "relative", "<= 0.1"))
    return found


def draw(measured: Dict[Setting, List[dict]], path: Path) -> None:
    """K over the run, with the schedule in it and without: median over the tensors and, shaded, their quartiles."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    titles = {"steady": "under a slow schedule (steady K)", "scheduled": "under this run's schedule (K)"}
    for axis, (kind, title) in zip(figure.subplots(1, 2), titles.items()):
        for number, (setting, records) in enumerate(measured.items()):
            places, low, middle, high = _binned(records, kind)
            axis.plot(places, middle, color=f"C{number}", ls="-" if setting in SETTINGS else "--", label=str(setting))
            axis.fill_between(places, low, high, color=f"C{number}", alpha=0.12, lw=0)
        axis.axhline(UNRELATED, color="black", lw=0.8, ls=":", label="unrelated gradients")
        axis.set(title=title, xlabel="share of the run", ylabel="K", ylim=(1, 5))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6, loc="upper center")
    figure.savefig(path, dpi=110)


def _binned(records: List[dict], kind: str, bins: int = 25) -> List[List[float]]:
    """Share of the run, and quartiles of K averaged over the steps and runs that fall into each share."""
    columns: List[List[float]] = [[], [], [], []]
    for number in range(bins):
        inside = [
            values
            for record in records
            for step, values in zip(record["step"], record[kind])
            if number <= step * bins / (record["step"][-1] + 1) < number + 1
        ]
        if inside:
            row = [(number + 0.5) / bins, *(statistics.mean(each) for each in zip(*inside))]
            for column, value in zip(columns, row):
                column.append(value)
    return columns


def write(rows: List[dict], found: List[dict], pods: Tuple[float, float, float]) -> None:
    """The table as CSV, and the page that shows it."""
    with open(RESULTS / "lars_forms.csv", "w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows({key: _short(value) for key, value in row.items()} for row in rows)
    (RESULTS / "lars_forms.md").write_text(_page(rows, found, pods))


def _short(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _page(rows: List[dict], found: List[dict], pods: Tuple[float, float, float]) -> str:
    about = claims.machine()
    mean, low, high = pods
    lowest = min(row["k_early_decay"] for row in rows if row["form"] == "gradient")
    short, long = 100 * (1 - mean / UNRELATED), 100 * (mean / lowest - 1)
    factors = [
        f"| {row['data']} | {row['batch']} | {row['peak']} | {row['depth']:g} | {row['steps']} "
        f"| {row['seeds']} | {row['k']:.2f} "
        f"| {row['k_steady']:.2f} ({row['k_steady_low']:.2f} to {row['k_steady_high']:.2f}) "
        f"| {row['k_warmup']:.2f} | {row['k_early_decay']:.2f} | {row['k_late_decay']:.2f} |"
        for row in rows
        if row["form"] == "gradient"
    ]
    ends = [
        f"| {row['data']} | {row['batch']} | {row['form']} | {row['seeds']} | {row['k']:.2f} | {row['path']:.2f} "
        f"| {row['distance']:.3f} ± {row['distance_half_range']:.3f} "
        f"| {row['loss']:.3f} ± {row['loss_half_range']:.3f} "
        f"| {100 * row['top1']:.1f} ± {100 * row['top1_half_range']:.1f} |"
        for setting in SETTINGS
        for row in rows
        if all(row[key] == getattr(setting, key) for key in ("data", "batch", "peak", "epochs", "depth"))
    ]
    judged = [
        f"| {each['name']} | {each['value']:.2f} ({each['spread'][0]:.2f} to {each['spread'][1]:.2f}) | {each['goal']} "
        f"| {'holds' if each['holds'] else 'does not hold'} |"
        for each in found
    ]
    return f"""# The two forms of LARS: by which factor their steps differ

Measured on {about["date"]}, {about["cpu"]}, torch {about["torch"]}, by `python -m benchmarks.lars_forms`: an
EfficientNet-B0 G16 of width 0.35 and depth 0.3 (B4: 1.4 and 1.8) on one thread, float32, momentum {MOMENTUM}, weight
decay 2.5e-6, linear warm-up over a fifth of the run and decay with power 2 as in the pod recipes; 1,437 digits at 28 px
and 4,000 glyphs of 20 classes at 32 px.

With the same peak and trust coefficient η the `momentum` form (`docs/optimizer.md`), which is what IPUs can run,
moves a tensor by lr·η‖w‖, and the `gradient` form by the length of its momentum buffer ‖m‖. K = ‖m‖ / (lr·η‖w‖), by
tensor and step. It is 1/√(1−μ²) = {UNRELATED:.2f} for unrelated gradients, 1/(1−μ) = {ALIGNED:.2f} for aligned ones,
and less than {UNRELATED:.2f} where successive gradients point against each other. *Steady K* leaves the learning rate
out of the buffer: it is K under a schedule that does not change within the buffer's memory of some nine steps. A
pod's run of 73,000 steps has such a schedule. These of 60 to 880 steps have not, so that K is smaller in their
warm-up and larger at their end.

## K along runs of the gradient form

One value a run: median over the trusted tensors of their averages over the run, with the learning rate as weight (in
brackets the quartiles over the tensors); then the same by phase, for steady K.

| data | batch | peak | depth | steps | seeds | K | steady K | warm-up | decay, first half | second half |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(factors)}

![K over the run](lars_forms.png)

## What the factor is worth

Runs of both forms from the same weights with the same images; ± is half the range over the seeds. "x K" multiplies the
trust coefficient by the K of that setting's gradient form, rounded to two decimals; "gradient x 1.01" shows how far
apart runs come that hardly differ. K is here measured along the run of the row. "Path" is the summed length of the
trusted tensors' updates relative to the gradient form's, "distance" that of the curves of training loss: the mean
absolute difference at the same steps. Final loss: mean over the last fifth.

| data | batch | form | seeds | K | path | distance | final training loss | top-1 (%) |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(ends)}

Distance with K in the place of 1, relative to that with 1, and what K leaves of the paths' difference:

| claim | value (over seeds) | goal | |
| --- | --- | --- | --- |
{chr(10).join(judged)}

## For the pods

`trust_coefficient` is {COEFFICIENT} x K, with K the mean of steady K over the settings at peak 8 (the pods': 8.485):
**{mean:.2f}**, from {low:.2f} to {high:.2f}. The schedule's peak stays: biases and scales of norms take plain momentum
in both forms, and K must not scale them.

Steady K, because a pod's rate does not change within nine steps. It depends on the phase more than on anything else.
While the rate is high, successive gradients point against each other and K is below {UNRELATED:.2f}, the further the
larger the batch, that is, the less noise there is. Early in the warm-up and at the end, where the rate is low, they
mostly agree and K is above it, again the more the larger the batch. In the average over a run the two cancel: batches
of 64 to 1,408 differ little, and so do runs of 150 and 400 steps. Nothing comes near {ALIGNED:.1f}.

With K in the coefficient the momentum form's path is as long as the gradient form's, and its loss curve much closer,
though not as close as that of a gradient form that differs by 1 %: one constant cannot follow K through the phases.
Final losses and accuracies of the two are the same within what seeds do. So they nearly are for other coefficients: the
data are easy, and the curves tell more than the ends.

What this does not show: no pod and no ImageNet. 6144 images of 1,000 classes have another share of noise than any
batch here. If noise rules there, K is {UNRELATED:.2f}, and {mean:.2f} makes the steps {short:.0f} % too short. With
less noise than here K may be {lowest:.1f} after the warm-up, as it is for the largest batch, and steps {long:.0f} %
too long there. Either is what a peak too low or too high by as much would be, for the trusted tensors. A network of
B4's depth did not learn at peak 8 with a warm-up of 14 steps (top-1 5 %), so its K is only known at peak 2. Float16
weights, cutmix, stochastic depth, B4's width and 73,000 steps were not tried.
"""


def main() -> None:
    as_json = claims.begin(__doc__, takes="an hour, less what is kept of runs before", quick="1 minute").json
    torch.set_num_threads(1)  # so that a run is the same on every machine with these kernels
    if claims.quick():
        short = Setting("digits", 64, 64, 2, 3)
        return claims.report("lars_forms", summarise({short: [made(Run(short, SEEDS[0]))]}, {}), [], as_json)
    measured, compared = measure_all()
    rows, found = summarise(measured, compared), verdicts(measured, compared)
    RESULTS.mkdir(parents=True, exist_ok=True)
    draw(measured, RESULTS / "lars_forms.png")
    write(rows, found, pod_factor(measured))
    claims.report("lars_forms", rows, found, as_json)
