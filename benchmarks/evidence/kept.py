"""Finished runs in docs/results/runs.jsonl, a line each: some experiments take longer than one machine is at hand.

A line has the name of the run's folder, what it ran and with which torch, and why it diverged or what pages read of its
log. To train a run anew, remove its line and its folder in the cache.
"""

import functools
import json
from pathlib import Path
from typing import Dict, List, Optional

import torch

from benchmarks import RESULTS
from recipe.bounded import parse_json

FILE = RESULTS / "runs.jsonl"
_FIELDS = {
    "train": ("event", "step", "epoch", "loss", "batch", "noise_scale"),
    "eval": ("event", "step", "epoch", "loss", "top1"),
    "end": ("event", "step", "top1", "step_average", "epoch_average"),
}

Events = Dict[str, List[dict]]


def keep(name: str, program: List[str], events: Events, diverged: str = "") -> None:
    """Adds a finished run. Args: name: of its folder. program: what trained it. diverged: why it did not end well."""
    events = {kind: events.get(kind, []) for kind in _FIELDS}
    events["train"] = [each for each in events["train"] if each.get("noise_scale") or each is events["train"][-1]]
    kept = {kind: list(map(_shortened, some)) for kind, some in events.items()}
    line = {"run": name, "program": program, "torch": torch.__version__, "diverged": diverged, "events": kept}
    with open(FILE, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(line, separators=(",", ":")) + "\n")


def find(name: str) -> Optional[dict]:
    """The line of a run: `events` by kind, and `diverged`, empty if it did not. None: it is not there."""
    return _lines(FILE, FILE.stat().st_mtime_ns).get(name) if FILE.exists() else None


def _shortened(event: dict) -> dict:
    short = {key: event[key] for key in _FIELDS[event["event"]] if key in event}
    scale = short.get("noise_scale")
    return {**short, "noise_scale": {key: scale[key] for key in ("images", "error")}} if scale else short


@functools.lru_cache(maxsize=1)
def _lines(path: Path, changed: int) -> Dict[str, dict]:
    """Args: changed: when, so that the file is read again."""
    read = map(parse_json, path.read_text(encoding="utf-8").splitlines())
    return {line["run"]: line for line in read}
