"""Where a loader's time goes: its parts one by one, and ways to decode less than a whole image, on the same boxes."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple

import torch

from benchmarks import loader_peers
from data import jpeg
from data.base import Box, Pixels
from data.encoded import EncodedImage, EncodedSource
from data.transforms import Frame, Training, framed
from recipe.batch import steps_per_epoch
from recipe.config import Data


class Shown(NamedTuple):
    """An image of a micro batch, and what is shown of it."""

    index: int
    epoch: int
    image: EncodedImage
    frame: Frame


class Side(NamedTuple):
    """Something whose time is taken.

    run: takes what `prepare` makes of a turn's number, which is outside of the time. images: of a turn, counted in what
    was prepared; None for a micro batch.
    """

    part: str
    name: str
    run: Callable[[Any], object]
    prepare: Callable[[int], Any] = int
    images: Callable[[Any], int] | None = None


def shown(source: EncodedSource, data: Data, micro: int, size: int, step: int) -> List[Shown]:
    """What a run with seed 0 shows in a step of one micro batch."""
    transform, found = Training(data, 0), []
    epoch, within = divmod(step, steps_per_epoch(len(source), micro))
    for index in source.order(0, epoch)[within * micro : (within + 1) * micro].tolist():
        image = source.open(index)
        found.append(Shown(index, epoch, image, transform.frame(image, size, epoch, index)))
    return found


def decoders(prepare: Callable[[int], List[Shown]]) -> List[Side]:
    """Whole images decoded from bytes in memory, and nothing else."""
    functions: Dict[str, Callable[[bytes], object]] = {
        "torchvision": loader_peers.by_torchvision,
        "simplejpeg": loader_peers.by_simplejpeg,
        "nvimgcodec": loader_peers.nvimgcodec_decoder(),
        "Pillow": loader_peers.by_pillow,
    }
    return [Side("decode only", name, _each(_on_bytes(decode)), prepare) for name, decode in functions.items()]


def ways(part: str, size: int, prepare: Callable[[int], List[Shown]]) -> List[Side]:
    """From bytes in memory to boxes of size x size pixels."""
    slices = loader_peers.DaliSlices(size, len(prepare(0)))

    def by_dali(images: List[Shown]) -> None:
        slices([each.image.encoded for each in images], [each.frame.box for each in images])

    return [
        Side(part, "whole, torchvision", _each(_whole(loader_peers.by_torchvision)), prepare),
        Side(part, "whole, simplejpeg", _each(_whole(loader_peers.by_simplejpeg)), prepare),
        Side(part, "box, nvimgcodec", _each(_box), prepare),
        Side(part, "box, or at a fraction (ours)", _each(_ours), prepare),
        Side(part, "box, DALI", by_dali, prepare),
    ]


def parts(part: str, size: int, source: EncodedSource, data: Data, prepare: Callable[[int], List[Shown]]) -> List[Side]:
    """What our torch reader does, one thing at a time."""
    transform = Training(data, 0)

    def copy(images: List[torch.Tensor]) -> torch.Tensor:
        batch = torch.empty(len(images), 3, size, size, dtype=torch.uint8, memory_format=torch.channels_last)
        for row, image in enumerate(images):
            batch[row] = image
        return batch

    def scaled_only(turn: int) -> List[Shown]:
        return [each for each in prepare(turn) if _factor(each) > 1]

    def decoded(turn: int) -> List[tuple]:
        return [(_pixels(each), each.frame) for each in prepare(turn)]

    def resized(turn: int) -> List[torch.Tensor]:
        return [_resize(*each) for each in decoded(turn)]

    taken = [
        Side(part, "read the file", _each(lambda each: source.encoded(each.index)), prepare),
        Side(part, "read the header", _each(lambda each: EncodedImage(each.image.encoded, "")), prepare),
        Side(part, "draw", _each(lambda each: transform.frame(each.image, size, each.epoch, each.index)), prepare),
        Side(part, "decode", _each(_pixels), prepare),
        Side(part, "resize, mirror", _each(lambda each: _resize(*each)), decoded),
        Side(part, "gather", copy, resized),
        Side(part, "decode all boxes at their size", _each(_region), prepare),
    ]
    if scaled_only(0):
        taken.append(Side(part, "decode those at a fraction", _each(_pixels), scaled_only, len))
    return taken


def _each(function: Callable[[Any], object]) -> Callable[[List[Any]], None]:
    def run(images: List[Any]) -> None:
        for each in images:
            function(each)

    return run


def _on_bytes(decode: Callable[[bytes], object]) -> Callable[[Shown], object]:
    return lambda each: decode(each.image.encoded)


def _whole(decode: Callable[[bytes], torch.Tensor]) -> Callable[[Shown], torch.Tensor]:
    return lambda each: framed(Pixels(decode(each.image.encoded)), each.frame._replace(flip=False))


def _box(each: Shown) -> torch.Tensor:
    return _resize(_region(each), each.frame._replace(flip=False))


def _ours(each: Shown) -> torch.Tensor:
    return framed(each.image, each.frame._replace(flip=False))


def _region(each: Shown) -> torch.Tensor:
    part = jpeg.region(each.image.encoded, each.frame.box)
    assert part is not None, each.frame.box
    return part


def _pixels(each: Shown) -> torch.Tensor:
    return each.image.pixels(each.frame.box, each.frame.size)


def _resize(pixels: torch.Tensor, frame: Frame) -> torch.Tensor:
    return framed(Pixels(pixels), frame._replace(box=Box(0, 0, *pixels.shape[1:])))


def _factor(each: Shown) -> int:
    return jpeg.largest_factor(min(each.frame.box.height, each.frame.box.width), each.frame.size)
