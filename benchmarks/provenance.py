"""When, on which processor and with which torch runs were trained: as their folders say, not as whoever asks is."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, Iterable, List, Mapping, NamedTuple, Sequence, Set, Tuple

from training.run_folder import starts

NOT_RECORDED = "not recorded"
_Values = Tuple[str, ...]  # of one kind, each once, sorted


class Provenance(NamedTuple):
    """Provenance of one run, or of some that are kept together.

    Each value is there once, sorted; NOT_RECORDED stands for those that are missing.

    days: of UTC, in ISO form; it was trained between the first and the last.
    processors: their names.
    torch: its versions.
    """

    days: _Values
    processors: _Values
    torch: _Values


_NOTHING = (NOT_RECORDED,)
UNKNOWN = Provenance(days=_NOTHING, processors=_NOTHING, torch=_NOTHING)


def of_folder(folder: Path) -> Provenance:
    """Return what `environment.json` of a run folder says; UNKNOWN where it says nothing.

    Only starts that led to training count: these have a `step`. Runs that began before
    `environment.json` named the processor have NOT_RECORDED in its place.

    Args:
        folder: of the run, which need not be there.
    """
    trained = [start for start in starts(folder) if "step" in start]
    return merged(_of_start(start) for start in trained)


def _of_start(start: dict) -> Provenance:
    """Return the provenance of one entry of `environment.json`."""
    moment = _value(start, "started")
    day = moment.partition("T")[0]
    processor = _value(start, "processor")
    torch = _value(start, "torch")
    return Provenance((day,), (processor,), (torch,))


def _value(start: dict, key: str) -> str:
    """Return the text of an entry's key; NOT_RECORDED where it has none."""
    return str(start.get(key) or NOT_RECORDED)


def from_json(values: Mapping[str, Sequence[str]]) -> Provenance:
    """Return a provenance that was kept as JSON.

    Args:
        values: its `_asdict`, as JSON gives it back.
    """
    return Provenance(
        days=tuple(values["days"]),
        processors=tuple(values["processors"]),
        torch=tuple(values["torch"]),
    )


def merged(several: Iterable[Provenance]) -> Provenance:
    """Return the values of `several` together; UNKNOWN of none."""
    parts = list(several)
    if not parts:
        return UNKNOWN
    return Provenance(
        days=_merged_values(part.days for part in parts),
        processors=_merged_values(part.processors for part in parts),
        torch=_merged_values(part.torch for part in parts),
    )


def _merged_values(several: Iterable[_Values]) -> _Values:
    """Return each value once, sorted."""
    distinct: Set[str] = set()
    for values in several:
        distinct.update(values)
    return tuple(sorted(distinct))


def about(runs: Sequence[Provenance]) -> Dict[str, str]:
    """Return days, processors and versions of torch in words, by the names of a Provenance's fields.

    Days are those from the first to the last. Each text says for how many runs it is not recorded.

    Args:
        runs: their provenances.
    """
    whole = merged(runs)
    days = _span(_recorded(whole.days))
    processors = " and ".join(_recorded(whole.processors))
    versions = " and ".join(_recorded(whole.torch))
    return {
        "days": _with_missing(days, [run.days for run in runs]),
        "processors": _with_missing(processors, [run.processors for run in runs]),
        "torch": _with_missing(versions, [run.torch for run in runs]),
    }


def described(runs: Sequence[Provenance]) -> str:
    """Return the head of a page about some runs.

    E.g. `Trained 2026-11-20 to 2026-11-25 on AMD EPYC and Intel Xeon, torch 2.14.1`.

    Args:
        runs: their provenances.
    """
    words = about(runs)
    # `Trained not recorded on not recorded` would be no sentence.
    if words["days"] == NOT_RECORDED:
        words["days"] = f"on days {NOT_RECORDED}"
    if words["processors"] == NOT_RECORDED:
        words["processors"] = f"processors {NOT_RECORDED}"
    return f"Trained {words['days']} on {words['processors']}, torch {words['torch']}"


def _recorded(values: Sequence[str]) -> List[str]:
    """Return the values that are recorded."""
    return [value for value in values if value != NOT_RECORDED]


def _span(days: Sequence[str]) -> str:
    """Return sorted days in words: the first and the last; nothing of none."""
    if not days:
        return ""
    first = days[0]
    last = days[-1]
    return first if first == last else f"{first} to {last}"


def _with_missing(text: str, by_run: Sequence[_Values]) -> str:
    """Return a text about values, and behind it for how many runs none is recorded."""
    if not text:
        return NOT_RECORDED
    missing = sum(NOT_RECORDED in values for values in by_run)
    if not missing:
        return text
    return f"{text} ({NOT_RECORDED} for {missing} of {len(by_run)} runs)"
