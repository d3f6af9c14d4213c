"""The gradient noise scale of a run: how large a batch pays.

Source: McCandless et al., 1812.06162, appendix A. With G the gradient of the whole distribution of images and S the
trace of the covariance of single images' gradients, the mean gradient g_B of B images has

    E |g_B|^2 = |G|^2 + S / B

so the squared norms at two batch sizes b < B give unbiased estimates

    |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b)        S = (|g_b|^2 - |g_B|^2) / (1 / b - 1 / B)

The noise scale S / |G|^2, in images, is a ratio of two averages over updates.
"""

from __future__ import annotations

import functools
from typing import Dict, List, Optional, Tuple

import torch
from torch import nn

from engines.base import NoiseScale
from optim.norms import norm
from parallel.exchange import Method
from recipe.config import Recipe
from recipe.division import Batch

_EVERY = 4  # updates, of which one is measured: reading every micro batch's gradient once more takes its time
_MOST = 8  # micro batches of a step that are measured
_DECAY = 0.96  # of the averages, in each measured update: about the last two hundred updates count
_MOMENTS = 7  # sums over updates: weights, squared weights; weighted S, |G|^2, their squares and product
_FEWEST = 10.0  # measured updates, as they count, from which a standard error means something


class Meter:
    """Running averages of S and |G|^2, from the norms of micro batches' gradients and of the whole batch's gradient.

    Hooks, which parameters have in measured updates only, measure each gradient before it is accumulated, so every
    pipeline schedule works, and an exchange that overlaps the backward pass. Of a step the same micro batches are
    measured whichever replica computes them. Where the exchange does not give each replica the sum of all gradients,
    the large batch is the replica's own. Updates that are not finite are ignored. Nothing waits for the device.

    on: whether the current update is measured; never without parameters.
    """

    def __init__(
        self, parameters: Dict[str, nn.Parameter], small: int, large: int, micro_batches: int, own: float, layers: bool
    ):
        """
        Args:
            small, large: images of the two batches. micro_batches: of a step over all replicas.
            own: this replica's weight in the mean over replicas of the large batch's squared norm.
            layers: whether to keep averages for each parameter as well, from this replica's micro batches alone.
        """
        self._small, self._large, self._own = small, large, own
        most = min(_MOST, micro_batches)
        self._measured = [number * micro_batches // most for number in range(most)]  # evenly, from the first on
        self._norms: List[Dict[int, torch.Tensor]] = [{} for _ in parameters]  # by number of a measured micro batch
        self.on = False
        self._parameters, self._hooks = list(parameters.values()), []
        self._names = [*([""] if parameters else ()), *(parameters if layers else ())]  # the whole model first
        device = next((each.device for each in parameters.values()), None)
        self.moments = torch.zeros(_MOMENTS, len(self._names), dtype=torch.float64, device=device)

    def start(self, number: int, share: range, steps: int = 1) -> None:
        """Begin update `number`, from 0.

        Args: share: this replica's, of a step's micro batches. steps: of the update; the first is measured.
        """
        self.on, self._steps = bool(self._norms) and number % _EVERY == 0, steps
        self._share, self._passed = share, [0] * len(self._norms)
        while self._hooks:
            self._hooks.pop().remove()
        for place, parameter in enumerate(self._parameters if self.on else ()):
            self._hooks.append(parameter.register_hook(functools.partial(self._measure, place)))
        for norms in self._norms:
            norms.clear()

    def squares(self, gradients: List[torch.Tensor], scale: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
        """This process's share of the squared norms of the gradients of each micro batch that is measured, and of the
        large batch: float64 [measured + 1], to be added up over all stages and replicas. Of several replicas one has
        what is not zero, so that the sum does not depend on their number.

        Args: gradients: sums over the large batch; `divisor` makes means of them. scale: of the loss.
        """
        none = torch.zeros((), dtype=torch.float64, device=scale.device)
        every = torch.stack([norms.get(each, none) for each in self._measured for norms in self._norms])
        every = (every / scale).square().view(len(self._measured), -1)
        whole = torch.stack([norm(each) for each in gradients]) / divisor
        count = max(1, sum(each in self._share for each in self._measured))
        own = every.sum(0) / count
        self._squares = torch.stack([own, whole.square()])
        return torch.cat([every.sum(1), whole.square().sum()[None] * self._own])

    def add(self, squares: torch.Tensor, finite: torch.Tensor) -> None:
        """Count an update. Args: squares: float64 [measured + 1], of all processes. finite: bool []."""
        whole = torch.stack([squares[:-1].mean(), squares[-1]])
        each = torch.cat([whole[:, None], self._squares[:, : len(self._names) - 1]], dim=1)
        (small, large), batch = each, self._large * self._steps
        signal = (batch * large - self._small * small) / (batch - self._small)
        noise = (small - large) / (1 / self._small - 1 / batch)
        one = torch.ones_like(small)
        new = torch.stack([one, one, noise, signal, noise**2, signal**2, noise * signal])
        past = self.moments * _DECAY
        past[1] *= _DECAY
        self.moments = torch.where(finite, past + new, self.moments)

    def values(self) -> Dict[str, NoiseScale]:
        """The noise scales that are known, by parameter and, as "", of the whole model. Waits for the device."""
        found = {name: estimate(moments) for name, moments in zip(self._names, self.moments.T.tolist())}
        return {name: each for name, each in found.items() if each is not None}

    def state_dict(self) -> Dict[str, torch.Tensor]:
        """The averages, by parameter and, as "", of the whole model, on the CPU."""
        return {name: moments.to("cpu", copy=True) for name, moments in zip(self._names, self.moments.T)}

    def load_state_dict(self, saved: Dict[str, torch.Tensor]) -> None:
        """Go on from the result of `state_dict`; what is missing begins anew."""
        for name, moments in zip(self._names, self.moments.T):
            if name in saved:
                moments.copy_(saved[name])

    def _measure(self, number: int, gradient: torch.Tensor) -> None:
        """Backward passes come in the order of the micro batches."""
        passed = self._passed[number]
        self._passed[number] += 1
        if passed < len(self._share) and self._share[passed] in self._measured:
            self._norms[number][self._share[passed]] = norm(gradient)


def create(
    recipe: Recipe, batch: Batch, method: Method, parameters: Dict[str, nn.Parameter], replica: int
) -> Tuple[Meter, str]:
    """The meter that `log.noise_scale` asks for, or one that measures nothing; and the reason if the recipe insists."""
    wanted, large = recipe.log.noise_scale, batch.global_ if method.complete else batch.micro * batch.accumulation
    why = ""
    if recipe.model.batch_statistics:
        why = "batch normalisation makes a gradient depend on the other images of its micro batch"
    elif large == batch.micro:
        why = "a gradient of one micro batch has nothing to be compared with"
    note = f"log.noise_scale: not measured, as {why}" if why and wanted not in ("auto", False) else ""
    measured = {} if why or not wanted else parameters
    own = float(replica == 0) if method.complete else 1 / batch.replicas
    return Meter(measured, batch.micro, large, batch.micro_batches, own, wanted == "layers"), note


def estimate(moments: List[float]) -> Optional[NoiseScale]:
    """The ratio of the averages; None for fewer than ten updates, or where the gradient is lost in its noise.

    The error is that of a ratio of two means, to first order, as if updates were independent.
    """
    weight, squared, noise, signal, noise2, signal2, product = moments
    if not squared or weight**2 / squared < _FEWEST:
        return None
    noise, signal = noise / weight, signal / weight
    if noise <= 0 or signal <= 0:
        return None
    ratio = noise / signal
    spread = noise2 / weight / noise**2 + signal2 / weight / signal**2 - 2 * product / weight / (noise * signal)
    return NoiseScale(ratio, ratio * (max(0.0, spread) * squared / weight**2) ** 0.5, signal, noise)
