"""Image files and folders that a user names, to be classified: they have no labels."""

import os
from typing import List, Sequence

import numpy as np

from common.errors import DataError
from common.text import printable
from data.base import Names
from data.encoded import FileSource
from data.folder import Scan


class NamedFiles(FileSource):
    """Image files in the order in which they are named; all labels are 0.

    In the place of a folder are the JPEG and PNG files at any depth in it, sorted by their paths as
    bytes.

    has_folders: whether a folder is among those named.
    """

    def __init__(self, paths: Sequence[str]):
        """
        Args:
            paths: of files and folders. Files are not looked at before they are read.

        Raises:
            DataError: a folder cannot be listed, or has no images.
        """
        files: List[bytes] = []
        notes: List[str] = []
        self.has_folders = False
        for path in paths:
            if os.path.isdir(path):
                self.has_folders = True
                scan = Scan(path)
                files.extend(_images_in(scan, path))
                notes.extend(scan.notes())
            else:
                files.append(os.fsencode(path))
        self.place = ", ".join(map(printable, paths))
        self.classes = ()
        self.labels = np.zeros(len(files), np.int64)
        self.notes = tuple(notes)
        self._folder = b""  # paths are as they were named
        lengths = np.array([len(file) for file in files], dtype=np.uint64)
        self._paths = Names([b"".join(files)], [lengths])


def _images_in(scan: Scan, folder: str) -> List[bytes]:
    """Return the sorted paths of the images in a folder, which begin with the folder's.

    Args:
        scan: of the folder; it notes what is left out.
        folder: its path.

    Raises:
        DataError: there are none.
    """
    # Images beside folders count as well as those in them, so the folder is listed as its own child.
    found = [os.path.normpath(path) for path in scan.images(b".")]
    if not found:
        raise DataError(
            f"{folder}: no .jpg, .jpeg or .png files in it; name a folder that has some"
        )
    return [os.path.join(os.fsencode(folder), path) for path in sorted(found)]
