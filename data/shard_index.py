"""The files beside tar shards: an index of each, and one manifest that names them all (docs/shards.md, Format)."""

import json
import re
from typing import Any, NamedTuple, Tuple

import numpy as np
import safetensors
import safetensors.numpy

from common.errors import DataError
from common.json_io import parse_json
from common.text import printable
from data.local import Folder, MissingFile
from recipe.images import MANIFEST

FORMAT = 1
MOST_OF_INDEX = 2**28  # bytes: some five million images in a shard
_MOST_OF_MANIFEST = 2**25  # bytes: some 200,000 shards

_REMEDY = "python -m tools.shards index FOLDER"

_ARRAYS = {
    "offsets": np.int64, "lengths": np.int64, "labels": np.int32, "crc32": np.uint32, "name_lengths": np.int32,
    "names": np.uint8,
}  # fmt: skip


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
    name: str
    bytes: int
    images: int
    sha256: str


class Manifest(NamedTuple):
    classes: Tuple[str, ...]
    shards: Tuple[Shard, ...]


def index_name(shard: str) -> str:
    return f"{shard}.index"


def encode_index(index: Index) -> bytes:
    """An index as it is stored; the same bytes for the same index."""
    found = {**index._asdict(), "names": np.frombuffer(index.names, np.uint8)}
    arrays = {name: np.ascontiguousarray(found[name], kind) for name, kind in _ARRAYS.items()}
    shard = {"format": FORMAT, "bytes": index.bytes, "sha256": index.sha256, "plan": index.plan}
    return safetensors.numpy.save(arrays, {"shard": json.dumps(shard)})


def decode_index(encoded: bytes, place: str) -> Index:
    """The index in a file's bytes, checked for consistency. Errors call the file `place`. Raises DataError."""
    try:
        arrays = safetensors.numpy.load(encoded)
        header = parse_json(encoded[8 : 8 + int.from_bytes(encoded[:8], "little")])
        shard = parse_json(header["__metadata__"]["shard"])
        _check_format(shard["format"], f"{place}: index")
        for name, kind in _ARRAYS.items():
            if arrays[name].dtype != kind or arrays[name].ndim != 1:
                raise ValueError(f"{name} is {arrays[name].dtype} {list(arrays[name].shape)}")
        found = {**{name: arrays[name] for name in _ARRAYS}, "names": arrays["names"].tobytes()}
        index = Index(**found, bytes=int(shard["bytes"]), sha256=str(shard["sha256"]), plan=str(shard["plan"]))
        _check_consistent(index)
        return index
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        reason = str(error) or type(error).__name__
        raise DataError(f"{place}: damaged index ({reason}); make it anew: {_REMEDY}") from None


def read_index(folder: Folder, shard: Shard, classes: int) -> Index:
    """A shard's index, checked against manifest, number of classes and, where that is quick, tar. Raises DataError."""
    place = folder.path(index_name(shard.name))
    try:
        index = decode_index(folder.read(index_name(shard.name), MOST_OF_INDEX), place)
    except MissingFile as error:
        raise DataError(f"{error}; make it: {_REMEDY}") from None
    size, labels = folder.size(shard.name), index.labels
    fault = ""
    if size not in (None, index.bytes):
        place = folder.path(shard.name)
        fault = f"{size:,} bytes, but its index is of {index.bytes:,}; copy the shard again, or make the index anew:"
    elif (index.bytes, len(labels), index.sha256) != (shard.bytes, shard.images, shard.sha256):
        fault = f"of another shard than {MANIFEST} lists; copy both again, or make them anew:"
    elif labels.max() >= classes:
        fault = f"label {labels.max()}, but {MANIFEST} names {classes} classes; name all by --classes FILE:"
    if fault:
        raise DataError(f"{place}: {fault} {_REMEDY}")
    return index


def encode_manifest(manifest: Manifest) -> bytes:
    """A manifest as it is stored: JSON, a shard a line."""
    shards = ",\n".join(json.dumps(shard._asdict()) for shard in manifest.shards)
    head = json.dumps({"format": FORMAT, "classes": manifest.classes})
    return f'{head[:-1]}, "shards": [\n{shards}\n]}}\n'.encode()


def read_manifest(folder: Folder) -> Manifest:
    """The manifest of a folder. Raises MissingFile, DataError."""
    place = folder.path(MANIFEST)
    try:
        data = parse_json(folder.read(MANIFEST, _MOST_OF_MANIFEST))
        _check_format(data["format"], f"{place}: manifest")
        shards = tuple(_shard(**shard) for shard in data["shards"])
        classes = tuple(printable(name) for name in data["classes"])
        if not shards or not classes or len({shard.name for shard in shards}) < len(shards):
            raise ValueError("no shards, no classes, or a shard twice")
        return Manifest(classes, shards)
    except MissingFile as error:
        raise MissingFile(f"{error}; make it: {_REMEDY}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{place}: damaged manifest ({error}); make it anew: {_REMEDY}") from None


def _check_format(version: Any, file: str) -> None:
    if version != FORMAT:
        raise DataError(f"{file} of format {version}, but this version reads {FORMAT}; make it anew: {_REMEDY}")


def _shard(name: str, bytes: int, images: int, sha256: str) -> Shard:
    # Names become paths: neither NUL nor half of a pair of UTF-16 can be in one.
    if not re.fullmatch(r"[^./\\\0\ud800-\udfff][^/\\\0\ud800-\udfff]*\.tar", name):
        raise ValueError(f"{name!r} is no name of a shard")
    if not all(type(number) is int and number > 0 for number in (bytes, images)) or not isinstance(sha256, str):
        raise ValueError(f"{name}: {bytes!r} bytes, {images!r} images, SHA-256 {sha256!r}")
    return Shard(name, bytes, images, sha256)


def _check_consistent(index: Index) -> None:
    """Raises ValueError."""
    counts = {len(getattr(index, name)) for name in _ARRAYS if name != "names"}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"arrays of {sorted(counts)} images")
    ends = index.offsets + index.lengths
    in_order = (index.offsets[1:] >= ends[:-1]).all() and index.offsets[0] >= 0 and (index.lengths >= 0).all()
    if not in_order or ends[-1] > index.bytes:
        raise ValueError("images overlap or lie outside the shard")
    if index.labels.min() < 0:
        raise ValueError(f"label {index.labels.min()}")
    if index.name_lengths.min() < 1 or index.name_lengths.sum(dtype=np.int64) != len(index.names):
        raise ValueError("names do not add up")
