"""Tar shards whose members have random names and kinds: each member must be read or counted, or the shard refused.

Keys and labels are looked up here by webdataset's own expression, and members are counted by Python's tarfile.
"""

import contextlib
import io
import json
import random
import re
import tarfile
from pathlib import Path
from typing import Dict, List

from common.errors import DONE, WRONG_INPUT, DataError
from data.shards import ShardsSource
from tools import shards

_STEMS = ("a", "b", "img_1", "img.1", "Ä", "a b", "__a__", "x" * 120)
_VARIANTS = ("", "", "", ".v2", ".v1", ".left", ".2.0")
_IMAGES = (".jpg", ".jpg", ".JPG", ".jpeg", ".png")
_OTHERS = (".json", ".txt", ".webp", ".gif", "", ".", ".jpg.bak", ".cls2", ".tar")
_FOLDERS = ("", "", "", "./", "v1.0/", ".hidden/", "__meta__/", "deep/er/")
_KINDS = (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)
_KEY = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # base_plus_ext of webdataset 1.0


def random_tar(draws: random.Random) -> bytes:
    """Return a tar of up to seven samples, most of them whole, among other members."""
    stream = io.BytesIO()
    form = draws.choice((tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
    with tarfile.open(fileobj=stream, mode="w", format=form, errors="surrogateescape") as archive:
        for number in range(draws.randrange(1, 8)):
            stem = (
                draws.choice(_FOLDERS)
                + draws.choice(_STEMS)
                + draws.choice(("", str(number)))
                + draws.choice(_VARIANTS)
            )
            names = [stem + draws.choice(_IMAGES), stem + ".cls"]
            if draws.random() < 0.05:
                names.pop(draws.randrange(2))
            if draws.random() < 0.05:
                names.append(stem + ".seg.png")
            if draws.random() < 0.3:
                names.append(stem + draws.choice(_OTHERS))
            if draws.random() < 0.1:
                names.append(draws.choice((".DS_Store", "._a.jpg", ".a.jpg", "README", "a.", "\udcff\udcfe.txt")))
            draws.shuffle(names)
            for name in names:
                _add(archive, name, draws)
            if draws.random() < 0.15:
                special = tarfile.TarInfo("folder.jpg")
                special.type = draws.choice(_KINDS) if draws.random() < 0.2 else tarfile.DIRTYPE
                archive.addfile(special)
    data = stream.getvalue()
    return data + data if draws.random() < 0.02 else data


def _add(archive: tarfile.TarFile, name: str, draws: random.Random) -> None:
    content = draws.randbytes(draws.choice((0, 3, 700)))
    if name.endswith(".cls"):
        content = b"%d" % draws.randrange(5) if draws.random() < 0.97 else draws.choice((b"", b"-1", b"one"))
    info = tarfile.TarInfo(name)
    info.size = len(content)
    with contextlib.suppress(ValueError):  # a name that is too long for the form
        archive.addfile(info, io.BytesIO(content))


def seeds(folder: Path) -> List[bytes]:
    """Return whole tars that are read."""
    found = []
    for number in range(60):
        data = random_tar(random.Random(number))
        with contextlib.suppress(DataError):
            read(data, folder)
            found.append(data)
    return found


def read(data: bytes, folder: Path) -> None:
    """Raise AssertionError where a member is neither read nor counted, or an image has another key's label."""
    for path in folder.iterdir():
        path.unlink()
    (folder / "part-0.tar").write_bytes(data)
    silent = io.StringIO()
    with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
        code = shards.main(["index", str(folder), "--json"])
    if code == WRONG_INPUT:
        raise DataError(silent.getvalue())
    assert code == DONE, silent.getvalue()
    counted = json.loads(silent.getvalue().splitlines()[-1])
    with tarfile.open(fileobj=io.BytesIO(data), ignore_zeros=True, errors="surrogateescape") as archive:
        members = archive.getmembers()
        labels = {
            member.name: int(archive.extractfile(member).read())
            for member in members
            if member.isreg() and re.search(r"[^/.][^/]*\.cls$", member.name, re.IGNORECASE) and member.size < 20
            if archive.extractfile(member).read().strip().isdigit()
        }
    read_or_counted = 2 * counted["images"] + sum(counted["left_out"].values())
    assert read_or_counted == len(members), f"{len(members)} members, {read_or_counted} read or counted"
    source = ShardsSource(str(folder), window=1)
    for index, label in enumerate(source.labels.tolist()):
        name = source._names[index].decode(errors="surrogateescape")
        assert label in _possible(name, labels), f"{name!r} has label {label} of {labels}"


def _possible(image: str, labels: Dict[str, int]) -> List[int]:
    """Labels that an image may have: of the same name but for the last extension, or else of the same key."""
    stem = image.rpartition(".")[0]
    exact = [label for name, label in labels.items() if name.rpartition(".")[0].lower() == stem.lower()]
    key = _KEY.match(image)[1]
    return exact or [label for name, label in labels.items() if (_KEY.match(name) or (0, 0))[1] == key]
