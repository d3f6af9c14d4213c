"""Training at half the pixels and finishing at the native size: what it costs, and what it reaches."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

from benchmarks import ROOT
from benchmarks.evidence import page
from benchmarks.evidence.experiment import Experiment, Series, standard_errors
from benchmarks.evidence.ladder import CLEAR
from benchmarks.evidence.runs import RECIPE
from models.shapes import blocks
from recipe import loading

NATIVE, HALF = 32, 21  # pixels a side: 0.43 of the pixels, as 252 against 380 px
LENGTHS = (2, 4, 8)  # epochs
NATIVELY, HALF_ONLY, TUNED = "native", "half", "half, then native"
_DATA = (
    "model.width=0.35", f"model.image_size={NATIVE}", f"data.glyph_size={NATIVE}",
    "data.train_images=7680", "batch.global=128", "batch.micro=128", "schedule.peak=1", "evaluation.every_epochs=2",
)  # fmt: skip
NONE, RANDOM = "none", "random"  # crops
_CROPS = {NONE: (), RANDOM: ("data.crop_area=[0.25,1]", "data.crop_aspect=[0.75,1.3333]")}
_TUNING = 0.25  # share of the epochs that is native in the end


class Resolution(Experiment):
    """All three for several lengths, so that accuracy stands over compute."""

    name = "resolution"
    question = "Half the resolution, finished at the native one: accuracy by compute"
    about = f"""A model of width 0.35; {NATIVE} px is native, {HALF} px has \
{HALF**2 / NATIVE**2:.2f} of the pixels (252 against 380 px: 0.44). "{TUNED}" trains the last {_TUNING:.0%} of its \
epochs at {NATIVE} px, by `data.image_sizes`, in one schedule. Everything is evaluated at {NATIVE} px. Batch 128, \
7,680 images, LARS at a peak of 1. Compute is counted: multiply-adds of all forward and backward \
passes, in units of one native epoch. Random crops have a quarter to all of the area, as photographs are cropped by \
most recipes."""
    published = (
        "Training EfficientNets at half the pixels and fine-tuning natively for 2 of 350 epochs reaches the native "
        "accuracy (Masters et al., 2106.03640; Touvron et al., 1906.06423, for why it needs the fine-tuning)."
    )

    def series(self) -> List[Series]:
        kinds = (NATIVELY, HALF_ONLY, TUNED)
        every = [(NONE, *each) for each in itertools.product(kinds, LENGTHS)]
        every += [(RANDOM, kind, LENGTHS[-1]) for kind in kinds]
        return [
            Series(
                {"crops": crops, "training": kind, "epochs": epochs, "compute": self._compute(kind, epochs)},
                (
                    *_DATA,
                    *_CROPS[crops],
                    f"run.epochs={epochs}",
                    f"schedule.warmup_epochs={0.15 * epochs:g}",
                    *_sizes(kind, epochs),
                ),
            )
            for crops, kind, epochs in every
        ]

    @staticmethod
    def _compute(kind: str, epochs: int) -> float:
        """In native epochs."""
        share = multiply_adds(HALF) / multiply_adds(NATIVE)
        native = {NATIVELY: epochs, HALF_ONLY: 0, TUNED: _native_epochs(epochs)}[kind]
        return round(native + share * (epochs - native), 3)

    def draw(self, rows: Sequence[dict], path: Path) -> None:
        panels: Dict[str, Dict[str, list]] = {}
        for row in rows:
            lines = panels.setdefault(f"crops: {row['crops']}", {})
            lines.setdefault(row["training"], []).append((row["compute"], row["top1_mean"], row["top1_sd"]))
        page.draw(panels, path, x="compute, in native epochs", y=f"validation top-1 at {NATIVE} px (%)")

    def verdict(self, rows: Sequence[dict]) -> str:
        at = {(row["crops"], row["training"]): row for row in rows if row["epochs"] == LENGTHS[-1]}
        behind = {crops: standard_errors(at[crops, NATIVELY], at[crops, TUNED]) > CLEAR for crops in (NONE, RANDOM)}
        word = "Did not reproduce" if all(behind.values()) else "Reproduced"
        if any(behind.values()) and not all(behind.values()):
            word = f"Reproduced with {'random crops' if behind[NONE] else 'whole images'} only"
        share = at[NONE, TUNED]["compute"] / at[NONE, NATIVELY]["compute"]
        told = "; ".join(
            f"{'with random crops' if crops == RANDOM else 'of whole images'} {at[crops, TUNED]['top1_mean']:.1f} % "
            f"instead of {at[crops, NATIVELY]['top1_mean']:.1f} % natively ({'clearly' if less else 'not clearly'} "
            f"less), {at[crops, HALF_ONLY]['top1_mean']:.1f} % without the native end"
            for crops, less in behind.items()
        )
        return (
            f"{word}: {LENGTHS[-1]} epochs at half resolution, the last {_native_epochs(LENGTHS[-1])} native, at "
            f"{share:.0%} of the compute: {told}."
        )


def _sizes(kind: str, epochs: int) -> Tuple[str, ...]:
    if kind == NATIVELY:
        return ()
    if kind == HALF_ONLY:
        return (f"data.image_sizes=[[0,{HALF}]]",)
    return (f"data.image_sizes=[[0,{HALF}],[{epochs - _native_epochs(epochs)},{NATIVE}]]",)


def _native_epochs(epochs: int) -> int:
    """At the end of a run that begins at half the resolution."""
    return max(1, round(_TUNING * epochs))


def multiply_adds(image_size: int) -> int:
    """Multiply-adds of one forward pass of an image."""
    model = loading.load(ROOT / RECIPE, _DATA).model
    return sum(block.multiply_adds for block in blocks(model, image_size).values())
