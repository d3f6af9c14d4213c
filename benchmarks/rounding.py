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

import itertools
from typing import Dict, List, NamedTuple

import numpy as np
import torch

from benchmarks import claims
from optim.rounding import LARGEST, RoundingBits, round_stochastically

_REPETITIONS = 7
_ELEMENTS = 10_000  # of each value
_STEPS = 100


class Sample(NamedTuple):
    """Values to be rounded, float64 but exact in float32, and the spacing of float16 around them."""

    ranges: np.ndarray
    values: np.ndarray
    spacing: np.ndarray
    share: np.ndarray  # distance from the lower neighbour in spacings: the probability of rounding up

    @property
    def standard_error(self) -> np.ndarray:
        """Standard error of the mean of exact, independent roundings."""
        return self.spacing * np.sqrt(self.share * (1 - self.share) / (_ELEMENTS * _STEPS))


def main() -> None:
    as_json = claims.begin(__doc__, takes="1 minute", quick="half a minute").json
    torch.set_num_threads(1)  # short operations: on a machine that does other work, too, threads wait for each other
    sample = draw_sample(np.random.default_rng(0))
    bias: Dict[str, List[np.ndarray]] = {"stochastic": [], "exact draws": []}
    for repetition in claims.progress(range(claims.less(_REPETITIONS, 2)), "turn"):
        bias["stochastic"].append(np.abs(stochastic_mean(sample, seed=repetition) - sample.values))
        bias["exact draws"].append(np.abs(ideal_mean(sample, np.random.default_rng([1, repetition])) - sample.values))
    bias["nearest"] = [np.abs(sample.values.astype(np.float16) - sample.values)]
    worst = [float((each / sample.standard_error).max()) for each in bias["stochastic"]]
    claim = claims.claim("bias_in_standard_errors", worst, "standard errors", "<= 4")
    claims.report("rounding", rows(sample, bias), [claim], as_json)


def draw_sample(random: np.random.Generator) -> Sample:
    """25 values each, of both signs, of four ranges: subnormals go down to 2**-30, the largest are below 65504."""
    count = 25
    magnitudes = {
        "normals": random.uniform(1, 2, count) * 2.0 ** random.integers(-14, 15, count),
        "around powers of two": _around_powers_of_two(random, count),
        "subnormals": np.append(2.0**-30, 2.0 ** random.uniform(-30, -15, count - 1)),
        "largest": random.uniform(LARGEST - 31, LARGEST - 1, count),
    }
    ranges = np.repeat(list(magnitudes), count)
    values = np.concatenate(list(magnitudes.values())) * random.choice([-1, 1], len(ranges))
    values = values.astype(np.float32).astype(np.float64)
    halves = values.astype(np.float16)
    # The spacing between the neighbours: below a power of two it is that of the smaller one.
    inner = np.where(np.abs(halves) > np.abs(values), np.nextafter(halves, np.float16(0)), halves)
    spacing = np.spacing(np.abs(inner)).astype(np.float64)
    return Sample(ranges, values, spacing, values / spacing - np.floor(values / spacing))


def _around_powers_of_two(random: np.random.Generator, count: int) -> np.ndarray:
    """Within a spacing of 2**-14 to 2**15, above or below."""
    power = 2.0 ** random.integers(-14, 16, count)
    return power + random.choice([-0.5, 1], count) * random.uniform(0.02, 0.98, count) * power * 2.0**-10


def stochastic_mean(sample: Sample, seed: int) -> np.ndarray:
    """Mean of our rounding, for each value."""
    source = torch.from_numpy(sample.values.astype(np.float32)).repeat_interleave(_ELEMENTS)
    bits = RoundingBits({"parameter": (0, len(source))}, len(source), seed, source.device)
    out, keep = torch.empty(len(source), dtype=torch.float16), torch.tensor(True)
    total = torch.zeros(len(sample.values), dtype=torch.float64)
    for step in range(_STEPS):
        round_stochastically(source, bits, step, "weight", out=out, keep=keep)
        total += out.view(-1, _ELEMENTS).sum(1, dtype=torch.float64)
    return (total / (_ELEMENTS * _STEPS)).numpy()


def ideal_mean(sample: Sample, random: np.random.Generator) -> np.ndarray:
    """Mean of exact, independent draws: the limit."""
    upwards = random.binomial(_ELEMENTS * _STEPS, sample.share) / (_ELEMENTS * _STEPS)
    return (np.floor(sample.values / sample.spacing) + upwards) * sample.spacing


def rows(sample: Sample, bias: Dict[str, List[np.ndarray]]) -> List[dict]:
    """The worst bias in each range by each rounding: the median over the repetitions."""
    found = []
    for name, (rounding, repetitions) in itertools.product(dict.fromkeys(sample.ranges.tolist()), bias.items()):
        chosen = sample.ranges == name
        worst = [(each / sample.standard_error)[chosen].max() for each in repetitions]
        found.append({"range": name, "rounding": rounding, "worst bias in standard errors": float(np.median(worst))})
    return found
