"""Targets of damaged input: each either takes it, or refuses it by the error that it promises."""

import contextlib
import io
import random
import tarfile
from functools import partial
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Tuple, Type

import numpy as np
import torch
from PIL import Image

from benchmarks import ROOT
from benchmarks.fuzz import folders, names, orientations, overrides, programs
from benchmarks.fuzz.mutations import mutated
from common.errors import DONE, WRONG_INPUT, DataError, UserError
from data.base import Box
from data.encoded import EncodedImage
from data.shards import ShardsSource
from recipe import batch, loading
from tools import shards
from training import weights
from training.checkpoint import CheckpointFolder


class Target(NamedTuple):
    """Something that reads files.

    seeds: whole files, given a folder to work in. read: of damaged bytes, in that folder. refuses: what it may raise.
    share: of all inputs. made: an input from the seeds and the draws.
    """

    seeds: Callable[[Path], List[bytes]]
    read: Callable[[bytes, Path], None]
    refuses: Tuple[Type[Exception], ...] = (UserError,)
    share: float = 0.1
    made: Callable[[List[bytes], random.Random], bytes] = mutated


def _recipes(folder: Path) -> List[bytes]:
    """Those that come along, as they are written where they extend no other, and as they are resolved."""
    paths = [path for path in sorted((ROOT / "configs").rglob("*.yaml")) if path.parent.name != "sweeps"]
    written = [path.read_bytes() for path in paths if "extends:" not in path.read_text()]
    return written + [loading.dump(loading.load(path)).encode() for path in paths]


def _read_recipe(path: Path) -> None:
    recipe = loading.load(path)
    divided = batch.divide(recipe, recipe.parallel.replicas or 1)
    assert divided.global_ == divided.micro * divided.accumulation * divided.replicas
    batch.lengths(recipe, recipe.data.images("train") or 10_000)


def _fresh_or_damaged(fresh: Callable[[random.Random], bytes]) -> Callable[[List[bytes], random.Random], bytes]:
    """Inputs of which half are made anew, and whole, and half are damaged seeds."""
    return lambda seeds, draws: fresh(draws) if draws.random() < 0.5 else mutated(seeds, draws)


def _images(folder: Path) -> List[bytes]:
    draws = np.random.default_rng(0)
    pixels = np.kron(draws.integers(0, 256, (6, 8, 3), dtype=np.uint8), np.ones((12, 12, 1), dtype=np.uint8))
    image, found = Image.fromarray(pixels), []
    turned = Image.Exif()
    turned[0x0112] = 6
    for mode, options in (
        ("RGB", {"format": "JPEG"}), ("RGB", {"format": "JPEG", "progressive": True, "quality": 50}),
        ("L", {"format": "JPEG"}), ("CMYK", {"format": "JPEG"}), ("RGB", {"format": "JPEG", "exif": turned}),
        ("RGB", {"format": "JPEG", "subsampling": 0, "restart_marker_rows": 1}), ("RGB", {"format": "PNG"}),
        ("P", {"format": "PNG"}), ("LA", {"format": "PNG"}), ("I;16", {"format": "PNG"}), ("1", {"format": "PNG"}),
    ):  # fmt: skip
        stream = io.BytesIO()
        made = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257) if mode == "I;16" else image.convert(mode)
        made.save(stream, **options)
        found.append(stream.getvalue())
    return found


def _read_image(data: bytes, folder: Path) -> None:
    """Whole, a box of it, and a box of it smaller."""
    image = EncodedImage(data, "damaged")
    height, width = max(1, image.height // 2), max(1, image.width // 2)
    box = Box(image.height // 4, image.width // 4, height, width)
    for given in ((None, None), (box, None), (box, 8)):
        pixels = image.pixels(*given)
        assert pixels.dtype == torch.uint8 and pixels.shape[0] == 3


def _tars(folder: Path) -> List[bytes]:
    images = _images(folder)
    found = []
    for form in (tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=form) as archive:
            for number in range(4):
                name = f"{'long' * 30}{number:04}" if number == 3 and form != tarfile.USTAR_FORMAT else f"{number:04}"
                for suffix, content in (("cls", b"%d\n" % (number % 2)), ("jpg", images[number])):
                    info = tarfile.TarInfo(f"{name}.{suffix}")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
        found.append(stream.getvalue())
    return found


def _read_tar(data: bytes, folder: Path) -> None:
    """Indexed as shards of other makers are, then opened and all its images read."""
    for path in folder.iterdir():
        path.unlink()
    (folder / "part-0.tar").write_bytes(data)
    silent = io.StringIO()
    with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
        code = shards.main(["index", str(folder)])
    if code == WRONG_INPUT:
        raise DataError(silent.getvalue())
    assert code == DONE, silent.getvalue()
    _read_all(folder)


def _side_files(suffix: str, folder: Path) -> List[bytes]:
    _read_tar(_tars(folder)[0], folder)
    return [path.read_bytes() for path in _named(suffix, folder)]


def _read_side_file(suffix: str, data: bytes, folder: Path) -> None:
    for path in _named(suffix, folder):
        path.write_bytes(data)
    _read_all(folder)


def _named(suffix: str, folder: Path) -> List[Path]:
    return [path for path in folder.iterdir() if (path.suffix if path.suffix in (".json", ".tar") else "") == suffix]


def _read_all(folder: Path) -> None:
    source = ShardsSource(str(folder), window=4)
    for opened in source.open_all(range(len(source))):
        if not isinstance(opened, Exception):
            with contextlib.suppress(UserError):
                opened.pixels()


def _checkpoints(folder: Path) -> List[bytes]:
    made = CheckpointFolder(folder / "whole", 2, False)
    state = {"weights": {"a": torch.arange(12.0).view(3, 4), "b": torch.zeros(2, dtype=torch.float16)}}
    path = made.save(1, {"engine": state, "recipe": "run: {epochs: 1}", "classes": ["x"]}, 0.5)
    return programs.with_members(folder, path.read_bytes(), ("data.pkl",))


def _read_weights(path: Path) -> None:
    weights.read(str(path))


def _tensors(folder: Path) -> List[bytes]:
    from safetensors.torch import save

    metadata = {"recipe": "run: {epochs: 1}", "classes": '["cat", "dog"]', "weights": "trained"}
    return [save({"a": torch.arange(120.0).view(3, 40), "b": torch.zeros(2)}, metadata)]


def _file(name: str, read: Callable[[Path], None]) -> Callable[[bytes, Path], None]:
    """A reader of damaged bytes, from one of a file. Of a zip file the bytes may be those of a member."""

    def reading(data: bytes, folder: Path) -> None:
        (folder / name).write_bytes(programs.with_member(data, folder))
        read(folder / name)

    return reading


TARGETS: Dict[str, Target] = {
    "recipes": Target(_recipes, _file("recipe.yaml", _read_recipe), share=0.15),
    "overrides": Target(overrides.seeds, overrides.read, share=0.1, made=_fresh_or_damaged(overrides.random_override)),
    "images": Target(_images, _read_image, share=0.3),
    "orientation": Target(
        orientations.seeds, orientations.read, share=0.1, made=_fresh_or_damaged(orientations.random_file)
    ),
    "tars": Target(_tars, _read_tar, share=0.1),
    "tar names": Target(names.seeds, names.read, share=0.1, made=_fresh_or_damaged(names.random_tar)),
    "shard manifests": Target(partial(_side_files, ".json"), partial(_read_side_file, ".json"), share=0.1),
    "shard indexes": Target(partial(_side_files, ""), partial(_read_side_file, ""), share=0.1),
    "run folders": Target(folders.runs, folders.read_run, share=0.01),
    "studies": Target(folders.studies, folders.read_study, share=0.01),
    "devkits": Target(programs.devkits, programs.read_devkit, share=0.05),
    ".pt2": Target(programs.torch_programs, _file("damaged.pt2", programs.read_program), share=0.05),
    ".onnx": Target(programs.onnx_programs, programs.read_onnx, share=0.05),
    "safetensors' metadata": Target(
        programs.metadata, _file("damaged.safetensors", programs.read_metadata), share=0.05
    ),
    "checkpoints": Target(_checkpoints, _file("damaged.pt", _read_weights), share=0.1),
    "safetensors": Target(_tensors, _file("damaged.safetensors", _read_weights), share=0.05),
}
