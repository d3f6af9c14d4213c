"""Norms at small and at larger micro batches, and grouped against depthwise convolutions of as many parameters."""

import itertools
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

from benchmarks import ROOT
from benchmarks.evidence import page
from benchmarks.evidence.experiment import Experiment, Series, changed
from benchmarks.evidence.runs import RECIPE
from models.shapes import blocks
from recipe import loading

MICRO = (3, 32)
NORMS: Dict[str, Tuple[str, ...]] = {
    "batch": ("model.norm=batch", "model.norm_momentum=0.1"),
    "group": ("model.norm=group",),
    "group, proxy": ("model.norm=group", "model.proxy_norm=true"),
}
G16, G1 = "G16, expansion 4", "G1, expansion 6"
GROUPS: Dict[str, Tuple[str, ...]] = {
    G16: (),
    # As many parameters as G16 at width 0.4: tests hold the two to 2 %.
    G1: ("model.group_size=1", "model.expansion=6", "model.width=0.49"),
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

    def series(self) -> List[Series]:
        cases = [*itertools.product(NORMS, MICRO, (G16,)), ("group", MICRO[1], G1)]
        return [
            Series(
                {"norm": norm, "micro_batch": micro, "convolutions": groups},
                (*changed(SIZE, GROUPS[groups]), *NORMS[norm], f"batch.micro={micro}"),
            )
            for norm, micro, groups in cases
        ]

    def draw(self, rows: Sequence[dict], path: Path) -> None:
        named = [{**row, "norm": row["norm"] + (", G1" if row["convolutions"] == G1 else "")} for row in rows]
        panels = {"": page.lines(named, "norm", "micro_batch")}
        page.draw(panels, path, x="micro batch", y="validation top-1 (%)")

    def pairs(self, rows: Sequence[dict]) -> Dict[str, Tuple[dict, dict]]:
        at = {(row["norm"], row["micro_batch"], row["convolutions"]): row for row in rows}
        small, large = MICRO
        return {
            f"batch norm at {small} against {large}": (at["batch", small, G16], at["batch", large, G16]),
            f"group norm at {small} against {large}": (at["group", small, G16], at["group", large, G16]),
            f"proxy norm at {small}": (at["group, proxy", small, G16], at["group", small, G16]),
            "G16 against G1 at equal parameters": (at["group", large, G16], at["group", large, G1]),
        }


def parameters(overrides: Sequence[str]) -> int:
    model = loading.load(ROOT / RECIPE, overrides).model
    return sum(block.parameters for block in blocks(model, model.image_size).values())
