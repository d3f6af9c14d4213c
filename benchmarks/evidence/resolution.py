"""Training at half the pixels and finishing at the native size: what it costs, and what it reaches."""

import itertools
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

from benchmarks import ROOT
from benchmarks.evidence import page
from benchmarks.evidence.experiment import Experiment, Series
from benchmarks.evidence.runs import RECIPE
from models.shapes import blocks
from recipe import loading

NATIVE, HALF = 32, 21  # pixels a side: 0.43 of the pixels, as 252 against 380 px
LENGTHS = (2, 4, 8)  # epochs
KINDS = NATIVELY, HALF_ONLY, TUNED = "native", "half", "half, then native"
_DATA = (
    "model.width=0.35", f"model.image_size={NATIVE}", f"data.glyph_size={NATIVE}",
    "data.train_images=7680", "batch.global=128", "batch.micro=128", "schedule.peak=1", "evaluation.every_epochs=2",
)  # fmt: skip
CROPS = {"none": (), "random": ("data.crop_area=[0.25,1]", "data.crop_aspect=[0.75,1.3333]")}
_TUNING = 0.25  # share of the epochs that is native in the end


class Resolution(Experiment):
    """Native size, half of the pixels, and both in turn, for several lengths: accuracy over compute."""

    name = "resolution"
    question = "Half the resolution, finished at the native one: accuracy by compute"

    def series(self) -> List[Series]:
        share = multiply_adds(HALF) / multiply_adds(NATIVE)
        found = []
        cases = [*itertools.product(["none"], KINDS, LENGTHS), *itertools.product(["random"], KINDS, LENGTHS[-1:])]
        for crops, kind, epochs in cases:
            tuning = max(1, round(_TUNING * epochs))
            native = {NATIVELY: epochs, HALF_ONLY: 0, TUNED: tuning}[kind]
            sizes = {
                NATIVELY: (),
                HALF_ONLY: (f"data.image_sizes=[[0,{HALF}]]",),
                TUNED: (f"data.image_sizes=[[0,{HALF}],[{epochs - tuning},{NATIVE}]]",),
            }[kind]
            length = (f"run.epochs={epochs}", f"schedule.warmup_epochs={0.15 * epochs:g}")
            compute = round(native + share * (epochs - native), 3)  # in native epochs
            labels = {"crops": crops, "training": kind, "epochs": epochs, "compute": compute}
            found.append(Series(labels, (*_DATA, *CROPS[crops], *length, *sizes)))
        return found

    def draw(self, rows: Sequence[dict], path: Path) -> None:
        panels = {
            f"crops: {crops}": page.lines([row for row in rows if row["crops"] == crops], "training", "compute")
            for crops in CROPS
        }
        page.draw(panels, path, x="compute, in native epochs", y=f"validation top-1 at {NATIVE} px (%)", log_x=False)

    def pairs(self, rows: Sequence[dict]) -> Dict[str, Tuple[dict, dict]]:
        at = {(row["crops"], row["training"]): row for row in rows if row["epochs"] == LENGTHS[-1]}
        pairs = itertools.product(CROPS, (TUNED, HALF_ONLY))
        return {f"{kind}, crops {crops}": (at[crops, kind], at[crops, NATIVELY]) for crops, kind in pairs}


def multiply_adds(image_size: int) -> int:
    """Multiply-adds of one forward pass of an image."""
    model = loading.load(ROOT / RECIPE, _DATA).model
    return sum(block.multiply_adds for block in blocks(model, image_size).values())
