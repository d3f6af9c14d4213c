"""Data sets of torchvision: wherever their files lie, images, labels and order are those of class
folders of them."""

import bz2
import gc
import gzip
import hashlib
import pickle
import sys

import numpy as np
import pytest
import torch
from torchvision import datasets

from common.errors import DataError
from data.base import permutation
from data.epochs import RunOrder
from data.folder import FolderSource
from data.loader import EvaluationBatches, TrainingBatches
from data.sources import open_source
from data.torchvision import read_idx
from recipe import torchvision_sets
from recipe.config import Data
from recipe.torchvision_sets import SETS
from tests.data.http_server import serving
from tests.data.image_sets import draw, idx, write_class_folders, write_idx
from tests.data.test_loader import contents

TRAIN = draw(60)
VALIDATION = draw(30, seed=1)
SIZES = {"train_images": 60, "validation_images": 30}
BOTH = {"train": TRAIN, "validation": VALIDATION}


def section(root, dataset="FashionMNIST", **keys):
    place = {} if root is None else {"root": str(root)}
    return Data(
        **{"source": "torchvision", "dataset": dataset, "workers": 0, **place, **SIZES, **keys}
    )


def opened(root, split="train", **keys):
    return open_source(section(root, **keys), 10, split)


def pixels(source):
    return torch.stack([source.read(index) for index in range(len(source))])


def assert_holds(source, drawn):
    """Images by label, those of a label in the order of the data set; grey in three equal
    channels."""
    expected = drawn.by_label()
    assert source.labels.dtype == np.int64 and source.labels.tolist() == [
        label for label, _ in expected
    ]
    images = torch.from_numpy(np.stack([image for _, image in expected]))
    images = (
        images[:, None].expand(-1, 3, -1, -1) if images.ndim == 3 else images.permute(0, 3, 1, 2)
    )
    assert torch.equal(pixels(source), images)


@pytest.fixture
def own_places(tmp_path, monkeypatch):
    """Folders of the test's in the place of the package's and of the user's cache: (package,
    cache)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    package = tmp_path / "package"
    known = SETS["FashionMNIST"]._replace(package=("dataset-fashion-mnist", str(package)))
    monkeypatch.setitem(torchvision_sets.SETS, "FashionMNIST", known)
    return package, tmp_path / "cache" / "large-batch-efficientnet" / "datasets"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("below", ["", "raw", "FashionMNIST/raw"])
def test_files_of_mnists_kind_are_found_in_three_places_packed_or_not(tmp_path, below, packed):
    write_idx(tmp_path / below, packed, **BOTH)
    for split, drawn in BOTH.items():
        assert_holds(opened(tmp_path, split), drawn)


def test_pixels_labels_and_names_are_those_that_torchvision_reads(tmp_path):
    """Its reader needs the files unpacked, in its own layout."""
    write_idx(tmp_path / "KMNIST" / "raw", **BOTH)
    theirs = datasets.KMNIST(str(tmp_path), train=True)
    source = opened(tmp_path, dataset="KMNIST")
    assert source.classes == tuple(theirs.classes)
    for index in range(60):
        name, _, number = source.name(index).rpartition("/")
        image, label = theirs[int(number)]
        assert name == "KMNIST/train" and label == source.labels[index]
        assert np.array_equal(
            np.asarray(image.convert("RGB")).transpose(2, 0, 1), source.read(index).numpy()
        )


def test_other_sets_of_the_same_file_names_lie_beside_each_other(tmp_path):
    other = draw(60, seed=5)
    write_idx(tmp_path, train=other)
    write_idx(tmp_path / "MNIST" / "raw", train=TRAIN)
    assert_holds(opened(tmp_path, dataset="MNIST"), TRAIN)
    assert_holds(opened(tmp_path, dataset="KMNIST"), other)


def test_without_a_root_packages_and_downloads_are_looked_at(own_places):
    package, cache = own_places
    other = draw(60, seed=5)
    write_idx(cache / "FashionMNIST" / "raw", train=other, validation=VALIDATION)
    assert_holds(opened(None), other)
    write_idx(package, packed=True, train=TRAIN)
    assert_holds(opened(None), TRAIN)
    assert_holds(opened(None, "validation"), VALIDATION)


def test_training_sees_the_bits_of_class_folders_with_any_number_of_workers(tmp_path):
    """Crops, flips and operations are drawn by number, so the numbers are those of the folders,
    too."""
    write_idx(tmp_path / "raw", packed=True, **BOTH)
    write_class_folders(tmp_path, **BOTH)

    def loaded(source, workers, kind):
        data = Data(source="digits", workers=workers, augment="randaugment", prefetch=1)
        if kind is EvaluationBatches:
            return contents(kind(source, data=data, image_size=9, batch=7))
        return contents(kind(RunOrder(source, data, 3, 20), range(7), image_size=9, micro=5))

    for split, folder, kind in (
        ("train", "train", TrainingBatches),
        ("validation", "val", EvaluationBatches),
    ):
        source = opened(tmp_path, split)
        expected = loaded(FolderSource(str(tmp_path / folder)), 0, kind)
        assert loaded(source, 0, kind) == loaded(source, 2, kind) == expected
        assert source.order(3, 1).tolist() == permutation(3, 1, len(source)).tolist()
        assert torch.equal(pixels(pickle.loads(pickle.dumps(source))), pixels(source))


def test_the_digest_is_of_the_content_wherever_it_lies(tmp_path):
    digests = []
    for place, packed, drawn in (
        ("a", False, TRAIN),
        ("b/raw", True, TRAIN),
        (
            "c",
            False,
            TRAIN._replace(
                images=TRAIN.images ^ (np.arange(60) == 33)[:, None, None].astype(np.uint8)
            ),
        ),
        ("d", False, TRAIN._replace(labels=(TRAIN.labels + 1) % 10)),
        ("e", False, TRAIN._replace(images=TRAIN.images[::-1], labels=TRAIN.labels[::-1])),
    ):
        write_idx(tmp_path / place, packed, train=drawn)
        digests.append(opened(tmp_path / place.partition("/")[0]).digest)
    assert digests[0] == digests[1] and len(set(digests)) == 4


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


def write_cifar(root, name, label_key, names_key, train, test, drawn, classes, monkeypatch):
    """Files of pickled arrays, with the checksums that torchvision compares. train, test: files of
    equal parts."""
    reader = getattr(datasets, name)
    folder = root / reader.base_folder
    folder.mkdir(parents=True)
    for files, kept, each in (
        (train, "train_list", drawn["train"]),
        (test, "test_list", drawn["validation"]),
    ):
        parts = zip(
            np.array_split(each.images, len(files)), np.array_split(each.labels, len(files))
        )
        for file, (images, labels) in zip(files, parts):
            rows = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
            (folder / file).write_bytes(pickle.dumps({"data": rows, label_key: labels.tolist()}))
        monkeypatch.setattr(reader, kept, [[file, md5(folder / file)] for file in files])
    meta = {**reader.meta, "md5": None}
    (folder / meta["filename"]).write_bytes(pickle.dumps({names_key: classes}))
    monkeypatch.setattr(reader, "meta", meta)
    return folder


def coloured(size=32):
    return {
        "train": draw(60, size=size, colours=True),
        "validation": draw(30, seed=1, size=size, colours=True),
    }


def test_cifar(tmp_path, monkeypatch):
    drawn = coloured()
    names = [f"class {number}" for number in range(10)]
    parts = ("data_batch_1", "data_batch_2", "data_batch_3")
    folder = write_cifar(
        tmp_path,
        "CIFAR10",
        "labels",
        names_key="label_names",
        train=parts,
        test=("test_batch",),
        drawn=drawn,
        classes=names,
        monkeypatch=monkeypatch,
    )
    for split in drawn:
        source = opened(tmp_path, split, dataset="CIFAR10")
        assert_holds(source, drawn[split])
        assert source.classes == tuple(names)
        assert source.read(3).stride() == (1, 96, 3), "as decoded images lie in memory"
    (folder / "data_batch_2").write_bytes((folder / "data_batch_2").read_bytes()[:-1])
    with pytest.raises(
        DataError, match=rf"^{tmp_path}: CIFAR10: missing or damaged files \(.*\); remove its files"
    ):
        opened(tmp_path, dataset="CIFAR10")


def test_cifar_of_a_hundred_classes(tmp_path, monkeypatch):
    drawn = coloured()
    names = [f"class {number}" for number in range(100)]
    write_cifar(
        tmp_path,
        "CIFAR100",
        "fine_labels",
        names_key="fine_label_names",
        train=("train",),
        test=("test",),
        drawn=drawn,
        classes=names,
        monkeypatch=monkeypatch,
    )
    source = open_source(section(tmp_path, "CIFAR100"), 100, "train")
    assert_holds(source, drawn["train"])
    assert source.classes == tuple(names)


def test_svhn(tmp_path, monkeypatch):
    """Its digit 0 is labelled 10 in the files."""
    io = pytest.importorskip("scipy.io", reason="scipy is not in requirements-ipu.txt")
    drawn = coloured()
    lists = {}
    for split, name in (("train", "train"), ("validation", "test")):
        path = tmp_path / f"{name}_32x32.mat"
        labels = np.where(drawn[split].labels == 0, 10, drawn[split].labels)[:, None]
        io.savemat(path, {"X": drawn[split].images.transpose(1, 2, 3, 0), "y": labels})
        lists[name] = ["", path.name, md5(path)]
    monkeypatch.setattr(datasets.SVHN, "split_list", lists)
    for split in drawn:
        source = opened(tmp_path, split, dataset="SVHN")
        assert_holds(source, drawn[split])
        assert source.classes == tuple("0123456789")
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.delitem(sys.modules, "scipy.io")
    with pytest.raises(DataError, match=r"^data\.dataset=SVHN: .*; pip install scipy$"):
        opened(tmp_path, dataset="SVHN")


def test_stl10(tmp_path, monkeypatch):
    """Its labels begin at 1, and its pixels go down the columns first."""
    drawn = coloured(size=96)
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    for split, name in (("train", "train"), ("validation", "test")):
        images, labels = drawn[split]
        (folder / f"{name}_X.bin").write_bytes(images.transpose(0, 3, 2, 1).tobytes())
        (folder / f"{name}_y.bin").write_bytes((labels + 1).tobytes())
    (folder / "class_names.txt").write_text("".join(f"class {number}\n" for number in range(10)))
    for kept, name in (("train_list", "train"), ("test_list", "test")):
        files = (f"{name}_X.bin", f"{name}_y.bin")
        monkeypatch.setattr(datasets.STL10, kept, [[file, md5(folder / file)] for file in files])
    for split in drawn:
        source = opened(tmp_path, split, dataset="STL10")
        assert_holds(source, drawn[split])
        assert source.classes == tuple(f"class {number}" for number in range(10))


def test_usps(tmp_path):
    """Its grey levels are numbers from -1 to 1 as text."""
    drawn = draw(60, size=16)
    lines = []
    for image, label in zip(drawn.images, drawn.labels):
        levels = (image.reshape(-1) + 0.5) / 255 * 2 - 1
        lines.append(
            f"{label + 1} "
            + " ".join(f"{n}:{level:.6f}" for n, level in enumerate(levels, 1))
            + "\n"
        )
    (tmp_path / "usps.bz2").write_bytes(bz2.compress("".join(lines).encode()))
    source = opened(tmp_path, dataset="USPS")
    assert_holds(source, drawn)
    assert source.classes == tuple("0123456789")


def test_numbers_of_classes_and_images_are_known_without_files():
    """As their authors give them; torchvision's pages say the same."""
    for dataset, classes, train, validation in (
        ("FashionMNIST", 10, 60_000, 10_000),
        ("CIFAR100", 100, 50_000, 10_000),
        ("SVHN", 10, 73_257, 26_032),
        ("STL10", 10, 5_000, 8_000),
    ):
        data = Data(source="torchvision", dataset=dataset)
        assert data.count_classes() == classes
        assert (data.images("train"), data.images("validation")) == (train, validation)


TRAIN_IMAGES = "train-images-idx3-ubyte"
# What spoils the files of FashionMNIST in a folder; the error behind the folder, and its remedy.
SPOILT = {
    "cut short": (
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        "damaged (8,655 bytes instead of 8,656)",
    ),
    "longer": (
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        "damaged (8,657 bytes instead of 8,656)",
    ),
    "empty": (lambda path: path.write_bytes(b""), "no idx file of bytes in 3 dimensions"),
    "text": (
        lambda path: path.write_text("<html> not found </html>"),
        "no idx file of bytes in 3 dimensions",
    ),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "cannot be read (Is a directory)"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_damaged_file_is_one_line(tmp_path, how):
    spoil, fault = SPOILT[how]
    write_idx(tmp_path, train=TRAIN)
    spoil(tmp_path / TRAIN_IMAGES)
    with pytest.raises(DataError) as caught:
        opened(tmp_path)
    assert str(caught.value) == f"{tmp_path}/{TRAIN_IMAGES}: {fault}; get it anew"


@pytest.mark.parametrize("size", [0, 5, 100, -1, -9])
def test_a_packed_file_that_is_cut_short_is_one_line(tmp_path, size):
    """Without content, in the header, in the pixels, in the checksum: gzip has another error for
    each."""
    path = write_idx(tmp_path, packed=True, train=TRAIN) / f"{TRAIN_IMAGES}.gz"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=rf"^{path}: .*; get it anew$"):
        opened(tmp_path)


def test_a_packed_file_with_a_changed_byte_is_one_line(tmp_path):
    path = write_idx(tmp_path, packed=True, train=TRAIN) / f"{TRAIN_IMAGES}.gz"
    content = bytearray(path.read_bytes())
    for place in (0, 12, len(content) // 2, len(content) - 6):
        changed = content[:]
        changed[place] ^= 0xFF
        path.write_bytes(changed)
        with pytest.raises(DataError, match=rf"^{path}: .*; get it anew$"):
            opened(tmp_path)


def test_a_packed_file_cannot_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("data.torchvision._MOST_BYTES", 1000)
    path = tmp_path / f"{TRAIN_IMAGES}.gz"
    path.write_bytes(gzip.compress(idx(TRAIN.images)))
    with pytest.raises(DataError, match=r"damaged \(more than 1,000 bytes instead of 8,656\)"):
        read_idx(str(path), 3)


def test_labels_fit_the_images_and_the_classes(tmp_path):
    write_idx(tmp_path, train=TRAIN._replace(labels=TRAIN.labels[:-1]))
    with pytest.raises(
        DataError, match=rf"^{tmp_path}: 60 images and 59 labels; get these files anew$"
    ):
        opened(tmp_path)
    write_idx(tmp_path, train=TRAIN._replace(labels=TRAIN.labels + 1))
    with pytest.raises(
        DataError, match=rf"^{tmp_path}: labels from 1 to 10, but 10 classes; get these files anew"
    ):
        opened(tmp_path)
    empty = TRAIN._replace(images=TRAIN.images[:0], labels=TRAIN.labels[:0])
    write_idx(tmp_path, train=empty)
    with pytest.raises(
        DataError, match=rf"^{tmp_path}: 0 images and 0 labels; get these files anew$"
    ):
        opened(tmp_path)


def test_another_number_of_images_than_the_set_has_is_an_error_unless_it_is_expected(tmp_path):
    write_idx(tmp_path, train=TRAIN)
    with pytest.raises(
        DataError, match=rf"^{tmp_path}: 60 images, but data\.train_images is 60000; .*_images=60$"
    ):
        opened(tmp_path, train_images=None)
    with pytest.raises(
        DataError, match=r": 10 classes, but model\.classes is 9; set model\.classes=10$"
    ):
        open_source(section(tmp_path), 9, "train")


def test_missing_files_are_one_line_that_says_how_to_get_them(tmp_path, own_places):
    package, cache = own_places
    image = f"no {TRAIN_IMAGES} (or .gz)"
    expected = (
        f"data.dataset=FashionMNIST: {image} in {package} or {cache}; apt-get install dataset-fashion-mnist, or set "
        "data.download=true, or data.root to their folder"
    )
    with pytest.raises(DataError) as caught:
        opened(None)
    assert str(caught.value) == expected
    with pytest.raises(DataError) as caught:
        opened(tmp_path)
    remedy = "correct data.root, or set data.download=true"
    assert (
        str(caught.value)
        == f"{tmp_path}: {image} of FashionMNIST with all that belongs to it; {remedy}"
    )
    with pytest.raises(
        DataError,
        match=rf"^data\.dataset=CIFAR10: no cifar-10-batches-py in {cache}; set data\.downl",
    ):
        opened(None, dataset="CIFAR10")


@pytest.fixture
def offered(tmp_path, monkeypatch):
    """A server of packed files, which torchvision takes for its own of FashionMNIST."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    folder = write_idx(tmp_path / "offered", packed=True, **BOTH)
    with serving(folder) as server:
        monkeypatch.setattr(datasets.FashionMNIST, "mirrors", [f"{server.url}/"])
        resources = [(path.name, md5(path)) for path in sorted(folder.iterdir())]
        monkeypatch.setattr(datasets.FashionMNIST, "resources", resources)
        yield server


def test_files_are_downloaded_once_where_the_recipe_allows_it(tmp_path, offered, own_places):
    with pytest.raises(DataError, match=r"data\.download=true"):
        opened(None)
    assert offered.asked == []
    for root in (tmp_path / "new", None):
        for split, drawn in BOTH.items():
            assert_holds(opened(root, split, download=True), drawn)
        assert_holds(opened(root), TRAIN)
        asked = [name for name in offered.asked if name]
        assert sorted(set(asked)) == sorted(path.name for path in offered.folder.iterdir())
        del offered.asked[:]
    assert (own_places[1] / "FashionMNIST" / "raw" / TRAIN_IMAGES).is_file()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # torchvision leaves the answer open
def test_a_download_that_fails_is_one_line(tmp_path, offered):
    offered.always = {f"{TRAIN_IMAGES}.gz": 404, "t10k-images-idx3-ubyte.gz": 404}
    with pytest.raises(
        DataError,
        match=r"^data\.dataset=FashionMNIST: cannot be downloaded \(Error downloading t10k",
    ):
        opened(tmp_path / "new", download=True)
    gc.collect()


def test_reading_an_image_is_a_slice(tmp_path):
    """No copy of the pixels: what is read shares the memory of the whole set."""
    write_idx(tmp_path, train=TRAIN)
    source = opened(tmp_path)
    storage = source.read(0).untyped_storage().data_ptr()
    assert all(source.read(index).untyped_storage().data_ptr() == storage for index in range(60))
