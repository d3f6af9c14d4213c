"""Images as JPEG and PNG files: headers are read at once, pixels only as far as they are needed."""

import abc
import os
from typing import Optional

import torch

from common.files import read_regular
from common.text import printable
from data import decode, jpeg
from data.base import Box, Image, Names, Pixels, Source, UnreadableImage

# Of the image: larger boxes take longer by themselves than within the whole.
_LARGEST_PART = 0.6


class EncodedImage(Image):
    """A JPEG or PNG file, checked as far as its header.

    Of a JPEG only the box is decoded where that is less work and the platform has a decoder for it;
    the pixels are those of the whole image. A box that comes smaller may reach one small pixel
    beyond the requested one.

    plain: a complete JPEG that every decoder takes: Huffman-coded, 8 bits, grey or three colours.
    orientation: of EXIF, 1 to 8; it is applied to `height` and `width`.
    """

    def __init__(self, encoded: bytes, name: str):
        """
        Args:
            encoded: the file's content.
            name: what errors call the file.

        Raises:
            UnreadableImage: see `decode.read_header`.
        """
        header = decode.read_header(encoded, name)
        self.encoded = encoded
        self._name = name
        self.damage = ""
        self.orientation = header.orientation
        # Decoders of parts do not look at what follows the box; whole decoding says what is wrong
        # with the file.
        self.plain = header.plain and decode.jpeg_ends(encoded, header)
        self._stored_size = (header.height, header.width)
        self.height = header.height
        self.width = header.width
        if decode.swaps_axes(self.orientation):
            self.height = header.width
            self.width = header.height

    def pixels(self, box: Optional[Box] = None, enough: Optional[int] = None) -> torch.Tensor:
        """Decode a `box`, or the whole image: see `Image.pixels`."""
        # Whole decoding is the way out of all that decoders of parts refuse.
        part = None
        try:
            if box is not None and self.plain:
                part = self._part(box, enough)
        except MemoryError:
            fault = f"not enough memory for {self.width} x {self.height} pixels"
            raise UnreadableImage(f"{self._name}: {fault}") from None
        if part is not None:
            return part
        image = decode.decode(self.encoded, self._name, complain=self._complain)
        return Pixels(image).pixels(box)

    def _complain(self, complaint: str) -> None:
        """Take note of a decoder's complaint."""
        self.damage = f"{self._name}: damaged, but can be decoded ({complaint})"

    def _part(self, box: Box, enough: Optional[int]) -> Optional[torch.Tensor]:
        """Return a box by a decoder of parts, or None if that is for one of whole images."""
        stored = self._stored_box(box)
        is_small = box.height * box.width <= _LARGEST_PART * self.height * self.width
        shorter = min(box.height, box.width)
        factor = jpeg.largest_factor(shorter, enough)
        # The scaled decoder makes all of the image, of which the box is cut out.
        if factor > 1:
            pixels = jpeg.scaled(self.encoded, stored, factor, self._stored_size, self._complain)
        elif is_small:
            pixels = jpeg.region(self.encoded, stored)
        else:
            return None
        return None if pixels is None else decode.upright(pixels, self.orientation)

    def _stored_box(self, box: Box) -> Box:
        """Return where a box of the upright image is stored: the inverse of `decode.upright`."""
        # In the reverse order of upright(): mirror first, then swap the axes.
        top, left, height, width = box
        vertical, horizontal = decode.mirrored(self.orientation)
        if vertical:
            top = self.height - top - height
        if horizontal:
            left = self.width - left - width
        if decode.swaps_axes(self.orientation):
            return Box(left, top, width, height)
        return Box(top, left, height, width)


def read_image(path: str) -> bytes:
    """Read the whole file at `path`.

    Raises:
        UnreadableImage: it cannot be read, is no regular file, or is too long.
    """
    # Bounded, and of regular files only: a pipe or a device in a folder of images would never end.
    try:
        return read_regular(path, decode.MAX_MEMORY)
    except OSError as error:
        raise UnreadableImage(f"{path}: {error.strerror}") from None
    # A table of Hugging Face may have anything where a path is expected.
    except ValueError:
        raise UnreadableImage(printable(f"{path}: the character NUL in its name")) from None
    except MemoryError:
        raise UnreadableImage(f"{path}: not enough memory to read it") from None


class EncodedSource(Source):
    """A source of files."""

    @abc.abstractmethod
    def encoded(self, index: int) -> bytes:
        """Return the file of image number `index`.

        Raises:
            UnreadableImage: it cannot be read.
        """

    def open(self, index: int) -> EncodedImage:
        """Read the file of image number `index`, and its header: see `Source.open`."""
        return EncodedImage(self.encoded(index), self.name(index))

    def read(self, index: int) -> torch.Tensor:
        """Decode image number `index`: see `Source.read`."""
        return self.open(index).pixels()


class FileSource(EncodedSource):
    """A source whose images are files of this machine, each in one of its own.

    Subclasses set `_folder`, to which paths are relative, and `_paths`, by number of the image.
    """

    _folder: bytes
    _paths: Names

    def name(self, index: int) -> str:
        """Return the path of image number `index`."""
        return printable(self._path(index))

    def encoded(self, index: int) -> bytes:
        """Read the file of image number `index`: see `EncodedSource.encoded`."""
        return read_image(self._path(index))

    def _path(self, index: int) -> str:
        """Return the path of an image, which may hold bytes that are no UTF-8."""
        return os.fsdecode(os.path.join(self._folder, self._paths[index]))
