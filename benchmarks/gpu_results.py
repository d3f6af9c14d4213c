"""What the GPU suite concludes and writes: claims, and DEVICE.md and .json, for docs/results/gpu/."""

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from benchmarks import claims
from benchmarks.gpu_checks import CHECKS, passed
from benchmarks.gpu_files import FILES, MEMORY
from benchmarks.gpu_first_step import COLD, FIRST_STEP
from benchmarks.gpu_kernels import OUR_UPDATE, UPDATE
from benchmarks.gpu_measure import LEAST_TURNS, Row
from benchmarks.gpu_training import AUTO, CLAIMED, COMPILED, MICROS, OURS, TIMM
from benchmarks.gpu_trainings import CPU, DEVICES, SAME
from common.json_io import json_text

NO_PEER = "timm's efficientnet_b4 compiled did not finish"
_PEER = f"{TIMM}, efficientnet"
_COMPARED = tuple(each.name for each in CLAIMED)
_SPEEDUP = ("b4_speedup_over_timm_compiled", "times", ">= 2.5")
_RATE = ("b4_images_per_second", "images/s", ">= 2500")
_FILES = ("jpeg_to_update_over_step", "share", ">= 0.95")
_FIRST_STEP = ("first_step_seconds", "s", "<= 15")
_SAME = ("same_top1_as_cpu", "of the interval", "<= 1")
_STUDENT = 2.776  # two-sided 95 % of Student's t with 4 degrees of freedom: two means of three seeds
_LEAST_INTERVAL = 0.1  # points: three seeds may be alike by chance

_HOW = """\
Measured by `python -m benchmarks.gpu_suite`, `--second` and `--third`, each in less than ten minutes. Figures are
medians over turns, in which the sides of a section are computed one after the other, each until the device is done,
without warm-up. Sides and limits are described in `benchmarks/gpu_checks.py`, `gpu_training.py`, `gpu_kernels.py`,
`gpu_files.py`, `gpu_memory.py`, `gpu_first_step.py` and `gpu_trainings.py`."""


class Measured(NamedTuple):
    """Rows, and by the name of a call the machine and program that they are of."""

    rows: List[Row]
    calls: Dict[str, dict]


# Claims ---------------------------------------------------------------------------------------------------------------


def made_claims(rows: Sequence[Row], absent: str = NO_PEER) -> List[dict]:
    """Those of which there are figures; the B4's also without, not holding. Args: absent: why there may be none."""
    made = _of_b4(rows, absent)
    checked = [row for row in rows if row.section == CHECKS]
    if checked:
        made.append(claims.claim("failed_checks", [sum(not passed(row) for row in checked)], "checks", "<= 0"))
    for row in rows:
        if row.section == UPDATE and row.what == OUR_UPDATE and len(row.repetitions) >= LEAST_TURNS and row.limit:
            ratios = [each / row.limit for each in row.repetitions]
            made.append(claims.claim("update_over_byte_floor", ratios, "times", "<= 1.5"))
    return [*made, *_of_files(rows), *_of_first_step(rows), *_of_trainings(rows)]


def _of_b4(rows: Sequence[Row], absent: str) -> List[dict]:
    """Our G16 at its best beside the faster of timm's compiled models, each in the better dtype, at one micro batch;
    and the best of ours at any micro batch. Neither holds unless timm's own model finished its turns."""
    compared = [row for row in rows if row.section in _COMPARED and len(row.repetitions) >= LEAST_TURNS]
    theirs = [row for row in compared if row.what.startswith(TIMM) and row.what.endswith(COMPILED)]
    ours = [row for row in compared if row.what.startswith(OURS)]
    finished = any(row.what.startswith(_PEER) for row in theirs)
    others = [
        row
        for row in rows
        if row.section in (MICROS.name, AUTO.name) and row.what.startswith(OURS) and len(row.repetitions) >= LEAST_TURNS
    ]
    best, peer, largest = _best(ours), _best(theirs), _best([*ours, *others])
    speedup = claims.unmeasured(*_SPEEDUP, reason=absent)
    rate = claims.unmeasured(*_RATE, reason=absent)
    if best and peer and finished:
        speedup = _claim(_SPEEDUP, claims.ratios(best.repetitions, peer.repetitions))
    elif finished:
        speedup["reason"] = rate["reason"] = "none of ours finished"
    if largest:
        rate = _claim(_RATE, largest.repetitions)
        if not finished:
            rate.update(holds=False, reason=absent)
    return [speedup, rate]


def _of_files(rows: Sequence[Row]) -> List[dict]:
    """The faster reader's images per second over those of images on the device."""
    found = {row.what: row for row in rows if row.section == FILES and len(row.repetitions) >= LEAST_TURNS}
    step = found.pop(MEMORY, None)
    reader = _best(list(found.values()))
    if step is None or reader is None or not step.value:
        return []
    return [_claim(_FILES, [rate / step.value for rate in reader.repetitions])]


def _of_first_step(rows: Sequence[Row]) -> List[dict]:
    """Seconds until the first update is made, where no program had been compiled before."""
    found = [row for row in rows if row.section == FIRST_STEP and row.what == COLD and row.repetitions]
    return [_claim(_FIRST_STEP, row.repetitions) for row in found]


def _of_trainings(rows: Sequence[Row]) -> List[dict]:
    """How far the device's mean accuracy is from the CPU's, over the half width of the 95 % interval of that difference
    between trainings alike, by their spread over seeds."""
    found = {row.what: row.repetitions for row in rows if row.section == SAME and row.repetitions}
    if found.keys() != {CPU, DEVICES}:
        return []
    difference = abs(statistics.mean(found[DEVICES]) - statistics.mean(found[CPU]))
    variances = [statistics.variance(values) / len(values) for values in found.values()]
    interval = max(_LEAST_INTERVAL, _STUDENT * math.sqrt(sum(variances)))
    return [_claim(_SAME, [difference / interval])]


def _claim(named: Sequence[str], repetitions: Sequence[float]) -> dict:
    name, unit, goal = named
    return claims.claim(name, repetitions, unit, goal)


def _best(rows: Sequence[Row]) -> Optional[Row]:
    return max(rows, key=lambda row: row.value or 0.0, default=None)


# Files ----------------------------------------------------------------------------------------------------------------


def write(measured: Measured, folder: Path) -> List[Path]:
    """DEVICE.json and DEVICE.md in `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    about = list(measured.calls.values())[-1]
    files = _files(folder, about["device"])
    columns = [{**row.columns(), "repetitions": _finite(row)} for row in measured.rows]
    content = {**claims.result("gpu_suite", columns, made_claims(measured.rows), about), "calls": measured.calls}
    for file, text in zip(files, (json_text(content, indent=1) + "\n", _markdown(measured))):
        temporary = file.with_suffix(".part")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    return files


def read(folder: Path, device: str) -> Measured:
    """What was written of a device; nothing if there are no files."""
    file = _files(folder, device)[0]
    if not file.exists():
        return Measured([], {})
    content = json.loads(file.read_text(encoding="utf-8"))
    return Measured([_row(each) for each in content["rows"]], content["calls"])


def _files(folder: Path, device: str) -> List[Path]:
    stem = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return [folder / f"{stem}.{kind}" for kind in ("json", "md")]


def _finite(row: Row) -> List[float]:
    return list(row.repetitions) if row.columns()["value"] is not None else []


def _row(columns: Dict[str, Any]) -> Row:
    names = ("section", "what", "repetitions", "unit", "limit", "note")
    values = {name: columns[name] for name in names}
    return Row(**{**values, "repetitions": tuple(values["repetitions"])})


def _markdown(measured: Measured) -> str:
    about = list(measured.calls.values())[-1]
    parts = [f"# {about['device']}", *(_call(name, each) for name, each in measured.calls.items()), _HOW]
    head = ("", "median", "", "lowest", "highest", "limit", "")
    for section in dict.fromkeys(row.section for row in measured.rows):
        columns = [list(row.columns().values())[1:] for row in measured.rows if row.section == section]
        lines = [[claims.cell(each).replace("|", "/") for each in line] for line in columns]
        parts += [f"## {section[0].upper()}{section[1:]}", claims.markdown(head, lines)]
    return "\n\n".join([*parts, "## Claims", claims.claims_table(made_claims(measured.rows))]) + "\n"


def _call(name: str, about: dict) -> str:
    return (
        f"{name.capitalize()} call on {about['date']} on {about['device']} ({about['memory_gib']} GiB): torch "
        f"{about['torch']}, CUDA {about['cuda']}, cuDNN {about['cudnn']}, Triton {about['triton']}, revision "
        f"{about['revision']}; {about['cores']} cores of {about['cpu']}."
    )
