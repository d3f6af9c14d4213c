"""Micro batches by NVIDIA DALI: a run of its threads or of a GPU decodes, crops and resizes each.

DALI draws nothing and keeps no state: it makes the transform's `frame` of an image, as the other
reader does, so order, resume and evaluation are exact. Images that DALI reads differently (rotated
photographs, PNG, CMYK) or refuses are made by the other reader's functions, one by one, so an
image's pixels never depend on those beside it.
"""

import contextlib
import itertools
from typing import Any, Iterable, Iterator, List, NamedTuple, Optional, Tuple, Union

import numpy as np
import torch

from common.errors import DataError
from data.base import Image, UnreadableImage
from data.batches import ReadBatch, Request
from data.encoded import EncodedImage
from data.reader import Reader
from data.transforms import Frame


class _Job(NamedTuple):
    """An image for DALI: the box that it decodes, and which part of that it resizes.

    The part is given by its first and last corner, in fractions of pixels; it is mirrored if these
    are swapped. Pixels around it in the box count at its edges, as if a larger picture were resized
    and then cut. All pairs are vertical, horizontal.
    """

    encoded: np.ndarray  # uint8 [bytes]
    anchor: Tuple[int, int]  # top and left of the box
    shape: Tuple[int, int]  # of the box
    first: Tuple[float, float]  # corner of the part
    last: Tuple[float, float]
    size: Tuple[int, int]  # of the result


class _Opened(NamedTuple):
    """An image that is to be made, or the error in its place."""

    image: Union[Image, UnreadableImage]
    showing: int  # see data/epochs.Shown
    job: Optional[_Job] = None  # None if it is not for DALI


class DaliLoader:
    """Loads as data/reader.py does but for rounding; images stay on the GPU.

    Boxes are decoded at their own size.
    """

    def __init__(
        self,
        reader: Reader,
        requests: Iterable[Request],
        threads: int,
        device: torch.device,
    ):
        """
        Args:
            reader: opens images, and makes those that DALI does not.
            requests: one for each micro batch; iterated anew by each iteration of the loader.
            threads: of DALI.
            device: where images are made.

        Raises:
            DataError: DALI is not installed.
        """
        try:
            import nvidia.dali  # noqa: F401
        except ImportError:
            fault = "data.reader=dali: NVIDIA DALI is not installed"
            remedy = "install nvidia-dali-cuda130, or set data.reader=torch"
            raise DataError(f"{fault}; {remedy}") from None
        if device.type == "cuda" and device.index is None:
            # Of this thread; images are made in another.
            device = torch.device("cuda", torch.cuda.current_device())
        self._reader = reader
        self._requests = requests
        self._transform = reader.transform
        self._threads = threads
        self._device = device

    def __iter__(self) -> Iterator[ReadBatch]:
        """While DALI makes the images of one micro batch, those of the next are opened.

        Closing ends DALI's threads.
        """
        stream = None
        if self._device.type == "cuda":
            stream = torch.cuda.Stream(self._device)
        dali = _Dali(self._reader.rows, self._threads, self._device)
        request_before: Optional[Request] = None
        opened_before: List[_Opened] = []
        for request in itertools.chain(self._requests, [None]):  # None: for the last batch
            # DALI makes the batch before this one meanwhile.
            opened = [] if request is None else self._open(request)
            pixels = dali.finish()
            # It makes this batch while the one before is gathered, and used.
            dali.start([image.job for image in opened if image.job is not None])
            if request_before is not None:
                with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                    batch = self._gather(request_before, iter(opened_before), iter(pixels))
                if stream is not None:
                    # Whoever takes the images uses another stream, and DALI is given back its
                    # memory after this.
                    stream.synchronize()
                yield batch
            request_before = request
            opened_before = opened

    def _open(self, request: Request) -> List[_Opened]:
        """Open the images of a request, and make the jobs of those that are for DALI."""
        opened = []
        images = self._reader.source.open_all(request.indices)
        for index, image, showing in zip(request.indices, images, request.showings()):
            # DALI would decode others with other pixels: see the head of this file.
            job = None
            if isinstance(image, EncodedImage) and image.plain and image.orientation == 1:
                frame = self._transform.frame(image, request.image_size, showing, index)
                job = _job(image, frame)
            opened.append(_Opened(image, showing, job))
        return opened

    def _gather(
        self,
        request: Request,
        opened: Iterator[_Opened],
        made: Iterator[Optional[torch.Tensor]],
    ) -> ReadBatch:
        """Gather a micro batch.

        Args:
            request: of the micro batch.
            opened: its images.
            made: pixels of those that have a job, None where DALI failed.
        """
        size = request.image_size
        # On the device of the run: an image that DALI did not make is copied there.
        images = torch.empty(
            (self._reader.rows, 3, size, size),
            dtype=torch.uint8,
            device=self._device,
            memory_format=torch.channels_last,
        )
        damaged: List[str] = []

        def make_next(index: int) -> torch.Tensor:
            """Return the pixels of the next image, number `index` of the source."""
            image, showing, job = next(opened)
            pixels = None if job is None else next(made)
            if isinstance(image, UnreadableImage):
                raise image
            if pixels is not None:
                return self._transform.finish(pixels, showing, index)
            pixels = self._transform(image, size, showing, index)
            if image.damage:
                damaged.append(image.damage)
            return pixels

        batch = self._reader.gather(request, images, make_next)
        return batch._replace(damaged=tuple(damaged))


class _Dali:
    """A pipeline of DALI, run for one batch of at most `most` jobs at a time.

    Its threads end with this object.
    """

    def __init__(self, most: int, threads: int, device: torch.device):
        self._most = most
        self._threads = threads
        self._device = device
        self._pipeline: Any = None
        self._jobs: List[_Job] = []  # whose bytes DALI reads where they are

    def start(self, jobs: List[_Job]) -> None:
        """Begin a run of `jobs` of one size; none is no run."""
        self._jobs = jobs
        if not jobs:
            return
        # Anew after a failure, which leaves a pipeline of no use.
        if self._pipeline is None:
            self._pipeline = self._build()
        self._pipeline.feed_input("encoded", [job.encoded for job in jobs])
        for name in ("anchor", "shape"):
            self._feed(name, np.int32)
        for name in ("first", "last", "size"):
            self._feed(name, np.float32)
        self._pipeline.schedule_run()

    def _feed(self, name: str, dtype: type) -> None:
        """Feed a pair of numbers of each job."""
        pairs: np.ndarray = np.array([getattr(job, name) for job in self._jobs], dtype)
        self._pipeline.feed_input(name, pairs)

    def finish(self) -> List[Optional[torch.Tensor]]:
        """Return the images of the started jobs, uint8 [3, size, size] each.

        None where DALI fails, as on damaged files.
        """
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
        # One image fails the run of all, and the error does not name it.
        images_one_by_one: List[Optional[torch.Tensor]] = []
        for job in jobs:
            self.start([job])
            images_one_by_one += self.finish()
        return images_one_by_one

    def _build(self) -> Any:
        """Build the pipeline, whose inputs are the fields of a job."""
        from nvidia.dali import Pipeline

        on_gpu = self._device.type == "cuda"
        pipeline = Pipeline(
            self._most,
            self._threads,
            self._device.index if on_gpu else None,
            prefetch_queue_depth=1,  # runs are started one by one
        )
        with pipeline:
            pipeline.set_outputs(_resized(_decoded(on_gpu)))
        pipeline.build()
        return pipeline


def _decoded(on_gpu: bool) -> Any:
    """Return the decoded boxes of the jobs' images, as a node of the pipeline that is being built."""
    from nvidia.dali import fn, types

    number = types.DALIDataType
    # Read where they are, without a copy: `_Dali` holds the jobs until the run is over.
    encoded = fn.external_source(name="encoded", ndim=1, dtype=number.UINT8, no_copy=True)
    return fn.decoders.image_slice(
        encoded,
        _pair("anchor", number.INT32),
        _pair("shape", number.INT32),
        axis_names="HW",
        device="mixed" if on_gpu else "cpu",
        output_type=types.DALIImageType.RGB,
        adjust_orientation=False,
        affine=False,  # threads of several ranks would all be bound to the same cores
    )


def _resized(decoded: Any) -> Any:
    """Return the part of each box from `first` to `last`; mirrored where these are swapped."""
    from nvidia.dali import fn, types

    number = types.DALIDataType
    return fn.resize(
        decoded,
        size=_pair("size", number.FLOAT),
        roi_start=_pair("first", number.FLOAT),
        roi_end=_pair("last", number.FLOAT),
        interp_type=types.DALIInterpType.INTERP_LINEAR,
        antialias=True,
    )


def _pair(name: str, dtype: Any) -> Any:
    """Return the input `name`, two numbers a job."""
    from nvidia.dali import fn

    return fn.external_source(name=name, ndim=1, dtype=dtype)


def _job(image: EncodedImage, frame: Frame) -> _Job:
    """Return the job that makes the frame of an image."""
    box = frame.box
    # The square is cut out before it is resized, so its corners are needed in pixels of the box.
    down = box.height / frame.height
    right = box.width / frame.width
    row, column = frame.corner
    top = row * down
    bottom = (row + frame.size) * down
    sides = [column * right, (column + frame.size) * right]
    if frame.flip:
        sides.reverse()
    first_side, last_side = sides
    return _Job(
        encoded=np.frombuffer(image.encoded, np.uint8),
        anchor=(box.top, box.left),
        shape=(box.height, box.width),
        first=(top, first_side),
        last=(bottom, last_side),
        size=(frame.size, frame.size),
    )
