"""A plan as text and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Iterator, List, Sequence, Tuple

from recipe import ipu_plan
from recipe.division import count
from tools.formats import duration, number, scaled
from tools.planning.memory import Widest
from tools.planning.summary import Summary


def lines(plan: Summary, note: str = "") -> Iterator[str]:
    """The plan below the lines that `--dry-run` prints. Args: note: on the machine."""
    machine, work = plan.machine, plan.workload
    yield f"machine    {machine.name}; its rate is from {machine.calibrated_on}"
    if note:
        yield f"           {note}"
    yield (
        f"model      {work.parameters:,} parameters, {scaled(work.multiply_adds, '')} multiply-adds an image forward; "
        f"stages: {work.cut}"
    )
    yield from _stages(plan)
    if plan.widest:
        yield f"widest     width multiplier that fits (now {plan.recipe.model.width:g}): {_widths(plan.widest)}"
    if plan.widest_1f1b:
        micro_batches = f"{plan.batch.accumulation:,} micro batches of a step"
        yield f"           gpipe keeps all {micro_batches}; 1f1b: {_widths(plan.widest_1f1b)}"
    yield from _step(plan)
    if plan.own.replicas > 1:
        yield "exchange   " + ", ".join(f"{name} {duration(seconds)}" for name, seconds in plan.methods.items())
    need = plan.input
    line = f"input      {need.device_bytes_per_second / 1e6:,.0f} MB/s to the devices"
    if need.cores is not None:
        line += (
            f", {need.file_bytes_per_second / 1e6:,.0f} MB/s of files as large as ImageNet's, "
            f"{need.cores:,.1f} of {need.cores_there:,.0f} cores to decode them"
        )
    yield line
    yield from _scaling(plan)


def as_data(plan: Summary) -> dict:
    """The plan as JSON has it: seconds, bytes, images a second; options on IPUs only."""
    memory, work = plan.memory, plan.workload
    options = {"options": [], "optimizer": {}}
    if plan.recipe.run.device == "ipu":
        options = ipu_plan.as_data(plan.recipe, plan.batch)
    stages = [
        {
            "blocks": stage.names,
            "parameters": stage.parameters,
            "multiply_adds": stage.multiply_adds,
            "state_bytes": own.state,
            "activation_bytes": own.activations,
            "activation_bytes_kept": plain.activations,
            "activation_bytes_recomputed": recomputed.activations,
        }
        for stage, own, plain, recomputed in zip(work.stages, memory.recipe, memory.plain, memory.recomputed)
    ]
    return {
        "batch": {key.rstrip("_"): value for key, value in dataclasses.asdict(plan.batch).items()},
        **options,
        "machine": plan.machine.model_dump(mode="json", exclude_none=True),
        "model": {key: getattr(work, key) for key in ("parameters", "multiply_adds", "cut", "imbalance")},
        "stages": stages,
        "memory": {"available": memory.available, "fits": memory.fits},
        "widest": [each._asdict() for each in plan.widest],
        "widest_1f1b": [each._asdict() for each in plan.widest_1f1b],
        "exchange": plan.methods,
        "input": plan.input._asdict(),
        "step": {**plan.own._asdict(), "hours": plan.own_hours},
        "scaling": [{**row._asdict(), "hours": hours} for row, hours in zip(plan.rows, plan.hours)],
    }


def _stages(plan: Summary) -> Iterator[str]:
    rows: List[Tuple] = [
        ("stage", "blocks", "parameters", "work", "state MB", "kept MB", "recomputed MB", "here MB", "of MB")
    ]
    total, memory = sum(stage.multiply_adds for stage in plan.workload.stages), plan.memory
    stages = zip(plan.workload.stages, memory.recipe, memory.plain, memory.recomputed)
    for place, (stage, own, plain, recomputed) in enumerate(stages):
        sizes = (own.state, plain.activations, recomputed.activations, own.total, memory.available)
        blocks, share = f"{stage.names[0]} to {stage.names[-1]}", f"{stage.multiply_adds / total:.0%}"
        megabytes = (f"{size / 1e6:,.0f}" for size in sizes)
        rows.append((str(place), blocks, f"{stage.parameters:,}", share, *megabytes))
    yield from _table(rows)
    if not memory.fits:
        yield "           DOES NOT FIT: lower batch.micro, recompute, or take more stages"
    yield "           activations of the micro batches in flight; program code and libraries' own memory not counted"


def _widths(found: Sequence[Widest]) -> str:
    shown = []
    for each in found:
        size = f"{each.width:.2f} ({each.parameters / 1e6:,.0f} M parameters)" if each.width else "none"
        shown.append(f"{count(each.stages, 'stage')} {size}")
    return "; ".join(shown)


def _step(plan: Summary) -> Iterator[str]:
    row = plan.own
    shares = {name: part / row.seconds for name, part in row.parts.items()}
    hours = f", {_training_time(plan.own_hours)} of training" if plan.own_hours is not None else ""
    pixels = f" at {plan.workload.image_size} px" if plan.recipe.data.image_sizes else ""
    yield (
        f"step       on {count(row.replicas, 'replica')}{pixels}: {duration(row.seconds)}, "
        f"{number(row.images_per_second)} images/s{hours}"
    )
    yield f"           {', '.join(f'{name} {share:.1%}' for name, share in shares.items() if share >= 0.0005)}"


def _scaling(plan: Summary) -> Iterator[str]:
    rows: List[Tuple] = [
        ("replicas", "devices", "batch", "micro batches", "step", "images/s", "of ideal", "time", "limit")
    ]
    for row, hours in zip(plan.rows, plan.hours):
        rows.append(
            (
                f"{row.replicas:,}",
                f"{row.devices:,}",
                f"{row.global_batch:,}" + ("*" if row.grown else ""),
                f"{row.accumulation:,}",
                duration(row.seconds),
                number(row.images_per_second),
                f"{row.efficiency:.0%}",
                _training_time(hours) if hours is not None else "",
                "compute" if row.limit == "compute" else f"{row.limit} {row.parts[row.limit] / row.seconds:.0%}",
            )
        )
    yield from _table(rows)
    if any(row.grown for row in plan.rows):
        yield (
            f"           * the batch grows: {plan.recipe.batch.global_:,} cannot be shared by so many replicas of "
            f"{plan.recipe.batch.micro} images a micro batch"
        )
    if plan.own_hours is None:
        yield "           no time: the number of images is known once data.root is read (or data.train_images given)"
    elif None in plan.hours:
        yield "           no time where the batch is too large for this many images and epochs"


def _table(rows: Sequence[Tuple[str, ...]]) -> Iterator[str]:
    """Rows in columns, the first of them the head. Columns whose last cell begins with a letter are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    left = [rows[-1][number][:1].isalpha() for number in range(len(widths))]
    for row in rows:
        cells = (text.ljust(width) if to_left else text.rjust(width) for text, width, to_left in zip(row, widths, left))
        yield "           " + "  ".join(cells).rstrip()


def _training_time(hours: float) -> str:
    if hours >= 48:
        return f"{hours / 24:.3g} days" if hours < 24000 else f"{hours / 24:,.0f} days"
    if hours >= 1:
        return f"{hours:.3g} h"
    return f"{hours * 60:.3g} min" if hours * 60 >= 1 else duration(hours * 3600)
