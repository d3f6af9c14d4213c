"""The k largest of many values, exactly and always the same ones.

A value's magnitude is compared by its bits without the sign: as integers they are in the order of the magnitudes, with
NaN above infinity (NaNs among themselves by their payload) and -0 like 0.
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
    """Indices, int64 [k] ascending, of the k elements of float32 [n] that are largest in magnitude.

    Of equal ones those of lower index; NaN counts as larger than infinity, and -0 as 0. The result is exact, a
    function of the values alone, and lies on their device; on CUDA the host waits for nothing.

    On a CPU a sample proposes a threshold that a few more than k values should reach; one pass over the memory
    collects these. A sample that misleads costs further passes, no exactness.
    """
    assert values.dtype == torch.float32 and values.dim() == 1 and values.is_contiguous(), (values.dtype, values.shape)
    assert 1 <= k <= len(values), f"{k} of {len(values)}"
    if values.device.type != "cpu":
        return _largest_by_keys(values, k)
    bits = values.detach().numpy().view(np.int32)
    threshold = _proposed_threshold(bits, k)
    found, magnitudes = _reaching(bits, threshold)
    if len(found) < k and threshold > 1:
        found, magnitudes = _reaching(bits, _kth(bits & _MAGNITUDE, k))
    if len(found) >= k:
        return torch.from_numpy(found[_among_largest(magnitudes, k)])
    zeros = np.flatnonzero(bits & _MAGNITUDE == 0)[: k - len(found)]
    return torch.from_numpy(np.sort(np.concatenate([found, zeros])))


def ranked(values: torch.Tensor, indices: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the k largest in magnitude of float32 [c], int64 [k], and of the others, int64 [c - k]; ascending.

    Args: indices: int32 or int64 [c], distinct and between 0 and 2^32: the elements' numbers, in any order. Of values
    of equal magnitude those of lower number are the larger ones.
    """
    assert values.dtype == torch.float32 and values.shape == indices.shape == (len(values),), values.shape
    assert 1 <= k <= len(values), f"{k} of {len(values)}"
    if values.device.type != "cpu":
        return _ranked_by_keys(values, indices, k)
    magnitudes = values.detach().contiguous().numpy().view(np.int32) & _MAGNITUDE
    kept = _among_largest(magnitudes, k, indices.numpy())
    return torch.from_numpy(np.flatnonzero(kept)), torch.from_numpy(np.flatnonzero(~kept))


def _proposed_threshold(bits: np.ndarray, k: int) -> int:
    """A magnitude that at least k of the values reach, in all likelihood, and not many more."""
    positions = _sample_positions(len(bits))
    expected = k / _SPACING
    rank = math.ceil(expected + _SAFETY * (math.sqrt(expected) + 1))
    if rank > len(positions):
        return _kth(bits & _MAGNITUDE, k)
    return _kth(bits.take(positions) & _MAGNITUDE, rank)


@functools.lru_cache(maxsize=8)
def _sample_positions(length: int) -> np.ndarray:
    """One position, drawn at random, in each whole run of _SPACING values: none of a gradient's layers is left out."""
    runs = length // _SPACING
    return np.arange(runs) * _SPACING + np.random.default_rng(0).integers(_SPACING, size=runs)


def _reaching(bits: np.ndarray, threshold: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices, int64 ascending, of the values of at least this magnitude, and their magnitudes, int32.

    No zeros: a gradient may be 0 nearly everywhere, and so the threshold. As many values as the cache holds at a time.
    """
    found = []
    scratch = np.empty(min(_CHUNK, len(bits)), np.int32)
    for start in range(0, len(bits), _CHUNK):
        chunk = bits[start : start + _CHUNK]
        magnitudes = np.bitwise_and(chunk, _MAGNITUDE, out=scratch[: len(chunk)])
        indices = np.flatnonzero(magnitudes >= max(1, threshold))
        found.append((indices + start, magnitudes[indices]))
    return np.concatenate([each for each, _ in found]), np.concatenate([each for _, each in found])


def _kth(magnitudes: np.ndarray, k: int) -> int:
    """The k-th largest magnitude."""
    place = len(magnitudes) - k
    return int(np.partition(magnitudes, place)[place])


def _among_largest(magnitudes: np.ndarray, k: int, numbers: np.ndarray | None = None) -> np.ndarray:
    """Mask of the k largest, bool; of equal ones those of lower number, or those that come first."""
    kth = _kth(magnitudes, k)
    kept = magnitudes > kth
    equal = np.flatnonzero(magnitudes == kth)
    if numbers is not None:
        equal = equal[np.argsort(numbers[equal])]
    kept[equal[: k - np.count_nonzero(kept)]] = True
    return kept


def _largest_by_keys(values: torch.Tensor, k: int) -> torch.Tensor:
    keys = _keys(values, torch.arange(len(values), device=values.device))
    return keys.topk(k, sorted=False).indices.sort().values


def _ranked_by_keys(values: torch.Tensor, indices: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    order = _keys(values, indices).argsort(descending=True)
    return order[:k].sort().values, order[k:].sort().values


def _keys(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """int64, no two alike, in the order of the magnitudes and, where these are equal, against that of the indices."""
    magnitudes = (values.contiguous().view(torch.int32) & _MAGNITUDE).long()
    return (magnitudes << 32) | (0xFFFFFFFF - indices.long())
