"""ImageNet's archives, with three classes: every image gets its class, and what does not fit is
refused."""

import gzip
import io
import struct
import zlib

import numpy as np
import pytest

from data.shards import ShardsSource
from tests.data.tar_shards import jpeg, pairs, run, tar_bytes, write_tar
from tools import imagenet

WNIDS = ("n01440764", "n01443537", "n15075141")


@pytest.fixture
def train_archive(tmp_path):
    path = tmp_path / "ILSVRC2012_img_train.tar"
    inner = {
        wnid: tar_bytes([(f"{wnid}_{n}.JPEG", jpeg(10 * label + n)) for n in (7, 2, 10)])
        for label, wnid in enumerate(WNIDS)
    }
    write_tar(path, [(f"{wnid}.tar", inner[wnid]) for wnid in reversed(WNIDS)])
    return path


@pytest.fixture
def validation_archive(tmp_path):
    path = tmp_path / "ILSVRC2012_img_val.tar"
    write_tar(path, [(f"ILSVRC2012_val_{n:08}.JPEG", jpeg(n)) for n in (3, 1, 5, 4, 2)])
    return path


def matlab_file(rows, **options):
    """An array of structs, `synsets`, as scipy writes it among other variables."""
    array = np.empty((len(rows), 1), [(name, object) for name in rows[0]])
    for row, place in zip(rows, array[:, 0]):
        for name, value in row.items():
            place[name] = np.array(value) if isinstance(value, list) else value
    stream = io.BytesIO()
    variables = {"other": np.arange(7), "synsets": array, "last": "text"}
    pytest.importorskip("scipy.io").savemat(stream, variables, **options)
    return stream.getvalue()


def devkit(path):
    """As ImageNet's: classes by number, then groups of them; in an order of its own."""
    rows = [(1, WNIDS[2], 0), (2, WNIDS[0], 0), (3, WNIDS[1], 0), (1001, "n00001740", 2)]
    content = matlab_file(
        [dict(zip(("ILSVRC2012_ID", "WNID", "num_children"), row)) for row in rows]
    )
    path.write_bytes(gzip.compress(tar_bytes([("ILSVRC2012_devkit_t12/data/meta.mat", content)])))
    return path


def test_imagenets_training_images_are_packed_with_their_classes(train_archive, tmp_path, capsys):
    options = ("--workers", 1, "--images-per-shard", 5)
    code, data, _ = run(
        capsys, "pack", "--imagenet-train", train_archive, tmp_path / "out", *options
    )
    assert (code, data["images"], data["classes"]) == (0, 9, 3)
    source = ShardsSource(str(tmp_path / "out"), 1)
    assert source.classes == WNIDS
    expected = [
        (wnid, jpeg(10 * label + n)) for label, wnid in enumerate(WNIDS) for n in (7, 2, 10)
    ]
    assert pairs(source) == sorted(expected)
    archive = imagenet.training(str(train_archive))
    assert archive.name(0) == f"{train_archive}/n01440764/n01440764_10.JPEG"
    assert archive.encoded(0) == jpeg(10)


@pytest.mark.parametrize("numbers", [False, True])
def test_imagenets_validation_images_get_their_classes_in_the_order_of_their_names(
    validation_archive, tmp_path, capsys, numbers
):
    """By WordNet numbers, or by the devkit's numbers."""
    truth = [WNIDS[2], WNIDS[0], WNIDS[1], WNIDS[0], WNIDS[2]]
    options = []
    (tmp_path / "truth").write_text("1\n2\n3\n2\n1\n" if numbers else "\n".join(truth))
    if numbers:
        options = ["--devkit", devkit(tmp_path / "kit.tar.gz")]
    arguments = (
        "--imagenet-validation",
        validation_archive,
        "--ground-truth",
        tmp_path / "truth",
        *options,
    )
    code, data, _ = run(capsys, "pack", *arguments, tmp_path / "out", "--workers", 1)
    assert (code, data["images"], data["classes"]) == (0, 5, 3)
    found = pairs(ShardsSource(str(tmp_path / "out"), 1))
    assert found == sorted((wnid, jpeg(n)) for n, wnid in enumerate(truth, start=1))


VALIDATION = "--imagenet-validation val.tar --ground-truth"
TRAIN = "--imagenet-train"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (f"{VALIDATION} short --devkit kit.tar.gz", "short: 2 lines, but val.tar has 5 images"),
        (
            f"{VALIDATION} mixed --devkit kit.tar.gz",
            "mixed:2: kit.tar.gz has no class 'n01440764'; all",
        ),
        (f"{VALIDATION} good", "good: numbers of the devkit; add --devkit"),
        (f"{VALIDATION} group --devkit kit.tar.gz", "group:5: kit.tar.gz has no class '1001'"),
        (f"{VALIDATION} good --devkit cut.tar.gz", "cut.tar.gz: damaged or no archive"),
        (f"{VALIDATION} good --devkit none.tar.gz", "none.tar.gz: no data/meta.mat in it"),
        (f"{VALIDATION} good --devkit gone", "gone: No such file or directory"),
        (f"{TRAIN} val.tar", "val.tar: 'ILSVRC2012_val_00000003.JPEG' is no"),
        (f"{TRAIN} cut.tar", "cut.tar"),
        (f"{TRAIN} gone", "gone: No such file or directory"),
        (f"{TRAIN} train.tar --ground-truth good", "--imagenet-validation and --ground"),
        (f"{TRAIN} train.tar --imagenet-validation val.tar", "pack FOLDER DEST, pack"),
    ],
)
def test_archives_that_do_not_fit_are_refused(
    train_archive, validation_archive, tmp_path, capsys, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    lists = {
        "short": (1, 2),
        "mixed": (1, WNIDS[0], 1, 1, 1),
        "good": (1, 2, 3, 2, 1),
        "group": (1, 2, 3, 2, 1001),
    }
    for name, lines in lists.items():
        (tmp_path / name).write_text("\n".join(map(str, lines)))
    kit = devkit(tmp_path / "kit.tar.gz")
    write_tar(tmp_path / "none.tar.gz", [("readme", b"")])
    (tmp_path / "cut.tar").write_bytes(train_archive.read_bytes()[:-12000])
    (tmp_path / "cut.tar.gz").write_bytes(kit.read_bytes()[:-40])
    train_archive.rename("train.tar")
    validation_archive.rename("val.tar")
    code, _, errors = run(capsys, "pack", *arguments.split(), "out", "--workers", 1)
    assert code == 2 and len(errors) == 1
    assert errors[0].startswith(message) and not (tmp_path / "out").exists()


def test_numbers_are_read_as_scipy_wrote_them_and_damaged_files_or_those_that_swell_are_refused():
    rows = [
        {
            "ILSVRC2012_ID": 1,
            "WNID": "n02119789",
            "words": "kit fox, Vulpes",
            "children": [],
            "images": [1300, 2],
        },
        {
            "ILSVRC2012_ID": 70_000.0,
            "WNID": "n00001740",
            "words": "ünïcode",
            "children": 4,
            "images": [1, 2, 3],
        },
    ]
    for compressed in (True, False):
        content = matlab_file(rows, do_compression=compressed)
        assert imagenet._numbered(content) == {1: "n02119789", 70_000: "n00001740"}
    packed = zlib.compress(bytes(64 << 20))
    for damaged, reason in (
        (b"", "no file of MATLAB 5"),
        (content[:200], "ends too early"),
        (content[:128], "no synsets in it"),
        (
            content[:128] + struct.pack("<II", 15, len(packed)) + packed,
            "more than 16 MB when unpacked",
        ),
    ):
        with pytest.raises(ValueError, match=reason):
            imagenet._numbered(damaged)
