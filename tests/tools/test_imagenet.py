"""ImageNet's archives, with three classes: every image gets its class, and what does not fit is refused."""

import io
import tarfile

import numpy as np
import pytest

from data.shards import ShardsSource
from tests.data.tar_shards import jpeg, pairs, run, write_tar
from tools import imagenet

WNIDS = ("n01440764", "n01443537", "n15075141")


def tar_bytes(files):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


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


def devkit(path, with_children=True):
    """As ImageNet's: classes by number, then groups of them; in an order of its own."""
    scipy_io = pytest.importorskip("scipy.io")
    kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("num_children", "O")][: 3 if with_children else 2]
    rows = [(1, WNIDS[2], 0), (2, WNIDS[0], 0), (3, WNIDS[1], 0), (1001, "n00001740", 2)]
    synsets = np.array([row[: len(kinds)] for row in rows], dtype=kinds).reshape(4, 1)
    stream = io.BytesIO()
    scipy_io.savemat(stream, {"synsets": synsets})
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo("ILSVRC2012_devkit_t12/data/meta.mat")
        info.size = stream.tell()
        stream.seek(0)
        archive.addfile(info, stream)
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
    kits = {"with": devkit(tmp_path / "with.tar.gz"), "without": devkit(tmp_path / "without.tar.gz", False)}
    for name, extra in (
        ("wnids", ()),
        ("numbers", ("--devkit", kits["with"])),
        ("numbers", ("--devkit", kits["without"])),
    ):
        out = tmp_path / f"out-{name}{len(list(tmp_path.iterdir()))}"
        code, data, _ = run(
            capsys, "pack", "--imagenet-validation", validation_archive, "--ground-truth", tmp_path / name, *extra, out,
            "--workers", 1,
        )  # fmt: skip
        assert (code, data["images"], data["classes"]) == (0, 5, 3)
        assert pairs(ShardsSource(str(out), 1)) == sorted((wnid, jpeg(n)) for n, wnid in enumerate(truth, start=1))


def test_what_does_not_fit_imagenet_is_refused(train_archive, validation_archive, tmp_path, capsys):
    kit = devkit(tmp_path / "kit.tar.gz")
    lists = {"short": "1\n2\n", "mixed": "1\nn01440764\n1\n1\n1\n", "unknown": "1\n2\n3\n2\n9\n",
             "good": "1\n2\n3\n2\n1\n", "group": "1\n2\n3\n2\n1001\n"}  # fmt: skip
    for name, text in lists.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "cut.tar").write_bytes(train_archive.read_bytes()[:-12000])
    (tmp_path / "cut.tar.gz").write_bytes(kit.read_bytes()[:-40])
    write_tar(tmp_path / "none.tar.gz", [("readme", b"")])

    def validated(name, *extra):
        return ("--imagenet-validation", validation_archive, "--ground-truth", tmp_path / name, *extra)

    cases = [
        (validated("short", "--devkit", kit), f"{tmp_path}/short: 2 lines, but {validation_archive} has 5 images"),
        (validated("mixed", "--devkit", kit), f"{tmp_path}/mixed:2: 'n01440764' is neither"),
        (validated("good"), f"{tmp_path}/good: numbers of the devkit, which says what they mean; add --devkit"),
        (validated("unknown", "--devkit", kit), f"{tmp_path}/unknown:5: {kit} has no class 9"),
        (validated("group", "--devkit", kit), f"{tmp_path}/group:5: {kit} has no class 1001"),
        (validated("good", "--devkit", tmp_path / "cut.tar.gz"), f"{tmp_path}/cut.tar.gz: damaged or no archive"),
        (validated("good", "--devkit", tmp_path / "none.tar.gz"), f"{tmp_path}/none.tar.gz: no data/meta.mat in it"),
        (validated("good", "--devkit", tmp_path / "gone"), f"{tmp_path}/gone: No such file or directory"),
        (
            ("--imagenet-train", validation_archive),
            f"{validation_archive}: 'ILSVRC2012_val_00000003.JPEG' is no archive",
        ),
        (("--imagenet-train", tmp_path / "cut.tar"), f"{tmp_path}/cut.tar"),
        (("--imagenet-train", tmp_path / "gone"), f"{tmp_path}/gone: No such file or directory"),
        (
            ("--imagenet-train", train_archive, "--ground-truth", tmp_path / "good"),
            "--imagenet-validation and --ground",
        ),
        (("--imagenet-train", train_archive, "--imagenet-validation", train_archive), "pack FOLDER DEST, pack"),
    ]
    for arguments, message in cases:
        code, _, errors = run(capsys, "pack", *arguments, tmp_path / "out", "--workers", 1)
        assert code == 2 and len(errors) == 1, arguments
        assert errors[0].startswith(message)
    assert not (tmp_path / "out").exists()
