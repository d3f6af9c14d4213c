"""Targets of damaged input: each either takes it, or refuses it by the error that it promises."""

import contextlib
import io
import random
import tarfile
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Tuple, Type

import numpy as np
import torch
from PIL import Image

from benchmarks import ROOT
from benchmarks.fuzz import commands, folders, names, orientations, overrides, programs
from benchmarks.fuzz.mutations import mutated
from common.errors import UserError
from data.base import Box
from data.encoded import EncodedImage
from data.shards import ShardsSource
from recipe import batch, loading
from tools import shards
from training import weights
from training.checkpoint import CheckpointFolder

_Make = Callable[[List[bytes], random.Random], bytes]
_IMAGES = 10_000  # of a recipe whose data say no number
_ORIENTATION_TAG = 0x0112  # of EXIF


class Target(NamedTuple):
    """Something that reads files.

    seeds: returns whole files, given a folder to work in.
    read: reads damaged bytes, in that folder.
    refuses: errors that it may raise.
    share: of all inputs.
    make: returns an input, given the seeds and random draws.
    """

    seeds: Callable[[Path], List[bytes]]
    read: Callable[[bytes, Path], None]
    refuses: Tuple[Type[Exception], ...] = (UserError,)
    share: float = 0.1
    make: _Make = mutated


class _ImageFormat(NamedTuple):
    """How an image is stored.

    mode: of Pillow.
    options: of Pillow's `save`.
    """

    mode: str
    options: Dict[str, Any]


def _recipes(folder: Path) -> List[bytes]:
    """Return the recipes that come along, as they are written and as they are resolved."""
    files = sorted((ROOT / "configs").rglob("*.yaml"))
    paths = [path for path in files if path.parent.name != "sweeps"]
    # The one that a recipe extends would not be found from the folder of the damaged ones.
    written = [path.read_bytes() for path in paths if "extends:" not in path.read_text()]
    resolved = [loading.dump(loading.load(path)).encode() for path in paths]
    return written + resolved


def _read_recipe(path: Path) -> None:
    """Load a recipe, and work out its batch and its lengths."""
    recipe = loading.load(path)
    divided = batch.divide(recipe, recipe.parallel.replicas or 1)
    assert divided.global_ == divided.micro * divided.accumulation * divided.replicas
    batch.lengths(recipe, recipe.data.images("train") or _IMAGES)


def _fresh_or_damaged(fresh: Callable[[random.Random], bytes]) -> _Make:
    """Return a maker of inputs, of which half are made anew, and whole, and half are damaged."""

    def make(seeds: List[bytes], draws: random.Random) -> bytes:
        """Return an input of random `draws`, or damage to `seeds`."""
        return fresh(draws) if draws.random() < 0.5 else mutated(seeds, draws)

    return make


def _images(folder: Path) -> List[bytes]:
    """Return the same image in all forms that are read."""
    draws = np.random.default_rng(0)
    squares = draws.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    pixels = np.kron(squares, np.ones((12, 12, 1), dtype=np.uint8))
    image = Image.fromarray(pixels)
    deep_grey = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    files = []
    for mode, options in _image_formats():
        stream = io.BytesIO()
        # Pillow converts nothing to 16 bits.
        converted = deep_grey if mode == "I;16" else image.convert(mode)
        converted.save(stream, **options)
        files.append(stream.getvalue())
    return files


def _image_formats() -> List[_ImageFormat]:
    """Return the forms of JPEG and PNG files."""
    turned = Image.Exif()
    turned[_ORIENTATION_TAG] = 6
    return [
        _ImageFormat("RGB", {"format": "JPEG"}),
        _ImageFormat("RGB", {"format": "JPEG", "progressive": True, "quality": 50}),
        _ImageFormat("L", {"format": "JPEG"}),
        _ImageFormat("CMYK", {"format": "JPEG"}),
        _ImageFormat("RGB", {"format": "JPEG", "exif": turned}),
        _ImageFormat("RGB", {"format": "JPEG", "subsampling": 0, "restart_marker_rows": 1}),
        _ImageFormat("RGB", {"format": "PNG"}),
        _ImageFormat("P", {"format": "PNG"}),
        _ImageFormat("LA", {"format": "PNG"}),
        _ImageFormat("I;16", {"format": "PNG"}),
        _ImageFormat("1", {"format": "PNG"}),
    ]


def _read_image(data: bytes, folder: Path) -> None:
    """Decode an image whole, a box of it, and a box of it smaller."""
    image = EncodedImage(data, "damaged")
    box = Box(
        image.height // 4,
        image.width // 4,
        max(1, image.height // 2),
        max(1, image.width // 2),
    )
    for part, enough in ((None, None), (box, None), (box, 8)):
        pixels = image.pixels(part, enough)
        assert pixels.dtype == torch.uint8 and pixels.shape[0] == 3


def _tars(folder: Path) -> List[bytes]:
    """Return a tar of four samples in each format."""
    images = _images(folder)
    tars = []
    for form in (tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=form) as archive:
            for number in range(4):
                # The newer formats have headers of their own for names that are too long for USTAR.
                is_long = number == 3 and form != tarfile.USTAR_FORMAT
                key = f"{'long' * 30}{number:04}" if is_long else f"{number:04}"
                _add(archive, f"{key}.cls", b"%d\n" % (number % 2))
                _add(archive, f"{key}.jpg", images[number])
        tars.append(stream.getvalue())
    return tars


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file to an archive."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def _read_tar(data: bytes, folder: Path) -> None:
    """Index a shard as one of another maker, then open it and read all its images."""
    for path in folder.iterdir():
        path.unlink()
    (folder / "part-0.tar").write_bytes(data)
    commands.output_of(shards.main, ["index", str(folder)])
    _read_all(folder)


def _side_files(suffix: str, folder: Path) -> List[bytes]:
    """Return the manifest or the indexes that stand beside a shard."""
    _read_tar(_tars(folder)[0], folder)
    return [path.read_bytes() for path in _with_suffix(suffix, folder)]


def _read_side_file(suffix: str, data: bytes, folder: Path) -> None:
    """Read a shard with another manifest or index beside it."""
    for path in _with_suffix(suffix, folder):
        path.write_bytes(data)
    _read_all(folder)


def _with_suffix(suffix: str, folder: Path) -> List[Path]:
    """Return the files of a folder whose names end so."""
    return [path for path in folder.iterdir() if path.suffix == suffix]


def _read_all(folder: Path) -> None:
    """Read all images of the shards in a folder; single ones may be unreadable."""
    source = ShardsSource(str(folder), window=4)
    for image in source.open_all(range(len(source))):
        if not isinstance(image, Exception):
            with contextlib.suppress(UserError):
                image.pixels()


def _checkpoints(folder: Path) -> List[bytes]:
    """Return a checkpoint, and the description of its tensors."""
    checkpoints = CheckpointFolder(folder / "whole", keep_last=2, keep_best=False)
    tensors = {
        "a": torch.arange(12.0).view(3, 4),
        "b": torch.zeros(2, dtype=torch.float16),
    }
    content = {
        "engine": {"weights": tensors},
        "recipe": "run: {epochs: 1}",
        "classes": ["x"],
    }
    path = checkpoints.save(1, content, top1=0.5)
    return programs.with_members(folder, path.read_bytes(), ("data.pkl",))


def _read_weights(path: Path) -> None:
    """Read the weights of a file."""
    weights.read(str(path))


def _tensors(folder: Path) -> List[bytes]:
    """Return a safetensors file of our own."""
    from safetensors.torch import save

    tensors = {"a": torch.arange(120.0).view(3, 40), "b": torch.zeros(2)}
    metadata = {
        "recipe": "run: {epochs: 1}",
        "classes": '["cat", "dog"]',
        "weights": "trained",
    }
    return [save(tensors, metadata)]


def _file(name: str, read: Callable[[Path], None]) -> Callable[[bytes, Path], None]:
    """Return a reader of damaged bytes, made from one of files.

    Of a zip file the bytes may be those of a member.
    """

    def read_bytes(data: bytes, folder: Path) -> None:
        """Put `data` into a file of the `folder`, and read it."""
        (folder / name).write_bytes(programs.with_member(data, folder))
        read(folder / name)

    return read_bytes


# Shares need not add up to one. Slow targets have small ones, the decoders of images the largest.
TARGETS: Dict[str, Target] = {
    "recipes": Target(
        _recipes,
        _file("recipe.yaml", _read_recipe),
        share=0.15,
    ),
    "overrides": Target(
        overrides.seeds,
        overrides.read,
        make=_fresh_or_damaged(overrides.random_override),
    ),
    "images": Target(
        _images,
        _read_image,
        share=0.3,
    ),
    "orientation": Target(
        orientations.seeds,
        orientations.read,
        make=_fresh_or_damaged(orientations.random_file),
    ),
    "tars": Target(
        _tars,
        _read_tar,
    ),
    "tar names": Target(
        names.seeds,
        names.read,
        make=_fresh_or_damaged(names.random_tar),
    ),
    "shard manifests": Target(
        partial(_side_files, ".json"),
        partial(_read_side_file, ".json"),
    ),
    "shard indexes": Target(
        partial(_side_files, ".index"),
        partial(_read_side_file, ".index"),
    ),
    "run folders": Target(
        folders.runs,
        folders.read_run,
        share=0.01,
    ),
    "studies": Target(
        folders.studies,
        folders.read_study,
        share=0.01,
    ),
    "devkits": Target(
        programs.devkits,
        programs.read_devkit,
        share=0.05,
    ),
    ".pt2": Target(
        programs.torch_programs,
        _file("damaged.pt2", programs.read_program),
        share=0.05,
    ),
    ".onnx": Target(
        programs.onnx_programs,
        programs.read_onnx,
        share=0.05,
    ),
    "safetensors' metadata": Target(
        programs.metadata,
        _file("damaged.safetensors", programs.read_metadata),
        share=0.05,
    ),
    "checkpoints": Target(
        _checkpoints,
        _file("damaged.pt", _read_weights),
    ),
    "safetensors": Target(
        _tensors,
        _file("damaged.safetensors", _read_weights),
        share=0.05,
    ),
}
