"""The plan's model beside what others have published.

It is calibrated on the smallest machine of a series, and compared on the larger ones. The figures
are those of Graphcore's performance page and of NVIDIA's DeepLearningExamples (docs/planning.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import List, NamedTuple, Tuple

from recipe import loading
from recipe.config import Recipe
from tools.planning import machine as machines
from tools.planning import scaling, workload
from tools.planning.machine import Machine
from tools.planning.workload import Workload

_CONFIGS = Path(__file__).resolve().parents[2] / "configs"
_HALF = 2  # bytes of a gradient in TensorFlow's 16.16 recipes
_BISECTIONS = 200  # of the rates from 1e6 to 1e18: more than float64 tells apart


class Series(NamedTuple):
    """One program on machines of growing size.

    name: for people.
    machine: name of its file in machines/.
    rates: (replicas, images a second); the first calibrates.
    micro: images of a micro batch.
    used: sizes from which a constant of the machine was taken; they are not compared.
    """

    name: str
    machine: str
    rates: List[Tuple[int, float]]
    micro: int = 3
    used: Tuple[int, ...] = ()


class Comparison(NamedTuple):
    """A prediction beside the published rate.

    name: of the series.
    published, predicted: images a second.
    error: of the prediction, relative.
    """

    name: str
    replicas: int
    published: float
    predicted: float
    error: float


PODS = (
    Series(
        "Bow Pods, TensorFlow 1, SDK 3.0",
        "bow_pod",
        [(8, 9000), (32, 34140), (128, 122665)],
    ),
    Series(
        "Bow Pods, TensorFlow 1, before SDK 2.5",
        "bow_pod",
        [(8, 8936), (32, 34943), (128, 117641)],
    ),
)
A100 = (
    Series(
        "A100, PyTorch, AMP",
        "dgx_a100",
        [(1, 331), (8, 2570), (16, 4813), (32, 9425), (64, 18900)],
        micro=128,
    ),
    Series(
        "A100, PyTorch, TF32",
        "dgx_a100",
        [(1, 157), (8, 1223), (16, 2417), (32, 4813), (64, 9146)],
        micro=64,
    ),
    Series(
        "A100, TensorFlow 2, AMP",
        "dgx_a100",
        [(1, 470), (8, 3550), (32, 12908), (64, 25455)],
        micro=128,
        used=(8,),
    ),
    Series(
        "A100, TensorFlow 2, TF32",
        "dgx_a100",
        [(1, 165), (8, 1308), (32, 4782), (64, 9473)],
        micro=64,
    ),
)


def compare(series: Series) -> List[Comparison]:
    """Predict every size of a `series` but those that calibrated the model."""
    machine = calibrated(series)
    comparisons = []
    # The first calibrates, so that its error is none.
    for replicas, rate in series.rates[1:]:
        if replicas in series.used:
            continue
        recipe, work = _setting(series, replicas)
        predicted = scaling.predict(recipe, machine, replicas, work).images_per_second
        error = predicted / rate - 1
        comparisons.append(Comparison(series.name, replicas, rate, predicted, error))
    return comparisons


def calibrated(series: Series) -> Machine:
    """Return the machine of a `series`, at whose rate the plan gives the first of its figures."""
    replicas, images_per_second = series.rates[0]
    machine = machines.load(series.machine)
    recipe, work = _setting(series, replicas)
    # Bisection on a logarithmic scale: the predicted rate rises with the device's.
    low = 1e6
    high = 1e18
    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5
        guess = workload.changed(machine, "rate", value=middle)
        predicted = scaling.predict(recipe, guess, replicas, work).images_per_second
        if predicted < images_per_second:
            low = middle
        else:
            high = middle
    return guess


def _setting(series: Series, replicas: int) -> Tuple[Recipe, Workload]:
    """Return the published recipe: of pods ours, of GPUs plain B4 with a batch for each GPU."""
    if series.machine == "bow_pod":
        recipe = loading.load(_CONFIGS / "pod.yaml")
        return recipe, workload.of(recipe)._replace(gradient_bytes=_HALF)
    # Ours has group convolutions, the published model depthwise ones.
    overrides = [
        "model.group_size=1",
        "model.expansion=6",
        "model.norm=batch",
        "run.device=cuda",
        f"batch.micro={series.micro}",
        f"batch.global={series.micro * replicas}",
    ]
    recipe = loading.load(_CONFIGS / "gpu.yaml", overrides)
    return recipe, workload.of(recipe)
