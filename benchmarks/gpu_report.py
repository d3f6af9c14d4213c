"""Report of benchmarks/gpu_suite.py: claims, the machine, and the files in docs/results/gpu."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import subprocess
from pathlib import Path
from typing import List, Optional, Sequence

import torch

from benchmarks import ROOT, claims
from benchmarks.gpu_measure import Row
from benchmarks.gpu_parts import OPTIMIZER, UPDATE, UPDATE_IN_GRAPH
from benchmarks.gpu_training import CLAIMED, OURS, TIMM

CHECKS, PUBLISHED = "checks", "published, not measured here"

# Training of EfficientNet-B4 at 380 px; DeepLearningExamples are NVIDIA's.
PUBLISHED_ROWS = [
    Row(PUBLISHED, "A100 80GB, PyTorch, AMP", (331.0,), "images/s", note="B4-G1-BN, batch 128; DeepLearningExamples"),
    Row(PUBLISHED, "A100 80GB, TensorFlow 2 XLA, AMP", (470.0,), "images/s", note="B4-G1-BN; DeepLearningExamples"),
    Row(
        PUBLISHED, "IPU of a Bow Pod16, TensorFlow 1, 16.16", (9000 / 16,), "images/s",
        note="B4-G16-GN, batch 6144: 9000 of 16 IPUs; graphcore.cn/performance-results",
    ),
]  # fmt: skip

_HOW = """\
Measured by `python -m benchmarks.gpu_suite`, all in one command of less than eight minutes; what there was no time for
says so. Figures are medians over turns, in which the sides of a section are computed one after the other, in an order
that turns around; CUDA's events are the clock, and what comes first (cuDNN's search, Triton's compiler) is left out.
Training is one update from one micro batch that lies on the device: ours is the engine (float16 weights and momentum,
stochastic rounding; uint8 images), timm's the body of its train.py (float32 weights, autocast, its Lars; normalised
images; the loss is read after each step). The update is one of float16 weights and momentum from float32 gradients; its
limit is 18 bytes a parameter at the speed of the copy: gradient and weight read for the norms, then gradient, weight
and momentum read and the last two written. A check's bound is twice the error of torch's own kernels against float64,
or the spacing of the dtype at the largest number.
"""

_LIMITS = {CHECKS: "bound"}


def about(device: torch.device) -> dict:
    """The machine and the program, as `claims.machine` and more."""
    cuda = device.type == "cuda"
    triton = importlib.util.find_spec("triton")
    return {
        **claims.machine(),
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "memory_gib": round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1) if cuda else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "triton": _triton_version() if triton else None,
        "revision": _revision(),
    }


def _triton_version() -> str:
    import triton

    return triton.__version__


def _revision() -> str:
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"


def made_claims(rows: Sequence[Row]) -> List[dict]:
    """Those of which there are figures."""
    made = []
    checks = [row for row in rows if row.section == CHECKS]
    if checks:
        made.append(claims.claim("failed_checks", [sum(not _passed(row) for row in checks)], "checks", "<= 0"))
    training = [row for row in rows if row.section in CLAIMED]
    ours, timms = (_best(training, side) for side in (OURS, TIMM))
    if ours and timms:
        ratios = [own / other for own, other in zip(ours.repetitions, timms.repetitions)]
        made.append(claims.claim("g16_speedup_over_timm", ratios, "times", ">= 1.5"))
    updates = {row.what: row for row in rows if row.section == OPTIMIZER and row.repetitions and row.limit}
    update = updates.get(UPDATE_IN_GRAPH) or updates.get(UPDATE)
    if update:
        ratios = [each / update.limit for each in update.repetitions]
        made.append(claims.claim("update_over_byte_floor", ratios, "times", "<= 1.5"))
    return made


def _passed(row: Row) -> bool:
    return row.value is not None and row.limit is not None and row.value <= row.limit


def _best(rows: Sequence[Row], side: str) -> Optional[Row]:
    measured = [row for row in rows if row.what.startswith(f"{side},") and row.repetitions]
    return max(measured, key=lambda row: row.value or 0.0, default=None)


def result(rows: Sequence[Row], machine: dict) -> dict:
    """The object that --json prints and the file holds."""
    return {
        "benchmark": "gpu_suite",
        "machine": machine,
        "quick": claims.quick(),
        "rows": [row.columns() for row in rows],
        "claims": made_claims(rows),
    }


def write(rows: Sequence[Row], machine: dict, folder: Path) -> List[Path]:
    """DEVICE.json and DEVICE.md in `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-")
    files = [folder / f"{stem}.json", folder / f"{stem}.md"]
    files[0].write_text(json.dumps(result(rows, machine), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    files[1].write_text(markdown(rows, machine), encoding="utf-8")
    return files


def markdown(rows: Sequence[Row], machine: dict) -> str:
    """A page of tables, one for each section."""
    memory = f" ({machine['memory_gib']} GiB)" if machine["memory_gib"] else ""
    lines = [
        f"# {machine['device']}",
        "",
        f"Measured on {machine['date']} on {machine['device']}{memory}: torch {machine['torch']}, CUDA "
        f"{machine['cuda']}, cuDNN {machine['cudnn']}, Triton {machine['triton']}, revision {machine['revision']}; "
        f"{machine['cores']} cores of {machine['cpu']}.",
        "",
        _HOW,
    ]
    for section in dict.fromkeys(row.section for row in rows):
        lines += [
            f"## {section[0].upper()}{section[1:]}",
            "",
            *_table([row for row in rows if row.section == section]),
            "",
        ]
    lines += ["## Claims", "", "| claim | median | lowest to highest | goal | |", "| --- | --- | --- | --- | --- |"]
    for claim in made_claims(rows):
        low, high = claim["spread"]
        lines.append(
            f"| `{claim['name']}` | {claim['value']:.4g} {claim['unit']} | {low:.4g} to {high:.4g} | {claim['goal']} "
            f"| {claims.judged(claim)} |"
        )
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Row]) -> List[str]:
    limited = any(row.limit is not None for row in rows)
    spread = any(len(row.repetitions) > 1 for row in rows)
    unit = next((row.unit for row in rows if row.unit), "error")
    titles = ["", unit, *(["lowest to highest"] * spread), *([_LIMITS.get(rows[0].section, "limit")] * limited), ""]
    lines = [f"| {' | '.join(titles)} |", f"| {' | '.join(['---'] * len(titles))} |"]
    for row in rows:
        value = claims.cell(row.value) + (f" {row.unit}" if row.unit not in ("", unit) else "")
        low_to_high = f"{min(row.repetitions):.4g} to {max(row.repetitions):.4g}" if row.repetitions else "-"
        note = row.note.replace("|", "/")
        cells = [row.what, value, *([low_to_high] * spread), *([claims.cell(row.limit)] * limited), note]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
