"""Is the gradient noise scale of a run what its definition says, and what does measuring it cost?

    python -m benchmarks.noise_scale [--quick] [--json]

- `noise_scale_error`: a small model on the digits, its weights held after 0, 60 and 120 updates, which gives three
  sizes of noise. |G|^2 and S of the engine's meter are averaged over updates of 8 micro batches of 8. Beside them the
  definition: from the gradient of each of the 1,437 images, in float64, the trace S of their covariance, and |G|^2 of
  the distribution they come from: that of their mean, less S / 1,437. The error is relative, the largest of the three.
- `meter_overhead`: four updates with the meter, which measures one of four, over four without, less 1, in turns,
  with the quickstart's model and its batch of 64 in 2 micro batches. Each of the four is timed: of 40 turns the mean of
  the four median quotients counts, five times over.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import statistics
from typing import Dict, Iterator, List, Sequence, Tuple

import torch
from torch.nn import functional as F

from benchmarks import QUICKSTART, claims
from benchmarks.ranks import Ours
from data.batches import MicroBatch
from data.sources import open_source
from engines import factory
from engines.base import Engine, one_step
from models.families import build
from recipe import loading
from recipe.batch import divide
from recipe.config import Recipe

MICRO, COUNT = 8, 8
HELD = ("model.width=0.35", "model.depth=0.3", "data.mixup=0", "precision.weights=float32", "run.device=cpu")
SIZES = (0, 60, 120)  # updates before the weights are held; of 240, after which all signal is lost in the noise
MEASURED = 1200  # updates with held weights
LR = 1.0
_EVERY = 100  # updates between two readings of the meter
OVERHEAD_TURNS, BLOCKS = 40, 5


def recipe(*overrides: str) -> Recipe:
    return loading.load(QUICKSTART, ["run.device=cpu", *overrides])


def drawn(images: torch.Tensor, labels: torch.Tensor, micro: int, count: int, step: int) -> Iterator[MicroBatch]:
    """An update's micro batches: images drawn without replacement, other ones in each update."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))[: micro * count]
    for number, rows in enumerate(order.split(micro)):
        yield MicroBatch(images[rows], labels[rows], rows, len(rows), number, step, ())


def digits(plan: Recipe) -> Tuple[torch.Tensor, torch.Tensor]:
    """All training images as the model takes them, uint8 [images, 3, size, size], and labels, int64."""
    source, size = open_source(plan.data, plan.model.classes, "train"), plan.model.image_size
    pixels = torch.stack([source.open(number).pixels() for number in range(len(source.labels))])
    images = F.interpolate(pixels.float(), (size, size), mode="bilinear", antialias=True).round().to(torch.uint8)
    return images, torch.from_numpy(source.labels)


def by_definition(plan: Recipe, weights: Dict[str, torch.Tensor], images: torch.Tensor, labels: torch.Tensor) -> float:
    """S / |G|^2 of the gradients of all images, one by one, float64."""
    model = build(plan.model, plan.run.seed).double().train()
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        parameter.data.copy_(weights[name])
    total, squares = torch.zeros(sum(each.numel() for each in parameters.values()), dtype=torch.float64), 0.0
    for image, label in zip(images, labels):
        logits = model(image[None])
        loss = F.cross_entropy(logits, label[None], label_smoothing=plan.data.label_smoothing)
        gradient = torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(parameters.values()))])
        total += gradient
        squares += gradient.square().sum().item()
    mean = (total / len(labels)).square().sum().item()
    noise = (squares / len(labels) - mean) * len(labels) / (len(labels) - 1)
    return noise / (mean - noise / len(labels))


def measured(engine: Engine, images: torch.Tensor, labels: torch.Tensor, first: int, updates: int) -> float:
    """S / |G|^2 by the meter, of weights that a rate of 0 holds; also of updates after which the engine tells none."""
    signal = noise = 0.0
    for step in range(first, first + updates):
        engine.train_step(
            drawn(images, labels, MICRO, COUNT, step), one_step(4 * step), 0.0
        )  # the meter takes one in four
        if (step + 1 - first) % _EVERY == 0:
            weight, _, more_noise, more_signal, *_ = engine.state_dict()["noise_scale"][""].tolist()
            signal, noise = signal + more_signal / weight, noise + more_noise / weight
    return noise / signal


def errors() -> Tuple[List[dict], List[float]]:
    """A row for each size of noise, and the relative errors."""
    plan = recipe(*HELD, f"batch.micro={MICRO}", f"batch.global={MICRO * COUNT}")
    images, labels = digits(plan)
    rows = []
    for before in claims.progress(claims.less(SIZES, SIZES[1:2]), "size of noise"):
        engine = factory.create(plan, divide(plan, 1), steps_per_epoch=22)
        for step in range(before):
            engine.train_step(drawn(images, labels, MICRO, COUNT, step), one_step(step), LR * (1 - step / 240))
        fresh = factory.create(plan, divide(plan, 1), steps_per_epoch=22)
        weights = engine.state_dict()["weights"]
        fresh.load_weights(weights)
        given = by_definition(plan, weights, images, labels)
        found = measured(fresh, images, labels, 10_000, claims.less(MEASURED, 2 * _EVERY))
        rows.append(
            {"side": f"after {before} updates", "definition": given, "meter": found, "error": found / given - 1}
        )
    return rows, [abs(row["error"]) for row in rows]


def overhead() -> Tuple[List[dict], List[float]]:
    """Rows, and what the meter adds to four updates, block by block."""
    sides = {on: Ours(recipe("batch.micro=32", f"log.noise_scale={on}")) for on in ("true", "false")}
    four = {on: lambda side=side: [claims.seconds(side.update) for _ in range(4)] for on, side in sides.items()}
    times = claims.in_turn(four, OVERHEAD_TURNS * BLOCKS, lambda side, _: side())
    rows = [
        {"side": f"four updates, meter {on}", **claims.milliseconds([*map(sum, turns)])} for on, turns in times.items()
    ]
    quotients = [claims.ratios(*pair) for pair in zip(times["true"], times["false"])]
    blocks = [quotients[first : first + OVERHEAD_TURNS] for first in range(0, len(quotients), OVERHEAD_TURNS)]
    return rows, [added(block) for block in blocks]


def added(quotients: Sequence[Sequence[float]]) -> float:
    """What four updates take more, from the quotients of each, of which the first of four is measured."""
    measured, *others = (statistics.median(each) for each in zip(*quotients))
    return statistics.mean([measured, *others]) - 1


def main() -> None:
    as_json = claims.begin(__doc__, takes="10 minutes", quick="1 minute").json
    torch.set_num_threads(1)
    held, wrong = errors()
    timed, more = overhead()
    found = [
        claims.claim("noise_scale_error", [max(wrong)], "relative", "<= 0.1"),
        claims.claim("meter_overhead", more, "of an update", "<= 0.01"),
    ]
    claims.report("noise_scale", [*held, *timed], found, as_json)
