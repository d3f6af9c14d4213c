"""The text and values of a training event: what the loop reports since its last log line."""

from __future__ import annotations

from typing import Any, Dict, Mapping, NamedTuple, Optional

import torch

from common.text import duration
from engines.base import NoiseScale, StepResult
from optim.norms import Norms
from training.monitor import Lap, pace

_NORMS = ("gradient", "weight", "update")
_DIGITS = ".6g"  # of trust ratios and noise scales by layer: more are noise


class Window(NamedTuple):
    """The steps since the last log line.

    epoch: done.
    loss: sum over steps of their mean losses. correct: top-1 hits.
    steps, updates, images: how many; images that could not be read are not counted.
    global_batch: images of a step.
    lr: of the last update.
    batch: its images, where the batch has a schedule.
    unreadable: images of the whole run.
    seconds: of the whole run.
    """

    epoch: float
    loss: float
    correct: int
    steps: int
    updates: int
    images: int
    global_batch: int
    lr: float
    batch: Optional[int]
    unreadable: int
    seconds: float


def values_of(
    window: Window,
    result: StepResult,
    lap: Lap,
    *,
    peak_flops: float,
    with_trust_ratios: bool,
) -> Dict[str, Any]:
    """Return the numbers of a training event. Reading the result waits for the device.

    Args:
        window: that ends with `result`.
        result: of the last update.
        lap: rates of the window.
        peak_flops: that all devices reach.
        with_trust_ratios: whether those of all layers are among the numbers, where the device
            reports norms.
    """
    # Unreadable images added nothing to the loss, whose mean is over those that could be read.
    readable = window.steps * window.global_batch / window.images
    values: Dict[str, Any] = {
        "epoch": window.epoch,
        "loss": window.loss / window.steps * readable,
        "top1": window.correct / window.images,
        "lr": window.lr,
    }
    if window.batch is not None:
        # The last update may be cut short, so that the number of all does not follow from it.
        values["batch"] = window.batch
        values["updates"] = window.updates
    # The first number that is read waits for the device; those after it are there already.
    values.update(_norms(result.norms))
    values.update(
        skipped_steps=result.skipped.item(),
        unreadable_images=window.unreadable,
        loss_scale=result.loss_scale.item(),
        images_per_second=lap.images,
        mfu=lap.operations / peak_flops,
        data_wait=lap.waiting,
        seconds=window.seconds,
    )
    if with_trust_ratios and result.norms is not None:
        values["trust"] = _trust_ratios(result.norms)
    return values


def _trust_ratios(norms: Norms) -> Dict[str, float]:
    """Return the trust ratio of each layer, by name."""
    # One copy from the device for all layers: each would wait by itself.
    if not norms.trust:
        return {}
    ratios = torch.stack(list(norms.trust.values())).tolist()
    return {name: _short(ratio) for name, ratio in zip(norms.trust, ratios)}


def by_layer(scales: Mapping[str, NoiseScale]) -> Dict[str, float]:
    """Return noise scales in images, by name, of `scales`."""
    return {name: _short(scale.images) for name, scale in scales.items()}


def text_of(values: Mapping[str, Any], done: int, total: int, seconds_left: float) -> str:
    """Return the line on the terminal.

    Args:
        values: of the event.
        done: steps.
        total: steps of the run.
        seconds_left: at the rate of the window.
    """
    text = (
        f"step {done}/{total}  loss {values['loss']:.3f} top1 {values['top1']:.1%} "
        f"{pace(values['images_per_second'])} MFU {values['mfu']:.0%} "
        f"wait {values['data_wait']:.0%} ETA {duration(seconds_left)}"
    )
    skipped = values["skipped_steps"]
    if skipped:
        # Only the events of a batch with a schedule tell its size.
        text += f" {skipped_updates(skipped, done, has_schedule='batch' in values)}"
    return text


def _norms(norms: Optional[Norms]) -> Dict[str, float]:
    """Return norms by the name of their value; none where a device does not report them."""
    if norms is None:
        return {}
    return {f"{kind}_norm": getattr(norms, kind).item() for kind in _NORMS}


def _short(number: float) -> float:
    """Round a number to the digits that are not noise."""
    return float(format(number, _DIGITS))


def skipped_updates(skipped: int, done: int, has_schedule: bool) -> str:
    """Say how many updates were left out.

    Args:
        skipped: updates.
        done: steps so far.
        has_schedule: whether the batch has a schedule, with which an update may be several steps.
    """
    of_all = "" if has_schedule else f" of {done}"
    return f"{skipped}{of_all} updates skipped"
