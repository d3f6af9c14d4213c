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
from parallel.exchange import Method
from recipe.config import Recipe
from recipe.division import Batch

_EVERY = 4  # updates, of which one is measured: reading every micro batch's gradient once more takes its time
_MOST = 8  # micro batches of a replica that are measured
_DECAY = 0.96  # of the averages, in each measured update: about the last two hundred updates count
_MOMENTS = 7  # sums over updates: weights, squared weights; weighted S, |G|^2, their squares and product
_FEWEST = 10.0  # measured updates, as they count, from which a standard error means something


class Meter:
    """Running averages of S and |G|^2, from the norms of micro batches' gradients and of the whole batch's gradient.

    Hooks measure the gradient of each parameter before it is accumulated. This works with every pipeline schedule, and
    with an exchange that overlaps the backward pass. If the exchange does not give each replica the sum of all
    gradients, the large batch is the replica's own. Updates with gradients that are not finite are ignored. Nothing
    waits for the device.

    on: whether the current update is measured.
    """

    def __init__(self, parameters: Dict[str, nn.Parameter], small: int, large: int, replicas: int, layers: bool):
        """
        Args:
            parameters: of this process.
            small, large: images of the two batches.
            replicas: over which norms are averaged.
            layers: whether to keep averages for each parameter as well, from this replica's micro batches alone.
        """
        assert small < large, (small, large)
        self._parameters, self._small, self._large, self._replicas = parameters, small, large, replicas
        self._norms: List[List[torch.Tensor]] = [[] for _ in parameters]
        self.on = False
        for number, parameter in enumerate(parameters.values()):
            parameter.register_hook(functools.partial(self._measure, number))
        device = next(iter(parameters.values())).device
        self.total = torch.zeros(_MOMENTS, dtype=torch.float64, device=device)
        self.layers = torch.zeros(_MOMENTS, len(parameters), dtype=torch.float64, device=device) if layers else None

    def start(self, number: int, steps: int = 1) -> None:
        """Begin update `number`, from 0. Args: steps: by which the large batch is larger than usual."""
        self.on = number % _EVERY == 0
        self._steps = steps
        for norms in self._norms:
            norms.clear()

    def squares(self, gradients: List[torch.Tensor], scale: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
        """Return this process's share of the squared norms of the small and the large batch's gradient, float64 [2].
        Its sum over all stages and replicas is the mean over replicas.

        Args:
            gradients: sums over the large batch, of each parameter. divisor: that makes means of them.
            scale: of the loss.
        """
        counts = [len(norms) for norms in self._norms]
        every = torch.stack([norm for norms in self._norms for norm in norms]).double() / scale
        own = torch.stack([part.square().mean() if len(part) else part.sum() for part in every.split(counts)])
        whole = torch.stack(torch._foreach_norm(gradients)).double() / divisor
        self._squares = torch.stack([own, whole.square()])
        return self._squares.sum(1) / self._replicas

    def add(self, squares: torch.Tensor, finite: torch.Tensor) -> None:
        """Count an update. Args: squares: float64 [2], of all processes. finite: bool []."""
        self.total = self._added(self.total, squares, finite)
        if self.layers is not None:
            self.layers = self._added(self.layers, self._squares, finite)

    def value(self) -> Optional[NoiseScale]:
        """Return the noise scale of the whole model; None until it is known. Waits for the device."""
        return estimate(self.total.tolist())

    def by_layer(self) -> Dict[str, NoiseScale]:
        """Return the noise scale of each of this process's parameters for which it is known. Waits for the device."""
        if self.layers is None:
            return {}
        found = {name: estimate(moments) for name, moments in zip(self._parameters, self.layers.T.tolist())}
        return {name: each for name, each in found.items() if each is not None}

    def state_dict(self) -> Dict[str, torch.Tensor]:
        """The averages, by parameter and of the whole model, on the CPU."""
        named = {} if self.layers is None else dict(zip(self._parameters, self.layers.T))
        return {name: moments.to("cpu", copy=True) for name, moments in {"": self.total, **named}.items()}

    def load_state_dict(self, saved: Dict[str, torch.Tensor]) -> None:
        """Go on from the result of `state_dict`; what is missing begins anew."""
        if "" in saved:
            self.total.copy_(saved[""])
        for number, name in enumerate(self._parameters if self.layers is not None else ()):
            if name in saved:
                self.layers[:, number] = saved[name]

    def _measure(self, number: int, gradient: torch.Tensor) -> None:
        if self.on and len(self._norms[number]) < _MOST:
            self._norms[number].append(torch.linalg.vector_norm(gradient, dtype=torch.float32))

    def _added(self, moments: torch.Tensor, squares: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        """Args: squares: float64 [2, ...] of the small and the large batch."""
        (small, large), batch = squares, self._large * self._steps
        signal = (batch * large - self._small * small) / (batch - self._small)
        noise = (small - large) / (1 / self._small - 1 / batch)
        one = torch.ones_like(small)
        new = torch.stack([one, one, noise, signal, noise**2, signal**2, noise * signal])
        kept = moments * _DECAY
        kept[1] *= _DECAY
        return torch.where(finite, kept + new, moments)


def create(recipe: Recipe, batch: Batch, method: Method, model: nn.Module) -> Tuple[Optional[Meter], str]:
    """Return the meter that `log.noise_scale` asks for; or None, and the reason if the recipe asks explicitly."""
    wanted, large = recipe.log.noise_scale, batch.global_ if method.complete else batch.micro * batch.accumulation
    if not wanted:
        return None, ""
    why = ""
    if recipe.model.batch_statistics:
        why = "batch normalisation makes a gradient depend on the other images of its micro batch"
    elif large == batch.micro:
        why = "a gradient of one micro batch has nothing to be compared with"
    if why:
        return None, f"log.noise_scale: not measured, as {why}" if wanted != "auto" else ""
    return Meter(dict(model.named_parameters()), batch.micro, large, batch.replicas, wanted == "layers"), ""


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
