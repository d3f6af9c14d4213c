"""When, on which processor and with which torch runs were trained: as their folders say, not as whoever asks is."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, Iterable, List, Mapping, NamedTuple, Sequence, Tuple

from training.run_folder import starts

NOT_RECORDED = "not recorded"


class Provenance(NamedTuple):
    """Of one run, or of some that are kept together: each value once, sorted; NOT_RECORDED where there is none.

    days: of UTC, in ISO form; it was trained between the first and the last. processors: their names.
    torch: its versions.
    """

    days: Tuple[str, ...]
    processors: Tuple[str, ...]
    torch: Tuple[str, ...]


UNKNOWN = Provenance((NOT_RECORDED,), (NOT_RECORDED,), (NOT_RECORDED,))


def of_folder(folder: Path) -> Provenance:
    """Return what `environment.json` of a run folder says; UNKNOWN where it says nothing.

    Only starts that led to training count: these have a `step`. Of runs that began before `environment.json` named the
    processor, that is not recorded.
    """
    trained = [start for start in starts(folder) if "step" in start]
    return merged(_of_start(start) for start in trained)


def _of_start(start: dict) -> Provenance:
    day = str(start.get("started") or NOT_RECORDED).partition("T")[0]
    processor = str(start.get("processor") or NOT_RECORDED)
    return Provenance((day,), (processor,), (str(start.get("torch") or NOT_RECORDED),))


def from_json(values: Mapping[str, Sequence[str]]) -> Provenance:
    """Return what was kept as JSON by `_asdict`."""
    return Provenance(**{name: tuple(values[name]) for name in Provenance._fields})


def merged(several: Iterable[Provenance]) -> Provenance:
    """Return the values of all; UNKNOWN of none."""
    columns = zip(*several)
    found = [tuple(sorted({value for values in column for value in values})) for column in columns]
    return Provenance(*found) if found else UNKNOWN


def about(runs: Sequence[Provenance]) -> Dict[str, str]:
    """Return days, processors and versions of torch in words, and for how many runs they are not recorded.

    Days are those from the first to the last.
    """
    whole = merged(runs)
    days = _recorded(whole.days)
    values = {
        "days": " to ".join(dict.fromkeys([*days[:1], *days[-1:]])),
        "processors": " and ".join(_recorded(whole.processors)),
        "torch": " and ".join(_recorded(whole.torch)),
    }
    return {name: _with_missing(text, [getattr(run, name) for run in runs]) for name, text in values.items()}


def described(runs: Sequence[Provenance]) -> str:
    """Return e.g. `Trained 2026-11-20 to 2026-11-25 on AMD EPYC and Intel Xeon, torch 2.14.1`, the head of a page."""
    words = about(runs)
    if words["days"] == NOT_RECORDED:
        words["days"] = f"on days {NOT_RECORDED}"
    if words["processors"] == NOT_RECORDED:
        words["processors"] = f"processors {NOT_RECORDED}"
    return f"Trained {words['days']} on {words['processors']}, torch {words['torch']}"


def _recorded(values: Sequence[str]) -> List[str]:
    return [value for value in values if value != NOT_RECORDED]


def _with_missing(text: str, values: Sequence[Tuple[str, ...]]) -> str:
    missing = sum(NOT_RECORDED in each for each in values)
    if not text or not missing:
        return text or NOT_RECORDED
    return f"{text} ({NOT_RECORDED} for {missing} of {len(values)} runs)"
