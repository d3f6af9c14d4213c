"""Files of MATLAB against scipy, which wrote them; and those that would take any amount of memory."""

import gzip
import io
import struct
import tarfile
import zlib

import numpy as np
import pytest

from recipe.errors import DataError
from tools import imagenet, matlab

scipy_io = pytest.importorskip("scipy.io")
ROWS = [
    {"ID": 1, "WNID": "n02119789", "words": "kit fox, Vulpes", "children": [], "height": 0.5, "images": [1300, 2]},
    {"ID": 70_000, "WNID": "n00001740", "words": "ünïcode", "children": 4, "height": -1e300, "images": [1, 2, 3]},
]


def written(rows=ROWS, **options):
    array = np.empty((len(rows), 1), [(name, object) for name in rows[0]])
    for row, place in zip(rows, array[:, 0]):
        for name, value in row.items():
            place[name] = np.array(value) if isinstance(value, list) else value
    stream = io.BytesIO()
    scipy_io.savemat(stream, {"other": np.arange(7), "synsets": array, "last": "text"}, **options)
    return stream.getvalue()


@pytest.mark.parametrize("compressed", [True, False])
def test_structs_are_read_as_scipy_wrote_them(compressed):
    found = matlab.structs(written(do_compression=compressed), "synsets")
    assert found == ROWS


def _nested(depth):
    """A struct in a struct in a struct."""
    inner = b""
    for _ in range(depth):
        content = struct.pack("<IIII", 6, 8, 2, 0) + struct.pack("<IIii", 5, 8, 1, 1) + struct.pack("<II", 1, 0)
        content += struct.pack("<HHi", 5, 4, 8) + struct.pack("<II8s", 1, 8, b"a") + inner
        inner = struct.pack("<II", 14, len(content)) + content
        if len(inner) > 1 << 20:
            break
    return written()[:128] + inner


def _swelling():
    packed = zlib.compress(bytes(64 << 20))
    return written()[:128] + struct.pack("<II", 15, len(packed)) + packed


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no file of MATLAB 5"),
        (written()[:200], "ends too early"),
        (written()[:128], "no synsets in it"),
        (_swelling(), "more than 16 MB when unpacked"),
        (_nested(1), "no synsets in it"),
    ],
)
def test_what_cannot_be_read_is_said(content, said):
    with pytest.raises(ValueError, match=said):
        matlab.structs(content, "synsets")


def test_a_file_that_is_nested_too_deeply_or_swells_is_refused_as_a_devkit(tmp_path):
    path = tmp_path / "kit.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo("kit/data/meta.mat")
        content = _nested(5000)
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    with pytest.raises(DataError, match=r"data/meta\.mat cannot be read \(.*recursion"):
        imagenet._devkit(str(path))
    with gzip.open(path, "wb", compresslevel=1) as stream:
        for _ in range(129):
            stream.write(bytes(1 << 20))
    with pytest.raises(DataError, match="more than 128 MB; give ILSVRC2012_devkit_t12"):
        imagenet._devkit(str(path))
