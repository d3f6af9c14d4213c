"""The files beside tar shards: an index of each, and one manifest that names them all.

docs/shards.md, Format, describes them.
"""

import json
import re
from typing import Any, Mapping, NamedTuple, Optional, Tuple

import numpy as np
import safetensors
import safetensors.numpy

from common.errors import DataError
from common.json_io import parse_json
from common.text import printable
from data.local import Folder, MissingFile
from recipe.images import MANIFEST

FORMAT = 1
_MOST_OF_INDEX = 2**28  # bytes: some five million images in a shard
_MOST_OF_MANIFEST = 2**25  # bytes: some 200,000 shards

_REMEDY = "python -m tools.shards index FOLDER"

# Names become paths: neither NUL nor half of a pair of UTF-16 can be in one.
_SHARD_NAME = re.compile(r"[^./\\\0\ud800-\udfff][^/\\\0\ud800-\udfff]*\.tar")

# In the order in which they are stored.
_ARRAYS = {
    "offsets": np.int64,
    "lengths": np.int64,
    "labels": np.int32,
    "crc32": np.uint32,
    "name_lengths": np.int32,
    "names": np.uint8,
}


# What reading a damaged index raises.
_DAMAGE = (
    safetensors.SafetensorError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
)


class Index(NamedTuple):
    """Where the images of a shard lie, in their order in the tar."""

    offsets: np.ndarray  # int64 [images], of the first byte of each image
    lengths: np.ndarray  # int64 [images], bytes
    labels: np.ndarray  # int32 [images]
    crc32: np.ndarray  # uint32 [images], of the image's bytes
    name_lengths: np.ndarray  # int32 [images], bytes of each name
    names: bytes
    bytes: int  # of the tar
    sha256: str  # of the tar
    plan: str  # digest of what pack made it from; "" for the shards of others


class Shard(NamedTuple):
    """A shard as the manifest lists it."""

    name: str
    bytes: int
    images: int
    sha256: str


class Manifest(NamedTuple):
    """The shards of a folder, in their order, and names of the classes by label."""

    classes: Tuple[str, ...]
    shards: Tuple[Shard, ...]
    # Of the source that pack made them from: see ClassNames. None for the shards of others, and
    # those of versions that did not store it.
    sorted: Optional[bool] = None


def index_name(shard: str) -> str:
    """Return the name of the file with the index of a `shard`."""
    return f"{shard}.index"


def encode_index(index: Index) -> bytes:
    """Return an `index` as it is stored; the same bytes for the same index."""
    # Arrays are all that safetensors stores; what is no array goes into the head as text.
    values = index._asdict()
    values["names"] = np.frombuffer(index.names, np.uint8)
    arrays = {name: np.ascontiguousarray(values[name], kind) for name, kind in _ARRAYS.items()}
    shard = {
        "format": FORMAT,
        "bytes": index.bytes,
        "sha256": index.sha256,
        "plan": index.plan,
    }
    return safetensors.numpy.save(arrays, {"shard": json.dumps(shard)})


def decode_index(encoded: bytes, place: str) -> Index:
    """Return the index in a file's bytes, checked for consistency.

    Args:
        encoded: the file's content.
        place: what errors call the file.

    Raises:
        DataError: it is damaged or of another format.
    """
    try:
        arrays = safetensors.numpy.load(encoded)
        shard = _head(encoded)
        _check_format(shard["format"], f"{place}: index")
        _check_arrays(arrays)
        index = Index(
            offsets=arrays["offsets"],
            lengths=arrays["lengths"],
            labels=arrays["labels"],
            crc32=arrays["crc32"],
            name_lengths=arrays["name_lengths"],
            names=arrays["names"].tobytes(),
            bytes=int(shard["bytes"]),
            sha256=str(shard["sha256"]),
            plan=str(shard["plan"]),
        )
        _check_consistent(index)
        return index
    except _DAMAGE as error:
        reason = str(error) or type(error).__name__
        raise DataError(f"{place}: damaged index ({reason}); make it anew: {_REMEDY}") from None


def _head(encoded: bytes) -> Any:
    """Return the numbers and texts of an index, which are in the head of its file.

    The length of the head comes first: see safetensors, "Format".
    """
    length = int.from_bytes(encoded[:8], "little")
    head = parse_json(encoded[8 : 8 + length])
    return parse_json(head["__metadata__"]["shard"])


def _check_arrays(arrays: Mapping[str, np.ndarray]) -> None:
    """Raise KeyError or ValueError for an array that is missing or of another kind."""
    for name, kind in _ARRAYS.items():
        array = arrays[name]
        if array.dtype != kind or array.ndim != 1:
            raise ValueError(f"{name} is {array.dtype} {list(array.shape)}")


def stored_index(folder: Folder, shard: str) -> Index:
    """Read a shard's index by itself.

    Args:
        folder: of the shards.
        shard: its name.

    Raises:
        MissingFile: there is none.
        DataError: it is damaged or of another format.
    """
    file = index_name(shard)
    return decode_index(folder.read(file, _MOST_OF_INDEX), folder.path(file))


def read_index(folder: Folder, shard: Shard, classes: int) -> Index:
    """Read a shard's index, and check that it fits the manifest and, where that is quick, the tar.

    Args:
        folder: of the shards.
        shard: as the manifest lists it.
        classes: how many the manifest names.

    Raises:
        DataError: it is missing or damaged, or does not fit.
    """
    place = folder.path(index_name(shard.name))
    try:
        index = stored_index(folder, shard.name)
    except MissingFile as error:
        raise DataError(f"{error}; make it: {_REMEDY}") from None
    # The index is of this tar as it is now, as the manifest lists it, and of classes that it names.
    size = folder.size(shard.name)
    if size not in (None, index.bytes):
        place = folder.path(shard.name)
        fault = f"{size:,} bytes, but its index is of {index.bytes:,}"
        remedy = "copy the shard again, or make the index anew"
        raise DataError(f"{place}: {fault}; {remedy}: {_REMEDY}")
    listed = (shard.bytes, shard.images, shard.sha256)
    if (index.bytes, len(index.labels), index.sha256) != listed:
        fault = f"of another shard than {MANIFEST} lists"
        raise DataError(f"{place}: {fault}; copy both again, or make them anew: {_REMEDY}")
    label = index.labels.max()
    if label >= classes:
        fault = f"label {label}, but {MANIFEST} names {classes} classes"
        raise DataError(f"{place}: {fault}; name all by --classes FILE: {_REMEDY}")
    return index


def encode_manifest(manifest: Manifest) -> bytes:
    """Return a `manifest` as it is stored: JSON, a shard a line."""
    # The digest of a source is one of these bytes: another form would be other images.
    shards = ",\n".join(json.dumps(shard._asdict()) for shard in manifest.shards)
    values = {"format": FORMAT, "classes": manifest.classes}
    if manifest.sorted is not None:
        values["sorted"] = manifest.sorted
    head = json.dumps(values)
    return f'{head[:-1]}, "shards": [\n{shards}\n]}}\n'.encode()


def read_manifest(folder: Folder) -> Manifest:
    """Read the manifest of a `folder`.

    Raises:
        MissingFile: there is none.
        DataError: it is damaged or of another format.
    """
    place = folder.path(MANIFEST)
    try:
        data = parse_json(folder.read(MANIFEST, _MOST_OF_MANIFEST))
        _check_format(data["format"], f"{place}: manifest")
        # Names are made printable as those of class folders are, since both are compared.
        shards = tuple(_checked_shard(**shard) for shard in data["shards"])
        classes = tuple(printable(name) for name in data["classes"])
        names = {shard.name for shard in shards}
        if not shards or not classes or len(names) < len(shards):
            raise ValueError("no shards, no classes, or a shard twice")
        are_sorted = data.get("sorted")
        if are_sorted is not None and not isinstance(are_sorted, bool):
            raise ValueError(f"sorted is {are_sorted!r}")
        return Manifest(classes, shards, are_sorted)
    except MissingFile as error:
        raise MissingFile(f"{error}; make it: {_REMEDY}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = f"make it anew: {_REMEDY} --classes FILE"
        raise DataError(f"{place}: damaged manifest ({error}); {remedy}") from None


def _check_format(version: Any, file: str) -> None:
    """Raise DataError for a file that another version wrote."""
    if version != FORMAT:
        fault = f"{file} of format {version}, but this version reads {FORMAT}"
        raise DataError(f"{fault}; make it anew: {_REMEDY}")


def _checked_shard(name: str, bytes: int, images: int, sha256: str) -> Shard:
    """Return a shard from the keys of a manifest. Raises ValueError, TypeError."""
    if not _SHARD_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a shard")
    # By type: true and false are integers to isinstance.
    are_counts = all(type(amount) is int and amount > 0 for amount in (bytes, images))
    if not are_counts or not isinstance(sha256, str):
        raise ValueError(f"{name}: {bytes!r} bytes, {images!r} images, SHA-256 {sha256!r}")
    return Shard(name, bytes, images, sha256)


def _check_consistent(index: Index) -> None:
    """Raise ValueError for arrays that do not fit each other or the shard."""
    arrays = (index.offsets, index.lengths, index.labels, index.crc32, index.name_lengths)
    counts = {len(array) for array in arrays}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"arrays of {sorted(counts)} images")
    # Images follow each other in the tar, with something or nothing between them. Each is compared
    # with the room behind its offset, as a sum with a damaged length could be beyond 64 bits.
    have_place = (index.offsets >= 0).all() and (index.lengths >= 0).all()
    are_inside = (index.lengths <= index.bytes - index.offsets).all()
    gaps = np.diff(index.offsets)
    are_apart = (index.lengths[:-1] <= gaps).all()
    if not (have_place and are_inside and are_apart):
        raise ValueError("images overlap or lie outside the shard")
    # The largest label is compared with the manifest, which has the classes.
    least = index.labels.min()
    if least < 0:
        raise ValueError(f"label {least}")
    # In 64 bits: a few damaged lengths would overflow the 32 of the array.
    name_bytes = index.name_lengths.sum(dtype=np.int64)
    if index.name_lengths.min() < 1 or name_bytes != len(index.names):
        raise ValueError("names do not add up")
