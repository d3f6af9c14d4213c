"""Micro batches by NVIDIA DALI: each is decoded, cropped and resized in one run of its threads, or of a GPU.

DALI draws nothing and keeps no state: it makes the transform's `frame` of an image, as the other reader does, so order,
resume and evaluation are exact. Images that DALI reads differently (rotated photographs, PNG, CMYK) or refuses are made
by the other reader's functions, one by one, so an image's pixels never depend on those beside it.
"""

import contextlib
import itertools
from typing import Any, Iterable, Iterator, List, NamedTuple, Optional, Tuple, Union

import numpy as np
import torch

from common.errors import DataError
from data.base import Image, UnreadableImage
from data.batches import MicroBatch, Request
from data.encoded import EncodedImage
from data.reader import Reader
from data.transforms import Frame


class _Job(NamedTuple):
    """An image for DALI: the box (anchor and shape) that it decodes, and which part of that it resizes to `size`.

    The part is given by its first and last corner, in fractions of pixels; it is mirrored if these are swapped. Pixels
    around it in the box count at its edges, as if a larger picture were resized and then cut.
    """

    encoded: np.ndarray  # uint8 [bytes]
    anchor: Tuple[int, int]
    shape: Tuple[int, int]
    first: Tuple[float, float]
    last: Tuple[float, float]
    size: Tuple[int, int]


_Opened = Tuple[Union[Image, UnreadableImage], Optional[_Job]]  # without a job, if it is not for DALI


class DaliLoader:
    """Loads as data/reader.py does but for rounding; images stay on the GPU. Boxes are decoded at their own size."""

    def __init__(self, reader: Reader, requests: Iterable[Request], threads: int, device: torch.device):
        """Raises DataError: DALI is not installed. Args: device: where images are made."""
        try:
            import nvidia.dali  # noqa: F401
        except ImportError:
            raise DataError(
                "data.reader=dali: NVIDIA DALI is not installed; install nvidia-dali-cuda130, or set data.reader=torch"
            ) from None
        self._reader, self._requests, self._transform = reader, requests, reader.transform
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # of this thread; images are made in another
        self._threads, self._device = threads, device

    def __iter__(self) -> Iterator[MicroBatch]:
        """While DALI makes the images of one micro batch, those of the next are opened. Closing ends DALI's threads."""
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        dali = _Dali(self._reader.rows, self._threads, self._device)
        before: Optional[Request] = None
        opened_before: List[_Opened] = []
        for request in itertools.chain(self._requests, [None]):
            opened = [] if request is None else self._opened(request)
            made = dali.made()
            dali.start([job for _, job in opened if job is not None])
            if before is not None:
                with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                    batch = self._micro_batch(before, iter(opened_before), iter(made))
                if stream is not None:
                    # Whoever takes the images uses another stream, and DALI is given back its memory after this.
                    stream.synchronize()
                yield batch
            before, opened_before = request, opened

    def _opened(self, request: Request) -> List[_Opened]:
        opened: List[_Opened] = []
        for index, image in zip(request.indices, self._reader.source.open_all(request.indices)):
            job = None
            if isinstance(image, EncodedImage) and image.plain and image.orientation == 1:
                job = _job(image, self._transform.frame(image, request.image_size, request.epoch, index))
            opened.append((image, job))
        return opened

    def _micro_batch(
        self, request: Request, opened: Iterator[_Opened], pixels: Iterator[Optional[torch.Tensor]]
    ) -> MicroBatch:
        shape = self._reader.rows, 3, request.image_size, request.image_size
        images = torch.empty(shape, dtype=torch.uint8, device=self._device, memory_format=torch.channels_last)
        damaged: List[str] = []

        def finished(index: int) -> torch.Tensor:
            image, job = next(opened)
            made = None if job is None else next(pixels)
            if isinstance(image, UnreadableImage):
                raise image
            if made is not None:
                return self._transform.finish(made, request.epoch, index)
            made = self._transform(image, request.image_size, request.epoch, index)
            if image.damage:
                damaged.append(image.damage)
            return made

        return self._reader.gather(request, images, finished)._replace(damaged=tuple(damaged))


class _Dali:
    """A pipeline of DALI, run for one batch of at most `most` jobs at a time. Its threads end with this object."""

    def __init__(self, most: int, threads: int, device: torch.device):
        self._most, self._threads, self._device = most, threads, device
        self._pipeline: Any = None
        self._jobs: List[_Job] = []  # whose bytes DALI reads where they are

    def start(self, jobs: List[_Job]) -> None:
        """Begin a run of jobs of one size; none is no run."""
        self._jobs = jobs
        if not jobs:
            return
        if self._pipeline is None:
            self._pipeline = self._built()
        self._pipeline.feed_input("encoded", [job.encoded for job in jobs])
        for name in ("anchor", "shape"):
            self._pipeline.feed_input(name, np.array([getattr(job, name) for job in jobs], np.int32))
        for name in ("first", "last", "size"):
            self._pipeline.feed_input(name, np.array([getattr(job, name) for job in jobs], np.float32))
        self._pipeline.schedule_run()

    def made(self) -> List[Optional[torch.Tensor]]:
        """Images of the started jobs, uint8 [3, size, size] each; None where DALI fails, as on damaged files."""
        jobs = self._jobs
        if not jobs:
            return []
        try:
            (images,) = self._pipeline.share_outputs()
            self._pipeline.release_outputs()
            # DALI's executor leaves outputs alone as long as somebody holds them.
            return list(torch.from_dlpack(images.as_tensor()).permute(0, 3, 1, 2))
        except RuntimeError:  # invalidates the pipeline
            self._pipeline = None
            if len(jobs) == 1:
                return [None]
        made: List[Optional[torch.Tensor]] = []
        for job in jobs:  # one image fails the run of all, and the error does not name it
            self.start([job])
            made += self.made()
        return made

    def _built(self) -> Any:
        from nvidia.dali import Pipeline, fn, types

        def given(name: str, dtype: Any) -> Any:
            return fn.external_source(name=name, ndim=1, dtype=dtype)

        cuda = self._device.type == "cuda"
        device = self._device.index if cuda else None
        pipeline = Pipeline(self._most, self._threads, device, prefetch_queue_depth=1)
        with pipeline:
            decoded = fn.decoders.image_slice(
                fn.external_source(name="encoded", ndim=1, dtype=types.UINT8, no_copy=True),
                given("anchor", types.INT32),
                given("shape", types.INT32),
                axis_names="HW",
                device="mixed" if cuda else "cpu",
                output_type=types.RGB,
                adjust_orientation=False,
                affine=False,  # threads of several ranks would all be bound to the same cores
            )
            resized = fn.resize(
                decoded,
                size=given("size", types.FLOAT),
                roi_start=given("first", types.FLOAT),
                roi_end=given("last", types.FLOAT),
                interp_type=types.INTERP_LINEAR,
                antialias=True,
            )
            pipeline.set_outputs(resized)
        pipeline.build()
        return pipeline


def _job(image: EncodedImage, frame: Frame) -> _Job:
    box, size = frame.box, frame.size
    down, right = box.height / frame.height, box.width / frame.width
    row, column = frame.corner
    top, bottom = row * down, (row + size) * down
    sides = column * right, (column + size) * right
    first, last = reversed(sides) if frame.flip else sides
    encoded = np.frombuffer(image.encoded, np.uint8)
    return _Job(encoded, (box.top, box.left), (box.height, box.width), (top, first), (bottom, last), (size, size))
