"""How long does it take to find the largest values of a gradient, exactly?

    python -m benchmarks.selection [--quick] [--json]

The share `density` of 19,328,168 float32 values (EfficientNet-B4 G16) that is largest in magnitude,
on one core. The data are normal, or like a gradient: heavy tails, an eighth zeros, 40 layers whose
scales differ by up to 1000.
- `torch.topk` and `numpy.argpartition` of the magnitudes give any of several equal values, in any
  order.
- `largest`: ours, with indices in ascending order and equal values settled; compared with a stable
  sort.
- `one pass`: the sum of all values: the limit.
Then a whole update by LARS with what a sparse exchange does on a replica but for its messages:
`compress_update_over_gradient` is what selecting from updates adds to it, over what selecting from
gradients adds.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

from typing import Callable, Dict, List, Optional, Tuple

import numpy as np
import torch
from torch import nn

from benchmarks import claims
from benchmarks.optimizer import b4_parameters
from models.families import build
from models.normalization import norm_parameters
from optim import factory
from optim.base import HasSlots
from optim.replica_update import ReplicaUpdate
from optim.weight_state import WeightState
from parallel.exchange import Setup
from parallel.processes import Processes
from parallel.selection import largest
from parallel.sparse_exchange import SparseExchange
from parallel.topology import Topology
from recipe.config import Model
from recipe.exchange import TopK
from recipe.optimization import Lars, Sgd

VALUES = 19_328_168
DENSITIES = (0.001, 0.01, 0.25)
CLAIMED = ("normal", 0.001)
TORCH = "torch.topk"
OURS = "largest"
LIMIT = "one pass"
_ROUNDS = 7
_ROUNDS_OF_CLAIM = 25


def main() -> None:
    """Measure, and print the report."""
    as_json = claims.begin(__doc__, takes="3 minutes", quick="1 minute").json
    torch.set_num_threads(1)
    rows, speedups = selections()
    times = updates()
    for name, seconds in times.items():
        row = {"data": "update", "density": DENSITY, "side": name}
        rows.append({**row, **claims.milliseconds(seconds)})
    extra = extra_over_gradient(times)
    made = [
        claims.claim("speedup_over_torch_topk", speedups, "times", ">= 15"),
        claims.claim("compress_update_over_gradient", extra, "times", "<= 1.5"),
    ]
    claims.report("selection", rows, made, as_json)


# Selections ---------------------------------------------------------------------------------------


def selections() -> Tuple[List[dict], List[float]]:
    """Return rows of all data and densities, and our speed-ups over torch for those of the claim.

    Raises:
        AssertionError: ours are not the largest values.
    """
    rows: List[dict] = []
    speedups: List[float] = []
    for name, values in data().items():
        order = np.argsort(-np.abs(values.numpy()), kind="stable")
        for density in DENSITIES:
            k = int(density * VALUES)
            # Of equal values the first ones count, as in a stable sort.
            expected = np.sort(order[:k])
            is_right = np.array_equal(largest(values, k).numpy(), expected)
            assert is_right, f"{name}, {density}: not the largest"
            is_claimed = (name, density) == CLAIMED
            rounds = _ROUNDS_OF_CLAIM if is_claimed else _ROUNDS
            times = claims.in_turn(sides(values, k), rounds)
            for side, seconds in times.items():
                row = {
                    "data": name,
                    "density": density,
                    "side": side,
                    **claims.milliseconds(seconds),
                    "speedup_over_torch_topk": claims.median_ratio(times[TORCH], seconds),
                    "times_one_pass": claims.median_ratio(seconds, times[LIMIT]),
                }
                rows.append(row)
            if is_claimed:
                speedups = claims.ratios(times[TORCH], times[OURS])
    return rows, speedups


def data() -> Dict[str, torch.Tensor]:
    """Return the values to select from, float32 [VALUES] each, by name."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(VALUES, generator=generator)
    # Heavy tails: one value in t^2, about, has a magnitude above t.
    like_a_gradient = normal / torch.rand(VALUES, generator=generator).sqrt()
    like_a_gradient[torch.rand(VALUES, generator=generator) < 1 / 8] = 0
    # Layers whose scales are from 1 down to a thousandth.
    scales = 10 ** (-3 * torch.rand(40, generator=generator))
    layers = like_a_gradient.chunk(40)
    for layer, scale in zip(layers, scales, strict=True):
        layer.mul_(scale)
    return {"normal": normal, "like a gradient": like_a_gradient}


def sides(values: torch.Tensor, k: int) -> Dict[str, Callable[[int], object]]:
    """Return the ways to select, by name; each takes the number of its round.

    Args:
        values: float32 [VALUES], to select from.
        k: how many are selected.
    """
    array = values.numpy()
    return {
        TORCH: lambda _: torch.topk(values.abs(), k),
        "numpy.argpartition": lambda _: _argpartition(array, k),
        OURS: lambda _: largest(values, k),
        LIMIT: lambda _: values.sum(),
    }


def _argpartition(array: np.ndarray, k: int) -> np.ndarray:
    """Return the places of the k largest magnitudes."""
    # NumPy leaves them behind those of all others.
    places = np.argpartition(np.abs(array), VALUES - k)
    return places[VALUES - k :]


# Whole updates ------------------------------------------------------------------------------------

DENSITY = 0.001
REPLICAS = 4
SKETCH = 61  # values a layer that replicas send beside their updates
GRADIENT = "LARS, top-k of the gradient"
UPDATE = "LARS, top-k of the update"
DENSE = "LARS, nothing selected"
_UPDATES = 15
_LR = 0.1
_DIVISOR = torch.tensor(512.0)


class Work:
    """An update from the gradient in the buffer on, without the messages.

    State is float32, nothing is compiled.
    """

    def __init__(self, name: str):
        """
        Args:
            name: GRADIENT, UPDATE or DENSE.
        """
        lars = Lars(weight_decay=2.5e-6)
        self._norms = norm_parameters(build(Model(), 0))
        self._parameters: Dict[str, nn.Parameter] = {}
        for key, parameter in b4_parameters().items():
            self._parameters[key] = nn.Parameter(parameter.detach().clone())
        # Where updates are selected, LARS makes them on the replica: what arrives is only added.
        adding = Sgd(momentum=0.0, weight_decay=0.0, skip=[])
        section = adding if name == UPDATE else lars

        def create_optimizer(parameters: Dict[str, nn.Parameter]) -> HasSlots:
            """Return the optimizer of `parameters`, which takes what has been exchanged."""
            return factory.create(section, parameters, self._norms)

        self._state = WeightState(
            self._parameters.items(),
            create_optimizer,
            dtype=torch.float32,
            rounding="nearest",
            seed=0,
        )
        for view in self._state.gradients.views:
            view.normal_()
        self._gradient = self._state.gradients.flat.clone()
        # With UPDATE alone, and with all but DENSE.
        self._replica_update: Optional[ReplicaUpdate] = None
        self._exchange: Optional[SparseExchange] = None
        if name == UPDATE:
            self._replica_update = self._create_replica_update(lars)
        if name != DENSE:
            self._exchange = self._create_exchange()

    def _create_replica_update(self, lars: Lars) -> ReplicaUpdate:
        """Return the replica's part of an update: as of several replicas, but nothing is sent."""
        replica_update = self._state.create_replica_update(
            factory.create(lars, self._parameters, self._norms),
            clip_norm=None,
            buckets=SKETCH,
            replicas=REPLICAS,
            add_up=lambda sketches: None,
        )
        replica_update.lr = _LR
        return replica_update

    def _create_exchange(self) -> SparseExchange:
        """Return the exchange of a single replica, which selects but sends nothing."""
        setup = Setup(
            batch=None,
            processes=Processes(Topology(), torch.device("cpu")),
            gradients=self._gradient,
            places=self._state.places(),
            collect=None,
            group=None,
            steps_per_epoch=None,
            replica_update=self._replica_update,
        )
        return SparseExchange(setup, TopK(density=DENSITY))

    def prepare(self) -> None:
        """Fill the buffer as it is at the end of a backward pass."""
        self._state.gradients.flat.copy_(self._gradient)

    def __call__(self, step: int) -> None:
        """Make an update.

        Args:
            step: its number, from 0.
        """
        if self._exchange is not None:
            self._exchange(self._state.gradients.flat, step, _DIVISOR)
        # An update that the replica has made has the rate in it.
        lr = _LR if self._replica_update is None else 1.0
        self._state.update(step, lr, _DIVISOR, measure=False)


def updates() -> Dict[str, List[float]]:
    """Return the seconds of each kind of update, turn by turn."""
    works = {name: Work(name) for name in (GRADIENT, UPDATE, DENSE)}
    return claims.in_turn(works, _UPDATES, _seconds)


def _seconds(work: Work, number: int) -> float:
    """Return the seconds of an update, without filling the buffer."""
    work.prepare()
    return claims.seconds(work, number)


def extra_over_gradient(times: Dict[str, List[float]]) -> List[float]:
    """Return what selecting from updates adds, over what selecting from gradients adds.

    Args:
        times: seconds of updates, turn by turn, by name.

    Returns:
        The quotients, turn by turn.
    """
    return claims.ratios(_added(times[UPDATE], times), _added(times[GRADIENT], times))


def _added(seconds: List[float], times: Dict[str, List[float]]) -> List[float]:
    """Return what an update takes longer than one that selects nothing, turn by turn."""
    return [longer - dense for longer, dense in zip(seconds, times[DENSE])]
