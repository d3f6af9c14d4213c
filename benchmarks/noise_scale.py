"""Is the gradient noise scale of a run what its definition says, and what does measuring it cost?

    python -m benchmarks.noise_scale [--quick] [--json]

- `noise_scale_error`: a small model on the digits, its weights held after 0, 60 and 120 updates,
  which gives three sizes of noise. |G|^2 and S of the engine's meter are averaged over updates of 8
  micro batches of 8. Beside them the definition: from the gradient of each of the 1,437 images, in
  float64, the trace S of their covariance, and |G|^2 of the distribution they come from: that of
  their mean, less S / 1,437. The error is relative, the largest of the three.
- `meter_overhead`: four updates with the meter, which measures one of four, over four without, less
  1, in turns, with the quickstart's model and its batch of 64 in 2 micro batches. Each of the four
  is timed: of 40 turns the mean of the four median quotients counts, five times over.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import statistics
from typing import Dict, Iterator, List, NamedTuple, Sequence, Tuple

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
from recipe.settled import image_size

MICRO = 8  # images of a micro batch
COUNT = 8  # micro batches of an update
HELD = (
    "model.width=0.35",
    "model.depth=0.3",
    "data.mixup=0",
    "precision.weights=float32",
    "run.device=cpu",
)
# Updates before the weights are held; of 240, after which all signal is lost in the noise.
SIZES = (0, 60, 120)
MEASURED = 1200  # updates with held weights
LR = 1.0
OVERHEAD_TURNS = 40
BLOCKS = 5
_ALL_UPDATES = 240  # after which the rate would be 0
_FIRST_MEASURED = 10_000  # number of the first update with held weights, whose images are others
_EVERY = 100  # updates between two readings of the meter
_PERIOD = 4  # updates, of which the meter measures the first


class Digits(NamedTuple):
    """All training images as the model takes them.

    images: uint8 [images, 3, size, size].
    labels: int64 [images].
    """

    images: torch.Tensor
    labels: torch.Tensor


def recipe(*overrides: str) -> Recipe:
    """Return the quickstart's recipe on the CPU.

    Args:
        overrides: further changes to it.
    """
    return loading.load(QUICKSTART, ["run.device=cpu", *overrides])


def drawn(digits: Digits, step: int) -> Iterator[MicroBatch]:
    """Yield an update's micro batches: images drawn without replacement, others in each update.

    Args:
        digits: from which they are drawn.
        step: number of the update, by which they are drawn.
    """
    generator = torch.Generator().manual_seed(step)
    order = torch.randperm(len(digits.labels), generator=generator)
    chosen = order[: MICRO * COUNT]
    for number, rows in enumerate(chosen.split(MICRO)):
        yield MicroBatch(
            images=digits.images[rows],
            labels=digits.labels[rows],
            indices=rows,
            valid=len(rows),
            number=number,
            step=step,
            unreadable=(),
        )


def read_digits(plan: Recipe) -> Digits:
    """Return the digits in the size that the model takes.

    Args:
        plan: the recipe.
    """
    source = open_source(plan.data, plan.model.classes, "train")
    pixels = [source.open(number).pixels() for number in range(len(source))]
    side = image_size(plan.model)
    resized = F.interpolate(
        torch.stack(pixels).float(),
        size=(side, side),
        mode="bilinear",
        antialias=True,
    )
    images = resized.round().to(torch.uint8)
    return Digits(images, torch.from_numpy(source.labels))


# The error ----------------------------------------------------------------------------------------


def by_definition(plan: Recipe, weights: Dict[str, torch.Tensor], digits: Digits) -> float:
    """Return S / |G|^2 of the gradients of all images, one by one, in float64.

    Args:
        plan: the recipe.
        weights: of the model, by name.
        digits: all images.
    """
    # Sums over images of their gradients and of these gradients' squared norms.
    total = torch.zeros((), dtype=torch.float64)
    squares = 0.0
    for gradient in _gradients(plan, weights, digits):
        total = total + gradient
        squares += gradient.square().sum().item()
    # The covariance is that of a sample around its own mean, so one image fewer counts.
    count = len(digits.labels)
    mean = (total / count).square().sum().item()
    noise = (squares / count - mean) * count / (count - 1)
    # The squared norm of that mean has a share of the noise in it.
    signal = mean - noise / count
    return noise / signal


def _gradients(
    plan: Recipe,
    weights: Dict[str, torch.Tensor],
    digits: Digits,
) -> Iterator[torch.Tensor]:
    """Yield the gradient of each image alone, float64 [parameters]."""
    model = build(plan.model, plan.run.seed).double().train()
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        parameter.data.copy_(weights[name])
    for image, label in zip(digits.images, digits.labels):
        loss = F.cross_entropy(
            model(image[None]),
            label[None],
            label_smoothing=plan.data.label_smoothing,
        )
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        yield torch.cat([gradient.flatten() for gradient in gradients])


def measured(engine: Engine, digits: Digits, updates: int) -> float:
    """Return S / |G|^2 by the engine's meter, of weights that a rate of 0 holds.

    Updates count also where the gradient is lost in its noise, of which the engine tells no scale.

    Args:
        engine: with the weights.
        digits: from which images are drawn.
        updates: a multiple of those between two readings.
    """
    signal = 0.0
    noise = 0.0
    for number in range(updates):
        step = _FIRST_MEASURED + number
        # By their numbers the meter measures one update of four: all of these.
        update = one_step(_PERIOD * step)
        engine.train_step(drawn(digits, step), update, lr=0.0)
        if (number + 1) % _EVERY == 0:
            # The sums that the meter keeps: see engines/noise_scale.py.
            moments = engine.state_dict()["noise_scale"][""].tolist()
            weight, _, weighted_noise, weighted_signal, *_ = moments
            noise += weighted_noise / weight
            signal += weighted_signal / weight
    return noise / signal


def errors() -> Tuple[List[dict], List[float]]:
    """Return a row for each size of noise, and the relative errors."""
    plan = recipe(*HELD, f"batch.micro={MICRO}", f"batch.global={MICRO * COUNT}")
    digits = read_digits(plan)
    sizes = claims.less(SIZES, SIZES[1:2])
    rows = []
    wrong = []
    for before in claims.progress(sizes, "size of noise"):
        weights = _weights_after(before, plan, digits)
        # A new engine, whose meter has seen nothing of the updates before.
        engine = _engine(plan)
        engine.load_weights(weights)
        definition = by_definition(plan, weights, digits)
        meter = measured(engine, digits, claims.less(MEASURED, 2 * _EVERY))
        error = meter / definition - 1
        wrong.append(abs(error))
        rows.append(
            {
                "side": f"after {before} updates",
                "definition": definition,
                "meter": meter,
                "error": error,
            }
        )
    return rows, wrong


def _weights_after(updates: int, plan: Recipe, digits: Digits) -> Dict[str, torch.Tensor]:
    """Return the weights after so many updates, by name."""
    engine = _engine(plan)
    for step in range(updates):
        lr = LR * (1 - step / _ALL_UPDATES)
        engine.train_step(drawn(digits, step), one_step(step), lr)
    return engine.state_dict()["weights"]


def _engine(plan: Recipe) -> Engine:
    """Return a new engine for the recipe, in this process alone."""
    return factory.create(plan, divide(plan, 1), steps_per_epoch=22)


# The overhead -------------------------------------------------------------------------------------


def overhead() -> Tuple[List[dict], List[float]]:
    """Return rows, and what the meter adds to four updates, block by block."""
    sides = {}
    for switch in ("true", "false"):
        sides[switch] = Ours(recipe("batch.micro=32", f"log.noise_scale={switch}"))
    times = claims.in_turn(sides, OVERHEAD_TURNS * BLOCKS, _seconds_of_four)
    rows = []
    for switch, turns in times.items():
        seconds = [sum(four) for four in turns]
        name = f"four updates, meter {switch}"
        rows.append({"side": name, **claims.milliseconds(seconds)})
    quotients = []
    for with_meter, without in zip(times["true"], times["false"]):
        quotients.append(claims.ratios(with_meter, without))
    # With --quick there are fewer turns than one block takes.
    more = []
    for first in range(0, len(quotients), OVERHEAD_TURNS):
        block = quotients[first : first + OVERHEAD_TURNS]
        more.append(added(block))
    return rows, more


def _seconds_of_four(side: Ours, _: int) -> List[float]:
    """Return the seconds of each of a side's next updates, of which the meter measures the first."""
    return [claims.seconds(side.update) for _ in range(_PERIOD)]


def added(quotients: Sequence[Sequence[float]]) -> float:
    """Return the share by which four updates take longer.

    Args:
        quotients: turn by turn, of the times of each of the four, of which the first is measured.
    """
    # Updates are compared with others of the same place: only the first of four takes longer.
    medians = [statistics.median(column) for column in zip(*quotients)]
    return statistics.mean(medians) - 1


def main() -> None:
    """Measure, and print the report."""
    as_json = claims.begin(__doc__, takes="10 minutes", quick="1 minute").json
    torch.set_num_threads(1)
    held, wrong = errors()
    timed, more = overhead()
    made = [
        claims.claim("noise_scale_error", [max(wrong)], "relative", "<= 0.1"),
        claims.claim("meter_overhead", more, "of an update", "<= 0.01"),
    ]
    claims.report("noise_scale", [*held, *timed], made, as_json)
