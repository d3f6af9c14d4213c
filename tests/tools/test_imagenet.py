"""ImageNet's archives, with three classes: every image gets its class, and what does not fit is refused."""

import gzip
import io
import struct
import zlib

import numpy as np
import pytest

from data.shards import ShardsSource
from recipe.errors import DataError
from tests.data.tar_shards import jpeg, pairs, run, tar_bytes, write_tar
from tools import imagenet, matlab

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


def devkit(path, with_children=True, content=None):
    """As ImageNet's: classes by number, then groups of them; in an order of its own."""
    rows = [(1, WNIDS[2], 0), (2, WNIDS[0], 0), (3, WNIDS[1], 0), (1001, "n00001740", 2)]
    kinds = ("ILSVRC2012_ID", "WNID", "num_children")[: 3 if with_children else 2]
    content = content or matlab_file([dict(zip(kinds, row)) for row in rows])
    path.write_bytes(gzip.compress(tar_bytes([("ILSVRC2012_devkit_t12/data/meta.mat", content)])))
    return path


def test_imagenets_training_images_are_packed_with_their_classes(train_archive, tmp_path, capsys):
    code, data, _ = run(capsys, "pack", "--imagenet-train", train_archive, tmp_path / "out", "--workers", 1,
                        "--images-per-shard", 5)  # fmt: skip
    assert (code, data["images"], data["classes"]) == (0, 9, 3)
    source = ShardsSource(str(tmp_path / "out"), 1)
    assert source.classes == WNIDS
    expected = [(wnid, jpeg(10 * label + n)) for label, wnid in enumerate(WNIDS) for n in (7, 2, 10)]
    assert pairs(source) == sorted(expected)
    archive = imagenet.training(str(train_archive))
    assert archive.name(0) == f"{train_archive}/n01440764/n01440764_10.JPEG"
    assert archive.encoded(0) == jpeg(10)


def test_imagenets_validation_images_get_their_classes_in_the_order_of_their_names(
    validation_archive, tmp_path, capsys
):
    """By WordNet numbers, and by the devkit's numbers: the same shards."""
    truth = [WNIDS[2], WNIDS[0], WNIDS[1], WNIDS[0], WNIDS[2]]
    (tmp_path / "wnids").write_text("\n".join(truth) + "\n")
    (tmp_path / "numbers").write_text("1\n2\n3\n2\n1\n")
    kits = [devkit(tmp_path / f"{with_children}.tar.gz", with_children) for with_children in (True, False)]
    for number, options in enumerate((["wnids"], ["numbers", "--devkit", kits[0]], ["numbers", "--devkit", kits[1]])):
        out = tmp_path / f"out-{number}"
        code, data, _ = run(
            capsys, "pack", "--imagenet-validation", validation_archive, "--ground-truth", tmp_path / options[0],
            *options[1:], out, "--workers", 1,
        )  # fmt: skip
        assert (code, data["images"], data["classes"]) == (0, 5, 3)
        assert pairs(ShardsSource(str(out), 1)) == sorted((wnid, jpeg(n)) for n, wnid in enumerate(truth, start=1))


def test_archives_that_do_not_fit_are_refused(train_archive, validation_archive, tmp_path, capsys):
    kit = devkit(tmp_path / "kit.tar.gz")
    lists = {"short": "1\n2\n", "mixed": "1\nn01440764\n1\n1\n1\n", "unknown": "1\n2\n3\n2\n9\n",
             "good": "1\n2\n3\n2\n1\n", "group": "1\n2\n3\n2\n1001\n"}  # fmt: skip
    for name, text in lists.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "cut.tar").write_bytes(train_archive.read_bytes()[:-12000])
    (tmp_path / "cut.tar.gz").write_bytes(kit.read_bytes()[:-40])
    write_tar(tmp_path / "none.tar.gz", [("readme", b"")])
    train = ("--imagenet-train", train_archive)

    def validated(name, *devkits):
        options = [option for name in devkits for option in ("--devkit", tmp_path / name)]
        return ("--imagenet-validation", validation_archive, "--ground-truth", tmp_path / name, *options)

    cases = [
        (validated("short", "kit.tar.gz"), f"{tmp_path}/short: 2 lines, but {validation_archive} has 5 images"),
        (validated("mixed", "kit.tar.gz"), f"{tmp_path}/mixed:2: 'n01440764' is neither"),
        (validated("good"), f"{tmp_path}/good: numbers of the devkit, which gives their classes; add --devkit"),
        (validated("unknown", "kit.tar.gz"), f"{tmp_path}/unknown:5: {kit} has no class 9"),
        (validated("group", "kit.tar.gz"), f"{tmp_path}/group:5: {kit} has no class 1001"),
        (validated("good", "cut.tar.gz"), f"{tmp_path}/cut.tar.gz: damaged or no archive"),
        (validated("good", "none.tar.gz"), f"{tmp_path}/none.tar.gz: no data/meta.mat in it"),
        (validated("good", "gone"), f"{tmp_path}/gone: No such file or directory"),
        (("--imagenet-train", validation_archive), f"{validation_archive}: 'ILSVRC2012_val_00000003.JPEG' is no"),
        (("--imagenet-train", tmp_path / "cut.tar"), f"{tmp_path}/cut.tar"),
        (("--imagenet-train", tmp_path / "gone"), f"{tmp_path}/gone: No such file or directory"),
        ((*train, "--ground-truth", tmp_path / "good"), "--imagenet-validation and --ground"),
        ((*train, "--imagenet-validation", train_archive), "pack FOLDER DEST, pack"),
    ]
    for arguments, message in cases:
        code, _, errors = run(capsys, "pack", *arguments, tmp_path / "out", "--workers", 1)
        assert code == 2 and len(errors) == 1, arguments
        assert errors[0].startswith(message)
    assert not (tmp_path / "out").exists()


def test_structs_are_read_as_scipy_wrote_them():
    rows = [
        {"ID": 1, "WNID": "n02119789", "words": "kit fox, Vulpes", "children": [], "height": 0.5, "images": [1300, 2]},
        {"ID": 70_000, "WNID": "n00001740", "words": "ünïcode", "children": 4, "height": -1e300, "images": [1, 2, 3]},
    ]
    for compressed in (True, False):
        assert matlab.structs(matlab_file(rows, do_compression=compressed), "synsets") == rows


def nested(depth):
    """A struct in a struct in a struct."""
    inner = b""
    while depth and len(inner) < 1 << 20:
        content = struct.pack("<IIIIIIii", 6, 8, 2, 0, 5, 8, 1, 1) + struct.pack("<II", 1, 0)
        content += struct.pack("<HHiII8s", 5, 4, 8, 1, 8, b"a") + inner
        inner, depth = struct.pack("<II", 14, len(content)) + content, depth - 1
    return matlab_file([{"ID": 1}])[:128] + inner


def test_files_of_matlab_that_are_damaged_or_swell_are_refused(tmp_path):
    """Also where a devkit holds them, or is itself too large."""
    whole, packed = matlab_file([{"ID": 1}]), zlib.compress(bytes(64 << 20))
    swelling = whole[:128] + struct.pack("<II", 15, len(packed)) + packed
    for content, reason in (
        (b"", "no file of MATLAB 5"),
        (whole[:200], "ends too early"),
        (whole[:128], "no synsets in it"),
        (nested(1), "no synsets in it"),
        (swelling, "more than 16 MB when unpacked"),
    ):
        with pytest.raises(ValueError, match=reason):
            matlab.structs(content, "synsets")
    with pytest.raises(DataError, match=r"data/meta\.mat cannot be read \(.*recursion"):
        imagenet._devkit(str(devkit(tmp_path / "kit.tar.gz", content=nested(5000))))
    (tmp_path / "large.tar.gz").write_bytes(gzip.compress(bytes(129 << 20), 1))
    with pytest.raises(DataError, match="more than 128 MB; give ILSVRC2012_devkit_t12"):
        imagenet._devkit(str(tmp_path / "large.tar.gz"))
