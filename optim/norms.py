"""Norms that float32 neither overflows nor underflows, and those of a model of which this process may have a part.

Squares of float32 numbers above 1.8e19 are infinite and those below 2e-23 are 0. So sums of squares are made in
float32, and made again in float64, which has them all, only where the result shows that they may be wrong.
"""

from __future__ import annotations

import math
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence

import torch

from optim.layout import Layout

SMALLEST = 2.0**-90  # of a sum of squares: in it, what float32 rounds off from squares below 2^-126 is no longer seen
LARGEST = torch.finfo(torch.float32).max


def asks(device: torch.device) -> bool:
    """Whether the host may look at a result to decide what to compute: that costs nothing on a CPU."""
    return device.type == "cpu"


def spoiled(sums: torch.Tensor) -> torch.Tensor:
    """Return where float64 sums of squares that were made in float32 may be wrong, bool [parameters]."""
    return ~(sums >= SMALLEST) | torch.isinf(sums)


def repaired(
    sums: Sequence[torch.Tensor], layout: Layout, values: Callable[[slice], Sequence[torch.Tensor]]
) -> List[torch.Tensor]:
    """Return sums of squares by parameter, float64, with those made anew that float32 may have spoiled.

    A CPU makes anew only those. Another device, which is not asked, makes all and selects.

    Args:
        sums: float64 [parameters] each. They may be written to.
        values: given some rows of the layout, what was squared for each of the sums, float32 [rows, ROW].
    """
    wrong = [spoiled(each) for each in sums]
    if not asks(layout.device):
        exact = [layout.sums(_row_sums(each)) for each in values(slice(None))]
        return [torch.where(*each) for each in zip(wrong, exact, sums)]
    for place in torch.stack(wrong).any(0).nonzero().flatten().tolist():
        for own, found, each in zip(wrong, sums, values(layout.rows[place])):
            if own[place]:
                found[place] = _row_sums(each).sum()
    return list(sums)


def norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the Euclidean norm of a tensor, float64 []; to float32 rounding, whatever its finite values are."""
    if asks(tensor.device):
        found = torch.linalg.vector_norm(tensor, dtype=torch.float32).double()
        # As `spoiled`, by numbers of Python: five operations of torch on one element take longer than the norm.
        square = found.item() ** 2
        if SMALLEST <= square < math.inf:
            return found
    return torch.linalg.vector_norm(tensor, dtype=torch.float64)


def clip_factor(limit: float, length: torch.Tensor) -> torch.Tensor:
    """Return the factor that shortens a gradient to a norm of at most `limit`, float32 []; 1 for a norm of 0.

    Args: length: of the gradient, float64 []. It may be more than a float32 holds.
    """
    factor = (limit / length.float()).clamp(max=1.0)
    return torch.where(length > LARGEST, (limit / length).float(), factor)


def in_float32(rate: torch.Tensor) -> torch.Tensor:
    """Return a ratio or rate in float32, the largest number there instead of infinity: that times 0 would be NaN."""
    return rate.clamp(max=LARGEST).float()


def _row_sums(values: torch.Tensor) -> torch.Tensor:
    return values.double().square().sum(1)


class Norms(NamedTuple):
    """Euclidean norms over all parameters, float32 []; trust ratios by parameter, float32 []."""

    gradient: torch.Tensor
    weight: torch.Tensor
    update: torch.Tensor
    trust: Dict[str, torch.Tensor]


class WholeModel:
    """Gathers values by parameter from the stages of a model. All stages must make the same calls."""

    def __init__(
        self,
        own: Sequence[str],
        model: Sequence[str],
        sum_over_stages: Optional[Callable[[torch.Tensor], torch.Tensor]],
        device: torch.device,
    ):
        """Args: own: names of this process's parameters. model: of all. sum_over_stages: as in WeightState."""
        self._own, self._model, self._sum_over_stages, self._device = own, model, sum_over_stages, device
        places = {name: place for place, name in enumerate(model)}
        self._places = [places[name] for name in own]

    def norm(self, squares: torch.Tensor) -> torch.Tensor:
        """Euclidean norm, float64 [], of sums of squares by own parameter, float64; stages do not change a bit."""
        return self._of_all(squares).sum().sqrt()

    def ratios(self, own: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
        """Trust ratios of the whole model by name, float32 [], from those of own parameters that have one."""
        if len(self._own) == len(self._model):
            return own
        absent = torch.full((), -1.0, device=self._device)  # a ratio is never negative
        ratios = torch.stack([own.get(name, absent) for name in self._own])
        shifted = self._of_all(ratios.double() + 1)  # what no stage has stays 0; NaN is not 0
        return {name: (shifted[place] - 1).float() for place, name in enumerate(self._model) if shifted[place] != 0}

    def _of_all(self, values: torch.Tensor) -> torch.Tensor:
        """A value for each own parameter, float64, at its place among those of all parameters of the model."""
        if len(self._own) == len(self._model):
            return values
        whole = torch.zeros(len(self._model), dtype=torch.float64, device=self._device)
        whole[self._places] = values
        assert self._sum_over_stages is not None, "other stages have parameters, too"
        return self._sum_over_stages(whole)
