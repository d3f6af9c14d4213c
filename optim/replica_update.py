"""Updates that each replica makes of its own gradient, and that add up to that of the mean gradient."""

from __future__ import annotations

import math
from typing import Callable, Container, Dict, Optional, Sequence, Tuple

import torch

from optim.lars_update import Rules
from optim.layout import in_parts, in_rows
from optim.norms import Norms, clamped, clip_factor, repaired
from optim.optimizer_update import Target
from recipe.randomness import bits32, key

_SIGNS = 1 << 20  # random signs in the table, about; longer vectors use them again


class Sketch:
    """Adds the elements of vectors up in few buckets, with random signs: a few numbers with a vector's norm.

    The sketch of a sum is the sum of the sketches, and its norm that of the sum, to about 1 / sqrt(2 buckets): an
    element's bucket is its place modulo `buckets`, its sign a function of its place. Best is a prime number of
    buckets: the elements of a row or of a channel, which are alike, then fall into different ones.

    Source: Alon, Matias and Szegedy, 1996, The space complexity of approximating the frequency moments; buckets:
    Charikar, Chen and Farach-Colton, 2002, Finding frequent items in data streams.
    """

    def __init__(self, vectors: Sequence[Sequence[Tuple[int, int]]], buckets: int, device: torch.device):
        """Args: vectors: of each its pieces of a flat buffer, (first element, number of elements). buckets: numbers of
        a vector's sketch, above 0."""
        self._vectors, self.buckets = vectors, buckets
        self._part = max(1, (1 << 17) // buckets) * buckets  # elements at a time: they stay in a core's cache
        count = -(-_SIGNS // self._part) * self._part
        numbers = torch.arange(count, device=device)
        self._signs = (bits32(key("sketch"), numbers) & 1).float().mul_(2).sub_(1)

    def __call__(self, flat: torch.Tensor) -> torch.Tensor:
        """The sketches of the vectors in a buffer, float32 [length]: float32 [vectors, buckets]."""
        found = torch.zeros(len(self._vectors), self.buckets, device=flat.device)
        for row, pieces in zip(found, self._vectors):
            place = 0  # signs depend on the place in the vector: where the vector lies does not matter
            for part in (part for start, count in pieces for part in flat[start : start + count].split(self._part)):
                place = 0 if place + len(part) > len(self._signs) else place
                signed = part * self._signs[place : place + len(part)]
                whole = len(signed) // self.buckets * self.buckets
                if whole:
                    row += signed[:whole].view(-1, self.buckets).sum(0)
                row[: len(signed) - whole] += signed[whole:]
                place += -(-len(part) // self.buckets) * self.buckets
        return found


class ReplicaUpdate:
    """Adds a replica's part of an update to what the replica has not sent yet.

    LARS is linear in the gradient once the trust ratio rho of each parameter is known. With g the replica's part of the
    mean gradient, w the weights, wd = `weight_decay`, mu = `momentum`, P replicas, and e what is not sent yet:

        trust gradient:  v = nu v + (1 - nu) / (1 - mu) lr rho (g + wd w / P);  e = e + v
        trust momentum:  v = nu v + (1 - nu) g;                                 e = e + lr rho (v + wd w / P)

    so with nu = mu the e of all replicas add up to LARS's step for the mean gradient. rho is that of the mean gradient,
    in the second form of the mean v + wd w / P, whose norms come from the sum of the replicas' sketches. Clipping is by
    the mean gradient's norm. The first form with all ratios 1 is SGD. With Nesterov momentum and s what is added to
    nu v, it adds nu v + s to e in the place of v.

    Waiting acts as momentum: at a density d values wait 1 / d - 1 updates or more in e, and momentum makes a gradient
    nu / (1 - nu) updates late on average, Nesterov momentum nu^2 / (1 - nu). Momentum makes up for what is missing to
    the lateness L that mu alone gives: nu is such that its own is max(0, L - (1 / d - 1)); in all, a gradient moves the
    weights as far as with mu.

    Sources: docs/exchange.md. The linear part alone bears error feedback: Tang et al., 2102.02888, section 3, on Adam.
    Delays act as momentum: Mitliagkas et al., 1605.09774.

    velocity: v, float32 [length]. lr: the learning rate, to be set before each update.
    """

    def __init__(
        self,
        rules: Rules,
        target: Target,
        *,
        clip_norm: Optional[float],
        buckets: int,
        replicas: int,
        add_up: Callable[[torch.Tensor], None],
        whole: Container[str] = (),
    ):
        """
        Args:
            rules: of the optimizer, by parameter. clip_norm: as of WeightState.
            buckets: of the sketch of each parameter that has a trust ratio; the others share one.
            add_up: sums a float32 tensor over the replicas, in place, to the same bits on all.
            whole: names of the parameters whose values never wait.
        """
        layout, self._rules, self._weights = target.layout, rules, in_rows(target.buffers.weights)
        self._layout, self._model = layout, target.model
        self._clip_norm, self._add_up, self._alone = clip_norm, add_up, replicas == 1
        places = list(layout.places.values())
        groups = [[place] for place in rules.adapted.values()]
        others = [place for place in range(len(places)) if place not in rules.adapted.values()]
        groups += [others] if others else []
        self._sketched = [group[0] for group in groups]  # where a group's squares are put
        self._sketch = Sketch([[places[place] for place in group] for group in groups], buckets, layout.device)
        self._decay = layout.spread(rules.decay / replicas)
        self._whole = torch.tensor([name in whole for name in layout.names], device=layout.device)
        self.velocity = layout.zeros(torch.float32)
        self.lr = 0.0

    @torch.no_grad()
    def __call__(
        self,
        residual: torch.Tensor,
        gradient: torch.Tensor,
        divisor: torch.Tensor,
        finite: torch.Tensor,
        density: float = 1.0,
    ) -> None:
        """Add this replica's part of the update to the residual, float32 [length]. Every replica calls.

        Args:
            gradient: float32 [length], sums over this replica's micro batches times the loss scale; zeros if those of
                any replica are not finite. It may be overwritten.
            divisor: float32 [], the loss scale times the micro batches of all replicas.
            finite: bool [], whether all gradients are finite: if not, nothing changes.
            density: share of the residual's values that is sent after it.
        """
        rules, velocity, scale = self._rules, in_rows(self.velocity), divisor.reciprocal()
        self._squares = self._mean_squares(gradient) * scale.double().square()
        if self._clip_norm:
            clip = clip_factor(self._clip_norm, self._model.norm(self._squares))
            scale = scale * clip
            self._squares = self._squares * clip.double().square()
        rows, moves, momentum = in_rows(gradient), finite.float(), self._momentum(density)
        mu, share = (self._layout.spread(each.float()) for each in (torch.where(finite, momentum, 1.0), 1 - momentum))
        weight = self._sums_of_squares(self._weights)
        squares = self._squares
        if rules.by_momentum:
            in_parts(_average, (rows, velocity, self._weights, self._decay, share, mu), (scale,))
            squares = self._mean_squares(gradient)
        self._ratio = rules.ratios(weight, squares)
        rate = self._layout.spread(clamped(self.lr * rules.lr_scale * self._ratio)) * moves
        if rules.by_momentum:
            in_rows(residual).addcmul_(rows, rate)
        else:
            rate *= share / (1 - rules.mu)
            arguments = (in_rows(residual), rows, velocity, self._weights, self._decay, rate, mu)
            in_parts(_accumulate, arguments, (rules.nesterov, scale, moves))

    def _momentum(self, density: float) -> torch.Tensor:
        """nu of each parameter, float64."""
        mu, nesterov = self._rules.mu, self._rules.nesterov
        late = max(0.0, (mu * mu if nesterov else mu) / (1 - mu) - (1 / density - 1))
        # What solves nu^2 / (1 - nu) = late, or nu / (1 - nu) = late.
        nu = (math.sqrt(late * late + 4 * late) - late) / 2 if nesterov else late / (1 + late)
        return torch.where(self._whole, mu, torch.full_like(self._whole, nu, dtype=torch.float64))

    def state(self) -> Dict[str, torch.Tensor]:
        return {"velocity": self.velocity}

    def norms(self, applied: Norms) -> Norms:
        """Those of the last update: `applied`, with the mean gradient's norm and the trust ratios. All stages call."""
        trust = self._model.ratios(self._rules.named(self._ratio))
        return applied._replace(gradient=self._model.norm(self._squares).float(), trust=trust)

    def _mean_squares(self, vector: torch.Tensor) -> torch.Tensor:
        """Sums of squares of the replicas' sum, float64 [parameters]; of those without a ratio the first has all."""
        if self._alone:
            return self._sums_of_squares(in_rows(vector))
        sketches = self._sketch(vector)
        self._add_up(sketches)
        found = torch.zeros(len(self._layout.names), dtype=torch.float64, device=vector.device)
        found[self._sketched] = sketches.double().square().sum(1)
        return found

    def _sums_of_squares(self, rows: torch.Tensor) -> torch.Tensor:
        """By parameter, float64, of a buffer as [rows, ROW]."""
        sums = self._layout.sums(in_parts(_squares, (rows,), ()))
        return repaired([sums], self._layout, lambda place: (rows[place].float(),))[0]


def _squares(weight: torch.Tensor) -> torch.Tensor:
    w = weight.float()
    return (w * w).sum(1)


def _accumulate(residual, gradient, velocity, weight, decay, rate, mu, nesterov: bool, scale, moves) -> None:
    step = torch.addcmul(gradient * scale, weight.float(), decay).mul_(rate)
    velocity.mul_(mu).add_(step)
    residual.addcmul_(step.addcmul_(velocity, mu) if nesterov else velocity, moves)


def _average(gradient, velocity, weight, decay, share, mu, scale) -> None:
    """The velocity, and in the place of the gradient the direction of the step."""
    velocity.mul_(mu).addcmul_(gradient * scale, share)
    torch.addcmul(velocity, weight.float(), decay, out=gradient)
