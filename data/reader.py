"""From a request to a micro batch of pixels: where images are opened, framed and gathered."""

from typing import Callable, List, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from data import crops
from data.base import MemorySource, Pixels, Source, UnreadableImage
from data.batches import ReadBatch, Request
from data.transforms import Training, Transform

_PADDING_INDEX = -1


class Reader(Dataset):
    """Loads requested micro batches of `rows` images.

    It lives in the workers, or in the training process where there are none.
    """

    def __init__(self, source: Source, rows: int, transform: Transform):
        """
        Args:
            source: of the images.
            rows: images of a micro batch, padding included.
            transform: makes the model's pixels of an image.
        """
        self.source = source
        self.rows = rows
        self.transform = transform
        # Here, so that workers find the function compiled.
        in_memory = isinstance(source, MemorySource)
        self._crops_at_once = in_memory and crops.available(transform.interpolation)

    def __getitem__(self, request: Request) -> ReadBatch:
        """Read the micro batch of a `request`."""
        if self._crops_at_once:
            return self._cropped_at_once(request)
        size = request.image_size
        opened = iter(zip(self.source.open_all(request.indices), request.showings()))
        damaged: List[str] = []

        def read_next(index: int) -> torch.Tensor:
            """Return the pixels of the next image, number `index` of the source."""
            image, showing = next(opened)
            if isinstance(image, UnreadableImage):
                raise image
            pixels = self.transform(image, size, showing, index)
            if image.damage:
                damaged.append(image.damage)
            return pixels

        batch = self.gather(request, self._empty_images(size), read_next)
        return batch._replace(damaged=tuple(damaged))

    def gather(
        self,
        request: Request,
        images: torch.Tensor,
        pixels: Callable[[int], torch.Tensor],
    ) -> ReadBatch:
        """Gather a micro batch, without the images that cannot be read.

        Args:
            request: of the micro batch.
            images: uint8 [rows, 3, size, size], which is filled and padded with black.
            pixels: called for each index of the request, in order; returns uint8 [3, size, size].
                Its UnreadableImage is caught here: torch would wrap it into a worker's traceback.
        """
        # Images that can be read move up, so that padding is at the end.
        read: List[int] = []
        unreadable: List[str] = []
        for index in request.indices:
            try:
                images[len(read)] = pixels(index)
                read.append(index)
            except UnreadableImage as error:
                unreadable.append(str(error))
        return self._micro_batch(request, images, read, unreadable)

    def _cropped_at_once(self, request: Request) -> ReadBatch:
        """Read a micro batch of images that are in memory."""
        assert isinstance(self.source, MemorySource)
        showings = request.showings()
        images = self._empty_images(request.image_size)
        pixels = self.source.pixels
        crops.crop(pixels, self._rows(request, showings, pixels), images)
        # torchvision augments image by image.
        if self.transform.augments:
            for row, index, showing in zip(images, request.indices, showings):
                row.copy_(self.transform.finish(row, showing, index))
        return self._micro_batch(request, images, request.indices, unreadable=())

    def _rows(
        self,
        request: Request,
        showings: Sequence[int],
        pixels: torch.Tensor,
    ) -> np.ndarray:
        """Return the plans of images that are all in memory: see data/crops.py.

        Args:
            request: of the micro batch.
            showings: of its images.
            pixels: of all images, uint8 [n, 3, height, width].
        """
        numbered = list(zip(showings, request.indices))
        # Draws of whole micro batches in Python would take as long as their crops.
        if isinstance(self.transform, Training):
            return crops.draw(
                request.indices,
                [self.transform.draw_key(showing, index) for showing, index in numbered],
                self.transform.data,
                height=pixels.shape[2],
                width=pixels.shape[3],
                size=request.image_size,
            )
        any_image = Pixels(pixels[0])  # all have its size
        frames = [
            self.transform.frame(any_image, request.image_size, showing, index)
            for showing, index in numbered
        ]
        return crops.rows_of(request.indices, frames)

    def _micro_batch(
        self,
        request: Request,
        images: torch.Tensor,
        read: Sequence[int],
        unreadable: Sequence[str],
    ) -> ReadBatch:
        """Return the micro batch of the images that were read, and pad it.

        Args:
            request: of the micro batch.
            images: uint8 [rows, 3, size, size], of which the first len(read) are written.
            read: indices of these images.
            unreadable: why others were left out.
        """
        # Memory is not cleared when it is taken: padding would show images of before.
        valid = len(read)
        images[valid:] = 0
        labels = np.zeros(len(images), np.int64)
        labels[:valid] = self.source.labels[read]
        indices = np.full(len(images), _PADDING_INDEX, np.int64)
        indices[:valid] = read
        return ReadBatch(
            images=images,
            labels=labels,
            indices=indices,
            valid=valid,
            number=request.number,
            step=request.step,
            unreadable=tuple(unreadable),
        )

    def _empty_images(self, size: int) -> torch.Tensor:
        """Return uint8 [rows, 3, size, size], channels last as decoding and resizing give them."""
        shape = (self.rows, 3, size, size)
        strides = (3 * size * size, 1, 3 * size, 3)
        if get_worker_info() is None:
            return torch.empty_strided(shape, strides, dtype=torch.uint8)
        # In shared memory, to which a worker's images would otherwise be copied.
        storage = torch.UntypedStorage._new_shared(self.rows * strides[0])
        return torch.empty(0, dtype=torch.uint8).set_(storage, 0, shape, strides)
