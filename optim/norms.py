"""Norms that float32 neither overflows nor underflows, of a model or of a stage of it.

Squares of float32 numbers above 1.8e19 are infinite and those below 2e-23 are 0. So sums of squares
are made in float32, and made again in float64, which has them all, only where the result shows that
they may be wrong.
"""

from __future__ import annotations

import math
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence

import torch

from optim.layout import Layout

# The smallest sum of squares in which float32's rounding of squares below 2^-126 is not seen.
SMALLEST = 2.0**-90
LARGEST = torch.finfo(torch.float32).max


def host_may_read(device: torch.device) -> bool:
    """Return whether the host may read a result to decide what to compute; free on a CPU only.

    Args:
        device: of the result. Any other than a CPU would have to be waited for.
    """
    return device.type == "cpu"


def spoiled(sums: torch.Tensor) -> torch.Tensor:
    """Return where sums of squares that were made in float32 may be wrong, bool [parameters].

    Args:
        sums: float64 [parameters].
    """
    return ~(sums >= SMALLEST) | torch.isinf(sums)


def repaired(
    sums: Sequence[torch.Tensor],
    layout: Layout,
    values: Callable[[slice], Sequence[torch.Tensor]],
) -> List[torch.Tensor]:
    """Return sums of squares by parameter, float64, with those made anew that may be wrong.

    A CPU makes anew only those. Another device, whose results are not read, makes all and selects.

    Args:
        sums: float64 [parameters] each. They may be written to.
        layout: of the parameters.
        values: given some rows of the layout, what was squared for each of the sums, float32
            [rows, ROW].
    """
    wrong = [spoiled(squares) for squares in sums]
    # To know which sums are wrong, the host would have to wait for a GPU: all are made again there.
    if not host_may_read(layout.device):
        exact = [layout.sums(_row_sums(rows)) for rows in values(slice(None))]
        return [torch.where(*choice) for choice in zip(wrong, exact, sums)]
    # On a CPU this is a rare parameter, so reading it once more does not show.
    affected = torch.stack(wrong).any(0).nonzero().flatten().tolist()
    for parameter in affected:
        squared = values(layout.rows[parameter])
        for number, rows in enumerate(squared):
            if wrong[number][parameter]:
                sums[number][parameter] = _row_sums(rows).sum()
    return list(sums)


def norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the Euclidean norm of a tensor, float64 [].

    Args:
        tensor: of any floating-point dtype. Of float64 the norm is exact to float64 rounding, of
            others to float32 rounding, whatever the finite values are.
    """
    if host_may_read(tensor.device) and tensor.dtype != torch.float64:
        length = torch.linalg.vector_norm(tensor, dtype=torch.float32).double()
        # As `spoiled`, but in Python: five operations of torch on one element take longer than the
        # norm itself.
        square = length.item() ** 2
        if SMALLEST <= square < math.inf:
            return length
    return torch.linalg.vector_norm(tensor, dtype=torch.float64)


def clip_factor(limit: float, length: torch.Tensor) -> torch.Tensor:
    """Return the factor that shortens a gradient to a norm of at most `limit`, float32 [].

    It is 1 for a norm of 0.

    Args:
        limit: above 0.
        length: norm of the gradient, float64 []. It may be more than a float32 holds.
    """
    factor = (limit / length.float()).clamp(max=1.0)
    # A norm beyond float32 is infinite there, and the factor 0; divided in float64 it is a small
    # number, as float32 has them down to 1e-45.
    return torch.where(length > LARGEST, (limit / length).float(), factor)


def clamped(rate: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a ratio or rate in `dtype`, the largest number there instead of infinity.

    Infinity times a gradient of 0 would be NaN.

    Args:
        rate: of any shape.
        dtype: floating-point.
    """
    return rate.clamp(max=torch.finfo(dtype).max).to(dtype)


def _row_sums(values: torch.Tensor) -> torch.Tensor:
    return values.double().square().sum(1)


class Norms(NamedTuple):
    """Euclidean norms over all parameters, float32 []; trust ratios by parameter, float32 [].

    The update's norm is not finite where the update was skipped.
    """

    gradient: torch.Tensor
    weight: torch.Tensor
    update: torch.Tensor
    trust: Dict[str, torch.Tensor]


class Stages(NamedTuple):
    """The pipeline stages of a model, of which a process has one.

    parameters: names of those of all stages, in the order of the model.
    add_up: sums a float64 tensor over the stages in place, and returns it.
    """

    parameters: Sequence[str]
    add_up: Callable[[torch.Tensor], torch.Tensor]


class WholeModel:
    """Gathers values by parameter from the stages of a model. All stages make the same calls."""

    def __init__(self, stage: Sequence[str], stages: Optional[Stages], device: torch.device):
        """
        Args:
            stage: names of this process's parameters.
            stages: of the model; None where this process has all parameters.
            device: of the values.
        """
        self._stage = stage
        self._stages = stages
        self._model = stage if stages is None else stages.parameters
        self._device = device
        numbers = {name: number for number, name in enumerate(self._model)}
        self._stage_numbers = [numbers[name] for name in stage]

    def norm(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the Euclidean norm of the whole model, float64 []; stages do not change a bit.

        Args:
            squares: sums of squares by parameter of this stage, float64.
        """
        return self._of_all(squares).sum().sqrt()

    def ratios(self, of_stage: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
        """Return the trust ratios of the whole model by name, float32 [].

        Args:
            of_stage: those of this stage's parameters that have one.
        """
        if len(self._stage) == len(self._model):
            return of_stage
        # Names are known everywhere, but not which parameters have a ratio: one tensor with a
        # number for each parameter is all that stages need to send each other.
        absent = torch.full((), -1.0, device=self._device)  # a ratio is never negative
        stage_ratios = torch.stack([of_stage.get(name, absent) for name in self._stage])
        # The sum over stages leaves 0 where no stage has a ratio. A ratio that is NaN is not 0.
        shifted = self._of_all(stage_ratios.double() + 1)
        ratios = {}
        for number, name in enumerate(self._model):
            if shifted[number] != 0:
                ratios[name] = (shifted[number] - 1).float()
        return ratios

    def _of_all(self, values: torch.Tensor) -> torch.Tensor:
        """Return a value for each parameter of the model, float64, from those of this stage's."""
        if len(self._stage) == len(self._model):
            return values
        # Each parameter is of one stage, so a sum over stages adds zeros to a number: bits stay,
        # and the order of the model is that of an undivided one.
        whole = torch.zeros(len(self._model), dtype=torch.float64, device=self._device)
        whole[self._stage_numbers] = values
        assert self._stages is not None, "other stages have parameters, too"
        return self._stages.add_up(whole)
