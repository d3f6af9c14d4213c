"""Peers of our loader: timm's and torchvision's loaders, and decoders that do nothing but decode."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any, Callable, Iterator, List, Sequence, Tuple

import numpy as np
import simplejpeg
import torch
import torchvision
from PIL import Image
from timm.data import create_dataset, create_loader
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from data.base import Box

AREA, ASPECT, FLIP = (0.05, 1.0), (3 / 4, 4 / 3), 0.5  # of random crops, as our recipes have them
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def timm_batches(folder: Path, size: int, micro: int, interpolation: str, prefetcher: bool) -> Iterator[Any]:
    """timm's loader for training without end, crop and flip only.

    Args:
        interpolation: timm's default is "random", bilinear or bicubic.
        prefetcher: normalise whole batches (what timm's train.py does by default, also on a CPU) or each image.
    """
    loader = create_loader(
        create_dataset("", root=str(folder), is_training=True), (3, size, size), micro, is_training=True, scale=AREA,
        ratio=ASPECT, hflip=FLIP, color_jitter=0.0, interpolation=interpolation, num_workers=0,
        use_prefetcher=prefetcher, device=torch.device("cpu"),
    )  # fmt: skip
    return itertools.chain.from_iterable(itertools.repeat(loader))


def torchvision_batches(folder: Path, size: int, micro: int, backend: str) -> Iterator[Any]:
    """The pipeline of torchvision's references/classification, crop and flip only, without end.

    Args:
        backend: "pil" crops what Pillow decoded; "tensor" crops what torchvision decoded.
    """
    crop = [v2.RandomResizedCrop(size, scale=AREA, ratio=ASPECT, antialias=True), v2.RandomHorizontalFlip(FLIP)]
    to_tensor = [v2.PILToTensor()] if backend == "pil" else []
    transform = v2.Compose([*crop, *to_tensor, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    opened = {} if backend == "pil" else {"loader": _opened_as_tensor}
    images = torchvision.datasets.ImageFolder(str(folder), transform, **opened)
    loader = DataLoader(images, micro, shuffle=True, drop_last=True, num_workers=0)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def _opened_as_tensor(path: str) -> torch.Tensor:
    return by_torchvision(Path(path).read_bytes())


def by_torchvision(encoded: bytes) -> torch.Tensor:
    """uint8 [3, height, width]."""
    # The operator, because torchvision.io.decode_jpeg warns at every call; a bytearray, because torch warns of bytes.
    data = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    return torch.ops.image.decode_jpeg(data, torchvision.io.ImageReadMode.RGB.value)


def by_simplejpeg(encoded: bytes) -> torch.Tensor:
    """uint8 [3, height, width]."""
    return torch.from_numpy(simplejpeg.decode_jpeg(encoded)).permute(2, 0, 1)


def by_pillow(encoded: bytes) -> Image.Image:
    """Decoded, left where Pillow has it."""
    image = Image.open(io.BytesIO(encoded))
    image.load()
    return image


def nvimgcodec_decoder() -> Callable[[bytes], np.ndarray]:
    """A function to uint8 [height, width, 3], on the CPU."""
    from nvidia import nvimgcodec

    decoder = nvimgcodec.Decoder(
        device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
        max_num_cpu_threads=1,
        backends=[nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)],
    )
    parameters = nvimgcodec.DecodeParams(apply_exif_orientation=False)
    return lambda encoded: np.asarray(decoder.decode(nvimgcodec.CodeStream(encoded), params=parameters))


class DaliSlices:
    """Boxes of JPEGs, resized to squares by a plain pipeline of DALI on the CPU, one batch at a time."""

    def __init__(self, size: int, most: int):
        """Args: size: pixels a side of the squares. most: images of a batch."""
        from nvidia.dali import Pipeline, fn, types

        self._pipeline = Pipeline(
            batch_size=most, num_threads=1, device_id=None, prefetch_queue_depth=1, exec_pipelined=False,
            exec_async=False, exec_dynamic=False,
        )  # fmt: skip
        with self._pipeline:
            encoded = fn.external_source(name="encoded", ndim=1, dtype=types.UINT8, no_copy=True)
            anchor, shape = (fn.external_source(name=name, ndim=1, dtype=types.INT32) for name in ("anchor", "shape"))
            parts = fn.decoders.image_slice(encoded, anchor, shape, axis_names="HW")
            self._pipeline.set_outputs(fn.resize(parts, size=(size, size), interp_type=types.INTERP_LINEAR))
        self._pipeline.build()

    def __call__(self, encoded: Sequence[bytes], boxes: Sequence[Box]) -> List[Tuple[int, ...]]:
        """Shapes of the squares, which are DALI's until the next call."""
        self._pipeline.feed_input("encoded", [np.frombuffer(each, np.uint8) for each in encoded])
        self._pipeline.feed_input("anchor", np.array([(box.top, box.left) for box in boxes], np.int32))
        self._pipeline.feed_input("shape", np.array([(box.height, box.width) for box in boxes], np.int32))
        (squares,) = self._pipeline.run()
        return squares.shape()
