"""How long until a run on a slow network is as accurate as one that exchanges everything, by method of exchange?

    python -m benchmarks.time_to_accuracy [--quick] [--json] [--write]        (as root)

Eight hosts of `benchmarks/networks.py` with cables of 50 Mbit/s and a rank of train.py on each: the
quickstart's model, its digits, its optimizer, 12 epochs of 22 updates, three seeds. After each
epoch the validation images are scored. A run is there with the first epoch from which on its top-1
stays at what the dense run of its seed ends with, less half a point. Its time is that of the
program itself, from its first update to that epoch's last one, with the evaluations of the epochs
before.

The only checkpoint is written at the end, after the time is taken: the first host gets the states
of all replicas for it, 8 MB from each with a sparse exchange, and such an epoch takes less time
than that.

All eight ranks share this machine's processors: a step's computing takes about as long as on one
host with all eight parts. Finished runs are cached under benchmarks/cache/, so the command goes on
where it was left off. Only --write changes what git tracks: docs/results/time_to_accuracy.jsonl,
which gets a seed's runs as one line once all are finished, and the figure beside it. So another
machine can go on with the next seed; times are only compared with those of the same machine.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import contextlib
import hashlib
import io
import json
import os
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
from training.run import run as train_recipe
from training.run_folder import starts

HOSTS = 8
RATE = 50_000_000  # bits a second
SEEDS = (0, 1, 2)
RECIPE = (
    "run.device=cpu",
    "run.epochs=12",
    "batch.micro=8",
    "schedule.warmup_epochs=2",
    "checkpoint.every_epochs=12",
)
SHORT = ("run.epochs=1", "schedule.warmup_epochs=0.2")  # with --quick
METHODS: Dict[str, Tuple[str, ...]] = {
    "dense": (),
    "dense, 4 bits": ("exchange.bits=4",),
    "topk of the update, 0.01": ("exchange.method=topk", "exchange.density=0.01"),
    "gtopk of the update, 0.04": (
        "exchange.method=gtopk",
        "exchange.pattern=owners",
        "exchange.density=0.04",
    ),
    "local, 8 steps": ("exchange.method=local",),
    "local, 4 steps, 4 bits": (
        "exchange.method=local",
        "exchange.local_steps=4",
        "exchange.bits=4",
    ),
    "local, 8 steps, 4 bits": ("exchange.method=local", "exchange.bits=4"),
    "auto": ("exchange.method=auto",),
}
FEW = ("dense", "local, 8 steps, 4 bits")  # with --quick
KEPT = RESULTS / "time_to_accuracy.jsonl"
LESS = 0.005  # of top-1, below what the dense run ends with


class Curve(NamedTuple):
    """A run.

    seconds: since its first update, at the end of each epoch.
    top1: at the end of each epoch.
    updates: of the whole run.
    exchange: the one that it had.
    """

    seconds: List[float]
    top1: List[float]
    updates: int
    exchange: str


def overrides(method: str, seed: int) -> List[str]:
    """Return all that a run has beside the quickstart's recipe, but for its folder.

    Args:
        method: one of METHODS.
        seed: of the run.
    """
    shortened = claims.less((), SHORT)
    return [*RECIPE, *shortened, *QUIET, *METHODS[method], f"run.seed={seed}"]


def folder(method: str, seed: int) -> Path:
    """Return where a run is kept, by its content.

    Args:
        method: one of METHODS.
        seed: of the run.
    """
    # Parsed, because comments of the recipe are no content.
    recipe = yaml_text.parse_yaml(QUICKSTART.read_text(), QUICKSTART.name)
    content = [
        json.dumps(recipe, sort_keys=True),
        str((HOSTS, RATE)),
        *overrides(method, seed),
    ]
    digest = hashlib.sha256("\n".join(content).encode()).hexdigest()
    return CACHE / "time_to_accuracy" / digest[:12]


def kept(seed: int) -> Dict[str, Curve]:
    """Return the runs of a seed that were finished together on some machine.

    Args:
        seed: of the runs.

    Returns:
        The runs by method; none if they are not kept.
    """
    line = _kept(seed)
    if line is None:
        return {}
    return {name: Curve(*values) for name, values in line["curves"].items()}


def _kept(seed: int) -> Optional[dict]:
    """Return the line that is kept of a seed's runs, as they are declared now."""
    if not KEPT.exists():
        return None
    runs = {name: folder(name, seed).name for name in METHODS}
    for text in KEPT.read_text().splitlines():
        line = json.loads(text)
        if line["runs"] == runs:
            return line
    return None


def keep(seed: int, curves: Dict[str, Curve]) -> None:
    """Add a seed's runs to those that `kept` returns.

    Args:
        seed: of the runs.
        curves: by method; all are finished, and their folders are on this machine.
    """
    folders = {name: folder(name, seed) for name in curves}
    cores = {start["cpus"] for place in folders.values() for start in starts(place)}
    line = {
        "seed": seed,
        "trained": provenance_of(seed, list(curves))._asdict(),
        "cores": sorted(cores),
        "runs": {name: place.name for name, place in folders.items()},
        "curves": curves,
    }
    with open(KEPT, "a", encoding="utf-8") as stream:
        stream.write(json_text(line) + "\n")


def provenance_of(seed: int, names: Sequence[str]) -> Provenance:
    """Return when and where a seed's runs were trained, as is kept of them or their folders say.

    Args:
        seed: of the runs.
        names: of their methods.
    """
    line = _kept(seed)
    if line is not None:
        return provenance.from_json(line["trained"])
    return provenance.merged(provenance.of_folder(folder(name, seed)) for name in names)


def read(where: Path) -> Optional[Curve]:
    """Return the curve of a run; None unless it has come to its end.

    Args:
        where: the run's folder, which need not be there.
    """
    if not (where / "metrics.jsonl").exists():
        return None
    events = read_events(where)
    if "end" not in events:
        return None
    exchange = loading.load(where / "config.yaml").exchange
    evaluations = events["eval"]
    steps = [event["step"] for event in evaluations]
    # The last epoch's evaluation is after its log line; that of the epochs before is within the
    # next one's seconds.
    seconds = {event["step"]: event["seconds"] for event in events["train"]}
    return Curve(
        seconds=[seconds[step] for step in steps],
        top1=[event["top1"] for event in evaluations],
        updates=steps[-1],
        exchange=exchange.variant,
    )


def train(method: str, seed: int) -> Curve:
    """Train on all hosts, from the beginning, unless the run is finished.

    Args:
        method: one of METHODS.
        seed: of the run.

    Returns:
        The curve of the run.
    """
    where = folder(method, seed)
    finished = read(where)
    if finished is not None:
        return finished
    # A run that was cut off begins anew: its time is that of one program from its first update.
    shutil.rmtree(where, ignore_errors=True)
    given = overrides(method, seed)
    with Network(HOSTS, RATE) as network:
        # Without a connection: each rank makes its own, as train.py does.
        networks.run(network, rank_trains, given, str(where), connect=False)
    curve = read(where)
    assert curve is not None, f"{where}: all ranks have ended, but not the run"
    return curve


def rank_trains(rank: int, meet: Callable[[], object], given: Sequence[str], where: str) -> None:
    """Train as one of the ranks, which finds its number in its environment.

    Args:
        rank: its number.
        meet: waits for all ranks, which is not needed.
        given: overrides of the recipe.
        where: the run's folder.
    """
    # Torch complains of hosts without names.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with contextlib.redirect_stdout(io.StringIO()):
        train_recipe(loading.load(QUICKSTART, [*given, f"run.output={where}"]))


def time_to(target: float, curve: Curve) -> Optional[float]:
    """Return the seconds until top-1 is at a target for good; None if it does not end there.

    Args:
        target: top-1, 0 to 1.
        curve: of the run.
    """
    # A run that falls below the target later was not there for good.
    first = 0
    for epoch, top1 in enumerate(curve.top1):
        if top1 < target:
            first = epoch + 1
    return curve.seconds[first] if first < len(curve.top1) else None


def times(curves: Dict[str, List[Curve]], name: str) -> List[Optional[float]]:
    """Return a method's seconds to what the dense run of its seed ends with, less half a point.

    Args:
        curves: of all methods, by seed.
        name: of the method.

    Returns:
        The seconds by seed; None where the method does not get there.
    """
    pairs = zip(curves["dense"], curves[name])
    return [time_to(dense.top1[-1] - LESS, curve) for dense, curve in pairs]


def rows(curves: Dict[str, List[Curve]]) -> List[dict]:
    """Return a row for each method; one of which a run does not get there has no time.

    Args:
        curves: of all methods, by seed.
    """
    return [_row(curves, name) for name in curves]


def _row(curves: Dict[str, List[Curve]], name: str) -> dict:
    """Return the row of a method."""
    runs = curves[name]
    needed = times(curves, name)
    reached = [seconds for seconds in needed if seconds is not None]
    all_reached = len(reached) == len(needed)
    update = statistics.median(curve.seconds[-1] / curve.updates for curve in runs)
    final = [100 * curve.top1[-1] for curve in runs]
    return {
        "exchange": f"{name}: {runs[0].exchange}" if name == "auto" else name,
        "ms_per_update": 1e3 * update,
        "top1": statistics.mean(final),
        "lowest": min(final),
        "there": f"{len(reached)} of {len(needed)}",
        "seconds": statistics.median(reached) if all_reached else None,
        "over_dense": statistics.median(speedups(curves, name)) if all_reached else None,
    }


def speedups(curves: Dict[str, List[Curve]], name: str) -> List[float]:
    """Return times of the dense run over a method's.

    Args:
        curves: of all methods, by seed.
        name: of the method.

    Returns:
        The quotients by seed; 0 where the method does not get there.
    """
    quotients = []
    for dense, seconds in zip(times(curves, "dense"), times(curves, name)):
        assert dense is not None  # it ends above its own target
        quotients.append(dense / seconds if seconds else 0.0)
    return quotients


def claimed(curves: Dict[str, List[Curve]]) -> List[dict]:
    """Return claims about the best method that gets there with each seed, and about `auto`.

    Args:
        curves: of all methods, by seed.
    """

    def merit(name: str) -> Tuple[bool, float]:
        """Return whether method `name` gets there with each seed, and how fast it is."""
        quotients = speedups(curves, name)
        return min(quotients) > 0, statistics.median(quotients)

    # The one that auto chooses has a claim of its own.
    others = [name for name in curves if name not in ("dense", "auto")]
    fastest = speedups(curves, max(others, key=merit))
    made = [claims.claim("time_to_dense_accuracy_p8", fastest, "times", ">= 4")]
    if "auto" in curves:
        chosen = speedups(curves, "auto")
        made.append(claims.claim("time_to_dense_accuracy_p8_auto", chosen, "times", ">= 3"))
    return made


def draw(curves: Dict[str, List[Curve]], path: Path) -> None:
    """Draw top-1 over time, a line for each method and seed, and the mean of the seeds' targets.

    Args:
        curves: of all methods, by seed.
        path: of the figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axis = figure.subplots()
    axis.set(xlabel="seconds", ylabel="validation top-1 (%)", xscale="log", ylim=(60, 100))
    for number, (name, runs) in enumerate(curves.items()):
        for place, curve in enumerate(runs):
            percent = [100 * top1 for top1 in curve.top1]
            # The legend has each method once.
            label = name if place == 0 else None
            axis.plot(curve.seconds, percent, color=f"C{number}", lw=1.2, label=label)
    goal = statistics.mean(curve.top1[-1] for curve in curves["dense"]) - LESS
    axis.axhline(100 * goal, color="grey", ls="--", lw=0.8)
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run the command."""
    parser = claims.parser(__doc__)
    tracked.add_option(parser)
    options = claims.begin(parser, takes="an hour, less for finished runs", quick="3 minutes")
    # As in the ranks, which are forked from here.
    torch.set_num_threads(1)
    writes = options.write and not claims.quick()

    # Train what neither lines nor folders have. A seed is kept once all its runs are there.
    names = claims.less(list(METHODS), list(FEW))
    seeds = claims.less(SEEDS, SEEDS[:1])
    runs = {seed: claims.less(kept(seed), {}) for seed in seeds}
    wanted = [(seed, name) for seed in seeds for name in names if name not in runs[seed]]
    for seed, name in claims.progress(wanted, "run"):
        of_seed = runs[seed]
        of_seed[name] = train(name, seed)
        if writes and len(of_seed) == len(names):
            keep(seed, of_seed)

    # Report, with the machine that trained: it need not be this one.
    curves = {name: [runs[seed][name] for seed in seeds] for name in names}
    if writes:
        draw(curves, RESULTS / "time_to_accuracy.png")
    elif wanted and not claims.quick():
        _print_new(wanted)
    about = provenance.about([provenance_of(seed, names) for seed in seeds])
    claims.report("time_to_accuracy", rows(curves), claimed(curves), options.json, about)


def _print_new(trained: Sequence[Tuple[int, str]]) -> None:
    """Print of which seeds --write would have kept the runs, given seed and method of each."""
    seeds = dict.fromkeys(seed for seed, _ in trained)
    listed = ", ".join(str(seed) for seed in seeds)
    print(f"{KEPT.name} would get the runs of seeds {listed} with --write")
