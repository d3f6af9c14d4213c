"""Accuracy of torch's own method for slow networks: PowerSGD on DistributedDataParallel, beside the same without it.

    python -m benchmarks.power_sgd [--quick] [--json]

The peer of `benchmarks.evidence exchange_learning`: the same model, images, order of images, mixing, schedule and seeds
on 4 processes with 16 images each, in a loop of a few lines around torch's DDP with the hook `powerSGD_hook` (rank 2,
warm start, error feedback; the first ten updates dense). With LARS as there, and with SGD (momentum 0.9, peak 0.01),
for which the hook's error feedback is sound. A loss is against DDP without the hook with the same seed: five seeds of
digits, two of glyphs. `kb_sent` is what a process sends in an update, by a ring. Finished runs are cached under
benchmarks/cache/.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from common.command import run

    run(__file__)

import hashlib
import itertools
import json
import statistics
import warnings
from typing import List, NamedTuple, Tuple

import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks import CACHE, QUICKSTART, claims, ranks
from benchmarks.evidence.exchange_learning import COMPARED, REPLICAS, SEEDS, SETTINGS
from data import loader, mixing
from data.sources import open_source
from engines.base import scored
from engines.feed import training_batches
from engines.torch_engine import image_settings
from models.families import build
from models.normalization import norm_parameters
from optim import factory, schedule
from parallel.exchange import Gradient, named
from parallel.processes import Processes
from parallel.topology import Topology
from recipe import loading
from recipe.batch import divide, lengths
from recipe.config import Recipe

RANK, DENSE_UPDATES = 2, 10
OPTIMIZERS = {"LARS": (), "SGD": ("optimizer.name=sgd", "schedule.peak=0.01")}
SHORT = ("run.epochs=1", "schedule.warmup_epochs=0.2")  # with --quick
Side = Tuple[str, str, bool]  # setting, optimizer, whether PowerSGD compresses
_SEEDS = {"digits": SEEDS, "glyphs": COMPARED["glyphs"]}


class Outcome(NamedTuple):
    """top1: of all validation images. values: that all processes together add up in an update."""

    top1: float
    values: float


def overrides(side: Side, seed: int) -> List[str]:
    """Changes to the quickstart's recipe."""
    setting, optimizer, _ = side
    keys = [*SETTINGS[setting], *OPTIMIZERS[optimizer], "batch.micro=16", "run.device=cpu", f"run.seed={seed}"]
    return [*keys, *claims.less((), SHORT)]


def outcome(side: Side, seed: int) -> Outcome:
    """Train a run, unless it is cached."""
    content = json.dumps([QUICKSTART.read_text(), RANK, DENSE_UPDATES, side[2], *overrides(side, seed)])
    path = CACHE / "power_sgd" / f"{hashlib.sha256(content.encode()).hexdigest()[:12]}.json"
    if not path.exists():
        found = ranks.run(REPLICAS, rank_trains, overrides(side, seed), side[2])[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
    return Outcome(*json.loads(path.read_text()))


def rank_trains(rank: int, given: List[str], compresses: bool) -> Outcome:
    """One rank's whole training."""
    recipe = loading.load(QUICKSTART, given)
    place = Topology(REPLICAS, 1, rank, rank)
    processes, batch = Processes(place, torch.device("cpu")), divide(recipe, REPLICAS)
    whole = build(recipe.model, recipe.run.seed).train()
    # One bucket: the hook waits for messages on gloo's two threads, so that two buckets wait for each other for ever.
    model = DistributedDataParallel(whole, process_group=processes.replica_group, bucket_cap_mb=64)
    if compresses:
        state = PowerSGDState(processes.replica_group, RANK, start_powerSGD_iter=DENSE_UPDATES)
        model.register_comm_hook(state, powerSGD_hook)
    optimizer = factory.create(recipe.optimizer, dict(whole.named_parameters()), norm_parameters(whole))
    source = open_source(recipe.data, recipe.model.classes, "train")
    length = lengths(recipe, len(source.labels))
    rate = schedule.create(recipe, length)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's hook divides by norms of 0 in the first updates
        micro_batches = training_batches(
            source,
            image_settings(recipe),
            batch=batch,
            replica=place.replica,
            steps=range(length.total),
            device=torch.device("cpu"),
        )
        for step, micro in enumerate(micro_batches):
            plan = mixing.draw(
                recipe.data, recipe.run.seed, (step, rank), rows=16, valid=16, size=micro.images.shape[2:]
            )
            whole.draws.step, whole.draws.micro_batch = step, rank
            logits = model(micro.images if plan is None else mixing.mix_images(micro.images, plan))
            targets = mixing.mix_targets(micro.labels, plan, recipe.model.classes)
            F.cross_entropy(logits, targets, label_smoothing=recipe.data.label_smoothing).backward()
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.step()
            optimizer.zero_grad()
    found = processes.gather(_hits(recipe, whole.eval(), rank))
    processes.part()
    hits, images = map(sum, zip(*found))
    values = sum(each.numel() for each in whole.parameters())
    if compresses:
        values = state.total_numel_after_compression / (length.total - DENSE_UPDATES)
    return Outcome(hits / images, values)


def _hits(recipe: Recipe, model: torch.nn.Module, rank: int) -> Tuple[int, int]:
    """Right answers among this rank's share of the validation images, and their number."""
    source = open_source(recipe.data, recipe.model.classes, "validation")
    batches = loader.EvaluationBatches(
        source,
        data=recipe.data,
        image_size=recipe.model.image_size,
        batch=recipe.batch.evaluation,
        device=torch.device("cpu"),
        replica=rank,
        replicas=REPLICAS,
    )
    hits = images = 0
    with torch.no_grad():
        for batch in batches:
            counts = scored(model(batch.images)[: batch.valid].float(), batch.labels[: batch.valid])
            hits, images = hits + counts.top1.item(), images + counts.images
    return hits, images


def main() -> None:
    as_json = claims.begin(__doc__, takes="an hour, less for finished runs", quick="2 minutes").json
    names = list(itertools.product(claims.less(list(SETTINGS), ["digits"]), OPTIMIZERS))
    rows = []
    for setting, optimizer in claims.progress(names, "setting"):
        seeds = claims.less(_SEEDS[setting], SEEDS[:2])
        dense, own = ([outcome((setting, optimizer, hook), seed) for seed in seeds] for hook in (False, True))
        lost = [100 * (one.top1 - other.top1) for one, other in zip(dense, own)]
        rows.append(
            {
                "setting": setting,
                "optimizer": optimizer,
                "seeds": len(seeds),
                "kb_sent": named("dense").bytes_sent(REPLICAS, Gradient(own[0].values)) / 1e3,
                "dense_top1": 100 * statistics.mean(each.top1 for each in dense),
                "power_sgd_top1": 100 * statistics.mean(each.top1 for each in own),
                "lost": statistics.mean(lost),
                "error": statistics.stdev(lost) / len(lost) ** 0.5,
            }
        )
    claims.report("power_sgd", rows, [], as_json)
