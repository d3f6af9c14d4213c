"""Accuracy of torch's own method for slow networks: PowerSGD on DistributedDataParallel, beside the
same without it.

    python -m benchmarks.power_sgd [--quick] [--json]

The peer of `benchmarks.evidence exchange_learning`: the same model, images, order of images,
mixing, schedule and seeds on 4 processes with 16 images each, in a loop of a few lines around
torch's DDP with the hook `powerSGD_hook` (rank 2, warm start, error feedback; the first ten updates
dense). With LARS as there, and with SGD (momentum 0.9, peak 0.01), for which the hook's error
feedback is sound. A loss is against DDP without the hook with the same seed: five seeds of digits,
two of glyphs. `kb_sent` is what a process sends in an update after the dense ones, by a ring.
Finished runs are cached under benchmarks/cache/.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import hashlib
import itertools
import json
import statistics
import warnings
from typing import List, NamedTuple, Sequence

import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks import CACHE, QUICKSTART, claims, ranks
from benchmarks.evidence.exchange_learning import COMPARED, REPLICAS, SEEDS, SETTINGS
from data import loader, mixing
from data.base import Source
from data.batches import MicroBatch
from data.sources import open_source
from engines.base import scored
from engines.feed import training_batches
from engines.torch_engine import image_settings
from models.base import BlockList
from models.families import build
from models.normalization import norm_parameters
from optim import factory, schedule
from parallel import costs
from parallel.exchange import BYTES
from parallel.processes import Processes
from parallel.topology import Topology
from recipe import loading
from recipe.batch import divide, lengths
from recipe.config import Recipe
from recipe.settled import image_size

RANK = 2  # of the matrices that PowerSGD sends in the place of a gradient
DENSE_UPDATES = 10
OPTIMIZERS = {"LARS": (), "SGD": ("optimizer.name=sgd", "schedule.peak=0.01")}
SHORT = ("run.epochs=1", "schedule.warmup_epochs=0.2")  # with --quick
_MICRO = 16  # images of a process in an update
_SEEDS = {"digits": SEEDS, "glyphs": COMPARED["glyphs"]}
_CPU = torch.device("cpu")


class Side(NamedTuple):
    """A kind of run.

    setting: key of SETTINGS.
    optimizer: key of OPTIMIZERS.
    compresses: whether PowerSGD compresses the gradients.
    """

    setting: str
    optimizer: str
    compresses: bool


class Outcome(NamedTuple):
    """A finished run.

    top1: share of all validation images that it knows.
    values: that all processes together add up in an update after the dense ones, on average.
    """

    top1: float
    values: float


class _Hits(NamedTuple):
    """Right answers, and the images that were asked for."""

    hits: int
    images: int


def overrides(side: Side, seed: int) -> List[str]:
    """Return changes to the quickstart's recipe.

    Args:
        side: kind of the run.
        seed: of the run.
    """
    return [
        *SETTINGS[side.setting],
        *OPTIMIZERS[side.optimizer],
        f"batch.micro={_MICRO}",
        "run.device=cpu",
        f"run.seed={seed}",
        *claims.less((), SHORT),
    ]


def outcome(side: Side, seed: int) -> Outcome:
    """Return how a run ended; train it, unless it is cached.

    Args:
        side: kind of the run.
        seed: of the run.
    """
    changes = overrides(side, seed)
    # All that a run depends on, so that another choice makes another file.
    content = [
        QUICKSTART.read_text(),
        REPLICAS,
        RANK,
        DENSE_UPDATES,
        side.compresses,
        *changes,
    ]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    path = CACHE / "power_sgd" / f"{digest[:12]}.json"
    if not path.exists():
        results = ranks.run(REPLICAS, rank_trains, changes, side.compresses)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results[0]))
    return Outcome(*json.loads(path.read_text()))


def rank_trains(rank: int, changes: List[str], compresses: bool) -> Outcome:
    """Train in one of the processes, and return how the run ended.

    Args:
        rank: of the process, which has one replica.
        changes: to the quickstart's recipe.
        compresses: whether PowerSGD compresses the gradients.
    """
    recipe = loading.load(QUICKSTART, changes)
    processes = Processes(Topology(REPLICAS, 1, rank, rank), _CPU)
    model = build(recipe.model, recipe.run.seed).train()
    source = open_source(recipe.data, recipe.model.classes, "train")
    updates = lengths(recipe, len(source)).total
    # One bucket: the hook waits for messages on gloo's two threads, so that two buckets wait for
    # each other for ever.
    replica = DistributedDataParallel(
        model,
        process_group=processes.replica_group,
        bucket_cap_mb=64,
    )
    values: float = sum(parameter.numel() for parameter in model.parameters())
    if not compresses:
        _train(recipe, rank, model, replica, source)
    else:
        state = PowerSGDState(processes.replica_group, RANK, start_powerSGD_iter=DENSE_UPDATES)
        replica.register_comm_hook(state, powerSGD_hook)
        _train(recipe, rank, model, replica, source)
        values = state.total_numel_after_compression / (updates - DENSE_UPDATES)

    # Each process has scored a share of the images.
    counts = processes.gather(_evaluated(recipe, rank, model.eval()))
    processes.part()
    hits = sum(count.hits for count in counts)
    images = sum(count.images for count in counts)
    return Outcome(hits / images, values)


def _train(
    recipe: Recipe,
    rank: int,
    model: BlockList,
    replica: DistributedDataParallel,
    source: Source,
) -> None:
    """Train a model, which `replica` wraps, on the images of a source."""
    parameters = dict(model.named_parameters())
    optimizer = factory.create(recipe.optimizer, parameters, norm_parameters(model))
    length = lengths(recipe, len(source))
    rate = schedule.create(recipe, length)
    micro_batches = training_batches(
        source,
        image_settings(recipe),
        batch=divide(recipe, REPLICAS),
        replica=rank,
        steps=range(length.total),
        device=_CPU,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's hook divides by norms of 0 in the first updates
        # An update has one micro batch of each process.
        for step, micro in enumerate(micro_batches):
            # The random layers draw as in our engine.
            model.draws.step = step
            model.draws.micro_batch = rank
            _loss(recipe, rank, replica, micro, step).backward()
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.step()
            optimizer.zero_grad()


def _loss(
    recipe: Recipe,
    rank: int,
    replica: DistributedDataParallel,
    micro: MicroBatch,
    step: int,
) -> torch.Tensor:
    """Return the mean loss of a micro batch, which is mixed as our engine would mix it."""
    height, width = micro.images.shape[2:]
    plan = mixing.draw(
        recipe.data,
        recipe.run.seed,
        (step, rank),
        rows=_MICRO,
        valid=_MICRO,
        size=(height, width),
    )
    images = micro.images if plan is None else mixing.mix_images(micro.images, plan)
    targets = mixing.mix_targets(micro.labels, plan, recipe.model.classes)
    return F.cross_entropy(replica(images), targets, label_smoothing=recipe.data.label_smoothing)


def _evaluated(recipe: Recipe, rank: int, model: BlockList) -> _Hits:
    """Return the right answers among this rank's share of the validation images."""
    batches = loader.EvaluationBatches(
        open_source(recipe.data, recipe.model.classes, "validation"),
        data=recipe.data,
        image_size=image_size(recipe.model),
        batch=recipe.batch.evaluation,
        replica=rank,
        replicas=REPLICAS,
        device=_CPU,
    )
    hits = 0
    images = 0
    with torch.no_grad():
        for batch in batches:
            # The last batch is padded.
            logits = model(batch.images)[: batch.valid].float()
            counts = scored(logits, batch.labels[: batch.valid])
            hits += int(counts.top1)
            images += counts.images
    return _Hits(hits, images)


def main() -> None:
    """Train all runs, and print the report."""
    takes = "an hour, less for finished runs"
    as_json = claims.begin(__doc__, takes=takes, quick="2 minutes").json
    settings = claims.less(list(SETTINGS), ["digits"])
    pairs = list(itertools.product(settings, OPTIMIZERS))
    rows = []
    for setting, optimizer in claims.progress(pairs, "setting"):
        seeds = claims.less(_SEEDS[setting], SEEDS[:2])
        dense = [outcome(Side(setting, optimizer, False), seed) for seed in seeds]
        compressed = [outcome(Side(setting, optimizer, True), seed) for seed in seeds]
        names = {"setting": setting, "optimizer": optimizer}
        rows.append({**names, **_figures(dense, compressed)})
    claims.report("power_sgd", rows, [], as_json)


def _figures(dense: Sequence[Outcome], compressed: Sequence[Outcome]) -> dict:
    """Return the figures of a row, from runs of the same seeds without PowerSGD and with it."""
    # Points of top-1, seed by seed.
    lost = [100 * (whole.top1 - part.top1) for whole, part in zip(dense, compressed)]
    size = 4 * compressed[0].values  # bytes of float32
    return {
        "seeds": len(lost),
        "kb_sent": costs.ring(BYTES, REPLICAS, size) / 1e3,
        "dense_top1": 100 * statistics.mean(run.top1 for run in dense),
        "power_sgd_top1": 100 * statistics.mean(run.top1 for run in compressed),
        "lost": statistics.mean(lost),
        "error": statistics.stdev(lost) / len(lost) ** 0.5,
    }
