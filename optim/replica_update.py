"""Updates that replicas make of their own gradients, which add up to that of the mean gradient."""

from __future__ import annotations

import math
from typing import Callable, Container, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from optim.lars_update import Rules
from optim.layout import in_parts, in_rows
from optim.norms import Norms, clamped, clip_factor, repaired
from optim.optimizer_update import Target
from recipe.randomness import bits32, key

_SIGNS = 1 << 20  # random signs in the table, about; longer vectors use them again
_PART = 1 << 17  # elements of a vector that are sketched at a time: they stay in a core's cache


class Sketch:
    """Adds the elements of vectors up in few buckets, with random signs, which keeps their norms.

    The sketch of a sum is the sum of the sketches, and its norm that of the sum, to about
    1 / sqrt(2 buckets): an element's bucket is its place modulo `buckets`, its sign a function of
    its place. Best is a prime number of buckets: the elements of a row or of a channel, which are
    alike, then fall into different ones.

    Source: Alon, Matias and Szegedy, 1996, The space complexity of approximating the frequency
    moments; buckets: Charikar, Chen and Farach-Colton, 2002, Finding frequent items in data
    streams.
    """

    def __init__(
        self,
        vectors: Sequence[Sequence[Tuple[int, int]]],
        buckets: int,
        device: torch.device,
    ):
        """
        Args:
            vectors: of each its pieces of a flat buffer, (first element, number of elements).
            buckets: numbers of a vector's sketch, above 0.
            device: of the buffer.
        """
        self._vectors = vectors
        self.buckets = buckets
        # Whole rounds of all buckets, so that a part begins with the first bucket; and a table of
        # whole parts, so that no part reaches beyond it.
        self._part = max(1, _PART // buckets) * buckets
        count = -(-_SIGNS // self._part) * self._part
        # No more than the longest vector asks for: to make a whole table takes longer than a step.
        longest = max((self._signs_of(pieces) for pieces in vectors), default=0)
        numbers = torch.arange(min(count, longest), device=device)
        bits = bits32(key("sketch"), numbers) & 1
        self._signs = bits.float().mul_(2).sub_(1)

    def _signs_of(self, pieces: Sequence[Tuple[int, int]]) -> int:
        """Return how many signs a vector of these pieces takes: each begins with the first bucket."""
        return sum(-(-count // self.buckets) * self.buckets for _, count in pieces)

    def __call__(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the sketches of the vectors in a buffer, float32 [vectors, buckets].

        Args:
            flat: float32 [length].
        """
        sketches = torch.zeros(len(self._vectors), self.buckets, device=flat.device)
        for sketch, pieces in zip(sketches, self._vectors):
            # Signs depend on the place in the vector: it does not matter where the vector lies.
            place = 0
            for start, count in pieces:
                for part in flat[start : start + count].split(self._part):
                    if place + len(part) > len(self._signs):
                        place = 0
                    signs = self._signs[place : place + len(part)]
                    self._add(sketch, part * signs)
                    # Each part begins with the first bucket.
                    place += -(-len(part) // self.buckets) * self.buckets
        return sketches

    def _add(self, sketch: torch.Tensor, signed: torch.Tensor) -> None:
        """Add elements with their signs to the buckets, in turn."""
        whole = len(signed) // self.buckets * self.buckets
        if whole:
            sketch += signed[:whole].view(-1, self.buckets).sum(0)
        sketch[: len(signed) - whole] += signed[whole:]


class ReplicaUpdate:
    """Adds a replica's part of an update to what the replica has not sent yet.

    LARS is linear in the gradient once the trust ratio rho of each parameter is known. With g the
    replica's part of the mean gradient, w the weights, wd = `weight_decay`, mu = `momentum`, P
    replicas, and e what is not sent yet:

        trust gradient:  v = nu v + (1 - nu) / (1 - mu) lr rho (g + wd w / P);  e = e + v
        trust momentum:  v = nu v + (1 - nu) g;                  e = e + lr rho (v + wd w / P)

    so with nu = mu the e of all replicas add up to LARS's step for the mean gradient. rho is that
    of the mean gradient, in the second form of the mean v + wd w / P, whose norms come from the sum
    of the replicas' sketches. Clipping is by the mean gradient's norm. The first form with all
    ratios 1 is SGD. With Nesterov momentum and s what is added to nu v, it adds nu v + s to e in
    the place of v.

    Waiting acts as momentum: at a density d values wait 1 / d - 1 updates or more in e, and
    momentum makes a gradient nu / (1 - nu) updates late on average, Nesterov momentum
    nu^2 / (1 - nu).
    Momentum makes up for what is missing to the lateness L that mu alone gives: nu is such that its
    own is max(0, L - (1 / d - 1)); in all, a gradient moves the weights as far as with mu.

    Sources: docs/exchange.md. The linear part alone bears error feedback: Tang et al., 2102.02888,
    section 3, on Adam. Delays act as momentum: Mitliagkas et al., 1605.09774.

    velocity: v, float32 [length].
    lr: the learning rate, to be set before each update.
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
            rules: of the optimizer, by parameter.
            target: what the update changes.
            clip_norm: as of WeightState.
            buckets: of the sketch of each parameter that has a trust ratio; the others share one.
            replicas: how many there are.
            add_up: sums a float32 tensor over the replicas, in place, to the same bits on all.
            whole: names of the parameters whose values never wait.
        """
        self._rules = rules
        self._layout = target.layout
        self._model = target.model
        self._weights = in_rows(target.buffers.weights)
        self._clip_norm = clip_norm
        self._add_up = add_up
        self._single = replicas == 1

        groups = self._sketched_groups()
        # The squares of a group stand at its first parameter.
        self._firsts = [group[0] for group in groups]
        places = list(self._layout.places.values())
        vectors = [[places[number] for number in group] for group in groups]
        self._sketch = Sketch(vectors, buckets, self._layout.device)

        # Each replica adds its part of the decay: all together decay once.
        self._decay = self._layout.spread(rules.decay / replicas)
        never_waits = [name in whole for name in self._layout.names]
        self._whole = torch.tensor(never_waits, device=self._layout.device)
        self.velocity = self._layout.zeros(torch.float32)
        self.lr = 0.0

    def _sketched_groups(self) -> List[List[int]]:
        """Return the parameters of each sketch: one with a trust ratio, or all that have none."""
        adapted = list(self._rules.adapted.values())
        others = [number for number in range(len(self._layout.names)) if number not in adapted]
        # Without a ratio only the norm of the whole gradient is asked for, so one sketch will do.
        groups = [[number] for number in adapted]
        if others:
            groups.append(others)
        return groups

    @torch.no_grad()
    def __call__(
        self,
        residual: torch.Tensor,
        gradient: torch.Tensor,
        divisor: torch.Tensor,
        finite: torch.Tensor,
        density: float = 1.0,
    ) -> None:
        """Add this replica's part of the update to the residual. Every replica calls.

        Args:
            residual: float32 [length].
            gradient: float32 [length], sums over this replica's micro batches times the loss scale;
                zeros if those of any replica are not finite. It may be overwritten.
            divisor: float32 [], the loss scale times the micro batches of all replicas.
            finite: bool [], whether all gradients are finite: if not, nothing changes.
            density: share of the residual's values that is sent after it.
        """
        scale = self._clipped_scale(gradient, divisor)
        # Where nothing may change the velocity is multiplied by 1, and 0 is added to the rest.
        moves = finite.float()
        momentum = self._momentum(density)
        factors = _MomentumFactors(
            mu=self._layout.spread(torch.where(finite, momentum, 1.0).float()),
            share=self._layout.spread((1 - momentum).float()),
        )
        rows = in_rows(gradient)
        add = self._add_average if self._rules.by_momentum else self._add_accumulated
        add(in_rows(residual), rows, factors, scale, moves)

    def _add_average(
        self,
        residual: torch.Tensor,
        gradient: torch.Tensor,
        factors: _MomentumFactors,
        scale: torch.Tensor,
        moves: torch.Tensor,
    ) -> None:
        """Make the update of the second form: its ratio is known after the momentum.

        Args:
            residual: float32 [rows, ROW], is added to.
            gradient: float32 [rows, ROW]; the direction takes its place.
            factors: of the momentum.
            scale: of the gradient, float32 [].
            moves: 1, or 0 where nothing may change, float32 [].
        """
        weight_squares = self._sums_of_squares(self._weights)
        average = _AverageRows(
            gradient=gradient,
            velocity=in_rows(self.velocity),
            weight=self._weights,
            decay=self._decay,
            share=factors.share,
            mu=factors.mu,
        )
        # The direction takes the gradient's memory: from here on its norm counts.
        in_parts(_average, average, scale)
        self._ratio = self._rules.ratios(weight_squares, self._mean_squares(gradient.flatten()))
        residual.addcmul_(gradient, self._rate() * moves)

    def _add_accumulated(
        self,
        residual: torch.Tensor,
        gradient: torch.Tensor,
        factors: _MomentumFactors,
        scale: torch.Tensor,
        moves: torch.Tensor,
    ) -> None:
        """Make the update of the first form: its ratio is that of the gradient, its rate inside.

        Args:
            residual, gradient, factors, scale, moves: see `_add_average`; the gradient stays.
        """
        rules = self._rules
        self._ratio = rules.ratios(self._sums_of_squares(self._weights), self._squares)
        rate = self._rate() * moves
        # With less momentum than mu, steps grow so that a gradient moves the weights as far.
        rate *= factors.share / (1 - rules.mu)
        rows = _AccumulateRows(
            residual=residual,
            gradient=gradient,
            velocity=in_rows(self.velocity),
            weight=self._weights,
            decay=self._decay,
            rate=rate,
            mu=factors.mu,
        )
        in_parts(_accumulate, rows, _AccumulateConstants(rules.nesterov, scale, moves))

    def _clipped_scale(self, gradient: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
        """Return the factor on the gradient, [], after taking the squares of the mean gradient."""
        scale = divisor.reciprocal()
        self._squares = self._mean_squares(gradient) * scale.double().square()
        # The norm that is logged is that before clipping, as of all optimizers.
        self._unclipped = self._squares
        if self._clip_norm:
            clip = clip_factor(self._clip_norm, self._model.norm(self._squares))
            scale = scale * clip
            self._squares = self._squares * clip.double().square()
        return scale

    def _rate(self) -> torch.Tensor:
        """Return learning rate times trust ratio, float32 [rows, 1]."""
        rates = clamped(self.lr * self._rules.lr_scale * self._ratio)
        return self._layout.spread(rates)

    def _momentum(self, density: float) -> torch.Tensor:
        """Return nu of each parameter, float64."""
        # Updates that a gradient is late: by momentum mu alone, by waiting alone, and what of the
        # first is left for momentum.
        mu = self._rules.mu
        nesterov = self._rules.nesterov
        lateness = (mu * mu if nesterov else mu) / (1 - mu)
        waiting = 1 / density - 1
        late = max(0.0, lateness - waiting)
        if nesterov:
            nu = (math.sqrt(late * late + 4 * late) - late) / 2  # solves nu^2 / (1 - nu) = late
        else:
            nu = late / (1 + late)  # solves nu / (1 - nu) = late
        # Parameters that are sent whole do not wait: they keep the momentum of the recipe.
        waits = torch.full_like(self._whole, nu, dtype=torch.float64)
        return torch.where(self._whole, mu, waits)

    def state(self) -> Dict[str, torch.Tensor]:
        """Return what persists: [length] each, by name."""
        return {"velocity": self.velocity}

    def norms(self, applied: Norms) -> Norms:
        """Return the norms of the last update. All stages call.

        Args:
            applied: norms of the exchanged update, without those of the gradient.
        """
        trust = self._model.ratios(self._rules.named(self._ratio))
        return applied._replace(gradient=self._model.norm(self._unclipped).float(), trust=trust)

    def _mean_squares(self, vector: torch.Tensor) -> torch.Tensor:
        """Return sums of squares of the replicas' sum of a vector, float64 [parameters].

        The first of the parameters without a ratio has the sum of all of them.
        """
        if self._single:
            return self._sums_of_squares(in_rows(vector))
        # Norms of replicas' vectors do not add up to that of the sum; sketches do.
        sketches = self._sketch(vector)
        self._add_up(sketches)
        parameters = len(self._layout.names)
        squares = torch.zeros(parameters, dtype=torch.float64, device=vector.device)
        squares[self._firsts] = sketches.double().square().sum(1)
        return squares

    def _sums_of_squares(self, rows: torch.Tensor) -> torch.Tensor:
        """Return sums of squares by parameter, float64, of a buffer as [rows, ROW]."""
        # In float32, and again in float64 only where that may be wrong: see norms.py.
        sums = self._layout.sums(in_parts(_squares, _ValueRows(rows), None))
        (squares,) = repaired([sums], self._layout, lambda place: (rows[place].float(),))
        return squares


class _MomentumFactors(NamedTuple):
    """Factors on the velocity, `mu`, and on what is added to it, `share`: float32 [rows, 1]."""

    mu: torch.Tensor
    share: torch.Tensor


class _ValueRows(NamedTuple):
    """Rows of `_squares`: [rows, ROW], of any floating-point dtype."""

    values: torch.Tensor


def _squares(rows: _ValueRows, constants: None) -> torch.Tensor:
    """Add up the squares of each row."""
    values = rows.values.float()
    return (values * values).sum(1)


class _AccumulateRows(NamedTuple):
    """Rows of `_accumulate`: [rows, ROW] of elements, [rows, 1] of decay, rate and mu."""

    residual: torch.Tensor
    gradient: torch.Tensor
    velocity: torch.Tensor
    weight: torch.Tensor
    decay: torch.Tensor
    rate: torch.Tensor
    mu: torch.Tensor


class _AccumulateConstants(NamedTuple):
    """The same for all rows of `_accumulate`; moves: 1, or 0 where nothing may change, []."""

    nesterov: bool
    scale: torch.Tensor
    moves: torch.Tensor


def _accumulate(rows: _AccumulateRows, constants: _AccumulateConstants) -> None:
    """Update the velocity of the first form, and add it to the residual."""
    scaled = rows.gradient * constants.scale
    step = torch.addcmul(scaled, rows.weight.float(), rows.decay).mul_(rows.rate)
    rows.velocity.mul_(rows.mu).add_(step)
    added = step.addcmul_(rows.velocity, rows.mu) if constants.nesterov else rows.velocity
    rows.residual.addcmul_(added, constants.moves)


class _AverageRows(NamedTuple):
    """Rows of `_average`: [rows, ROW] of elements, [rows, 1] of decay, share and mu."""

    gradient: torch.Tensor
    velocity: torch.Tensor
    weight: torch.Tensor
    decay: torch.Tensor
    share: torch.Tensor
    mu: torch.Tensor


def _average(rows: _AverageRows, scale: torch.Tensor) -> None:
    """Update the velocity of the second form, and replace the gradient by the direction."""
    rows.velocity.mul_(rows.mu).addcmul_(rows.gradient * scale, rows.share)
    torch.addcmul(rows.velocity, rows.weight.float(), rows.decay, out=rows.gradient)
