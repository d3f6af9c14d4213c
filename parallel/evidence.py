"""Measured losses of exchanges: points of top-1 against a dense one.

They come from `benchmarks.evidence exchange_learning`.

Needs no torch. Each figure is the mean loss of five seeds on glyphs, paired with dense runs of the
same seed (docs/results/exchange_learning.csv); on digits none loses more. Model: EfficientNet of
1.03 million parameters on 4 replicas, 1,280 updates.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple

from recipe.exchange import Dense, Exchange, GTopK, Local, TopK
from recipe.optimization import Optimizer

PAGE = "docs/exchange.md"
OPTIMIZER = "lars"  # with which all of it was measured
_SENDS_MORE_AT_FIRST = ("density_warmup", "dense_steps", "dense_epochs")


class Evidence(NamedTuple):
    """A measured loss of accuracy.

    loss: points of top-1, the mean over seeds, in the worse of two settings.
    error: its standard error there.
    """

    loss: float
    error: float

    def __str__(self) -> str:
        points = f"{self.loss:.1f} ± {self.error:.1f} points"
        if self.loss <= self.error:
            return f"loses nothing that could be measured ({points})"
        return f"loses {points}"


MEASURED: Tuple[Tuple[Exchange, Evidence], ...] = (
    (Dense(bits=4), Evidence(0.39, 0.26)),
    (Local(local_steps=8), Evidence(5.44, 0.57)),
    (TopK(density=0.01), Evidence(-0.07, 0.47)),
    (TopK(density=0.001), Evidence(1.81, 0.46)),
    (GTopK(pattern="owners", density=0.04), Evidence(-0.65, 0.36)),
)


def of(section: Exchange, optimizer: Optimizer) -> Optional[Evidence]:
    """Return the measured loss of an exchange.

    Args:
        section: of the exchange.
        optimizer: section of the optimizer.

    Returns:
        The loss; None if it was not measured.
    """
    # With another optimizer the same exchange may lose more.
    if optimizer.name != OPTIMIZER:
        return None
    keys = _keys(section, optimizer)
    for measured, evidence in MEASURED:
        if _keys(measured, optimizer) == keys:
            return evidence
    return None


def _keys(section: Exchange, optimizer: Optimizer) -> dict:
    """Return the keys by which exchanges are compared.

    `compress` is as resolved; keys that are not used or only send more at first are left out.
    """
    keys = dict(section, compress=section.compresses_update(optimizer))
    unused = () if section.sparse else ("density",)
    for key in (*_SENDS_MORE_AT_FIRST, *unused):
        keys.pop(key, None)
    return keys
