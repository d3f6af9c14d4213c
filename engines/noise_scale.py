"""The gradient noise scale of a run: how large a batch pays.

Source: McCandless et al., 1812.06162, appendix A. With G the gradient of the whole distribution of
images and S the trace of the covariance of single images' gradients, the mean gradient g_B of B
images has

    E |g_B|^2 = |G|^2 + S / B

so the squared norms at two batch sizes b < B give unbiased estimates

    |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b)        S = (|g_b|^2 - |g_B|^2) / (1 / b - 1 / B)

The noise scale S / |G|^2, in images, is a ratio of two averages over updates.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Sequence

import torch
from torch import nn

from engines.base import NoiseScale
from engines.listeners import StepListener
from optim.gradients import Gradients
from optim.loss_scale import LossScale
from optim.norms import norm
from recipe.course import Update
from recipe.division import Batch

# Updates, of which one is measured: reading each micro batch's gradient again takes time.
_EVERY = 4
_MOST = 8  # micro batches of a step that are measured
_DECAY = 0.96  # of the averages, in each measured update: about the last two hundred updates count
# Sums over updates: of weights and their squares; weighted, of S, |G|^2, their squares and product.
_MOMENTS = 7
_FEWEST = 10.0  # measured updates, as they count, from which a standard error means something
_WHOLE = ""  # the name under which the whole model's averages are kept
_SQUARES = "squared norms"  # the name under which processes add them up


@dataclass
class Batches:
    """The two batches whose gradients are compared, and this replica's part of a step.

    small, large: their images.
    micro_batches: of a step over all replicas.
    share: this replica's, of these; to be replaced when shares change.
    weight: of this replica's norm of the large batch in the mean over replicas.
    """

    small: int
    large: int
    micro_batches: int
    share: range
    weight: float


class Meter:
    """Running averages of S and |G|^2, from norms of micro batches' and the whole batch's gradients.

    Hooks, which parameters have in measured updates only, measure each gradient before it is
    accumulated, so every pipeline schedule works, and an exchange that overlaps the backward pass.
    Of a step the same micro batches are measured whichever replica computes them. Where the
    exchange does not give each replica the sum of all gradients, the large batch is the replica's
    own. Updates that are not finite are ignored. Nothing waits for the device.

    on: whether the current update is measured; never without parameters.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], batches: Batches, *, layers: bool):
        """
        Args:
            parameters: of this process, by name; none measures nothing.
            batches: that are compared.
            layers: whether to keep averages for each parameter as well, from this replica's micro
                batches alone.
        """
        self.batches = batches
        self.on = False
        self._parameters = list(parameters.values())
        self._hooks: List[torch.utils.hooks.RemovableHandle] = []
        # Evenly over the step, from the first micro batch on.
        most = min(_MOST, batches.micro_batches)
        self._measured = [number * batches.micro_batches // most for number in range(most)]
        # The norm of each parameter's gradient, by number of a measured micro batch.
        self._norms: List[Dict[int, torch.Tensor]] = [{} for _ in self._parameters]
        self._names: List[str] = []
        if parameters:
            self._names.append(_WHOLE)
        if layers:
            self._names.extend(parameters)
        device = self._parameters[0].device if self._parameters else None
        self.moments = torch.zeros(_MOMENTS, len(self._names), dtype=torch.float64, device=device)

    def start(self, index: int, steps: int = 1) -> None:
        """Begin an update.

        Args:
            index: of the update, from 0.
            steps: of the update; the first is measured.
        """
        self.on = bool(self._norms) and index % _EVERY == 0
        self._steps = steps
        self._passed = [0] * len(self._norms)
        # In updates that are not measured a hook would cost a call for each gradient.
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for norms in self._norms:
            norms.clear()
        if not self.on:
            return
        for place, parameter in enumerate(self._parameters):
            measure = functools.partial(self._measure, place)
            self._hooks.append(parameter.register_hook(measure))

    def squares(
        self,
        gradients: Sequence[torch.Tensor],
        scale: torch.Tensor,
        divisor: torch.Tensor,
    ) -> torch.Tensor:
        """Return this process's share of the squared norms.

        Of several replicas one has what is not zero, so that the sum does not depend on their
        number.

        Args:
            gradients: sums over the large batch, a tensor for each parameter.
            scale: float32 [], of the loss.
            divisor: float32 [], makes means of the gradients.

        Returns:
            Of each micro batch that is measured, and of the large batch: float64 [measured + 1], to
            be added up over all stages and replicas.
        """
        # What other replicas have measured is 0 here, and comes by the sum over processes.
        none = torch.zeros((), dtype=torch.float64, device=scale.device)
        small = []
        for number in self._measured:
            for norms in self._norms:
                small.append(norms.get(number, none))
        # A micro batch's gradient is a mean already, times the loss scale alone.
        small_squares = (torch.stack(small) / scale).square().view(len(self._measured), -1)
        # The large batch's is a sum of such means: the divisor has their number, too.
        large_norms = torch.stack([norm(gradient) for gradient in gradients]) / divisor
        large_squares = large_norms.square()
        # Averages by parameter are of this replica's micro batches alone.
        count = sum(number in self.batches.share for number in self._measured)
        self._by_parameter = torch.stack([small_squares.sum(0) / max(1, count), large_squares])
        whole = large_squares.sum() * self.batches.weight
        return torch.cat([small_squares.sum(1), whole[None]])

    def add(self, squares: torch.Tensor, finite: torch.Tensor) -> None:
        """Count an update.

        Args:
            squares: float64 [measured + 1], of all processes; some not finite: it does not count.
            finite: bool [], whether the update counts.
        """
        # One column for the whole model, then, if they are kept, one for each parameter.
        whole = torch.stack([squares[:-1].mean(), squares[-1]])
        parameters = self._by_parameter[:, : len(self._names) - 1]
        small, large = torch.cat([whole[:, None], parameters], dim=1)
        # The two estimates of the source, for the whole model and each parameter.
        images = self.batches.small
        batch = self.batches.large * self._steps
        signal = (batch * large - images * small) / (batch - images)
        noise = (small - large) / (1 / images - 1 / batch)
        # A weight of 1, which decays; its square is needed for the standard error.
        one = torch.ones_like(small)
        new = torch.stack([one, one, noise, signal, noise**2, signal**2, noise * signal])
        # With a delay the update is of an earlier gradient: that one may be finite, and this step's
        # may not.
        counts = finite & torch.isfinite(new).all()
        past = self.moments * _DECAY
        past[1] *= _DECAY
        self.moments = torch.where(counts, past + new, self.moments)

    def values(self) -> Dict[str, NoiseScale]:
        """Return the noise scales that are known, by parameter, and of the whole model as "".

        Waits for the device.
        """
        known = {}
        for name, moments in zip(self._names, self.moments.T.tolist()):
            scale = estimate(moments)
            if scale is not None:
                known[name] = scale
        return known

    def state_dict(self) -> Dict[str, torch.Tensor]:
        """Return the averages by parameter, and of the whole model as "", on the CPU."""
        columns = zip(self._names, self.moments.T)
        return {name: moments.to("cpu", copy=True) for name, moments in columns}

    def load_state_dict(self, saved: Dict[str, torch.Tensor]) -> None:
        """Go on from the result of `state_dict`, here `saved`; what is missing begins anew."""
        for name, moments in zip(self._names, self.moments.T):
            if name in saved:
                moments.copy_(saved[name])

    def _measure(self, parameter: int, gradient: torch.Tensor) -> None:
        """Measure a gradient; backward passes come in the order of the micro batches."""
        passed = self._passed[parameter]
        self._passed[parameter] += 1
        share = self.batches.share
        # Of an update of several steps the first is measured.
        if passed < len(share) and share[passed] in self._measured:
            self._norms[parameter][share[passed]] = norm(gradient)


class NoiseListener(StepListener):
    """Feeds a meter with the gradients of training steps.

    meter: the running averages.
    """

    def __init__(self, meter: Meter, gradients: Gradients, loss_scale: LossScale, *, summed: bool):
        """
        Args:
            meter: that is fed.
            gradients: of this process.
            loss_scale: of the loss that they are computed of.
            summed: whether the large batch is that of all replicas, not of this one.
        """
        self.meter = meter
        self._gradients = gradients
        self._loss_scale = loss_scale
        self._summed = summed
        self._squares: Optional[torch.Tensor] = None

    def begin(self, update: Update) -> None:
        self._squares = None
        self.meter.start(update.index, update.steps)

    def computed(self, divisor: torch.Tensor) -> None:
        if not self._summed:
            self._measure(divisor)

    def exchanged(self, divisor: Optional[torch.Tensor]) -> None:
        if self._summed and divisor is not None:
            self._measure(divisor)

    def contribution(self) -> Dict[str, torch.Tensor]:
        return {} if self._squares is None else {_SQUARES: self._squares}

    def agreed(self, sums: Dict[str, torch.Tensor], finite: torch.Tensor) -> None:
        if _SQUARES in sums:
            self.meter.add(sums[_SQUARES], finite)

    def _measure(self, divisor: torch.Tensor) -> None:
        if self.meter.on:
            scale = self._loss_scale.scale
            self._squares = self.meter.squares(self._gradients.views, scale, divisor)


def compared(batch: Batch, replica: int, *, summed: bool) -> Batches:
    """Return the batches that a run compares.

    Args:
        batch: of a step.
        replica: this one.
        summed: whether its gradients become the sums over all replicas.
    """
    # Without a sum each replica compares with its own batch, and the norms of all count alike.
    large = batch.micro * batch.accumulation
    weight = 1 / batch.replicas
    if summed:
        large = batch.global_
        weight = float(replica == 0)
    share = batch.shares[replica]
    return Batches(batch.micro, large, batch.micro_batches, share=share, weight=weight)


def obstacle(batches: Batches, batch_statistics: bool) -> str:
    """Return why the noise scale cannot be measured; "" where it can.

    Args:
        batches: that would be compared.
        batch_statistics: whether the model normalises by statistics of a micro batch.
    """
    if batch_statistics:
        return "batch normalisation makes a gradient depend on the other images of its micro batch"
    if batches.large == batches.small:
        return "a gradient of one micro batch has nothing to be compared with"
    return ""


def estimate(moments: Sequence[float]) -> Optional[NoiseScale]:
    """Return the ratio of the averages, with the standard error of a ratio of two means.

    The error is to first order, as if updates were independent.

    Args:
        moments: sums over updates: of weights and squared weights; weighted by these, of noise,
            signal, their squares and their product.

    Returns:
        None for fewer than ten updates, or where the gradient is lost in its noise.
    """
    weight, squared_weight, *weighted = moments
    if not squared_weight or weight**2 / squared_weight < _FEWEST:
        return None
    noise, signal, noise_squared, signal_squared, product = (total / weight for total in weighted)
    if noise <= 0 or signal <= 0:
        return None
    ratio = noise / signal
    spread = noise_squared / noise**2 + signal_squared / signal**2 - 2 * product / (noise * signal)
    # The error of a mean is smaller by the root of the updates that count, weight^2 / squared_weight.
    error = ratio * (max(0.0, spread) * squared_weight / weight**2) ** 0.5
    return NoiseScale(ratio, error, signal=signal, noise=noise)
