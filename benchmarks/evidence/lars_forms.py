"""The factor K by which a step of LARS's gradient form is longer than one of its momentum form, and its effect.

Runs of the gradient form measure K. Runs of the momentum form with the trust coefficient times 1, K and multiples of
it show whether K makes the two forms equal.
"""

import json
import statistics
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence, Tuple

from benchmarks import claims
from benchmarks.evidence import page
from benchmarks.evidence.experiment import Experiment, Series, cell, plus_minus
from benchmarks.evidence.runs import Run, curve, outcome

MOMENTUM, COEFFICIENT = 0.885, 0.001  # of the pod recipes
UNRELATED = (1 - MOMENTUM**2) ** -0.5  # K of unrelated gradients
PHASES = {"warmup": (0.0, 0.2), "early_decay": (0.2, 0.6), "late_decay": (0.6, 1.0)}  # shares of the run
DATA = {
    "digits": ("model.image_size=28", "model.classes=10"),
    "glyphs": (
        "model.image_size=32", "model.classes=20", "data.train_images=4000", "data.validation_images=1000",
        "data.glyph_difficulty=0.2",
    ),
}  # fmt: skip
SEEDS = (0, 1)
ENDS = ("distance", "loss", "top1")


class Setting(NamedTuple):
    """A comparison of the two forms. The peak is the schedule's."""

    data: str
    batch: int
    peak: int
    epochs: int
    depth: float = 0.3


SETTINGS = (
    Setting("digits", 64, 2, 20), Setting("digits", 256, 8, 30), Setting("glyphs", 96, 2, 7),
    Setting("glyphs", 384, 8, 10),
)  # fmt: skip
# Only measured, with one seed: the batch at one peak, up to nearly all images; the peak at one batch; a longer run;
# and the depth of B4, which at peak 8 does not learn in a run so short.
MEASURED = (
    Setting("digits", 64, 8, 40), Setting("digits", 256, 2, 30), Setting("digits", 256, 8, 80),
    Setting("digits", 1408, 8, 60), Setting("glyphs", 384, 2, 7, depth=1.8),
)  # fmt: skip
MULTIPLES = {SETTINGS[0]: (0.5, 2.0), SETTINGS[1]: (0.5, 2.0)}  # of K, also tried with the momentum form
GRADIENT, NOISE = "gradient", "gradient x 1.01"  # NOISE: distance of runs that hardly differ


class LarsForms(Experiment):
    """The two forms from the same weights with the same images."""

    name = "lars_forms"
    question = "The two forms of LARS: by which factor their steps differ"
    takes = "an hour, less for cached runs"
    base = "configs/quickstart.yaml"
    compared = ("top1", "top1_half_range")

    def series(self) -> List[Series]:
        found = [self._series(setting, SEEDS) for setting in SETTINGS]
        found += [self._series(setting, SEEDS[:1]) for setting in MEASURED]
        for setting, reference in zip(SETTINGS, list(found)):
            records = [record(run) for run in reference.runs]
            if None in records:
                continue
            own = round(k_factor(records), 2)
            tried = {"1": 1.0, "K": own, **{f"{times:g} K": times * own for times in MULTIPLES.get(setting, ())}}
            found += [self._series(setting, SEEDS, f"momentum x {name}", value) for name, value in tried.items()]
            found.append(self._series(setting, SEEDS[:1], NOISE, 1.01))
        return found

    def _series(self, setting: Setting, seeds: Tuple[int, ...], form: str = GRADIENT, factor: float = 1.0) -> Series:
        """The published trust coefficient times `factor`."""
        overrides = (
            "model.width=0.35", f"model.depth={setting.depth}", f"data.source={setting.data}", *DATA[setting.data],
            f"batch.global={setting.batch}", f"batch.micro={min(setting.batch, 128)}",
            "precision.weights=float32", f"optimizer.trust={form.partition(' ')[0]}",
            f"optimizer.trust_coefficient={COEFFICIENT * factor:.6g}", f"optimizer.momentum={MOMENTUM}",
            "optimizer.weight_decay=2.5e-6", f"schedule.peak={setting.peak}",
            f"schedule.warmup_epochs={0.2 * setting.epochs}", f"run.epochs={setting.epochs}",
            "evaluation.every_epochs=1000", "log.every_steps=10",
        )  # fmt: skip
        return Series({**setting._asdict(), "form": form}, overrides, seeds, base=self.base, measured=True)

    def quick(self) -> List[Series]:
        return [self._series(Setting("digits", 64, 2, 3), SEEDS[:1])]

    def rows_of(self, series: Sequence[Series]) -> List[dict]:
        """K along the runs, and their ends; `path` and `distance`: to the gradient form's run of the same seed."""
        references = {_setting(each): each for each in series if each.labels["form"] == GRADIENT}
        return [_row(each, references[_setting(each)]) for each in series]

    def table(self, rows: Sequence[dict]) -> str:
        head = ("data", "batch", "peak", "depth", "steps", "seeds", "K", "steady K", "warm-up", "decay, first half",
                "second half")  # fmt: skip
        lines = [
            (
                *(cell(row[key]) for key in ("data", "batch", "peak", "depth", "steps", "seeds")),
                f"{row['k']:.2f}",
                f"{row['k_steady']:.2f} ({row['k_steady_low']:.2f} to {row['k_steady_high']:.2f})",
                *(f"{row[f'k_{phase}']:.2f}" for phase in PHASES),
            )
            for row in rows
            if row["form"] == GRADIENT
        ]
        return claims.markdown(head, lines)

    def more(self, rows: Sequence[dict]) -> str:
        ends = [
            (
                *(row[key] for key in ("data", "batch", "form", "seeds")),
                *(f"{row[key]:.2f}" for key in ("k", "path")),
                *(plus_minus(row[key], row[f"{key}_half_range"], 1 if key == "top1" else 3) for key in ENDS),
            )
            for setting in SETTINGS
            for row in rows
            if all(row[key] == value for key, value in setting._asdict().items())
        ]
        head = ("data", "batch", "form", "seeds", "K", "path", "distance", "final training loss", "top-1 (%)")
        return f"""## Effect of the factor

{claims.markdown(head, ends)}

Distance with K instead of 1, relative to that with 1, and the difference of the paths that K leaves (range over seeds):

{claims.claims_table(self.claims(), "{:.2f} ({:.2f} to {:.2f})")}"""

    def draw(self, rows: Sequence[dict], path: Path) -> None:
        gradient = [row for row in rows if row["form"] == GRADIENT]
        names = [f"{row['data']}, batch {row['batch']}, peak {row['peak']}, {row['steps']} steps" for row in gradient]
        sides = {kind: [row[key] for row in gradient] for kind, key in (("K", "k"), ("steady K", "k_steady"))}
        page.bars(names, sides, path, f"K; {UNRELATED:.2f} for unrelated gradients")

    def claims(self) -> List[dict]:
        """By setting, a value a seed: the share of the distance at K = 1 that K leaves, and the paths' difference."""
        records = {(_setting(each), each.labels["form"]): [record(run) for run in each.runs] for each in self.series()}
        found = []
        for setting in SETTINGS:
            name, reference = f"{setting.data}{setting.batch}", records[setting, GRADIENT]
            scaled, plain = (list(zip(records[setting, f"momentum x {each}"], reference)) for each in ("K", "1"))
            left = [_distance(*near) / _distance(*far) for near, far in zip(scaled, plain)]
            found.append(claims.claim(f"distance_left_{name}", left, "of that at K = 1", "<= 0.67"))
            paths = [abs(_path(*pair) - 1) for pair in scaled]
            found.append(claims.claim(f"path_difference_{name}", paths, "relative", "<= 0.1"))
        return found

    def verdict(self, rows: Sequence[dict]) -> str:
        steady = [row["k_steady"] for row in rows if row["form"] == GRADIENT and row["peak"] == 8]
        return (
            f"The pods' `trust_coefficient` is {COEFFICIENT} x K with K {statistics.mean(steady):.2f}, the mean of "
            f"steady K at peak 8 (the pods': 8.485), from {min(steady):.2f} to {max(steady):.2f}."
        )


def record(run: Run) -> Optional[dict]:
    """Step lengths, training losses (each a mean over ten steps) and final top-1 of a run; None before its end."""
    found = outcome(run)
    if found is None:
        return None
    return {**json.loads(run.record.read_text()), "losses": curve(run, "train", "loss")[1], "top1": found.top1}


def k_factor(records: Sequence[dict], kind: str = "scheduled") -> float:
    """K: median over the tensors of their averages over the run, averaged over the runs."""
    return statistics.mean(statistics.median(each[f"{kind}_tensors"]) for each in records)


def _setting(series: Series) -> Setting:
    return Setting(*(series.labels[name] for name in Setting._fields))


def _row(series: Series, reference: Series) -> dict:
    records, others = ([record(run) for run in each.runs] for each in (series, reference))
    quartiles = [statistics.quantiles(each["steady_tensors"], n=4) for each in records]
    row = {
        **series.labels,
        "steps": records[0]["step"][-1] + 1,
        "seeds": len(records),
        "k": k_factor(records),
        "k_steady": k_factor(records, "steady"),
        "k_steady_low": statistics.mean(low for low, _, _ in quartiles),
        "k_steady_high": statistics.mean(high for _, _, high in quartiles),
        **{f"k_{name}": statistics.mean(_phase(each, *span) for each in records) for name, span in PHASES.items()},
    }
    for name, values in {
        "path": [_path(*pair) for pair in zip(records, others)],
        "distance": [_distance(*pair) for pair in zip(records, others)],
        "loss": [statistics.mean(each["losses"][-max(1, len(each["losses"]) // 5) :]) for each in records],
        "top1": [100 * each["top1"] for each in records],
    }.items():
        row.update({name: statistics.mean(values), f"{name}_half_range": (max(values) - min(values)) / 2})
    return {key: float(f"{each:.5g}") if isinstance(each, float) else each for key, each in row.items()}


def _path(own: dict, other: dict) -> float:
    return sum(own["update"]) / sum(other["update"])


def _distance(own: dict, other: dict) -> float:
    """Mean absolute difference of two runs' training losses at the same steps."""
    return statistics.mean(abs(one - two) for one, two in zip(own["losses"], other["losses"]))


def _phase(own: dict, start: float, end: float) -> float:
    """Steady K between two fractions of the run: median over the tensors, averaged with the rate as weight."""
    total = own["step"][-1] + 1
    steps = [number for number, step in enumerate(own["step"]) if start * total <= step < end * total]
    rates = [own["lr"][number] for number in steps]
    return sum(rate * own["steady"][number][1] for rate, number in zip(rates, steps)) / sum(rates)
