"""Tar shards whose members have random names and kinds.

Each member must be read or counted, or the shard refused. Keys and labels are looked up here by
webdataset's own expression, and members are counted by Python's tarfile.
"""

import contextlib
import io
import json
import random
import re
import tarfile
from pathlib import Path
from typing import Dict, List, Optional

from benchmarks.fuzz import commands
from common.errors import DataError
from data.shards import ShardsSource
from tools import shards

# What stands twice or more is drawn as often.
_FORMATS = (
    tarfile.USTAR_FORMAT,
    tarfile.PAX_FORMAT,
    tarfile.GNU_FORMAT,
    tarfile.PAX_FORMAT,
)
_STEMS = ("a", "b", "img_1", "img.1", "Ä", "a b", "__a__", "x" * 120)
_VARIANTS = ("", "", "", ".v2", ".v1", ".left", ".2.0")
_IMAGES = (".jpg", ".jpg", ".JPG", ".jpeg", ".png")
_OTHERS = (".json", ".txt", ".webp", ".gif", "", ".", ".jpg.bak", ".cls2", ".tar")
_NO_SAMPLES = (".DS_Store", "._a.jpg", ".a.jpg", "README", "a.", "\udcff\udcfe.txt")
_FOLDERS = ("", "", "", "./", "v1.0/", ".hidden/", "__meta__/", "deep/er/")
_KINDS = (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)
_SIZES = (0, 3, 700)  # bytes of a member
_NO_LABELS = (b"", b"-1", b"one")
_KEY = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # base_plus_ext of webdataset 1.0
_LABEL_FILE = re.compile(r"[^/.][^/]*\.cls$", re.IGNORECASE)
_LABEL_BYTES = 20  # a file of a label is smaller
_WHOLE_TARS = 60  # random ones, of which those that are read are damaged


def random_tar(draws: random.Random) -> bytes:
    """Return a tar of up to seven samples, most of them whole, among other members.

    Args:
        draws: for all that is random.
    """
    stream = io.BytesIO()
    form = draws.choice(_FORMATS)
    with tarfile.open(fileobj=stream, mode="w", format=form, errors="surrogateescape") as archive:
        for number in range(draws.randrange(1, 8)):
            for name in _names_of_sample(number, draws):
                _add(archive, name, draws)
            if draws.random() < 0.15:
                _add_special(archive, draws)
    data = stream.getvalue()
    # A tar behind a tar: tarfile reads on there with `ignore_zeros`.
    return data + data if draws.random() < 0.02 else data


def _names_of_sample(number: int, draws: random.Random) -> List[str]:
    """Return the names of a sample's files in random order, at times with others or without one."""
    folder = draws.choice(_FOLDERS)
    stem = draws.choice(_STEMS)
    suffix = draws.choice(("", str(number)))
    whole_stem = folder + stem + suffix + draws.choice(_VARIANTS)
    names = [whole_stem + draws.choice(_IMAGES), whole_stem + ".cls"]
    if draws.random() < 0.05:
        names.pop(draws.randrange(2))
    if draws.random() < 0.05:
        names.append(whole_stem + ".seg.png")
    if draws.random() < 0.3:
        names.append(whole_stem + draws.choice(_OTHERS))
    if draws.random() < 0.1:
        names.append(draws.choice(_NO_SAMPLES))
    draws.shuffle(names)
    return names


def _add(archive: tarfile.TarFile, name: str, draws: random.Random) -> None:
    """Add a file of random bytes, or of a label, to an archive."""
    content = draws.randbytes(draws.choice(_SIZES))
    if name.endswith(".cls"):
        is_label = draws.random() < 0.97
        content = b"%d" % draws.randrange(5) if is_label else draws.choice(_NO_LABELS)
    info = tarfile.TarInfo(name)
    info.size = len(content)
    # A name may be too long for the format.
    with contextlib.suppress(ValueError):
        archive.addfile(info, io.BytesIO(content))


def _add_special(archive: tarfile.TarFile, draws: random.Random) -> None:
    """Add a member that is no file but has an image's name; most are folders."""
    special = tarfile.TarInfo("folder.jpg")
    special.type = draws.choice(_KINDS) if draws.random() < 0.2 else tarfile.DIRTYPE
    archive.addfile(special)


def seeds(folder: Path) -> List[bytes]:
    """Return whole tars that are read.

    Args:
        folder: to work in.
    """
    tars = []
    for number in range(_WHOLE_TARS):
        data = random_tar(random.Random(number))
        with contextlib.suppress(DataError):
            read(data, folder)
            tars.append(data)
    return tars


def read(data: bytes, folder: Path) -> None:
    """Index a shard, and compare its images and labels with those that Python's tarfile finds.

    Args:
        data: the shard, which may be damaged.
        folder: to work in; it is emptied.

    Raises:
        AssertionError: a member is neither read nor counted, or an image has another key's label.
        DataError: the shard is refused.
    """
    read_or_counted = _read_or_counted(data, folder)
    stream = io.BytesIO(data)
    with tarfile.open(fileobj=stream, ignore_zeros=True, errors="surrogateescape") as archive:
        members = archive.getmembers()
        labels = _labels(archive, members)
    complaint = f"{len(members)} members, {read_or_counted} read or counted"
    assert read_or_counted == len(members), complaint

    source = ShardsSource(str(folder), window=1)
    for index, label in enumerate(source.labels.tolist()):
        name = source._names[index].decode(errors="surrogateescape")
        assert label in _possible(name, labels), f"{name!r} has label {label} of {labels}"


def _read_or_counted(data: bytes, folder: Path) -> int:
    """Index a shard; return how many of its members are read, or counted among those left out."""
    for path in folder.iterdir():
        path.unlink()
    (folder / "part-0.tar").write_bytes(data)
    printed = commands.output_of(shards.main, ["index", str(folder), "--json"])
    summary = json.loads(printed.splitlines()[-1])
    # An image and its label are two members.
    in_samples = 2 * summary["images"]
    left_out = sum(summary["left_out"].values())
    return in_samples + left_out


def _labels(archive: tarfile.TarFile, members: List[tarfile.TarInfo]) -> Dict[str, int]:
    """Return the labels that an archive holds, by the names of their members."""
    labels = {}
    for member in members:
        is_label_file = member.isreg() and _LABEL_FILE.search(member.name)
        if not is_label_file or member.size >= _LABEL_BYTES:
            continue
        file = archive.extractfile(member)
        assert file is not None  # only that of a folder or a device is
        text = file.read().strip()
        if text.isdigit():
            labels[member.name] = int(text)
    return labels


def _possible(image: str, labels: Dict[str, int]) -> List[int]:
    """Return the labels that an image may have.

    These are the ones of the same name but for the last extension, or else those of the same key.
    """
    stem = _stem(image)
    of_same_name = [label for name, label in labels.items() if _stem(name) == stem]
    if of_same_name:
        return of_same_name
    key = _key(image)
    assert key is not None, f"{image!r} is no image to webdataset"
    return [label for name, label in labels.items() if _key(name) == key]


def _stem(name: str) -> str:
    """Return a name without its last extension, in lower case."""
    return name.rpartition(".")[0].lower()


def _key(name: str) -> Optional[str]:
    """Return the key of the sample that a member belongs to; None where webdataset skips it."""
    match = _KEY.match(name)
    return match[1] if match else None
