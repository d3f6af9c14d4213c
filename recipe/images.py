"""Where the images of a recipe lie, as far as that is known without opening any."""

from __future__ import annotations

import os
from typing import List

from recipe.config import Data
from recipe.errors import DataError


def split_folder(data: Data, split: str) -> str:
    """The folder, or the URL, of the "train" or "validation" images. Raises DataError where there is no such folder."""
    if data.root is None:
        raise DataError("data.root is not set; name the folder of the images: data.root=/path/to/images")
    name_key = "train_folder" if split == "train" else "validation_folder"
    name = getattr(data, name_key)
    folder = below(data.root, name)
    if data.source == "shards" and "://" in data.root:
        return folder  # whether it is there, its manifest tells
    if not os.path.isdir(data.root):
        raise DataError(f"{data.root}: no such folder; correct data.root")
    if not os.path.isdir(folder):
        raise DataError(f"{data.root}: no folder {name!r}; set data.{name_key} to the folder of the {split} images")
    return folder


def below(root: str, name: str) -> str:
    """A folder in a folder or below a URL."""
    return f"{root.rstrip('/')}/{name}" if "://" in root else os.path.join(root, name)


def describe(data: Data) -> List[str]:
    """The plan's line about folders on this machine: whether they are there; none for other sources."""
    if data.source not in ("folder", "shards"):
        return []
    try:
        folders = [split_folder(data, split) for split in ("train", "validation")]
    except DataError as error:
        return [f"images     not found here: {error}"]
    return [] if "://" in folders[0] else [f"images     found: {', '.join(folders)}"]
