"""Is stochastic rounding to float16 unbiased? Beside it: rounding to nearest, and exact independent draws.

    python -m benchmarks.rounding [--quick] [--json]

Each of 100 values between two float16 neighbours is rounded a million times: as 10,000 elements of a parameter in 100
steps. The bias of the mean is given in standard errors of a mean of exact, independent draws, with which the worst of
100 values is about 2.7, and above 4 in one repetition of 160. Rounding to nearest shows that the test sees a bias.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

from typing import Dict, List, NamedTuple

import numpy as np
import torch
from numpy.random import Generator, default_rng

from benchmarks import claims
from optim.rounding import LARGEST, RoundingBits, round_stochastically

_REPETITIONS = 7
_VALUES = 25  # of each range
_ELEMENTS = 10_000  # of each value
_STEPS = 100
_ROUNDINGS = _ELEMENTS * _STEPS  # of each value in a repetition
Biases = Dict[str, List[np.ndarray]]  # by rounding; for each repetition that of each value


class Sample(NamedTuple):
    """Values that are to be rounded, and where each lies between its neighbours.

    ranges: str [values], the range that a value was drawn from.
    values: float64 [values], but exact in float32.
    spacing: float64 [values], that of float16 around each value.
    share: float64 [values], distance from the lower neighbour in spacings: the probability of
        rounding up.
    """

    ranges: np.ndarray
    values: np.ndarray
    spacing: np.ndarray
    share: np.ndarray

    @property
    def standard_error(self) -> np.ndarray:
        """Return the standard error of the mean of exact, independent roundings."""
        variance = self.share * (1 - self.share)  # in squares of spacings
        return self.spacing * np.sqrt(variance / _ROUNDINGS)

    def bias(self, mean: np.ndarray) -> np.ndarray:
        """Return how far the `mean` of each value's roundings is off, in standard errors."""
        return np.abs(mean - self.values) / self.standard_error


def main() -> None:
    """Round all values in each way, and report the worst biases."""
    options = claims.begin(__doc__, takes="1 minute", quick="half a minute")
    # Short operations: on a machine that does other work, too, threads wait for each other.
    torch.set_num_threads(1)
    sample = draw_sample(default_rng(0))
    biases = measure_biases(sample)
    # The claim is about the value that comes off worst, in each repetition.
    worst = [float(bias.max()) for bias in biases["stochastic"]]
    claim = claims.claim("bias_in_standard_errors", worst, "standard errors", "<= 4")
    claims.report("rounding", rows(sample, biases), [claim], options.json)


def measure_biases(sample: Sample) -> Biases:
    """Round all values in each way.

    Args:
        sample: the values.
    """
    stochastic = []
    exact_draws = []
    repetitions = range(claims.less(_REPETITIONS, 2))
    for repetition in claims.progress(repetitions, "turn"):
        our_mean = stochastic_mean(sample, seed=repetition)
        stochastic.append(sample.bias(our_mean))
        random = default_rng([1, repetition])
        exact_draws.append(sample.bias(ideal_mean(sample, random)))
    # Rounding to nearest draws nothing: once is enough.
    nearest = sample.values.astype(np.float16)
    return {
        "stochastic": stochastic,
        "exact draws": exact_draws,
        "nearest": [sample.bias(nearest)],
    }


def draw_sample(random: Generator) -> Sample:
    """Draw 25 values each, of both signs, of four ranges.

    Subnormals go down to 2**-30, the largest are below 65504.

    Args:
        random: that draws.
    """
    magnitudes = _draw_magnitudes(random, _VALUES)
    ranges = np.repeat(list(magnitudes), _VALUES)
    drawn = np.concatenate(list(magnitudes.values()))
    signs = random.choice([-1, 1], len(drawn))
    # By way of float32, so that our rounding begins with exactly these values.
    singles = (drawn * signs).astype(np.float32)
    values = singles.astype(np.float64)
    spacing = _spacing_around(values)
    spacings = values / spacing
    share = spacings - np.floor(spacings)
    return Sample(ranges, values, spacing, share)


def _draw_magnitudes(random: Generator, count: int) -> Dict[str, np.ndarray]:
    """Draw `count` positive values of each range, by its name."""
    significands = random.uniform(1, 2, count)
    exponents = random.integers(-14, 15, count)
    around_powers = _around_powers_of_two(random, count)
    exponents_below = random.uniform(-30, -15, count - 1)
    largest = random.uniform(LARGEST - 31, LARGEST - 1, count)
    return {
        "normals": significands * 2.0**exponents,
        "around powers of two": around_powers,
        # Float16 is normal from 2**-14 on, and its smallest number is 2**-24.
        "subnormals": np.append(2.0**-30, 2.0**exponents_below),
        "largest": largest,
    }


def _around_powers_of_two(random: Generator, count: int) -> np.ndarray:
    """Draw values within a spacing of 2**-14 to 2**15, above or below."""
    exponent = random.integers(-14, 16, count)
    power = 2.0**exponent
    spacing_above = power * 2.0**-10
    # Below a power of two the spacing is half as wide.
    side = random.choice([-0.5, 1], count)
    distance = random.uniform(0.02, 0.98, count)
    return power + side * distance * spacing_above


def _spacing_around(values: np.ndarray) -> np.ndarray:
    """Return the distance between the two neighbours of each value in float16."""
    halves = values.astype(np.float16)
    # Below a power of two it is that of the smaller neighbour.
    is_rounded_up = np.abs(halves) > np.abs(values)
    next_smaller = np.nextafter(halves, np.float16(0))
    smaller = np.where(is_rounded_up, next_smaller, halves)
    spacing = np.spacing(np.abs(smaller))
    return spacing.astype(np.float64)


def stochastic_mean(sample: Sample, seed: int) -> np.ndarray:
    """Return the mean of our rounding for each value, float64 [values].

    Args:
        sample: the values.
        seed: of the random bits.
    """
    values = torch.from_numpy(sample.values.astype(np.float32))
    source = values.repeat_interleave(_ELEMENTS)
    length = len(source)
    bits = RoundingBits({"parameter": (0, length)}, length, seed, source.device)
    out = torch.empty(length, dtype=torch.float16)
    keep = torch.tensor(True)
    total = torch.zeros(len(values), dtype=torch.float64)
    for step in range(_STEPS):
        round_stochastically(source, bits, step, "weight", out=out, keep=keep)
        by_value = out.view(-1, _ELEMENTS)
        total += by_value.sum(1, dtype=torch.float64)
    return (total / _ROUNDINGS).numpy()


def ideal_mean(sample: Sample, random: Generator) -> np.ndarray:
    """Return the mean of exact, independent draws for each value, float64 [values]: the limit.

    Args:
        sample: the values.
        random: that draws.
    """
    share_upwards = random.binomial(_ROUNDINGS, sample.share) / _ROUNDINGS
    lower = np.floor(sample.values / sample.spacing)
    return (lower + share_upwards) * sample.spacing


def rows(sample: Sample, biases: Biases) -> List[dict]:
    """Return the worst bias in each range by each rounding, the median over the repetitions.

    Args:
        sample: the values.
        biases: of their roundings.
    """
    table = []
    for name in dict.fromkeys(sample.ranges.tolist()):
        is_in_range = sample.ranges == name
        for rounding, repetitions in biases.items():
            worst = [bias[is_in_range].max() for bias in repetitions]
            row = {
                "range": name,
                "rounding": rounding,
                "worst bias in standard errors": float(np.median(worst)),
            }
            table.append(row)
    return table
