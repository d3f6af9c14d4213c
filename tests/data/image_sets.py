"""Small data sets for tests, written by other code than that which reads them."""

import gzip
import io
from typing import NamedTuple

import numpy as np
from PIL import Image

FILES = {"train": "train", "validation": "t10k"}
CLASSES = 10


class Drawn(NamedTuple):
    """Images in a mixed order. images: uint8 [n, size, size] or [n, size, size, 3]. labels: uint8
    [n]."""

    images: np.ndarray
    labels: np.ndarray

    def by_label(self):
        """(label, image) of all images, in the order of class folders of them."""
        return [
            (label, i)
            for label in range(CLASSES)
            for i, each in zip(self.images, self.labels)
            if each == label
        ]


def draw(count, seed=0, size=12, colours=False):
    """Images of all ten classes that differ and can be told apart: noise, in a tenth of which the
    class is bright."""
    generator = np.random.default_rng(seed)
    labels = (np.arange(count) % CLASSES).astype(np.uint8)
    generator.shuffle(labels)
    images = generator.integers(
        0, 128, (count, size, size, *([3] if colours else [])), dtype=np.uint8
    )
    for image, label in zip(images, labels):
        image[label : label + 2] += 120
    return Drawn(images, labels)


def idx(array):
    """An array of bytes as a file of MNIST's kind."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def write_idx(folder, packed=False, **splits):
    """Write the files of MNIST's kind of each split (train=Drawn, validation=Drawn), by gzip or
    not."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, drawn in splits.items():
        for kind, array in (("images-idx3", drawn.images), ("labels-idx1", drawn.labels)):
            content = idx(array)
            name = f"{FILES[split]}-{kind}-ubyte" + (".gz" if packed else "")
            (folder / name).write_bytes(gzip.compress(content) if packed else content)
    return folder


def write_class_folders(root, **splits):
    """Write root/train and root/val of class folders 0 to 9, of PNG files that are numbered as in
    the data set."""
    for split, drawn in splits.items():
        for number, (image, label) in enumerate(zip(drawn.images, drawn.labels)):
            path = (
                root
                / {"train": "train", "validation": "val"}[split]
                / str(label)
                / f"{number:05d}.png"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    return root


def write_list(file, folder):
    """Write a list of the images in the class folders of `folder`, last ones first."""
    paths = sorted(folder.glob("*/*.png"), reverse=True)
    file.write_text(
        "".join(f"{path.relative_to(file.parent)},{path.parent.name}\n" for path in paths)
    )


def write_parquet(root, names, kind="PNG", columns=("image", "label"), rows=None, **splits):
    """Write a folder of parquet files, two for each split, as the hub has them.

    Args:
        names: of the classes; None writes no description, as programs other than datasets do.
        kind: of the encoded images.
        columns: of images and labels; a third has images, too.
        rows: in the place of splits, the images of a training split; labels are their numbers.
    """
    import datasets
    import pyarrow
    from pyarrow import parquet

    described = (
        {columns[0]: datasets.Image(), columns[1]: datasets.ClassLabel(names=names)}
        if names
        else {}
    )
    described.update({name: datasets.Image() for name in columns[2:] if names})
    tables = {
        split: (_encoded(drawn.images, kind), drawn.labels) for split, drawn in splits.items()
    }
    if rows is not None:
        tables = {"train": (rows, np.arange(len(rows)))}
    (root / "data").mkdir(parents=True)
    for split, (images, labels) in tables.items():
        parts = 1 if len(images) < 2 else 2
        for part in range(parts):
            chosen = slice(part * len(images) // parts, (part + 1) * len(images) // parts)
            kept = {columns[0]: images[chosen], columns[1]: labels[chosen].tolist()}
            kept.update(dict.fromkeys(columns[2:], images[chosen]))
            path = root / "data" / f"{split}-{part:05d}-of-{parts:05d}.parquet"
            if names:
                features = datasets.Features(described)
                datasets.Dataset.from_dict(kept, features=features).to_parquet(path)
            else:
                image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
                arrays = [
                    pyarrow.array(kept[columns[0]], image),
                    pyarrow.array(kept[columns[1]], pyarrow.int64()),
                ]
                parquet.write_table(pyarrow.table(arrays, names=list(columns[:2])), path)
    return root


def _encoded(images, kind):
    """Rows of images as datasets has them."""
    rows = []
    for image in images:
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, kind)
        rows.append({"bytes": stream.getvalue(), "path": None})
    return rows
