"""How long until a run on a slow network is as accurate as one that exchanges everything, by method of exchange?

    python -m benchmarks.time_to_accuracy [--quick] [--json] [--write]        (as root)

Eight hosts of `benchmarks/networks.py` with cables of 50 Mbit/s and a rank of train.py on each: the quickstart's model,
its digits, its optimizer, 12 epochs of 22 updates, three seeds. After each epoch the validation images are scored. A
run is there with the first epoch from which on its top-1 stays at what the dense run of its seed ends with, less half
a point. Its time is that of the program itself, from its first update to that epoch's end, evaluations included.

The only checkpoint is written at the end, after the time is taken: the first host gets the states of all replicas for
it, 8 MB from each with a sparse exchange, and such an epoch takes less time than that.

All eight ranks share this machine's processors: a step's computing takes about as long as on one host with all eight
parts. Finished runs are cached under benchmarks/cache/, so the command goes on where it was left off. Only --write
changes what git tracks: docs/results/time_to_accuracy.jsonl, which gets a seed's runs as one line once all are
finished, and the figure beside it. So another machine can go on with the next seed; times are only compared with those
of the same machine.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from common.command import run

    run(__file__)

import contextlib
import hashlib
import io
import json
import shutil
import statistics
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from benchmarks import CACHE, QUICKSTART, QUIET, RESULTS, claims, networks, provenance, tracked
from benchmarks.networks import Network
from benchmarks.provenance import Provenance
from common import yaml_text
from common.json_io import json_text
from recipe import loading
from training.metrics import read_events
from training.run import run
from training.run_folder import starts

HOSTS, RATE = 8, 50_000_000  # bits a second
SEEDS = (0, 1, 2)
RECIPE = (
    "run.device=cpu", "run.epochs=12", "batch.micro=8", "schedule.warmup_epochs=2", "checkpoint.every_epochs=12",
)  # fmt: skip
SHORT = ("run.epochs=1", "schedule.warmup_epochs=0.2")  # with --quick
METHODS: Dict[str, Tuple[str, ...]] = {
    "dense": (),
    "dense, 4 bits": ("exchange.bits=4",),
    "topk of the update, 0.01": ("exchange.method=topk", "exchange.density=0.01"),
    "gtopk of the update, 0.04": ("exchange.method=gtopk", "exchange.pattern=owners", "exchange.density=0.04"),
    "local, 8 steps": ("exchange.method=local",),
    "local, 4 steps, 4 bits": ("exchange.method=local", "exchange.local_steps=4", "exchange.bits=4"),
    "local, 8 steps, 4 bits": ("exchange.method=local", "exchange.bits=4"),
    "auto": ("exchange.method=auto",),
}
FEW = ("dense", "local, 8 steps, 4 bits")  # with --quick
KEPT = RESULTS / "time_to_accuracy.jsonl"
LESS = 0.005  # of top-1, below what the dense run ends with


class Curve(NamedTuple):
    """A run: seconds since its first update and top-1 at the end of each epoch, updates, and the exchange it had."""

    seconds: List[float]
    top1: List[float]
    updates: int
    exchange: str


def overrides(method: str, seed: int) -> List[str]:
    """All that a run has beside the quickstart's recipe, but for its folder."""
    return [*RECIPE, *claims.less((), SHORT), *QUIET, *METHODS[method], f"run.seed={seed}"]


def folder(method: str, seed: int) -> Path:
    """Where a run is kept, by its content; comments of the recipe are none."""
    recipe = yaml_text.parse_yaml(QUICKSTART.read_text(), QUICKSTART.name)
    content = [json.dumps(recipe, sort_keys=True), str((HOSTS, RATE)), *overrides(method, seed)]
    return CACHE / "time_to_accuracy" / hashlib.sha256("\n".join(content).encode()).hexdigest()[:12]


def kept(seed: int) -> Dict[str, Curve]:
    """The runs of a seed that were finished together on some machine, by method; empty if there are none."""
    line = _kept(seed)
    return {name: Curve(*values) for name, values in line["curves"].items()} if line else {}


def _kept(seed: int) -> Optional[dict]:
    """The line of a seed's runs, as they are declared now."""
    runs = {name: folder(name, seed).name for name in METHODS}
    for line in KEPT.read_text().splitlines() if KEPT.exists() else ():
        found = json.loads(line)
        if found["runs"] == runs:
            return found
    return None


def keep(seed: int, curves: Dict[str, Curve]) -> None:
    """Add a seed's runs, all finished and with folders here, to what `kept` finds."""
    folders = {name: folder(name, seed) for name in curves}
    cores = {start["cpus"] for each in folders.values() for start in starts(each)}
    line = {
        "seed": seed,
        "trained": provenance_of(seed, list(curves))._asdict(),
        "cores": sorted(cores),
        "runs": {name: each.name for name, each in folders.items()},
        "curves": curves,
    }
    with open(KEPT, "a", encoding="utf-8") as stream:
        stream.write(json_text(line) + "\n")


def provenance_of(seed: int, names: Sequence[str]) -> Provenance:
    """When and where a seed's runs of some methods were trained, as is kept of them or as their folders say."""
    line = _kept(seed)
    if line:
        return provenance.from_json(line["trained"])
    return provenance.merged(provenance.of_folder(folder(name, seed)) for name in names)


def read(where: Path) -> Optional[Curve]:
    """The curve of a run; None unless it has come to its end."""
    if not (where / "metrics.jsonl").exists():
        return None
    events = read_events(where)
    if "end" not in events:
        return None
    seconds = {event["step"]: event["seconds"] for event in events["train"]}
    exchange = loading.load(where / "config.yaml").exchange
    scores = events["eval"]
    steps = [event["step"] for event in scores]
    # The last epoch's evaluation is after its log line; that of the epochs before is within the next one's seconds.
    return Curve([seconds[step] for step in steps], [event["top1"] for event in scores], steps[-1], exchange.variant)


def train(method: str, seed: int) -> Curve:
    """A training on all hosts, from its beginning unless it is finished."""
    where = folder(method, seed)
    found = read(where)
    if found is None:
        shutil.rmtree(where, ignore_errors=True)
        with Network(HOSTS, RATE) as network:
            networks.run(network, rank_trains, overrides(method, seed), str(where), connect=False)
        found = read(where)
    return found


def rank_trains(rank: int, meet: Callable[[], object], given: Sequence[str], where: str) -> None:
    """One rank's whole training."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch complains of hosts without names
    with contextlib.redirect_stdout(io.StringIO()):
        run(loading.load(QUICKSTART, [*given, f"run.output={where}"]))


def time_to(target: float, curve: Curve) -> Optional[float]:
    """Seconds until top-1 is at the target for good; None if it does not end there."""
    below = [place for place, top1 in enumerate(curve.top1) if top1 < target]
    first = below[-1] + 1 if below else 0
    return curve.seconds[first] if first < len(curve.top1) else None


def times(curves: Dict[str, List[Curve]], name: str) -> List[Optional[float]]:
    """A method's times to what the dense run of the same seed ends with, less half a point."""
    return [time_to(dense.top1[-1] - LESS, own) for dense, own in zip(curves["dense"], curves[name])]


def rows(curves: Dict[str, List[Curve]]) -> List[dict]:
    """A row per method; no time for one of which a run does not get there."""
    found = []
    for name, runs in curves.items():
        needed = times(curves, name)
        final = [100 * curve.top1[-1] for curve in runs]
        there = None not in needed
        found.append(
            {
                "exchange": f"{name}: {runs[0].exchange}" if name == "auto" else name,
                "ms_per_update": 1e3 * statistics.median(curve.seconds[-1] / curve.updates for curve in runs),
                "top1": statistics.mean(final),
                "lowest": min(final),
                "there": f"{len(needed) - needed.count(None)} of {len(needed)}",
                "seconds": statistics.median(needed) if there else None,
                "over_dense": statistics.median(speedups(curves, name)) if there else None,
            }
        )
    return found


def speedups(curves: Dict[str, List[Curve]], name: str) -> List[float]:
    """Times of the dense run over a method's, by seed; 0 where the method does not get there."""
    pairs = zip(times(curves, "dense"), times(curves, name))
    return [dense / own if own else 0.0 for dense, own in pairs]


def claimed(curves: Dict[str, List[Curve]]) -> List[dict]:
    """The best method that gets there with each seed, and `auto`."""
    others = [name for name in curves if name not in ("dense", "auto")]
    best = max(others, key=lambda name: (min(speedups(curves, name)) > 0, statistics.median(speedups(curves, name))))
    found = [claims.claim("time_to_dense_accuracy_p8", speedups(curves, best), "times", ">= 4")]
    if "auto" in curves:
        found.append(claims.claim("time_to_dense_accuracy_p8_auto", speedups(curves, "auto"), "times", ">= 3"))
    return found


def draw(curves: Dict[str, List[Curve]], path: Path) -> None:
    """Top-1 over time, a line for each method and seed, and the mean of the seeds' targets."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axis = figure.subplots()
    axis.set(xlabel="seconds", ylabel="validation top-1 (%)", xscale="log", ylim=(60, 100))
    for number, (name, runs) in enumerate(curves.items()):
        for seed, curve in enumerate(runs):
            values = [100 * top1 for top1 in curve.top1]
            axis.plot(curve.seconds, values, color=f"C{number}", lw=1.2, label=None if seed else name)
    goal = statistics.mean(curve.top1[-1] for curve in curves["dense"]) - LESS
    axis.axhline(100 * goal, color="grey", ls="--", lw=0.8)
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = claims.parser(__doc__)
    tracked.add_option(parser)
    options = claims.begin(parser, takes="an hour, less for finished runs", quick="3 minutes")
    torch.set_num_threads(1)  # as in the ranks, which are forked from here
    # Train what neither lines nor folders have. A seed is kept once all its runs are there.
    names, seeds = claims.less(list(METHODS), list(FEW)), claims.less(SEEDS, SEEDS[:1])
    found = {seed: claims.less(kept(seed), {}) for seed in seeds}
    wanted = [(seed, name) for seed in seeds for name in names if name not in found[seed]]
    writes = options.write and not claims.quick()
    for seed, name in claims.progress(wanted, "run"):
        found[seed][name] = train(name, seed)
        if writes and len(found[seed]) == len(names):
            keep(seed, found[seed])
    # Report, with the machine that trained: it need not be this one.
    curves = {name: [found[seed][name] for seed in seeds] for name in names}
    if writes:
        draw(curves, RESULTS / "time_to_accuracy.png")
    elif wanted and not claims.quick():
        new = ", ".join(str(seed) for seed in dict.fromkeys(seed for seed, _ in wanted))
        print(f"{KEPT.name} would get the runs of seeds {new} with --write")
    about = provenance.about([provenance_of(seed, names) for seed in seeds])
    claims.report("time_to_accuracy", rows(curves), claimed(curves), options.json, about)
