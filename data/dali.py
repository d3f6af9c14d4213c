"""Micro batches by NVIDIA DALI: several are decoded, cropped and resized in one run of its threads, or of a GPU.

DALI draws nothing and keeps no state: it makes the transform's `frame` of an image, as the other reader does, so order,
resume and evaluation are exact. Images that DALI reads differently (rotated photographs, PNG, CMYK) or refuses are made
by the other reader's functions, one by one, so that an image's pixels never depend on those beside it.
"""

import contextlib
from typing import Any, ContextManager, Iterable, Iterator, List, NamedTuple, Optional, Tuple, Union

import numpy as np
import torch

from data.base import Image, Source, UnreadableImage
from data.batches import Loaded, Request
from data.encoded import EncodedImage
from data.reader import gathered
from data.transforms import Frame, Transform
from recipe.errors import DataError

_IMAGES_PER_THREAD = 4  # of one run, at least: threads end at about the same time, and images still lie in caches


class _Job(NamedTuple):
    """An image for DALI: the box that it decodes, and which part of that it resizes to which square.

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


class DaliReader:
    """Loads requested micro batches as data/reader.py does, except for the rounding of resampling.

    Images that are made on a GPU stay there. A box is always decoded at its own size.
    """

    ahead = True  # by threads of its own

    def __init__(self, source: Source, rows: int, transform: Transform, threads: int, device: torch.device):
        """
        Args:
            source: of files (data.encoded.EncodedSource).
            rows: images of a micro batch, with those that are padding.
            threads: of DALI, for all that it does not do on a GPU.
            device: where images are made.

        Raises DataError: DALI is not there.
        """
        try:
            import nvidia.dali  # noqa: F401
        except ImportError:
            raise DataError(
                "data.reader=dali: NVIDIA DALI is not installed; install nvidia-dali-cuda130, or set data.reader=torch"
            ) from None
        self._source, self._rows, self._transform = source, rows, transform
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # of this thread; images are made in another
        self._threads, self._device = threads, device
        self._together = max(1, -(-_IMAGES_PER_THREAD * threads // rows))

    def load(self, requests: Iterable[Request]) -> Iterator[Loaded]:
        """Answers in the order of the requests; while DALI makes the images of a group, those of the next are opened.

        Closing the iterator ends DALI's threads.
        """
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        with contextlib.closing(_Dali(self._rows * self._together, self._threads, self._device)) as dali:
            before: List[Request] = []
            opened_before: List[_Opened] = []
            for group in _groups(requests, self._together):
                opened = self._opened(group)
                made = dali.made()
                dali.start([job for _, job in opened if job is not None])
                yield from self._loaded(before, opened_before, made, stream)
                before, opened_before = group, opened
            yield from self._loaded(before, opened_before, dali.made(), stream)

    def _opened(self, requests: List[Request]) -> List[_Opened]:
        wanted = [(index, request) for request in requests for index in request.indices]
        opened: List[_Opened] = []
        for (index, request), image in zip(wanted, self._source.open_all([index for index, _ in wanted])):
            job = None
            if isinstance(image, EncodedImage) and image.plain and image.orientation == 1:
                job = _job(image, self._transform.frame(image, request.image_size, request.epoch, index))
            opened.append((image, job))
        return opened

    def _loaded(
        self,
        requests: List[Request],
        opened: List[_Opened],
        made: List[Optional[torch.Tensor]],
        stream: Optional["torch.cuda.Stream"],
    ) -> List[Loaded]:
        """The micro batches of a group of requests. Args: made: of the images with a job."""
        images, pixels = iter(opened), iter(made)
        on_stream: ContextManager[Any] = contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
        with on_stream:
            loaded = [self._micro_batch(request, images, pixels) for request in requests]
        if stream is not None:
            # Whoever takes the images uses another stream, and DALI is given back its memory after this.
            stream.synchronize()
        return loaded

    def _micro_batch(
        self, request: Request, opened: Iterator[_Opened], pixels: Iterator[Optional[torch.Tensor]]
    ) -> Loaded:
        """Take a request's images from `opened`, and those that DALI made from `pixels`."""
        shape = self._rows, 3, request.image_size, request.image_size
        images = torch.empty(shape, dtype=torch.uint8, device=self._device, memory_format=torch.channels_last)

        def finished(index: int) -> torch.Tensor:
            image, job = next(opened)
            made = None if job is None else next(pixels)
            if isinstance(image, UnreadableImage):
                raise image
            if made is None:
                return self._transform(image, request.image_size, request.epoch, index)
            return self._transform.finish(made, request.epoch, index)

        return gathered(request, images, self._source, finished)


class _Dali:
    """A pipeline of DALI, run for one batch of jobs at a time."""

    def __init__(self, most: int, threads: int, device: torch.device):
        """Args: most: jobs in a run."""
        self._most, self._threads, self._device = most, threads, device
        self._pipeline: Any = None
        self._jobs: List[_Job] = []  # whose bytes DALI reads where they are

    def start(self, jobs: List[_Job]) -> None:
        """Begin a run. Args: jobs: any number up to the most, of one size; none is no run."""
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
        except RuntimeError:  # invalidates the pipeline
            self._pipeline = None
            if len(jobs) == 1:
                return [None]
        else:
            # DALI's executor leaves outputs alone as long as somebody holds them.
            return list(torch.from_dlpack(images.as_tensor()).permute(0, 3, 1, 2))
        made: List[Optional[torch.Tensor]] = []
        for job in jobs:  # one image fails the run of all, and the error does not name it
            self.start([job])
            made += self.made()
        return made

    def close(self) -> None:
        """End DALI's threads."""
        self._pipeline = None
        self._jobs = []

    def _built(self) -> Any:
        from nvidia.dali import Pipeline, fn, types

        def given(name: str, dtype: Any) -> Any:
            return fn.external_source(name=name, ndim=1, dtype=dtype)

        cuda = self._device.type == "cuda"
        pipeline = Pipeline(
            batch_size=self._most,
            num_threads=self._threads,
            device_id=self._device.index if cuda else None,
            prefetch_queue_depth=1,
        )
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


def _groups(requests: Iterable[Request], most: int) -> Iterator[List[Request]]:
    """Up to `most` requests at a time, all of one image size."""
    group: List[Request] = []
    for request in requests:
        if group and (len(group) == most or request.image_size != group[0].image_size):
            yield group
            group = []
        group.append(request)
    if group:
        yield group


def _job(image: EncodedImage, frame: Frame) -> _Job:
    box, size = frame.box, frame.size
    down, right = box.height / frame.height, box.width / frame.width
    top, bottom = frame.top * down, (frame.top + size) * down
    sides = frame.left * right, (frame.left + size) * right
    first, last = reversed(sides) if frame.flip else sides
    encoded = np.frombuffer(image.encoded, np.uint8)
    return _Job(encoded, (box.top, box.left), (box.height, box.width), (top, first), (bottom, last), (size, size))
