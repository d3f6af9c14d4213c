"""From a request to a micro batch of pixels: where images are opened, framed and gathered."""

from typing import Callable, List

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from data.base import Source, UnreadableImage
from data.batches import MicroBatch, Request
from data.transforms import Transform


class Reader(Dataset):
    """Loads requested micro batches of `rows` images; lives in the workers, or in the training process without any."""

    def __init__(self, source: Source, rows: int, transform: Transform):
        self.source, self.rows, self.transform = source, rows, transform

    def __getitem__(self, request: Request) -> MicroBatch:
        def pixels(index: int) -> torch.Tensor:
            image = next(opened)
            if isinstance(image, UnreadableImage):
                raise image
            made = self.transform(image, size, request.epoch, index)
            if image.damage:
                damaged.append(image.damage)
            return made

        size = request.image_size
        damaged: List[str] = []
        # Channels last in memory, as decoding and resizing give them.
        shape, strides = (self.rows, 3, size, size), (3 * size * size, 1, 3 * size, 3)
        if get_worker_info() is None:
            images = torch.empty_strided(shape, strides, dtype=torch.uint8)
        else:  # in shared memory, to which the images would otherwise be copied
            storage = torch.UntypedStorage._new_shared(self.rows * strides[0])
            images = torch.empty(0, dtype=torch.uint8).set_(storage, 0, shape, strides)
        opened = iter(self.source.open_all(request.indices))
        return self.gather(request, images, pixels)._replace(damaged=tuple(damaged))

    def gather(self, request: Request, images: torch.Tensor, pixels: Callable[[int], torch.Tensor]) -> MicroBatch:
        """The requested micro batch in `images`, uint8 [rows, 3, size, size], without those that cannot be read.

        `pixels` is called for each index of the request, in order, and returns uint8 [3, size, size]. Its
        UnreadableImage is caught here: torch would wrap it into the traceback of a worker.
        """
        found: List[int] = []
        unreadable = []
        for index in request.indices:
            try:
                images[len(found)] = pixels(index)
                found.append(index)
            except UnreadableImage as error:
                unreadable.append(str(error))
        valid = len(found)
        images[valid:] = 0
        labels, indices = np.zeros(len(images), np.int64), np.full(len(images), -1, np.int64)
        labels[:valid], indices[:valid] = self.source.labels[found], found
        return MicroBatch(images, labels, indices, valid, request.number, request.step, tuple(unreadable))
