"""How long does it take to find the largest values of a gradient, exactly?

    python -m benchmarks.selection [--quick] [--json]

19,328,168 float32 values, as many as EfficientNet-B4 G16 has parameters, on one core; of these a share `density`, the
largest in magnitude. The data are normal, or like a gradient: heavy tails, an eighth exact zeros, and 40 layers whose
scales differ by up to 1000. The sides are called in turn, on the same values:
- `torch.topk`: of the magnitudes, as it is written everywhere. `numpy.argpartition`: of the magnitudes, too. Both give
  any of several equal values, in any order.
- `largest`: ours, with indices in ascending order and equal values settled.
- `one pass`: the sum of all values, one thing that reads each of them: the limit.
Ours is compared with a stable sort of everything, element by element. Ratios are those of neighbouring turns.
At the end, a whole update by LARS on one core, with what a sparse exchange does on a replica but for its messages:
`compress_update_over_gradient` is what selecting from updates adds to it, over what selecting from gradients adds.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from training.command import run

    run(__file__)

from typing import Callable, Dict, List

import numpy as np
import torch

from benchmarks import claims, sparse_update
from benchmarks.sparse_update import DENSITY
from parallel.selection import largest

VALUES = 19_328_168
DENSITIES = (0.001, 0.01, 0.25)
CLAIMED = ("normal", 0.001)
TORCH, OURS, LIMIT = "torch.topk", "largest", "one pass"
_ROUNDS, _ROUNDS_OF_CLAIM = 7, 25


def main() -> None:
    as_json = claims.begin(__doc__, takes="3 minutes", quick="1 minute").json
    torch.set_num_threads(1)
    rows: List[dict] = []
    for name, values in data().items():
        order = np.argsort(-np.abs(values.numpy()), kind="stable")
        for density in DENSITIES:
            k = int(density * VALUES)
            assert np.array_equal(largest(values, k).numpy(), np.sort(order[:k])), f"{name}, {density}: not the largest"
            claimed = (name, density) == CLAIMED
            times = claims.in_turn(sides(values, k), _ROUNDS_OF_CLAIM if claimed else _ROUNDS)
            rows += [
                {
                    "data": name,
                    "density": density,
                    "side": side,
                    **claims.milliseconds(seconds),
                    "speedup_over_torch_topk": claims.median_ratio(times[TORCH], seconds),
                    "times_one_pass": claims.median_ratio(seconds, times[LIMIT]),
                }
                for side, seconds in times.items()
            ]
            if claimed:
                speedups = claims.ratios(times[TORCH], times[OURS])
    whole = sparse_update.measured()
    others = {"speedup_over_torch_topk": None, "times_one_pass": None}
    rows += [
        {"data": "update", "density": DENSITY, "side": name, **claims.milliseconds(seconds), **others}
        for name, seconds in whole.items()
    ]
    found = [
        claims.claim("speedup_over_torch_topk", speedups, "times", ">= 15"),
        claims.claim("compress_update_over_gradient", sparse_update.extra_over_gradient(whole), "times", "<= 1.5"),
    ]
    claims.report("selection", rows, found, as_json)


def data() -> Dict[str, torch.Tensor]:
    """float32 [VALUES] each."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(VALUES, generator=generator)
    like_a_gradient = normal / torch.rand(VALUES, generator=generator).sqrt()
    like_a_gradient[torch.rand(VALUES, generator=generator) < 1 / 8] = 0
    scales = 10 ** (-3 * torch.rand(40, generator=generator))
    for layer, scale in zip(like_a_gradient.chunk(40), scales, strict=True):
        layer.mul_(scale)
    return {"normal": normal, "like a gradient": like_a_gradient}


def sides(values: torch.Tensor, k: int) -> Dict[str, Callable[[int], object]]:
    """The calls that take turns."""
    array = values.numpy()
    return {
        TORCH: lambda _: torch.topk(values.abs(), k),
        "numpy.argpartition": lambda _: np.argpartition(np.abs(array), VALUES - k)[VALUES - k :],
        OURS: lambda _: largest(values, k),
        LIMIT: lambda _: values.sum(),
    }
