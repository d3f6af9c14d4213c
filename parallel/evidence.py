"""What exchanges lose: points of top-1 against a dense one, as measured by `benchmarks.evidence exchange_learning`.

Needs no torch. Each figure is the mean loss of five seeds on glyphs, paired with dense runs of the same seed
(docs/results/exchange_learning.csv); on digits none loses more. Model: EfficientNet of 1.03 million parameters on 4
replicas, 1,280 updates.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple

from recipe.exchange import Exchange
from recipe.optimization import Optimizer

PAGE = "docs/exchange.md"
_MORE = ("density_warmup", "dense_steps", "dense_epochs")
OPTIMIZER = "lars"  # with which all of it was measured


class Evidence(NamedTuple):
    """loss: points of top-1, the mean over seeds, in the worse of two settings. error: its standard error there."""

    loss: float
    error: float

    def __str__(self) -> str:
        if self.loss <= self.error:
            return f"loses nothing that could be measured ({self.loss:.1f} ± {self.error:.1f} points)"
        return f"loses {self.loss:.1f} ± {self.error:.1f} points"


MEASURED: Tuple[Tuple[Exchange, Evidence], ...] = (
    (Exchange(method="dense", bits=4), Evidence(0.39, 0.26)),
    (Exchange(method="local", local_steps=8), Evidence(5.44, 0.57)),
    (Exchange(method="topk", density=0.01), Evidence(-0.07, 0.47)),
    (Exchange(method="topk", density=0.001), Evidence(1.81, 0.46)),
    (Exchange(method="gtopk", pattern="owners", density=0.04), Evidence(-0.65, 0.36)),
)


def of(section: Exchange, optimizer: Optimizer) -> Optional[Evidence]:
    """What an exchange loses; None if that was not measured."""
    if optimizer.name != OPTIMIZER:
        return None
    wanted = _keys(section, optimizer)
    return next((evidence for each, evidence in MEASURED if _keys(each, optimizer) == wanted), None)


def _keys(section: Exchange, optimizer: Optimizer) -> dict:
    """The keys by which exchanges are compared: `compress` as resolved, without keys that are not used or only send
    more at first."""
    keys = dict(section, compress=section.compresses_update(optimizer))
    for key in _MORE if section.sparse else (*_MORE, "density"):
        keys.pop(key, None)
    return keys
