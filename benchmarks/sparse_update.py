"""What a sparse exchange of gradients, or of updates, costs a replica's processor besides the update itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Dict, List

import torch
from torch import nn

from benchmarks import claims
from benchmarks.optimizer import b4_parameters
from models.efficientnet import build
from models.normalization import norm_parameters
from optim import factory
from optim.half_weights import WeightState
from parallel.exchange import Setup
from parallel.sparse_exchange import SparseExchange
from parallel.topology import Topology
from recipe.config import Model, Optimizer
from recipe.exchange import Exchange

DENSITY, REPLICAS, SKETCH = 0.001, 4, 61
GRADIENT, UPDATE, DENSE = "LARS, top-k of the gradient", "LARS, top-k of the update", "LARS, nothing selected"
_TURNS, _LR, _DIVISOR = 15, 0.1, torch.tensor(512.0)


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
        self._exchange = self._update = None
        if name == UPDATE:
            self._update = self._state.replica_update(
                factory.create(lars, own, norms),
                clip_norm=None, buckets=SKETCH, replicas=REPLICAS, add_up=lambda sketches: None,
            )  # fmt: skip
            self._update.lr = _LR
        if name != DENSE:
            section = Exchange(method="topk", density=DENSITY, factor_masking=False)
            processes = SimpleNamespace(topology=Topology(), gather=lambda value: [value], further_group=lambda: None)
            places, update = self._state.places(), self._update
            setup = Setup(
                SimpleNamespace(optimizer=lars), None, processes, self._gradient, places, None, None, None, update
            )
            self._exchange = SparseExchange(setup, section)

    def prepare(self) -> None:
        """The buffer as it is at the end of a backward pass."""
        self._state.gradients.flat.copy_(self._gradient)

    def __call__(self, step: int) -> None:
        if self._exchange is not None:
            self._exchange(self._state.gradients.flat, step, _DIVISOR)
        self._state.update(step, 1.0 if self._update else _LR, _DIVISOR, measure=False)


def measured() -> Dict[str, List[float]]:
    """Seconds of each kind of update, turn by turn; on as many threads as torch has."""

    def seconds(work: Work, number: int) -> float:
        work.prepare()
        return claims.seconds(work, number)

    return claims.in_turn({name: Work(name) for name in (GRADIENT, UPDATE, DENSE)}, _TURNS, seconds)


def extra_over_gradient(times: Dict[str, List[float]]) -> List[float]:
    """What selecting from updates adds to an update, over what selecting from gradients adds, turn by turn."""
    more = {name: [own - plain for own, plain in zip(times[name], times[DENSE])] for name in (UPDATE, GRADIENT)}
    return claims.ratios(more[UPDATE], more[GRADIENT])
