"""What the GPU suite concludes and writes: claims, and DEVICE.md and .json, for docs/results/gpu/."""

import json
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
_COMPARED = tuple(comparison.name for comparison in CLAIMED)
_OTHER_SIZES = (MICROS.name, AUTO.name)
_LEAST_INTERVAL = 0.1  # points: three seeds may be alike by chance

_HOW = """\
Measured by `python -m benchmarks.gpu_suite`, `--second` and `--third`, each in less than ten minutes. Figures are
medians over turns, in which the sides of a section are computed one after the other, each until the device is done,
without warm-up. Sides and limits are described in `benchmarks/gpu_checks.py`, `gpu_training.py`, `gpu_kernels.py`,
`gpu_files.py`, `gpu_memory.py`, `gpu_first_step.py` and `gpu_trainings.py`."""
_HEAD = ("", "median", "", "lowest", "highest", "limit", "")  # of the page's tables


class Measured(NamedTuple):
    """Rows, and the machines and programs that they were measured on.

    calls: by the name of a call, see `gpu_calls.machine`.
    """

    rows: List[Row]
    calls: Dict[str, dict]


# Claims -------------------------------------------------------------------------------------------


class _Goal(NamedTuple):
    """A claim without its figures.

    bound: a comparison and a number, as `claims.claim` takes it.
    """

    name: str
    unit: str
    bound: str

    def claim(self, repetitions: Sequence[float]) -> dict:
        """Return the claim with its figures.

        Args:
            repetitions: of the figure, in `unit`.
        """
        return claims.claim(self.name, repetitions, self.unit, self.bound)

    def unmeasured(self, reason: str) -> dict:
        """Return the claim where there are no figures.

        Args:
            reason: why there are none.
        """
        return claims.unmeasured(self.name, self.unit, self.bound, reason=reason)


_SPEEDUP = _Goal(
    name="b4_speedup_over_timm_compiled",
    unit="times",
    bound=">= 2.5",
)
_RATE = _Goal(
    name="b4_images_per_second",
    unit="images/s",
    bound=">= 2500",
)
_FAILED_CHECKS = _Goal(
    name="failed_checks",
    unit="checks",
    bound="<= 0",
)
_UPDATE = _Goal(
    name="update_over_byte_floor",
    unit="times",
    bound="<= 1.5",
)
_FILES = _Goal(
    name="jpeg_to_update_over_step",
    unit="share",
    bound=">= 0.95",
)
_FIRST_STEP = _Goal(
    name="first_step_seconds",
    unit="s",
    bound="<= 15",
)
_SAME = _Goal(
    name="same_top1_as_cpu",
    unit="of the interval",
    bound="<= 1",
)


def made_claims(rows: Sequence[Row], absent: str = NO_PEER) -> List[dict]:
    """Return the claims for which there are figures, and those on B4 in any case.

    Args:
        rows: of all sections that were measured.
        absent: why the claims on B4 do not hold where timm's own model has no figures.

    Returns:
        Claims as `claims.claim` and `claims.unmeasured` make them.
    """
    return [
        *_b4_claims(rows, absent),
        *_check_claims(rows),
        *_update_claims(rows),
        *_file_claims(rows),
        *_first_step_claims(rows),
        *_accuracy_claims(rows),
    ]


def _b4_claims(rows: Sequence[Row], absent: str) -> List[dict]:
    """Return the speedup over timm, and our rate; neither holds unless timm's own model finished.

    The speedup is that of our G16 at its best over timm's own model compiled, at one micro batch.
    The rate is the best of ours at any micro batch.

    Args:
        rows: of all sections.
        absent: why timm's own model may have no figures.
    """
    peers = []
    ours = []
    ours_at_other_sizes = []
    for row in rows:
        if not _has_turns(row):
            continue
        is_ours = row.what.startswith(OURS)
        if row.section in _OTHER_SIZES and is_ours:
            ours_at_other_sizes.append(row)
        elif row.section in _COMPARED and is_ours:
            ours.append(row)
        elif row.section in _COMPARED and _is_compiled_timm(row):
            peers.append(row)
    best = _fastest(ours)
    best_at_any_size = _fastest([*ours, *ours_at_other_sizes])
    peer = _fastest(peers)
    # Kept rows may be of the G16 in timm's code, which does not stand in for timm's own model.
    has_peer = any(row.what.startswith(_PEER) for row in peers)
    reason = "none of ours finished" if has_peer else absent

    if best is not None and peer is not None and has_peer:
        ratios = claims.ratios(best.repetitions, peer.repetitions)
        speedup = _SPEEDUP.claim(ratios)
    else:
        speedup = _SPEEDUP.unmeasured(reason)

    # A rate needs no peer to be shown, only to hold.
    if best_at_any_size is not None:
        rate = _RATE.claim(best_at_any_size.repetitions)
        if not has_peer:
            rate.update(holds=False, reason=absent)
    else:
        rate = _RATE.unmeasured(reason)
    return [speedup, rate]


def _check_claims(rows: Sequence[Row]) -> List[dict]:
    """Return the claim on the number of failed checks; none if nothing was checked."""
    checks = [row for row in rows if row.section == CHECKS]
    if not checks:
        return []
    failed = 0
    for check in checks:
        if not passed(check):
            failed += 1
    return [_FAILED_CHECKS.claim([failed])]


def _update_claims(rows: Sequence[Row]) -> List[dict]:
    """Return the claim on the time of our update over the time that moving its bytes takes."""
    made = []
    for row in rows:
        is_our_update = row.section == UPDATE and row.what == OUR_UPDATE
        if is_our_update and _has_turns(row) and row.limit:
            ratios = [milliseconds / row.limit for milliseconds in row.repetitions]
            made.append(_UPDATE.claim(ratios))
    return made


def _file_claims(rows: Sequence[Row]) -> List[dict]:
    """Return the claim on images per second of the faster reader over images on the device."""
    step = None
    readers = []
    for row in rows:
        if row.section != FILES or not _has_turns(row):
            continue
        if row.what == MEMORY:
            step = row
        else:
            readers.append(row)
    reader = _fastest(readers)
    if step is None or reader is None or not step.value:
        return []
    shares = [rate / step.value for rate in reader.repetitions]
    return [_FILES.claim(shares)]


def _first_step_claims(rows: Sequence[Row]) -> List[dict]:
    """Return the claim on the seconds until the first update, with no program in the cache."""
    made = []
    for row in rows:
        is_cold = row.section == FIRST_STEP and row.what == COLD
        # One figure is enough: a first step has no turns.
        if is_cold and row.repetitions:
            made.append(_FIRST_STEP.claim(row.repetitions))
    return made


def _accuracy_claims(rows: Sequence[Row]) -> List[dict]:
    """Return the claim on how far the device's mean accuracy is from the CPU's.

    The unit is half the width of the 95 % interval of that difference between trainings that are
    alike, by their spread over seeds.
    """
    accuracies = {}
    for row in rows:
        if row.section == SAME and row.repetitions:
            accuracies[row.what] = row.repetitions
    # A side that failed has a row without figures.
    if accuracies.keys() != {CPU, DEVICES}:
        return []
    device = accuracies[DEVICES]
    cpu = accuracies[CPU]
    difference = abs(statistics.mean(device) - statistics.mean(cpu))
    variance = _variance_of_mean(device) + _variance_of_mean(cpu)
    interval = max(_LEAST_INTERVAL, claims.interval_of_difference(variance))
    return [_SAME.claim([difference / interval])]


def _variance_of_mean(values: Sequence[float]) -> float:
    """Return the variance of the mean of some values, estimated by their spread."""
    variance = statistics.variance(values)
    return variance / len(values)


def _has_turns(row: Row) -> bool:
    """Return whether a side has taken its turns."""
    return len(row.repetitions) >= LEAST_TURNS


def _is_compiled_timm(row: Row) -> bool:
    """Return whether a row is of a compiled model of timm's."""
    is_timm = row.what.startswith(TIMM)
    return is_timm and row.what.endswith(COMPILED)


def _fastest(rows: Sequence[Row]) -> Optional[Row]:
    """Return the row of the highest rate, the first of equal ones; None if there are no rows."""
    fastest = None
    for row in rows:
        if fastest is None or _figure(row) > _figure(fastest):
            fastest = row
    return fastest


def _figure(row: Row) -> float:
    """Return the figure of a row; 0 where it has none."""
    return row.value or 0.0


# Files --------------------------------------------------------------------------------------------


class _Files(NamedTuple):
    """The files of a device."""

    json: Path
    page: Path


def write(measured: Measured, folder: Path) -> List[Path]:
    """Write DEVICE.json and DEVICE.md.

    Args:
        measured: all rows; the files are named after the device of the last call.
        folder: of the files, made if it is not there.

    Returns:
        The two files, the JSON first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    about = _last_call(measured)
    files = _files(folder, about["device"])
    rows = []
    for row in measured.rows:
        rows.append({**row.columns(), "repetitions": _finite(row)})
    result = claims.result("gpu_suite", rows, made_claims(measured.rows), about)
    content = {**result, "calls": measured.calls}
    texts = {
        files.json: json_text(content, indent=1) + "\n",
        files.page: _markdown(measured),
    }
    # A suite that is ended while it writes leaves the files of the row before.
    for file, text in texts.items():
        temporary = file.with_suffix(".part")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    return [files.json, files.page]


def read(folder: Path, device: str) -> Measured:
    """Read what was written of a device.

    Args:
        folder: of the files.
        device: its name, as PyTorch has it.

    Returns:
        All rows and calls; none if there are no files.
    """
    file = _files(folder, device).json
    if not file.exists():
        return Measured(rows=[], calls={})
    content = json.loads(file.read_text(encoding="utf-8"))
    rows = [_row(columns) for columns in content["rows"]]
    return Measured(rows, content["calls"])


def _files(folder: Path, device: str) -> _Files:
    """Return the files of a device, named after it."""
    stem = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return _Files(
        json=folder / f"{stem}.json",
        page=folder / f"{stem}.md",
    )


def _last_call(measured: Measured) -> dict:
    """Return the machine and program of the newest call."""
    *_, about = measured.calls.values()
    return about


def _finite(row: Row) -> List[float]:
    """Return a row's repetitions; none where one is not finite, which JSON cannot hold."""
    if row.columns()["value"] is None:
        return []
    return list(row.repetitions)


def _row(columns: Dict[str, Any]) -> Row:
    """Return a row from its columns in JSON."""
    return Row(
        section=columns["section"],
        what=columns["what"],
        repetitions=tuple(columns["repetitions"]),
        unit=columns["unit"],
        limit=columns["limit"],
        note=columns["note"],
    )


def _markdown(measured: Measured) -> str:
    """Return the page of a device: its calls, a table for each section, and the claims."""
    device = _last_call(measured)["device"]
    parts = [f"# {device}"]
    for name, about in measured.calls.items():
        parts.append(_call(name, about))
    parts.append(_HOW)
    for section, table in _tables(measured.rows).items():
        title = section[0].upper() + section[1:]
        parts.append(f"## {title}")
        parts.append(table)
    made = made_claims(measured.rows)
    parts.append("## Claims")
    parts.append(claims.claims_table(made))
    return "\n\n".join(parts) + "\n"


def _tables(rows: Sequence[Row]) -> Dict[str, str]:
    """Return a table in Markdown by section, in the order in which sections first occur."""
    lines: Dict[str, List[List[str]]] = {}  # by section
    for row in rows:
        lines_of_section = lines.setdefault(row.section, [])
        lines_of_section.append(_table_line(row))
    tables = {}
    for section, lines_of_section in lines.items():
        tables[section] = claims.markdown(_HEAD, lines_of_section)
    return tables


def _table_line(row: Row) -> List[str]:
    """Return the cells of a row, without its section, which is the table's title."""
    _, *columns = row.columns().values()
    cells = []
    for value in columns:
        text = claims.cell(value)
        # A bar would end the cell.
        cells.append(text.replace("|", "/"))
    return cells


def _call(name: str, about: dict) -> str:
    """Return the paragraph on a call: when, where and with which programs it measured."""
    return (
        f"{name.capitalize()} call on {about['date']} on {about['device']} ({about['memory_gib']} GiB): torch "
        f"{about['torch']}, CUDA {about['cuda']}, cuDNN {about['cudnn']}, Triton {about['triton']}, revision "
        f"{about['revision']}; {about['cores']} cores of {about['cpu']}."
    )
