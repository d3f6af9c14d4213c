"""Mixup and cutmix of a micro batch: by the rules of the published G16 recipe, or by timm's.

Draws are made on the host, images are mixed on the device. Partners are rows of the same micro
batch, and draws are a function of (seed, step, micro batch).

Sources: Zhang et al., 1710.09412 (mixup); Yun et al., 1905.04899 (cutmix).
"""

import functools
import math
from typing import NamedTuple, Optional, Tuple

import numpy as np
import torch

from data.prefetch import to_device
from recipe.config import Data
from recipe.randomness import Stream, key

_Box = Tuple[int, int, int, int]
_NO_BOX = (0, 0, 0, 0)
_CPU = torch.device("cpu")
# Such shares are 0 and 1 already; from 1e-100, numpy 1.24 never returns.
_SMALLEST_ALPHA = 1e-6


class Mixing(NamedTuple):
    """Mixing of the N rows of a micro batch; its tensors are not to be changed.

    Padding rows are their own partners and donors. Mixup comes first: row i becomes share[i] x
    itself + (1 - share[i]) x row partner[i]. Cutmix works on the result: inside the box, row i
    shows row donor[i].
    """

    share: torch.Tensor  # float32 [N], from 0 to 1; by the G16 recipe from 0.5
    partner: torch.Tensor  # int64 [N]
    # Top, left, height, width in pixels, the same in all rows; height or width 0: none.
    box: _Box
    donor: torch.Tensor  # int64 [N]
    kept: float  # share of the image's pixels that are outside the box


def draw(
    data: Data,
    seed: int,
    place: Tuple[int, int],
    *,
    rows: int,
    valid: int,
    size: Tuple[int, int],
    device: torch.device = _CPU,
) -> Optional[Mixing]:
    """Draw how a micro batch is mixed. No GPU is waited for.

    The partner is the image before (i - 1), the donor the one two before, or before if there are
    only two.

    Args:
        data: with the strength of mixup and cutmix.
        seed: of the run.
        place: step of the micro batch (an update may have several), and its number within the step,
            over all replicas.
        rows: of the micro batch.
        valid: rows that are images; they come first.
        size: height and width of the images in pixels.
        device: of the micro batch, and of the tensors.

    Returns:
        None where the recipe does not mix.
    """
    if not data.mixes:
        return None
    # A single image has no partner.
    share = np.ones(rows, np.float32)
    box = _NO_BOX
    height, width = size
    if valid > 1:
        draw_by_rule = _by_timm if data.mixing == "timm" else _by_g16
        drawn, box = draw_by_rule(data, (seed, *place), rows, height, width)
        share[:valid] = drawn[:valid]
    _, _, box_height, box_width = box
    # The same box for all rows, so that a single copy moves it, and labels have one share.
    return Mixing(
        share=to_device(torch.from_numpy(share), device),
        partner=_before(1, rows, valid, device),
        box=box,
        donor=_before(2 if valid > 2 else 1, rows, valid, device),
        kept=1 - box_height * box_width / (height * width),
    )


def mix_images(images: torch.Tensor, plan: Mixing) -> torch.Tensor:
    """Mix the images of a micro batch.

    Args:
        images: uint8 [N, 3, H, W].
        plan: on their device.

    Returns:
        float32 [N, 3, H, W], from 0 to 255.
    """
    # A copy is made in any case, so the box is pasted in place.
    mixed = _mixed_up(images.float(), plan)
    top, left, height, width = plan.box
    if height and width:
        inside = mixed[:, :, top : top + height, left : left + width]
        inside.copy_(inside[plan.donor])
    return mixed


def mix_targets(labels: torch.Tensor, plan: Optional[Mixing], classes: int) -> torch.Tensor:
    """Return each class's share of a row's pixels.

    Args:
        labels: int64 [N].
        plan: on their device; None for images that are not mixed.
        classes: how many there are.

    Returns:
        float32 [N, classes]; one-hot without a plan.
    """
    labels_of_columns = torch.arange(classes, device=labels.device)
    targets = (labels[:, None] == labels_of_columns).float()
    if plan is None:
        return targets
    targets = _mixed_up(targets, plan)
    return torch.lerp(targets[plan.donor], targets, plan.kept)


def _mixed_up(rows: torch.Tensor, plan: Mixing) -> torch.Tensor:
    """Return share x row + (1 - share) x partner; exactly the row where the two are equal."""
    other_axes = [1] * (rows.dim() - 1)
    return torch.lerp(rows[plan.partner], rows, plan.share.view(-1, *other_axes))


@functools.lru_cache(maxsize=64)
def _before(distance: int, rows: int, valid: int, device: torch.device) -> torch.Tensor:
    """Return the number of the image `distance` before each row, cyclic over the valid ones.

    int64 [rows], one tensor for all callers.
    """
    # Cached: it is the same for nearly every micro batch, and would be copied to a GPU each time.
    partners = np.arange(rows)
    partners[:valid] = (partners[:valid] - distance) % max(1, valid)
    return to_device(torch.from_numpy(partners), device)


def _by_g16(
    data: Data,
    names: Tuple[int, int, int],
    rows: int,
    height: int,
    width: int,
) -> Tuple[np.ndarray, _Box]:
    """Draw the shares of rows, float64 [rows], and the box of a micro batch, by the G16 recipe.

    Args:
        data: with the strengths.
        names: seed, step and number of the micro batch.
        rows: of the micro batch.
        height: of the images in pixels.
        width: of the images in pixels.
    """
    share = np.ones(rows)
    box = _NO_BOX
    if data.mixup:
        share = _mixup_shares(data.mixup, key("mixup", *names), rows)
    # A key of its own: beside mixup the boxes are those of a recipe with cutmix alone.
    if data.cutmix:
        box = _cutmix_box(data.cutmix, Stream(key("cutmix", *names)), height, width)
    return share, box


def _by_timm(
    data: Data,
    names: Tuple[int, int, int],
    rows: int,
    height: int,
    width: int,
) -> Tuple[np.ndarray, _Box]:
    """Draw shares and box as timm's Mixup does in its mode `batch`: see `_by_g16`.

    A micro batch has one share from a Beta distribution, for mixup or for cutmix. timm pairs
    image i with image N - 1 - i; here partners are those of the G16 recipe, which IPUs find by
    rolling: images come in random order, so the pairs are distributed alike.
    """
    share = np.ones(rows)
    stream = Stream(key("mixing", *names))
    # All numbers are drawn, used or not, so that no key changes what another one draws.
    is_mixed = stream.uniform() < data.mixing_probability
    switches = stream.uniform() < data.mixing_switch
    if not is_mixed:
        return share, _NO_BOX
    if data.cutmix and (switches or not data.mixup):
        kept = _beta(data.cutmix, key("mixing share", *names), 1).item()
        return share, _timm_box(kept, stream, height, width)
    share[:] = _beta(data.mixup, key("mixing share", *names), 1)
    return share, _NO_BOX


def _timm_box(kept: float, stream: Stream, height: int, width: int) -> _Box:
    """Draw the box of timm's cutmix: of the image's aspect and 1 - kept of its area, its centre
    uniform over the pixels, cut off where it leaves the image.

    Source: Yun et al., 1905.04899, appendix A; timm.data.mixup.rand_bbox.
    """
    side = math.sqrt(1 - kept)
    edges = []
    for pixels in (height, width):
        length = int(pixels * side)
        centre = stream.integer(pixels)
        edges.append(max(0, centre - length // 2))
        edges.append(min(pixels, centre + (length + 1) // 2))
    top, bottom, left, right = edges
    return top, left, bottom - top, right - left


def _mixup_shares(alpha: float, draw: int, count: int) -> np.ndarray:
    """Return max(l, 1 - l) for l from Beta(alpha, alpha): float64 [count]."""
    # The larger share makes the row itself, not its partner, the main content.
    drawn = _beta(alpha, draw, count)
    return np.maximum(drawn, 1 - drawn)


def _beta(alpha: float, draw: int, count: int) -> np.ndarray:
    """Draw numbers from Beta(alpha, alpha): float64 [count].

    NumPy 1.24 and 2.4 draw the same.
    """
    # Philox is keyed, so that no state is shared.
    alpha = max(alpha, _SMALLEST_ALPHA)
    generator = np.random.Generator(np.random.Philox(key=draw))
    return generator.beta(alpha, alpha, count)


def _cutmix_box(cutmix: float, stream: Stream, height: int, width: int) -> _Box:
    """Draw one box for a micro batch, of the image's aspect.

    There is none with probability 1.55 x cutmix - 0.96. Else its share of the area is -ln(u) / 4
    for u uniform in [e^-4, 1). The centre is uniform, then moved so that the box fits.
    """
    if stream.uniform() < 1.55 * cutmix - 0.96:
        return _NO_BOX
    u = stream.uniform(math.exp(-4.0), 1.0)
    area = -math.log(u) / 4.0  # at most 1, as u is at least e^-4
    side = math.sqrt(area)
    top, bottom = _edges(stream.uniform(), side, height)
    left, right = _edges(stream.uniform(), side, width)
    return top, left, bottom - top, right - left


def _edges(centre: float, side: float, pixels: int) -> Tuple[int, int]:
    """Return the first and last edge of a box on an axis.

    Args:
        centre: of the box, as a share of the image's pixels.
        side: of the box, likewise.
        pixels: of the image.
    """
    # Rounding both edges, rather than one and a length, keeps a box at the border inside.
    half = side / 2
    centre = min(max(centre, half), 1 - half)
    first = round((centre - half) * pixels)
    last = round((centre + half) * pixels)
    return first, last
