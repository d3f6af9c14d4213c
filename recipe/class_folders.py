"""What a class folder is and which of its files are images: for counting before a run, and for
reading.
"""

import os
from typing import Callable, Iterator, List, Optional, Sequence, Tuple

from common.errors import DataError

# Folders that file systems, archives and storage servers make by themselves; some hold small copies
# of the images.
NOT_OF_THE_USER = (
    b"lost+found",
    b"@eaDir",
    b"#recycle",
    b"#snapshot",
    b"@Recycle",
    b"@Recently-Snapshot",
    b"$RECYCLE.BIN",
    b"System Volume Information",
    b"__MACOSX",
)

_EXTENSIONS = (b".jpg", b".jpeg", b".png")
# A user who has these beside others may think that they are read.
_OTHER_IMAGES = (
    b".avif .bmp .gif .heic .heif .jfif .jp2 .jpe .jxl .pbm .pgm .ppm .tga .tif .tiff .webp".split()
)
# Files that Windows makes by itself.
_OF_DESKTOPS = (b"thumbs.db", b"desktop.ini")


def class_folders(folder: str) -> Tuple[str, ...]:
    """Return the names of the class folders in `folder`, in the order of their bytes.

    Raises:
        DataError: the folder cannot be listed, or has none.
    """
    names = sorted(entry.name for entry in _entries_of_classes(folder))
    if not names:
        raise DataError(f"{folder}: no class folders; it must hold one folder of images per class")
    return tuple(os.fsdecode(name) for name in names)


def class_folder_around(folder: str, inside: str) -> Optional[str]:
    """Return the name of the class folder in `folder` that another folder is or lies in.

    Links are followed.

    Args:
        folder: of the class folders.
        inside: the other folder.

    Returns:
        None if it lies in no class folder.

    Raises:
        DataError: the folder of the class folders cannot be listed.
    """
    # The slash that join appends keeps /data/train from being taken for a part of /data/training.
    target = os.path.join(os.path.realpath(os.fsencode(inside)), b"")
    around = os.path.realpath(os.fsencode(folder))
    for entry in _entries_of_classes(folder):
        path = os.path.join(around, entry.name)
        # Only of links: it asks the file system for each part of a path.
        if entry.is_symlink():
            path = os.path.realpath(path)
        if target.startswith(os.path.join(path, b"")):
            return os.fsdecode(entry.name)
    return None


def _entries_of_classes(folder: str) -> "List[os.DirEntry[bytes]]":
    """Return the class folders in `folder`, in no order. Raises DataError."""
    # As bytes: names that are no UTF-8 sort, and are found again, like all others.
    place = os.fsencode(folder)
    return [
        entry
        for entry in listed(place)
        if is_folder(entry) and why_left_out(entry, [place]) is None
    ]


def listed(folder: bytes) -> "List[os.DirEntry[bytes]]":
    """Return the entries of `folder` that are not hidden. Raises DataError."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(b".")]
    except OSError as error:
        raise DataError(f"{os.fsdecode(folder)}: {error.strerror}") from None


def is_folder(entry: "os.DirEntry[bytes]") -> bool:
    """Return whether `entry` is a folder, or a link to one."""
    # Of a link DirEntry.is_dir raises where the link leads to itself.
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def is_image(path: bytes) -> bool:
    """Return whether a path has the extension of a JPEG or PNG file."""
    return os.path.splitext(path)[1].lower() in _EXTENSIONS


def why_left_out(entry: "os.DirEntry[bytes]", around: Sequence[bytes]) -> Optional[str]:
    """Return the kind of a folder or link in which images are not looked for; None for all others.

    Args:
        entry: of a folder.
        around: paths of the folders that the entry lies in.
    """
    if entry.name in NOT_OF_THE_USER and is_folder(entry):
        return "folders of file systems and storage servers"
    if not entry.is_symlink():
        return None
    # A link to a folder around it would make the walk endless. The slash that join appends keeps
    # /data/train from being taken for a part of /data/training.
    target = os.path.join(os.path.realpath(entry.path), b"")
    if any(os.path.join(os.path.realpath(folder), b"").startswith(target) for folder in around):
        return "links that lead back to a folder around them"
    return None


def images_below(
    folder: bytes,
    name: bytes,
    leave_out: Callable[[str, str, bytes], None],
    around: Tuple[bytes, ...] = (),
) -> Iterator[bytes]:
    """Yield the paths of the images at any depth in a folder `name` in `folder`, relative to
    `folder`, in no order.

    Args:
        folder: to which paths are relative.
        name: of a folder in it.
        leave_out: called with what is left out: its kind, the extension of an image, and the path.
        around: folders between `folder` and this one.

    Raises:
        DataError: a folder cannot be listed.
    """
    place = os.path.join(folder, name)
    inside = (*(around or (folder,)), place)
    for entry in listed(place):
        path = name + b"/" + entry.name
        # Extensions first: the kind of an entry can cost a call to the file system. An image's name
        # on something that is no file is found when it is read.
        if is_image(entry.name):
            yield path
            continue
        kind = os.path.splitext(entry.name)[1].lower()
        reason = why_left_out(entry, inside)
        if reason is not None:
            leave_out(reason, "", path)
        elif is_folder(entry):
            yield from images_below(folder, path, leave_out, inside)
        elif kind in _OTHER_IMAGES:
            leave_out("images that are not named .jpg, .jpeg or .png", f" {kind.decode()}", path)
        elif entry.name.lower() not in _OF_DESKTOPS:
            leave_out("files that are not named .jpg, .jpeg or .png", "", path)
