"""Measures this GPU and checks our kernels on it, in less than eight minutes.

    python -m benchmarks.gpu_suite [--quick] [--json]

In this order: checks of the kernels on fresh random inputs; training beside timm's loop, eager; the optimizer's update
beside a copy; memory; and at last, for as long as time is left, training compiled. Each section has a time of its own.
Tables are printed, and written to docs/results/gpu/DEVICE.md and .json after every section.

Each section runs in a process of its own: a kernel that reads where it must not, or a compiler that does not end, costs
the rest of one section.
"""

if __name__ == "__main__":  # before the imports: see run
    from training.command import run

    run(__file__)

import dataclasses
import functools
import importlib.util
import itertools
import json
import re
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

from benchmarks import RESULTS, claims, optimizer, ranks
from benchmarks.gpu_checks import CHECKS, checks, passed
from benchmarks.gpu_measure import REAL, Plan, Row, Session, Side, missing, reason, recipe
from benchmarks.gpu_training import CLAIMED, MEMORY, OURS, SETTINGS, TIMM, memory, training
from models.efficientnet import build
from recipe.errors import ConfigError
from training.run_folder import describe_environment

UPDATE = "update"
OUR_UPDATE = "ours, Triton"
_FIRST = 120.0  # seconds in which the machine must be described, before all sections
_GRACE = 40.0  # seconds that a section may take beyond its time, which it only looks at between two turns
_RESERVE = 20.0  # seconds before the end of all, in which the last section may take its turns
# A parameter. Gradient and weight are read for the norms (4 + 2); no weight may change before all norms are known, so
# they are read again, with the momentum (4 + 2 + 2), and weight and momentum written (2 + 2).
_BYTES = 18

_HOW = """\
Measured by `python -m benchmarks.gpu_suite` in less than eight minutes. Figures are medians over turns, in which the
sides of a section are computed one after the other, each until the device is done, without warm-up. Sides and limits
are described in `benchmarks/gpu_training.py`, `gpu_suite.py` and `gpu_checks.py`."""


class Section(NamedTuple):
    """A part of the suite: `measure` gives its rows within about so many seconds."""

    name: str
    seconds: float
    measure: Callable[[Session], Iterator[Row]]


def update(session: Session) -> Iterator[Row]:
    """Milliseconds of an update of the model's parameters; limit: 18 bytes each at the speed of the copy."""
    plan, device = session.plan, session.device
    named = itertools.islice(build(recipe(plan, 1).model, 0).named_parameters(), plan.tensors)
    parameters = {name: nn.Parameter(parameter.detach().to(device)) for name, parameter in named}
    moved = _BYTES * sum(parameter.numel() for parameter in parameters.values())
    compare = functools.partial(
        session.compare, figure=lambda seconds: 1e3 * seconds, unit="ms", calls=plan.queued, warm_up=3,
        note=f"{moved // _BYTES:,} parameters, {plan.queued} updates queued",
    )  # fmt: skip
    (copy,) = compare(
        {f"copy of {_BYTES} bytes a parameter": lambda stack: _call(optimizer.copy_of(moved, plan.device))}
    )
    yield copy
    makers = {
        OUR_UPDATE: lambda stack: _our_update(parameters),
        optimizer.TIMM: lambda stack: _call(optimizer.their_updates(parameters)[optimizer.TIMM]),
    }
    yield from compare(makers, limit=copy.value)


def _call(side: Callable[[int], object]) -> Side:
    return functools.partial(side, 0)


def _our_update(parameters: optimizer.Parameters) -> Side:
    return _call(optimizer.updating(optimizer.weight_state(parameters, torch.float16, torch.float16, compile=False)))


_TRAINING = [
    Section(setting.name(), seconds, functools.partial(training, setting=setting))
    for setting, seconds in zip(SETTINGS, (70, 40, 30, 300))
]
# Compiling is the last: nothing but its end ends a compiler, and it may take all that is left.
SECTIONS = (
    Section(CHECKS, 45, checks),
    *_TRAINING[:-1],
    Section(UPDATE, 15, update),
    Section(MEMORY, 40, memory),
    _TRAINING[-1],
)


def main() -> None:
    as_json = claims.begin(__doc__, takes="8 minutes of a GPU", quick="2 minutes of a GPU").json
    if not torch.cuda.is_available():
        raise ConfigError("benchmarks.gpu_suite: PyTorch finds no CUDA device here; run it where there is one")
    with tempfile.TemporaryDirectory() as folder:  # a page is of a whole measurement
        share = claims.less(1.0, 0.25)
        plan = dataclasses.replace(REAL, total=share * REAL.total)
        sections = [section._replace(seconds=share * section.seconds) for section in SECTIONS]
        rows, about = measured(plan, sections, claims.less(RESULTS / "gpu", Path(folder)))
    claims.report("gpu_suite", [row.columns() for row in rows], made_claims(rows), as_json, about)


def measured(plan: Plan, sections: Sequence[Section], folder: Path) -> Tuple[List[Row], dict]:
    """Rows of all sections, and the machine they are of; the files in `folder` are renewed after every section."""
    end, rows = time.monotonic() + plan.total, []
    (about,) = ranks.stream(min(_FIRST, plan.total), machine, plan.device)
    for section in sections:
        left = min(end - time.monotonic(), section.seconds + _GRACE)
        print(f"{section.name}: {end - time.monotonic():.0f} s are left", file=sys.stderr, flush=True)
        for row in _within(left, section, plan):
            rows.append(row)
            value = f"{claims.cell(row.value)} {row.unit}, " if row.value is not None else ""
            print(f"  {row.section}: {row.what}: {value}{row.note}", file=sys.stderr, flush=True)
        files = write(rows, about, folder)
    print(f"written: {', '.join(map(str, files))}", file=sys.stderr)
    return rows, about


def _within(left: float, section: Section, plan: Plan) -> Iterator[Row]:
    """A section's rows, from a process that is ended after `left` seconds; the last one says why there are no more."""
    section = section._replace(seconds=min(section.seconds, left - min(_RESERVE, left / 2)))
    try:
        yield from ranks.stream(max(0.0, left), perform, section, plan)
    except (RuntimeError, TimeoutError) as error:
        yield missing(section.name, "the rest", reason(error))


def perform(section: Section, plan: Plan) -> Iterator[Row]:
    return section.measure(Session(section.name, plan, section.seconds))


def machine(name: str) -> Iterator[dict]:
    """The machine and the program, as `claims.machine` and more."""
    device = torch.device(name)
    cuda = device.type == "cuda"
    yield {
        **claims.machine(),
        "device": torch.cuda.get_device_name(device) if cuda else name,
        "memory_gib": round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1) if cuda else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "triton": metadata.version("triton") if importlib.util.find_spec("triton") else None,
        "revision": describe_environment()["revision"],
    }


def made_claims(rows: Sequence[Row]) -> List[dict]:
    """Those of which there are figures."""
    made = []
    checked = [row for row in rows if row.section == CHECKS]
    if checked:
        made.append(claims.claim("failed_checks", [sum(not passed(row) for row in checked)], "checks", "<= 0"))
    ours, timms = (_best(rows, side) for side in (OURS, TIMM))
    if ours and timms:
        ratios = claims.ratios(ours.repetitions, timms.repetitions)
        made.append(claims.claim("g16_speedup_over_timm", ratios, "times", ">= 1.5"))
    for row in rows:
        if row.section == UPDATE and row.what == OUR_UPDATE and row.repetitions and row.limit:
            ratios = [each / row.limit for each in row.repetitions]
            made.append(claims.claim("update_over_byte_floor", ratios, "times", "<= 1.5"))
    return made


def _best(rows: Sequence[Row], side: str) -> Optional[Row]:
    found = [row for row in rows if row.section in CLAIMED and row.what.startswith(f"{side},") and row.repetitions]
    return max(found, key=lambda row: row.value, default=None)


def write(rows: Sequence[Row], about: dict, folder: Path) -> List[Path]:
    """DEVICE.json and DEVICE.md in `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^a-z0-9]+", "-", about["device"].lower()).strip("-")
    files = [folder / f"{stem}.json", folder / f"{stem}.md"]
    content = claims.result("gpu_suite", [row.columns() for row in rows], made_claims(rows), about)
    files[0].write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    files[1].write_text(markdown(rows, about), encoding="utf-8")
    return files


def markdown(rows: Sequence[Row], about: dict) -> str:
    parts = [
        f"# {about['device']}",
        f"Measured on {about['date']} on {about['device']} ({about['memory_gib']} GiB): torch {about['torch']}, CUDA "
        f"{about['cuda']}, cuDNN {about['cudnn']}, Triton {about['triton']}, revision {about['revision']}; "
        f"{about['cores']} cores of {about['cpu']}.",
        _HOW,
    ]
    head = ("", "median", "", "lowest", "highest", "limit", "")
    for section in dict.fromkeys(row.section for row in rows):
        columns = [list(row.columns().values())[1:] for row in rows if row.section == section]
        lines = [[claims.cell(each).replace("|", "/") for each in line] for line in columns]
        parts += [f"## {section[0].upper()}{section[1:]}", claims.markdown(head, lines)]
    return "\n\n".join([*parts, "## Claims", claims.claims_table(made_claims(rows))]) + "\n"
