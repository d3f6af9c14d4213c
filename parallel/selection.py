"""The k largest of many values, exactly and always the same ones.

A value's magnitude is compared by its bits without the sign: as integers they are in the order of
the magnitudes, with NaN above infinity (NaNs among themselves by their payload) and -0 like 0.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

_MAGNITUDE = 0x7FFFFFFF  # all bits of a float32 but the sign
_CHUNK = 1 << 17  # values; with their magnitudes 1 MiB, which the second-level caches of today hold
_SPACING = 128  # of n values one of so many is in the sample
_SAFETY = 4.0  # standard deviations of the number of a sample's values above a threshold


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Find the k elements that are largest in magnitude.

    Of equal ones those of lower index; NaN counts as larger than infinity, and -0 as 0. The result
    is exact and a function of the values alone; on CUDA the host waits for nothing.

    On a CPU a sample proposes a threshold that a few more than k values should reach; one pass over
    the memory collects these. A sample that misleads costs further passes, no exactness.

    Args:
        values: float32 [n], contiguous.
        k: from 1 to n.

    Returns:
        Their indices, int64 [k], ascending, on the device of the values.
    """
    assert values.dtype == torch.float32, values.dtype
    assert values.dim() == 1 and values.is_contiguous(), values.shape
    assert 1 <= k <= len(values), f"{k} of {len(values)}"
    if values.device.type != "cpu":
        return _largest_by_keys(values, k)
    bits = values.detach().numpy().view(np.int32)
    threshold = _proposed_threshold(bits, k)
    candidates, magnitudes = _reaching(bits, threshold)
    if len(candidates) < k and threshold > 1:
        # The sample misled: now by the exact threshold.
        threshold = _kth(bits & _MAGNITUDE, k)
        candidates, magnitudes = _reaching(bits, threshold)
    if len(candidates) >= k:
        return torch.from_numpy(candidates[_among_largest(magnitudes, k)])
    # Fewer than k values are not 0: the first zeros make up the number.
    zeros = np.flatnonzero(bits & _MAGNITUDE == 0)[: k - len(candidates)]
    return torch.from_numpy(np.sort(np.concatenate([candidates, zeros])))


def ranked(
    values: torch.Tensor,
    indices: torch.Tensor,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide values into the k largest in magnitude and the others.

    Args:
        values: float32 [c].
        indices: int32 or int64 [c], distinct and between 0 and 2^32: the elements' numbers, in any
            order. Of values of equal magnitude those of lower number are the larger ones.
        k: from 1 to c.

    Returns:
        Positions of the k largest, int64 [k], and of the others, int64 [c - k]; both ascending.
    """
    assert values.dtype == torch.float32, values.dtype
    assert values.shape == indices.shape == (len(values),), (values.shape, indices.shape)
    assert 1 <= k <= len(values), f"{k} of {len(values)}"
    if values.device.type != "cpu":
        return _ranked_by_keys(values, indices, k)
    bits = values.detach().contiguous().numpy().view(np.int32)
    magnitudes = bits & _MAGNITUDE
    kept = _among_largest(magnitudes, k, indices.numpy())
    return torch.from_numpy(np.flatnonzero(kept)), torch.from_numpy(np.flatnonzero(~kept))


def _proposed_threshold(bits: np.ndarray, k: int) -> int:
    """Return a magnitude that most likely at least k values reach, and not many more."""
    positions = _sample_positions(len(bits))
    expected = k / _SPACING
    # The number of a sample's values above a threshold is spread like a Poisson variable's.
    rank = math.ceil(expected + _SAFETY * (math.sqrt(expected) + 1))
    if rank > len(positions):
        return _kth(bits & _MAGNITUDE, k)
    return _kth(bits.take(positions) & _MAGNITUDE, rank)


@functools.lru_cache(maxsize=8)
def _sample_positions(length: int) -> np.ndarray:
    """Draw one position at random in each whole run of _SPACING values.

    So no layer of a gradient is left out.
    """
    runs = length // _SPACING
    offsets = np.random.default_rng(0).integers(_SPACING, size=runs)
    return np.arange(runs) * _SPACING + offsets


def _reaching(bits: np.ndarray, threshold: int) -> tuple[np.ndarray, np.ndarray]:
    """Return indices, int64 ascending, and magnitudes, int32, of values that reach a threshold.

    No zeros: a gradient may be 0 nearly everywhere, and so the threshold. As many values as the
    cache holds at a time.
    """
    threshold = max(1, threshold)
    all_indices = []
    all_magnitudes = []
    # One piece of memory for all chunks stays in the cache; new ones would each be fetched.
    scratch = np.empty(min(_CHUNK, len(bits)), np.int32)
    for start in range(0, len(bits), _CHUNK):
        chunk = bits[start : start + _CHUNK]
        magnitudes = np.bitwise_and(chunk, _MAGNITUDE, out=scratch[: len(chunk)])
        indices = np.flatnonzero(magnitudes >= threshold)
        all_indices.append(indices + start)
        all_magnitudes.append(magnitudes[indices])
    return np.concatenate(all_indices), np.concatenate(all_magnitudes)


def _kth(magnitudes: np.ndarray, k: int) -> int:
    """Return the k-th largest magnitude."""
    place = len(magnitudes) - k
    return int(np.partition(magnitudes, place)[place])


def _among_largest(magnitudes: np.ndarray, k: int, numbers: np.ndarray | None = None) -> np.ndarray:
    """Return the mask of the k largest, bool.

    Of equal ones those of lower number, or those that come first.
    """
    kth = _kth(magnitudes, k)
    kept = magnitudes > kth
    equal = np.flatnonzero(magnitudes == kth)
    if numbers is not None:
        equal = equal[np.argsort(numbers[equal])]
    missing = k - np.count_nonzero(kept)
    kept[equal[:missing]] = True
    return kept


def _largest_by_keys(values: torch.Tensor, k: int) -> torch.Tensor:
    """Do what `largest` does, on any device."""
    # On a GPU a sample's threshold would have to be read by the host, which waits.
    keys = _keys(values, torch.arange(len(values), device=values.device))
    return keys.topk(k, sorted=False).indices.sort().values


def _ranked_by_keys(
    values: torch.Tensor,
    indices: torch.Tensor,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `ranked` does, on any device."""
    order = _keys(values, indices).argsort(descending=True)
    return order[:k].sort().values, order[k:].sort().values


def _keys(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return keys for sorting, int64, no two alike.

    They are in the order of the magnitudes and, where these are equal, against that of the indices.
    """
    magnitudes = (values.contiguous().view(torch.int32) & _MAGNITUDE).long()
    return (magnitudes << 32) | (0xFFFFFFFF - indices.long())
