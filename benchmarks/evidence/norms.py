"""Norms at small and at larger micro batches, and grouped against depthwise convolutions of as many parameters."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

from benchmarks import ROOT
from benchmarks.evidence import page
from benchmarks.evidence.experiment import Experiment, Series, changed, standard_errors
from benchmarks.evidence.ladder import CLEAR
from benchmarks.evidence.runs import RECIPE
from models.shapes import blocks
from recipe import loading

MICRO = (3, 32)
NORMS: Dict[str, Tuple[str, ...]] = {
    "batch": ("model.norm=batch", "model.norm_momentum=0.1"),
    "group": ("model.norm=group",),
    "group, proxy": ("model.norm=group", "model.proxy_norm=true"),
}
GROUPS: Dict[str, Tuple[str, ...]] = {
    "G16, expansion 4": (),
    # As many parameters as G16 at width 0.4: tests hold the two to 2 %.
    "G1, expansion 6": ("model.group_size=1", "model.expansion=6", "model.width=0.49"),
}
SIZE = (
    "model.width=0.4", "model.norm_groups=4", "model.image_size=32", "data.glyph_size=32",
    "data.glyph_difficulty=0.3", "batch.global=96", "data.train_images=10240", "run.epochs=2",
    "schedule.warmup_epochs=0.3", "schedule.peak=1", "evaluation.every_epochs=2", "batch.evaluation=256",
)  # fmt: skip


class Norms(Experiment):
    """The same images, batch and rate for all."""

    name = "norms"
    question = "Norms at micro batches of 3 and 32, and G16 against G1 at equal parameters"
    published = (
        "With micro batches of 3 only norms that do not look across the batch are possible; layer and group "
        "normalisation with proxy normalisation match batch normalisation on ImageNet (Labatie et al., 2106.03743), "
        "and G16 with expansion 4 matches the depthwise original with expansion 6 at about equal parameters, faster on "
        "IPUs (Masters et al., 2106.03640)."
    )

    @property
    def about(self) -> str:
        counts = {name: parameters(changed(SIZE, overrides)) for name, overrides in GROUPS.items()}
        told = ", ".join(f"{name}: {count:,} parameters" for name, count in counts.items())
        return f"""A model of width 0.4 at 32 px, 20,480 images of difficulty 0.3 in 213 updates of 96, LARS at a peak \
of 1 for all: rates were not searched for each row. Group normalisation has 4 groups; running statistics of batch \
normalisation have momentum 0.1. {told}, both with group normalisation and micro batches of 32."""

    def series(self) -> List[Series]:
        found = [
            Series(
                {"norm": norm, "micro_batch": micro, "convolutions": "G16, expansion 4"},
                (*SIZE, *NORMS[norm], f"batch.micro={micro}"),
            )
            for norm, micro in itertools.product(NORMS, MICRO)
        ]
        labels = {"norm": "group", "micro_batch": 32, "convolutions": "G1, expansion 6"}
        depthwise = changed(SIZE, GROUPS["G1, expansion 6"])
        return [*found, Series(labels, (*depthwise, *NORMS["group"], "batch.micro=32"))]

    def draw(self, rows: Sequence[dict], path: Path) -> None:
        lines = {
            norm: [
                (row["micro_batch"], row["top1_mean"], row["top1_sd"])
                for row in rows
                if row["norm"] == norm and row["convolutions"] == "G16, expansion 4"
            ]
            for norm in NORMS
        }
        other = rows[-1]
        lines["group, G1"] = [(other["micro_batch"], other["top1_mean"], other["top1_sd"])]
        page.draw({"": lines}, path, x="micro batch", y="validation top-1 (%)", log_x=True)

    def verdict(self, rows: Sequence[dict]) -> str:
        at = {(row["norm"], row["micro_batch"], row["convolutions"]): row for row in rows}
        (small, large), (g16, g1) = MICRO, GROUPS
        loses = standard_errors(at["batch", large, g16], at["batch", small, g16]) > CLEAR
        proxy = _points(at["group, proxy", small, g16], at["group", small, g16])
        return (
            f"{'Reproduced' if loses else 'Did not reproduce'}: at micro batches of {small} instead of {large}, batch "
            f"normalisation changes by {_points(at['batch', small, g16], at['batch', large, g16])}, group "
            f"normalisation by {_points(at['group', small, g16], at['group', large, g16])}; at micro batches of "
            f"{small}, proxy normalisation adds {proxy} to the latter; G16 against G1 at equal parameters is "
            f"{_points(at['group', large, g16], at['group', large, g1])}."
        )


def _points(one: dict, other: dict) -> str:
    """By how much one row is above another, and whether chance explains it."""
    clear = abs(standard_errors(one, other)) > CLEAR
    return f"{one['top1_mean'] - other['top1_mean']:+.1f} points ({'clear' if clear else 'within the spread'})"


def parameters(overrides: Sequence[str]) -> int:
    """Of the recipe's model under overrides."""
    model = loading.load(ROOT / RECIPE, overrides).model
    return sum(block.parameters for block in blocks(model, model.image_size).values())
