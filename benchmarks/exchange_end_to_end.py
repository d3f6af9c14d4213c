"""How many images a second does train.py reach on eight hosts whose network is slow, by method of exchange?

    python -m benchmarks.exchange_end_to_end [--quick] [--json]        (as root)

Eight hosts of `benchmarks/networks.py`, a rank of train.py on each, whole steps: reading, forward, backward, exchange,
update. The model is the quickstart's on digits; the cables have 1 Gbit/s times its parameters over those of
EfficientNet-B4 G16, so that its gradients take as long on them as B4's on 1 Gbit/s. All eight ranks share this
machine's processors: these are busy while they compute and idle while gradients travel. A turn is a training of some
steps, whose first ones do not count; methods take turns, and so their neighbours' ratios hold.
`none` sends no gradients, and is what a network of no cost would give; `auto` says which method the program takes here.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from training.command import run

    run(__file__)

import contextlib
import io
import statistics
import tempfile
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Tuple

import torch

from benchmarks import QUICKSTART, claims, networks
from benchmarks.networks import Network
from models.efficientnet import build
from recipe import loading
from training.metrics import read_events
from training.run import run

HOSTS = 8
B4_PARAMETERS = 19_328_168  # of B4 G16 with 1,000 classes
GIGABIT = 10**9
LOGGED, WINDOWS = 3, 4  # steps between two log lines, of which the first is warm-up
RECIPE = (
    "run.device=cpu", f"run.steps={LOGGED * WINDOWS}", "batch.micro=8", "schedule.warmup_epochs=null",
    "schedule.warmup_steps=2", f"log.every_steps={LOGGED}", "log.tensorboard=false",
)  # fmt: skip
TURNS = 3
SPARSE = ("exchange.density=0.001",)
METHODS: Dict[str, Tuple[str, ...]] = {
    "none": ("exchange.method=none",),
    "dense": (),
    "dense, delay 1": ("exchange.delay=1",),
    "half": ("exchange.method=half",),
    "topk": ("exchange.method=topk", *SPARSE),
    "gtopk tree": ("exchange.method=gtopk", *SPARSE),
    "gtopk butterfly": ("exchange.method=gtopk", "exchange.pattern=butterfly", *SPARSE),
    "gtopk butterfly, 0.01": ("exchange.method=gtopk", "exchange.pattern=butterfly", "exchange.density=0.01"),
    "auto": ("exchange.method=auto", *SPARSE),
}
FEW = ("none", "dense", "half", "gtopk butterfly", "auto")  # with --quick


class Turn(NamedTuple):
    """One training: images a second of all hosts, share of the time that processors were idle, method it came to."""

    images_per_second: float
    idle: float
    method: str


def parameters() -> int:
    """Parameters of the model."""
    recipe = loading.load(QUICKSTART, RECIPE)
    with torch.device("meta"):
        return sum(each.numel() for each in build(recipe.model, 0).parameters())


def rank_trains(rank: int, meet: Callable[[], object], overrides: Tuple[str, ...], folder: str) -> Turn:
    """One rank's whole training."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch complains of hosts without names
    meet()
    idle, ticks = networks.processors()
    with contextlib.redirect_stdout(io.StringIO()):
        run(loading.load(QUICKSTART, [*RECIPE, *overrides, f"run.output={folder}"]))
    idle_after, ticks_after = networks.processors()
    meet()
    events = read_events(Path(folder))["train"]
    method = loading.load(Path(folder) / "config.yaml").exchange
    return Turn(
        statistics.median(event["images_per_second"] for event in events[1:]),
        (idle_after - idle) / (ticks_after - ticks),
        f"{method.method} {method.pattern}" if method.method == "gtopk" else method.method,
    )


def train_once(overrides: Tuple[str, ...], rate: int) -> Turn:
    """A training on all hosts, as rank 0 saw it."""
    with tempfile.TemporaryDirectory() as folder, Network(HOSTS, rate) as network:
        return networks.run(network, rank_trains, overrides, f"{folder}/run", connect=False)[0]


def rows(turns: Dict[str, List[Turn]]) -> List[dict]:
    """A row per method."""
    dense = [turn.images_per_second for turn in turns["dense"]]
    found = []
    for name, each in turns.items():
        rates = [turn.images_per_second for turn in each]
        found.append(
            {
                "exchange": f"{name}: {each[-1].method}" if name == "auto" else name,
                "images_per_second": statistics.median(rates),
                "lowest": min(rates),
                "highest": max(rates),
                "over_dense": statistics.median(own / other for own, other in zip(rates, dense)),
                "idle": 100 * statistics.median(turn.idle for turn in each),
            }
        )
    return found


def main() -> None:
    as_json = claims.begin(__doc__, takes="8 minutes", quick="2 minutes").json
    torch.set_num_threads(1)
    count = parameters()
    rate = round(GIGABIT * count / B4_PARAMETERS)
    print(f"{HOSTS} hosts, {count:,} parameters, cables of {rate / 1e6:.1f} Mbit/s (B4 G16 at 1 Gbit/s)")
    turns: Dict[str, List[Turn]] = {name: [] for name in claims.less(METHODS, FEW)}
    for number in range(claims.less(TURNS, 1)):
        names = list(turns)[:: -1 if number % 2 else 1]
        for name in claims.progress(names, f"turn {number + 1} of {claims.less(TURNS, 1)}, method"):
            turns[name].append(train_once(METHODS[name], rate))
    claims.report("exchange_end_to_end", rows(turns), [], as_json)
