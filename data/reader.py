"""From a request to a micro batch of pixels: where images are opened, framed and gathered."""

from typing import Callable, List

import torch
from torch.utils.data import Dataset, get_worker_info

from data.base import Source, UnreadableImage
from data.batches import Loaded, Request
from data.transforms import Transform


class Reader(Dataset):
    """Loads requested micro batches; lives in the workers, or in the training process if there are none."""

    def __init__(self, source: Source, rows: int, transform: Transform):
        """Args: rows: images of a micro batch, with those that are padding."""
        self._source, self._rows, self._transform = source, rows, transform

    def __getitem__(self, request: Request) -> Loaded:
        def pixels(index: int) -> torch.Tensor:
            image = next(opened)
            if isinstance(image, UnreadableImage):
                raise image
            return self._transform(image, size, request.epoch, index)

        size = request.image_size
        # Channels last in memory, as decoding and resizing give them.
        shape, strides = (self._rows, 3, size, size), (3 * size * size, 1, 3 * size, 3)
        if get_worker_info() is None:
            images = torch.empty_strided(shape, strides, dtype=torch.uint8)
        else:  # in memory that processes share, to which the answer would otherwise be copied
            storage = torch.UntypedStorage._new_shared(self._rows * strides[0])
            images = torch.empty(0, dtype=torch.uint8).set_(storage, 0, shape, strides)
        opened = iter(self._source.open_all(request.indices))
        return gathered(request, images, self._source, pixels)


def gathered(request: Request, images: torch.Tensor, source: Source, pixels: Callable[[int], torch.Tensor]) -> Loaded:
    """The answer to a request; images that cannot be read are named in it and left out.

    Args:
        images: room for it, uint8 [rows, 3, size, size]; rows that are not filled become 0.
        pixels: from an index of the request to uint8 [3, size, size]; called for each, in order. Raises
            UnreadableImage, which is not raised out of here: torch would wrap it into the traceback of a worker.
    """
    indices: List[int] = []
    unreadable = []
    for index in request.indices:
        try:
            images[len(indices)] = pixels(index)
        except UnreadableImage as error:
            unreadable.append(str(error))
        else:
            indices.append(index)
    images[len(indices) :] = 0
    labels = [int(source.labels[index]) for index in indices]
    return Loaded(images, labels, indices, request.number, request.step, tuple(unreadable))
