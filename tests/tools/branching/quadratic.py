"""SGD on a noisy quadratic, whose expected loss is known for any batch and any rates: no network,
no images.

The loss is the mean over coordinates of h t^2 / 2, with curvatures h from 1 to 0.01. The gradient
of a step's images has noise of variance `noise` in each coordinate. With k steps in an update it is
noise / k.
"""

CURVATURES = [100.0 ** (-number / 39) for number in range(40)]
START = 1.0  # of each coordinate


def falling(rate, updates):
    """Rates of the updates of a branch: from `rate` linearly to 0."""
    return [rate * (1 - number / updates) for number in range(updates)]


def expected(noise, rate, multiple, factor, steps):
    """Expected loss after a branch: exact, by the mean and the variance of each coordinate."""
    total = 0.0
    for curvature in CURVATURES:
        mean = START
        variance = 0.0
        for each in falling(rate * factor, steps // multiple):
            shrink = 1 - each * curvature
            mean = shrink * mean
            variance = shrink**2 * variance + each**2 * noise / multiple
        total += curvature * (mean**2 + variance) / 2
    return total / len(CURVATURES)


def sampled(noise, rate, multiple, factor, draws):
    """Loss of a branch that makes its steps, in float64.

    Args: draws: standard normal, [steps, 40, copies]; an update of several steps has their mean, as
    a larger batch has the same images.
    """
    import numpy as np  # slow to load, and not needed by the double

    coordinates = np.full(draws.shape[1:], START)
    curvatures = np.array(CURVATURES)[:, None]
    batches = draws.reshape(-1, multiple, *draws.shape[1:]).mean(1)
    for each, drawn in zip(falling(rate * factor, len(batches)), batches):
        coordinates -= each * (curvatures * coordinates + noise**0.5 * drawn)
    return float(np.mean(curvatures * coordinates**2) / 2)
