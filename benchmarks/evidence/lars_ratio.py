"""Measures, while a run trains, how much longer a step of LARS's gradient form is than one of its momentum form."""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple
from unittest import mock

import torch

from optim.weight_state import WeightState


class StepRatio:
    """Length of the gradient form's step over the momentum form's, for each tensor, along a run of either form.

    The momentum form's step is lr * eta * |w|. The gradient form's is its momentum buffer; the trust coefficient eta
    cancels. `steady` leaves the learning rate out of the buffer: the ratio under a schedule so slow that the rate
    does not change within the momentum's memory. Both need every step of the run.
    """

    def __init__(self, momentum: float, weight_decay: float):
        self._momentum, self._weight_decay = momentum, weight_decay
        self._buffers: Dict[str, List[torch.Tensor]] = {}

    def step(
        self, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], lr: float
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Add the step's gradients, at the weights they belong to; return (scheduled, steady), float32 [tensors].

        `scheduled` is not finite where lr or a norm is 0.
        """
        weight_norms = torch.stack(torch._foreach_norm(weights))
        ratios = weight_norms / (torch.stack(torch._foreach_norm(gradients)) + self._weight_decay * weight_norms)
        directions = torch._foreach_add(gradients, weights, alpha=self._weight_decay)
        torch._foreach_mul_(directions, list(ratios.unbind()))
        lengths = []
        for name, rate in (("scheduled", lr), ("steady", 1.0)):
            buffers = self._buffers.setdefault(name, [torch.zeros_like(weight) for weight in weights])
            torch._foreach_mul_(buffers, self._momentum)
            torch._foreach_add_(buffers, directions, alpha=rate)
            lengths.append(torch.stack(torch._foreach_norm(buffers)))
        return lengths[0] / (lr * weight_norms), lengths[1] / weight_norms


class Recorder:
    """Watches the trusted tensors of the one WeightState that is updated by LARS while it is entered."""

    def __init__(self) -> None:
        self._ratio: List[StepRatio] = []
        self._gradients: List[torch.Tensor] = []
        self.rates: List[float] = []
        self.ratios: List[Tuple[torch.Tensor, torch.Tensor]] = []
        self.updates: List[float] = []

    def __enter__(self) -> Recorder:
        prepare, apply = WeightState.prepare, WeightState.apply

        @torch.no_grad()
        def prepared(state: WeightState, divisor: torch.Tensor) -> torch.Tensor:
            gradient_of = {id(weight): view for (_, weight), view in zip(state.places(), state.gradients.views)}
            weights = _trusted(state)["params"]
            self._gradients = torch._foreach_div([gradient_of[id(weight)] for weight in weights], divisor)
            return prepare(state, divisor)

        @torch.no_grad()
        def applied(state: WeightState, step: int, lr: float, *others: object) -> object:
            group = _trusted(state)
            weights = group["params"]
            if not self._ratio:
                self._ratio.append(StepRatio(group["momentum"], group["weight_decay"]))
            self.rates.append(lr)
            self.ratios.append(self._ratio[0].step(weights, self._gradients, lr))
            before = [weight.clone() for weight in weights]
            result = apply(state, step, lr, *others)
            differences = torch._foreach_sub(weights, before)
            self.updates.append(torch.stack(torch._foreach_norm(differences)).norm().item())
            return result

        self._patch = mock.patch.multiple(WeightState, prepare=prepared, apply=applied)
        self._patch.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.__exit__(*error)

    def summary(self) -> dict:
        """Lists over the steps with a learning rate above 0, and K of each tensor, averaged with the rate as weight."""
        assert self.rates, "no WeightState was updated"
        steps = [number for number, rate in enumerate(self.rates) if rate > 0]
        rates = torch.tensor([self.rates[step] for step in steps])
        found = {"step": steps, "lr": rates.tolist(), "update": [self.updates[step] for step in steps]}
        for place, name in enumerate(("scheduled", "steady")):
            by_step = torch.stack([self.ratios[step][place] for step in steps])
            assert by_step.isfinite().all(), "a trusted tensor or its gradient was 0"
            found[name] = by_step.quantile(torch.tensor([0.25, 0.5, 0.75]), dim=1).T.tolist()
            found[f"{name}_tensors"] = (rates @ by_step / rates.sum()).tolist()
        return found


def _trusted(state: WeightState) -> dict:
    group, *others = [group for group in state.optimizer.param_groups if group["adapt"]]
    assert not others
    return group
