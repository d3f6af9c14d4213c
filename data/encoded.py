"""Images as JPEG and PNG files: their headers are read at once, their pixels only as far as they are needed."""

import abc
from typing import Optional

import torch

from common.files import read_regular
from data import decode, jpeg
from data.base import Box, Image, Pixels, Source, UnreadableImage

_LARGEST_PART = 0.6  # of the image: larger boxes take longer by themselves than within the whole


class EncodedImage(Image):
    """A JPEG or PNG file, checked as far as its header.

    Of a JPEG only the box is decoded where that is less work and the platform has a decoder for it; the pixels are
    those of the whole image. A box that comes smaller may reach one small pixel beyond the requested one.

    plain: a complete JPEG that every decoder takes: Huffman-coded, 8 bits, grey or three colours. orientation: of EXIF,
    1 to 8; it is applied to `height` and `width`.
    """

    def __init__(self, encoded: bytes, name: str):
        """Raises UnreadableImage, see decode.decode."""
        header = decode.read_header(encoded, name)
        self.encoded, self._name = encoded, name
        self.damage = ""
        self._stored_size, self.orientation = (header.height, header.width), header.orientation
        # Decoders of parts do not look at what follows the box; whole decoding says what is wrong with the file.
        self.plain = header.plain and encoded.rfind(b"\xff\xd9") >= header.end
        self.height, self.width = self._stored_size[::-1] if self.orientation >= 5 else self._stored_size

    def pixels(self, box: Optional[Box] = None, enough: Optional[int] = None) -> torch.Tensor:
        try:
            part = self._part(box, enough) if box is not None and self.plain else None
        except MemoryError:
            raise UnreadableImage(f"{self._name}: not enough memory for {self.width} x {self.height} pixels") from None
        if part is not None:
            return part
        return Pixels(decode.decode(self.encoded, self._name, complain=self._complain)).pixels(box)

    def _complain(self, complaint: str) -> None:
        self.damage = f"{self._name}: damaged, but can be decoded ({complaint})"

    def _part(self, box: Box, enough: Optional[int]) -> Optional[torch.Tensor]:
        """The box by a decoder of parts, or None if that is for the decoder of whole images."""
        top, left, height, width = box
        vertical, horizontal = decode.mirrored(self.orientation)  # the inverse of decode.upright
        top = self.height - top - height if vertical else top
        left = self.width - left - width if horizontal else left
        stored = Box(left, top, width, height) if self.orientation >= 5 else Box(top, left, height, width)
        factor = jpeg.largest_factor(min(height, width), enough)
        if factor > 1:
            pixels = jpeg.scaled(self.encoded, stored, factor, *self._stored_size, self._complain)
        elif height * width <= _LARGEST_PART * self.height * self.width:
            pixels = jpeg.region(self.encoded, stored)
        else:
            return None
        return None if pixels is None else decode.upright(pixels, self.orientation)


def read_image(path: str) -> bytes:
    """The whole file at `path`. Raises UnreadableImage: it cannot be read, is no regular file, or is too long."""
    try:
        return read_regular(path, decode.MAX_MEMORY)
    except OSError as error:
        raise UnreadableImage(f"{path}: {error.strerror}") from None
    except MemoryError:
        raise UnreadableImage(f"{path}: not enough memory to read it") from None


class EncodedSource(Source):
    """A source of files."""

    @abc.abstractmethod
    def encoded(self, index: int) -> bytes:
        """The file of an image. Raises UnreadableImage."""

    def open(self, index: int) -> EncodedImage:
        return EncodedImage(self.encoded(index), self.name(index))

    def read(self, index: int) -> torch.Tensor:
        return self.open(index).pixels()
