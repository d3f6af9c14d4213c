"""A plan as text and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Container, Dict, Iterator, Sequence

from common.text import count
from recipe.ipu import plan as ipu_plan
from tools.formats import duration, number, scaled
from tools.planning.scaling import Row
from tools.planning.summary import Summary
from tools.planning.workload import Widest

_INDENT = " " * 11
_LEAST_SHARE = 0.0005  # of a step, below which a part is not listed


def lines(plan: Summary, note: str = "") -> Iterator[str]:
    """Yield the plan below the lines that `--dry-run` prints.

    Args:
        plan: of a recipe on a machine.
        note: on the machine.
    """
    yield f"machine    {plan.machine.name}; its rate is from {plan.machine.calibrated_on}"
    if note:
        yield f"{_INDENT}{note}"
    # The memory of its devices comes before the time: a model that does not fit has none.
    yield from _model(plan)
    yield from _stages(plan)
    yield from _widest(plan)
    yield from _step(plan)
    # One replica exchanges nothing.
    if plan.step.replicas > 1:
        methods = [f"{name} {duration(seconds)}" for name, seconds in plan.exchange.items()]
        yield f"exchange   {', '.join(methods)}"
    yield _input(plan)
    yield from _scaling(plan)


def _model(plan: Summary) -> Iterator[str]:
    """Yield the size of the model, and how it is cut."""
    work = plan.workload
    parameters = f"{work.parameters:,} parameters"
    multiply_adds = f"{scaled(work.multiply_adds, '')} multiply-adds an image forward"
    yield f"model      {parameters}, {multiply_adds}; stages: {work.cut}"


def _widest(plan: Summary) -> Iterator[str]:
    """Yield the widest models that fit, by the number of stages."""
    if plan.widest:
        width = f"width multiplier that fits (now {plan.width:g})"
        yield f"widest     {width}: {_widths(plan.widest)}"
    if plan.widest_1f1b:
        kept = f"gpipe keeps all {plan.batch.accumulation:,} micro batches of a step"
        yield f"{_INDENT}{kept}; 1f1b: {_widths(plan.widest_1f1b)}"


def as_data(plan: Summary) -> dict:
    """Return a `plan` as JSON has it: seconds, bytes, images a second; options on IPUs only."""
    # Programs find the same keys on all devices.
    options: Dict[str, object] = {"options": [], "optimizer": {}}
    if plan.recipe.run.device == "ipu":
        options = ipu_plan.as_data(plan.recipe, plan.batch)
    batch = dataclasses.asdict(plan.batch)
    return {
        "batch": {key.rstrip("_"): value for key, value in batch.items()},
        **options,
        "machine": plan.machine.model_dump(mode="json", exclude_none=True),
        "model": {
            "parameters": plan.workload.parameters,
            "multiply_adds": plan.workload.multiply_adds,
            "cut": plan.workload.cut,
            "imbalance": plan.workload.imbalance,
        },
        "memory": {"available": plan.available, "fits": plan.fits},
        "stages": [stage._asdict() for stage in plan.stages],
        "widest": [widest._asdict() for widest in plan.widest],
        "widest_1f1b": [widest._asdict() for widest in plan.widest_1f1b],
        "scaling": [row._asdict() for row in plan.scaling],
        "exchange": plan.exchange,
        "input": plan.input._asdict(),
        "step": plan.step._asdict(),
    }


def _stages(plan: Summary) -> Iterator[str]:
    """Yield a table of the devices of a replica, and whether the model fits."""
    head = (
        "stage", "blocks", "parameters", "work", "state MB", "kept MB", "recomputed MB", "here MB",
        "of MB",
    )  # fmt: skip
    rows = [head]
    total = sum(stage.multiply_adds for stage in plan.stages)
    for index, stage in enumerate(plan.stages):
        here = stage.state_bytes + stage.activation_bytes
        row = (
            str(index),
            f"{stage.blocks[0]} to {stage.blocks[-1]}",
            f"{stage.parameters:,}",
            f"{stage.multiply_adds / total:.0%}",
            _megabytes(stage.state_bytes),
            _megabytes(stage.activation_bytes_kept),
            _megabytes(stage.activation_bytes_recomputed),
            _megabytes(here),
            _megabytes(plan.available),
        )
        rows.append(row)
    yield from table(rows, _INDENT, left=(1,))
    if not plan.fits:
        yield f"{_INDENT}DOES NOT FIT: lower batch.micro, recompute, or take more stages"
    yield f"{_INDENT}activations of the micro batches in flight; program code and libraries' own memory not counted"


def _megabytes(size: float) -> str:
    """Return bytes as megabytes."""
    return f"{size / 1e6:,.0f}"


def _widths(models: Sequence[Widest]) -> str:
    """Return the widest model for each number of stages."""
    shown = []
    for model in models:
        size = "none"
        if model.width:
            millions = model.parameters / 1e6
            size = f"{model.width:.2f} ({millions:,.0f} M parameters)"
        shown.append(f"{count(model.stages, 'stage')} {size}")
    return "; ".join(shown)


def _step(plan: Summary) -> Iterator[str]:
    """Yield the time of a step, and its parts."""
    row = plan.step
    line = f"step       on {count(row.replicas, 'replica')}"
    # Of several sizes the step is that of the largest.
    if plan.recipe.data.image_sizes:
        line += f" at {plan.workload.image_size} px"
    line += f": {duration(row.seconds)}, {number(row.images_per_second)} images/s"
    # The length of a run is not known where its images are not counted.
    if row.hours is not None:
        line += f", {_training_time(row.hours)} of training"
    yield line
    parts = []
    for name, seconds in row.parts.items():
        share = seconds / row.seconds
        if share >= _LEAST_SHARE:
            parts.append(f"{name} {share:.1%}")
    yield _INDENT + ", ".join(parts)


def _input(plan: Summary) -> str:
    """Return what must be read and decoded."""
    need = plan.input
    line = f"input      {_megabytes(need.device_bytes_per_second)} MB/s to the devices"
    # Images that are no files have neither.
    if need.file_bytes_per_second is not None and need.cores is not None:
        files = f"{_megabytes(need.file_bytes_per_second)} MB/s"
        cores = f"{need.cores:,.1f} of {need.cores_there:,.0f} cores"
        line += f", {files} of files as large as ImageNet's, {cores} to decode them"
    return line


def _scaling(plan: Summary) -> Iterator[str]:
    """Yield a table of steps on more and more replicas."""
    head = (
        "replicas", "devices", "batch", "micro batches", "step", "images/s", "of ideal", "time",
        "limit",
    )  # fmt: skip
    rows = [head, *map(_cells, plan.scaling)]
    yield from table(rows, _INDENT, left=(8,))
    # Footnotes.
    batch = plan.recipe.batch
    if any(row.grown for row in plan.scaling):
        cause = f"cannot be shared by so many replicas of {batch.micro} images a micro batch"
        yield f"{_INDENT}* the batch grows: {batch.global_:,} {cause}"
    # One sentence for both causes: rows of a table may have either.
    if any(row.hours is None for row in plan.scaling):
        yield (
            f"{_INDENT}no time: the number of images is not known (data.train_images), or the batch too large for it"
        )


def _cells(row: Row) -> Sequence[str]:
    """Return a row of the table of steps."""
    # A star marks a batch that had to grow.
    star = "*" if row.grown else ""
    return (
        f"{row.replicas:,}",
        f"{row.devices:,}",
        f"{row.global_batch:,}{star}",
        f"{row.accumulation:,}",
        duration(row.seconds),
        number(row.images_per_second),
        f"{row.efficiency:.0%}",
        "" if row.hours is None else _training_time(row.hours),
        _limit(row),
    )


def _limit(row: Row) -> str:
    """Return what limits a step, with its share if that is not computing."""
    if row.limit == "compute":
        return row.limit
    share = row.parts[row.limit] / row.seconds
    return f"{row.limit} {share:.0%}"


def table(rows: Sequence[Sequence[str]], indent: str, left: Container[int]) -> Iterator[str]:
    """Yield rows in columns.

    Args:
        rows: the first of them is the head.
        indent: before each line.
        left: numbers of the columns that are left-aligned.
    """
    # A column is as wide as its longest cell.
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths)):
            # Numbers are right-aligned, so that their digits stand below each other.
            aligned = cell.ljust(width) if column in left else cell.rjust(width)
            cells.append(aligned)
        line = "  ".join(cells)
        yield f"{indent}{line.rstrip()}"


def _training_time(hours: float) -> str:
    """Return hours of training in a unit that suits them."""
    # A thousand days or more, of which three digits would be 1.23e+03.
    if hours >= 24000:
        return f"{hours / 24:,.0f} days"
    if hours >= 48:
        return f"{hours / 24:.3g} days"
    if hours >= 1:
        return f"{hours:.3g} h"
    minutes = hours * 60
    if minutes >= 1:
        return f"{minutes:.3g} min"
    return duration(hours * 3600)
