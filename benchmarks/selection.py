"""How long does it take to find the largest values of a gradient, exactly?

    python -m benchmarks.selection [--quick] [--json]

The share `density` of 19,328,168 float32 values (EfficientNet-B4 G16) that is largest in magnitude, on one core. The
data are normal, or like a gradient: heavy tails, an eighth zeros, 40 layers whose scales differ by up to 1000.
- `torch.topk` and `numpy.argpartition` of the magnitudes give any of several equal values, in any order.
- `largest`: ours, with indices in ascending order and equal values settled; compared with a stable sort.
- `one pass`: the sum of all values: the limit.
Then a whole update by LARS with what a sparse exchange does on a replica but for its messages:
`compress_update_over_gradient` is what selecting from updates adds to it, over what selecting from gradients adds.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

from types import SimpleNamespace
from typing import Callable, Dict, List

import numpy as np
import torch
from torch import nn

from benchmarks import claims
from benchmarks.optimizer import b4_parameters
from models.efficientnet import build
from models.normalization import norm_parameters
from optim import factory
from optim.weight_state import WeightState
from parallel.exchange import Setup
from parallel.selection import largest
from parallel.sparse_exchange import SparseExchange
from parallel.topology import Topology
from recipe.config import Model, Optimizer
from recipe.exchange import Exchange

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
    whole = updates()
    rows += [
        {"data": "update", "density": DENSITY, "side": name, **claims.milliseconds(seconds)}
        for name, seconds in whole.items()
    ]
    found = [
        claims.claim("speedup_over_torch_topk", speedups, "times", ">= 15"),
        claims.claim("compress_update_over_gradient", extra_over_gradient(whole), "times", "<= 1.5"),
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
    array = values.numpy()
    return {
        TORCH: lambda _: torch.topk(values.abs(), k),
        "numpy.argpartition": lambda _: np.argpartition(np.abs(array), VALUES - k)[VALUES - k :],
        OURS: lambda _: largest(values, k),
        LIMIT: lambda _: values.sum(),
    }


# Whole updates --------------------------------------------------------------------------------------------------------

DENSITY, REPLICAS, SKETCH = 0.001, 4, 61
GRADIENT, UPDATE, DENSE = "LARS, top-k of the gradient", "LARS, top-k of the update", "LARS, nothing selected"
_UPDATES, _LR, _DIVISOR = 15, 0.1, torch.tensor(512.0)


class Work:
    """An update from the gradient in the buffer on, without the messages. Float32 state, nothing compiled."""

    def __init__(self, name: str):
        own = {key: nn.Parameter(each.detach().clone()) for key, each in b4_parameters().items()}
        norms = norm_parameters(build(Model(), 0))
        lars = Optimizer(name="lars", weight_decay=2.5e-6)
        plain = Optimizer(name="sgd", momentum=0.0, weight_decay=0.0, skip=[])
        section = plain if name == UPDATE else lars
        self._state = WeightState(
            own.items(), lambda named: factory.create(section, named, norms),
            dtype=torch.float32, rounding="nearest", seed=0,
        )  # fmt: skip
        for view in self._state.gradients.views:
            view.normal_()
        self._gradient = self._state.gradients.flat.clone()
        self._exchange = self._replica_update = None
        if name == UPDATE:
            self._replica_update = self._state.create_replica_update(
                factory.create(lars, own, norms),
                clip_norm=None, buckets=SKETCH, replicas=REPLICAS, add_up=lambda sketches: None,
            )  # fmt: skip
            self._replica_update.lr = _LR
        if name != DENSE:
            section = Exchange(method="topk", density=DENSITY)
            processes = SimpleNamespace(topology=Topology(), gather=lambda value: [value], further_group=lambda: None)
            places, update = self._state.places(), self._replica_update
            setup = Setup(None, processes, self._gradient, places, None, None, None, update)
            self._exchange = SparseExchange(setup, section)

    def prepare(self) -> None:
        """The buffer as it is at the end of a backward pass."""
        self._state.gradients.flat.copy_(self._gradient)

    def __call__(self, step: int) -> None:
        if self._exchange is not None:
            self._exchange(self._state.gradients.flat, step, _DIVISOR)
        self._state.update(step, 1.0 if self._replica_update else _LR, _DIVISOR, measure=False)


def updates() -> Dict[str, List[float]]:
    """Seconds of each kind of update, turn by turn; on as many threads as torch has."""

    def seconds(work: Work, number: int) -> float:
        work.prepare()
        return claims.seconds(work, number)

    return claims.in_turn({name: Work(name) for name in (GRADIENT, UPDATE, DENSE)}, _UPDATES, seconds)


def extra_over_gradient(times: Dict[str, List[float]]) -> List[float]:
    """What selecting from updates adds to an update, over what selecting from gradients adds, turn by turn."""
    more = {name: [own - plain for own, plain in zip(times[name], times[DENSE])] for name in (UPDATE, GRADIENT)}
    return claims.ratios(more[UPDATE], more[GRADIENT])
