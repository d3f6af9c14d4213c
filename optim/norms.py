"""Norms and trust ratios of a whole model of which this process may have a part."""

from __future__ import annotations

from typing import Callable, Dict, NamedTuple, Optional, Sequence

import torch


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
        """Euclidean norm, float32 [], of sums of squares by own parameter, float64; stages do not change a bit."""
        return self._of_all(squares).sum().sqrt().float()

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
