"""Shards for tests, written by Python's tarfile and read by `tools.shards index`: nothing of
`pack`."""

import io
import json
import tarfile

import numpy as np
from PIL import Image

from tools import shards


def jpeg(number, size=(20, 16)):
    """An encoded image that differs from those of other numbers."""
    colours = np.random.default_rng(number).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(colours).resize(size).save(stream, "JPEG")
    return stream.getvalue()


def tar_bytes(files):
    """A tar of (name, bytes) pairs."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def write_tar(path, files):
    path.write_bytes(tar_bytes(files))


def write_shards(folder, counts, classes=2):
    """Shards of so many images each, image i with label i % classes, with index and manifest.

    Returns the images.
    """
    folder.mkdir(parents=True)
    images = [jpeg(number) for number in range(sum(counts))]
    numbers = iter(range(len(images)))
    for shard, count in enumerate(counts):
        files = []
        for number in [next(numbers) for _ in range(count)]:
            files += [
                (f"{number:04}.cls", b"%d\n" % (number % classes)),
                (f"{number:04}.JPG", images[number]),
            ]
            files.append((f"{number:04}.json", b"{}"))
        write_tar(folder / f"part-{shard}.tar", files)
    assert shards.main(["index", str(folder)]) == 0
    return images


def run(capsys, *arguments):
    """(exit code, last line as JSON or None, lines of errors)."""
    capsys.readouterr()
    code = shards.main([*map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    return (
        code,
        json.loads(out.splitlines()[-1]) if code == 0 or "{" in out else None,
        err.splitlines(),
    )


def pairs(source):
    """(class, bytes) of all images, in no order."""
    return sorted((source.classes[source.labels[n]], source.encoded(n)) for n in range(len(source)))
