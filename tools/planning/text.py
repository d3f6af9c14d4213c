"""A plan as text and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Container, Iterator, Sequence

from common.text import count
from recipe.ipu import plan as ipu_plan
from tools.formats import duration, number, scaled
from tools.planning.summary import Summary
from tools.planning.workload import Widest

_INDENT = " " * 11


def lines(plan: Summary, note: str = "") -> Iterator[str]:
    """The plan below the lines that `--dry-run` prints. Args: note: on the machine."""
    work, need = plan.workload, plan.input
    yield f"machine    {plan.machine.name}; its rate is from {plan.machine.calibrated_on}"
    if note:
        yield f"{_INDENT}{note}"
    size = f"{work.parameters:,} parameters, {scaled(work.multiply_adds, '')} multiply-adds an image forward"
    yield f"model      {size}; stages: {work.cut}"
    yield from _stages(plan)
    if plan.widest:
        yield f"widest     width multiplier that fits (now {plan.recipe.model.width:g}): {_widths(plan.widest)}"
    if plan.widest_1f1b:
        kept = f"gpipe keeps all {plan.batch.accumulation:,} micro batches of a step"
        yield f"{_INDENT}{kept}; 1f1b: {_widths(plan.widest_1f1b)}"
    yield from _step(plan)
    if plan.step.replicas > 1:
        yield "exchange   " + ", ".join(f"{name} {duration(seconds)}" for name, seconds in plan.exchange.items())
    line = f"input      {need['device_bytes_per_second'] / 1e6:,.0f} MB/s to the devices"
    if need["cores"] is not None:
        line += f", {need['file_bytes_per_second'] / 1e6:,.0f} MB/s of files as large as ImageNet's"
        line += f", {need['cores']:,.1f} of {need['cores_there']:,.0f} cores to decode them"
    yield line
    yield from _scaling(plan)


def as_data(plan: Summary) -> dict:
    """The plan as JSON has it: seconds, bytes, images a second; options on IPUs only."""
    options = {"options": [], "optimizer": {}}
    if plan.recipe.run.device == "ipu":
        options = ipu_plan.as_data(plan.recipe, plan.batch)
    names = ("stages", "widest", "widest_1f1b", "scaling")
    return {
        "batch": {key.rstrip("_"): value for key, value in dataclasses.asdict(plan.batch).items()},
        **options,
        "machine": plan.machine.model_dump(mode="json", exclude_none=True),
        "model": {key: getattr(plan.workload, key) for key in ("parameters", "multiply_adds", "cut", "imbalance")},
        "memory": {"available": plan.available, "fits": plan.fits},
        **{name: [each._asdict() for each in getattr(plan, name)] for name in names},
        "exchange": plan.exchange,
        "input": plan.input,
        "step": plan.step._asdict(),
    }


def _stages(plan: Summary) -> Iterator[str]:
    rows = [("stage", "blocks", "parameters", "work", "state MB", "kept MB", "recomputed MB", "here MB", "of MB")]
    total = sum(stage.multiply_adds for stage in plan.stages)
    for place, stage in enumerate(plan.stages):
        here = stage.state_bytes + stage.activation_bytes
        sizes = (stage.state_bytes, stage.activation_bytes_kept, stage.activation_bytes_recomputed, here)
        blocks, share = f"{stage.blocks[0]} to {stage.blocks[-1]}", f"{stage.multiply_adds / total:.0%}"
        megabytes = (f"{size / 1e6:,.0f}" for size in (*sizes, plan.available))
        rows.append((str(place), blocks, f"{stage.parameters:,}", share, *megabytes))
    yield from table(rows, _INDENT, left=(1,))
    if not plan.fits:
        yield f"{_INDENT}DOES NOT FIT: lower batch.micro, recompute, or take more stages"
    yield f"{_INDENT}activations of the micro batches in flight; program code and libraries' own memory not counted"


def _widths(found: Sequence[Widest]) -> str:
    shown = []
    for each in found:
        size = f"{each.width:.2f} ({each.parameters / 1e6:,.0f} M parameters)" if each.width else "none"
        shown.append(f"{count(each.stages, 'stage')} {size}")
    return "; ".join(shown)


def _step(plan: Summary) -> Iterator[str]:
    row = plan.step
    hours = f", {_training_time(row.hours)} of training" if row.hours is not None else ""
    pixels = f" at {plan.workload.image_size} px" if plan.recipe.data.image_sizes else ""
    rate = f"{number(row.images_per_second)} images/s"
    yield f"step       on {count(row.replicas, 'replica')}{pixels}: {duration(row.seconds)}, {rate}{hours}"
    shares = {name: part / row.seconds for name, part in row.parts.items()}
    yield _INDENT + ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share >= 0.0005)


def _scaling(plan: Summary) -> Iterator[str]:
    rows = [("replicas", "devices", "batch", "micro batches", "step", "images/s", "of ideal", "time", "limit")]
    for row in plan.scaling:
        share = "" if row.limit == "compute" else f" {row.parts[row.limit] / row.seconds:.0%}"
        counts = (f"{row.replicas:,}", f"{row.devices:,}", f"{row.global_batch:,}" + "*" * row.grown)
        figures = (f"{row.accumulation:,}", duration(row.seconds), number(row.images_per_second))
        time = _training_time(row.hours) if row.hours is not None else ""
        rows.append((*counts, *figures, f"{row.efficiency:.0%}", time, row.limit + share))
    yield from table(rows, _INDENT, left=(8,))
    batch = plan.recipe.batch
    if any(row.grown for row in plan.scaling):
        cause = f"cannot be shared by so many replicas of {batch.micro} images a micro batch"
        yield f"{_INDENT}* the batch grows: {batch.global_:,} {cause}"
    if any(row.hours is None for row in plan.scaling):
        yield f"{_INDENT}no time: the number of images is not known (data.train_images), or the batch too large for it"


def table(rows: Sequence[Sequence[str]], indent: str, left: Container[int]) -> Iterator[str]:
    """Rows in columns, the first of them the head. Args: left: numbers of the columns that are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    sides = ["<" if place in left else ">" for place in range(len(widths))]
    for row in rows:
        yield indent + "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths)).rstrip()


def _training_time(hours: float) -> str:
    if hours >= 48:
        return f"{hours / 24:.3g} days" if hours < 24000 else f"{hours / 24:,.0f} days"
    if hours >= 1:
        return f"{hours:.3g} h"
    return f"{hours * 60:.3g} min" if hours * 60 >= 1 else duration(hours * 3600)
