"""python -m tools.shards: what is packed is what was there; what is damaged or dangerous is refused in one line."""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import time

import numpy as np
import pytest
from PIL import Image

from data import shard_index
from data.local import LocalFolder
from data.shards import ShardsSource
from tests.conftest import ROOT
from tests.data.http_server import serving
from tests.data.tar_shards import jpeg, pairs, run, write_shards, write_tar
from tests.data.test_decode import png
from tools import packing, shards


@pytest.fixture
def classes(tmp_path):
    """Class folders of 20 images."""
    folder = tmp_path / "images"
    for number in range(20):
        path = folder / ("cat", "dog", "emu")[number % 3] / f"im.{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(number, (40 + number, 30)))
    Image.new("RGBA", (9, 7), (1, 2, 3, 4)).save(folder / "cat" / "ünï code.png")
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_packed_images_are_those_of_the_folders(classes, tmp_path, capsys):
    code, data, _ = run(capsys, "pack", classes, tmp_path / "out", "--images-per-shard", 6, "--workers", 1)
    assert code == 0
    source = ShardsSource(str(tmp_path / "out"), 10)
    assert data == {
        "folder": str(tmp_path / "out"), "shards": 4, "images": 21, "classes": 3, "kept": 0, "skipped": 0, "named": [],
        "bytes": sum(path.stat().st_size for path in (tmp_path / "out").glob("*.tar")),
    }  # fmt: skip
    expected = [(path.parent.name, path.read_bytes()) for path in classes.glob("*/*")]
    assert pairs(source) == sorted(expected)
    assert len({source.labels[:6].tobytes(), bytes(48)}) == 2  # shards hold classes in a mixture
    assert sorted(os.listdir(tmp_path / "out"))[:3] == ["000000.tar", "000000.tar.index", "000001.tar"]


def test_pythons_tarfile_reads_what_is_packed_and_index_finds_the_same(classes, tmp_path, capsys):
    run(capsys, "pack", classes, tmp_path / "out", "--images-per-shard", 6, "--workers", 1)
    source = ShardsSource(str(tmp_path / "out"), 10)
    found = []
    for path in sorted((tmp_path / "out").glob("*.tar")):
        with tarfile.open(path) as archive:
            members = {member.name: archive.extractfile(member).read() for member in archive}
        found += [
            (members[name.rpartition(".")[0] + ".cls"], content)
            for name, content in members.items()
            if "cls" not in name
        ]
    assert found == [(b"%d" % source.labels[n], source.encoded(n)) for n in range(21)]
    before = contents(tmp_path / "out")
    names = tmp_path / "names"
    names.write_text("cat\ndog\nemu\n")
    assert run(capsys, "index", tmp_path / "out", "--classes", names)[0] == 0
    after = contents(tmp_path / "out")
    assert after["shards.json"] == before["shards.json"]
    for name in ("000000.tar.index", "000003.tar.index"):
        old, new = (shard_index.decode_index(files[name], name) for files in (before, after))
        assert shard_index.encode_index(old._replace(plan="")) == shard_index.encode_index(new)


def test_the_bytes_do_not_depend_on_the_number_of_workers(classes, tmp_path, capsys):
    for workers in (1, 2):
        assert (
            run(capsys, "pack", classes, tmp_path / f"{workers}", "--images-per-shard", 4, "--workers", workers)[0] == 0
        )
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    run(capsys, "pack", classes, tmp_path / "seed", "--images-per-shard", 4, "--workers", 1, "--seed", 1)
    assert contents(tmp_path / "seed") != contents(tmp_path / "1")
    assert pairs(ShardsSource(str(tmp_path / "seed"), 1)) == pairs(ShardsSource(str(tmp_path / "1"), 1))


def test_an_interrupted_call_is_continued(classes, tmp_path, capsys, monkeypatch):
    command = ("pack", classes, tmp_path / "out", "--images-per-shard", 6, "--workers", 1)
    run(capsys, *command)
    whole = contents(tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    made = []
    original = packing._pack_shard

    def failing(task, name, number):
        made.append(name)
        if len(made) == 3:
            (tmp_path / "out/000002.tar").write_bytes(b"between the shard and its index")
            raise KeyboardInterrupt
        return original(task, name, number)

    monkeypatch.setattr(packing, "_pack_shard", failing)
    code, _, errors = run(capsys, *command)
    assert code == 1
    assert errors == ["interrupted; rerun the same command: it goes on where it was"]
    assert not (tmp_path / "out/shards.json").exists()
    code, data, _ = run(capsys, *command)
    assert (code, data["kept"]) == (0, 2)
    assert made[3:] == ["000002.tar", "000003.tar"]
    assert contents(tmp_path / "out") == whole
    os.truncate(tmp_path / "out/000001.tar", 600)
    assert run(capsys, *command)[1]["kept"] == 3
    assert contents(tmp_path / "out") == whole


def test_a_full_disk_is_an_error_that_leaves_no_part(classes, small_disk, capsys):
    disk = small_disk("16k")
    code, _, (error,) = run(capsys, "pack", classes, disk / "out", "--workers", 1)
    assert code == 1
    remedy = "make room, then rerun the same command: it goes on where it was"
    assert re.fullmatch(rf"{disk / 'out'}/\S+: No space left on device; {remedy}", error)
    assert os.listdir(disk / "out") == []


@pytest.mark.parametrize(
    "other", [("--seed", 1), ("--short-side", 8), ("--images-per-shard", 7), ("--images-per-shard", 30)]
)
def test_shards_of_another_plan_are_not_overwritten(classes, tmp_path, capsys, other):
    command = ("pack", classes, tmp_path / "out", "--images-per-shard", 6, "--workers", 1)
    run(capsys, *command)
    before = contents(tmp_path / "out")
    code, _, (error,) = run(capsys, *command, *other)
    assert code == 2
    assert "packed from other images or with other options; name an empty folder" in error
    (classes / "cat/new.jpg").write_bytes(jpeg(99))
    assert run(capsys, *command)[0] == 2
    assert contents(tmp_path / "out") == before
    write_shards(tmp_path / "strange", (2,))
    assert run(capsys, "pack", classes, tmp_path / "strange", "--workers", 1)[0] == 2


def test_only_images_with_a_longer_short_side_are_made_smaller(tmp_path, capsys):
    (tmp_path / "images/one").mkdir(parents=True)
    rows, columns = np.mgrid[0:600, 0:900]
    image = Image.fromarray(np.stack([rows // 3, columns // 4, 255 - rows // 3], 2).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # stored on its side
    image.save(tmp_path / "images/one/turned.jpg", exif=exif)
    image.resize((450, 300)).save(tmp_path / "images/one/large.png")
    image.resize((90, 60)).save(tmp_path / "images/one/small.jpg", exif=exif)
    run(capsys, "pack", tmp_path / "images", tmp_path / "out", "--short-side", 60, "--workers", 1, "--quality", 95)
    source = ShardsSource(str(tmp_path / "out"), 1)
    found = {source.name(n).rpartition("-")[2]: n for n in range(3)}
    assert sorted(found) == ["large.jpg", "small.jpg", "turned.jpg"]
    assert source.encoded(found["small.jpg"]) == (tmp_path / "images/one/small.jpg").read_bytes()
    upright = source.read(found["turned.jpg"]).numpy().astype(int)
    assert upright.shape == (3, 90, 60)
    expected = np.rot90(np.asarray(image.resize((90, 60), Image.Resampling.BICUBIC)), -1).transpose(2, 0, 1)
    assert np.abs(upright - expected).max() < 8  # of slopes that span 200 levels; JPEG at quality 95 twice
    assert source.read(found["large.jpg"]).shape == (3, 60, 90)


def test_a_bad_image_is_named_or_counted(classes, tmp_path, capsys):
    bad = classes / "cat/im.0.jpg"
    bad.write_bytes(bad.read_bytes()[:-100])
    command = ("pack", classes, tmp_path / "out", "--images-per-shard", 6, "--workers", 1)
    code, _, (error,) = run(capsys, *command)
    assert code == 2
    assert error.startswith(f"{bad}: ")
    code, data, _ = run(capsys, *command, "--skip-bad")
    assert (code, data["images"], data["skipped"]) == (0, 20, 1)
    assert run(capsys, *command, "--skip-bad")[1]["kept"] == 4
    assert run(capsys, *command)[0] == 2
    assert run(capsys, "verify", tmp_path / "out", "--decode")[0] == 0


def test_what_is_left_out_is_named(classes, tmp_path, capsys):
    """Files that cannot be read, of which one would hang and one would swell, and those of other kinds."""
    os.mkfifo(classes / "cat/pipe.jpg")
    (classes / "dog/large.png").write_bytes(png(1, 178_956_970, 8, 0, [b"\0" * 9]))
    (classes / "dog/other.webp").write_bytes(b"pixels")
    command = ("pack", classes, tmp_path / "out", "--images-per-shard", 6, "--workers", 2, "--skip-bad", "--json")
    assert shards.main([str(argument) for argument in command]) == 0
    captured = capsys.readouterr()
    assert f"{classes}: left out images that are neither JPEG nor PNG: 1 .webp" in captured.out
    named = json.loads(captured.out.splitlines()[-1])["named"]
    assert captured.err.splitlines() == [f"left out: {reason}" for reason in named]
    assert sorted(reason.partition(": ")[0] for reason in named) == [
        f"{classes}/cat/pipe.jpg", f"{classes}/dog/large.png"
    ]  # fmt: skip


LABEL = ("a.cls", b"1")
IMAGE = ("a.jpg", jpeg(0))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([IMAGE], "'a' has no a.cls, its label"),
        ([IMAGE, LABEL, ("b.cls", b"1")], "'b' has no image"),
        ([IMAGE, LABEL, ("a.png", b"x")], "'a' has a second image"),
        ([IMAGE, LABEL, LABEL], "'a' has a second label"),
        ([IMAGE, ("a.cls", b"cat")], "'a.cls' holds no label"),
        ([IMAGE, ("a.cls", b"-1")], "'a.cls' holds no label"),
        ([IMAGE, ("a.cls", b"1.0")], "'a.cls' holds no label"),
        ([IMAGE, ("a.cls", b"9" * 40)], "'a.cls' holds no label"),
        ([IMAGE, LABEL, ("../b.txt", b"")], "'../b.txt' leads out of the archive"),
        ([IMAGE, LABEL, ("/b.txt", b"")], "'/b.txt' leads out of the archive"),
        ([("readme.txt", b"")], "no images"),
        ([], "no images"),
    ],
)
def test_what_a_shard_must_not_hold_is_refused(tmp_path, capsys, files, message):
    write_tar(tmp_path / "x.tar", files)
    code, _, (error,) = run(capsys, "index", tmp_path)
    assert code == 2
    assert error.startswith(f"{tmp_path}/x.tar: {message}")
    assert not (tmp_path / "x.tar.index").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(tmp_path, capsys, kind):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        info = tarfile.TarInfo("a.jpg")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    code, _, (error,) = run(capsys, "index", tmp_path)
    assert code == 2
    assert "'a.jpg' is no plain file" in error


def test_a_tar_cut_short_anywhere_is_refused(tmp_path, capsys):
    """In a header, in an image, in a label, before the end's mark: only the very end may be missing a part of that."""
    write_tar(tmp_path / "x.tar", [IMAGE, LABEL, ("b.jpg", jpeg(1)), ("b.cls", b"0")])
    whole = (tmp_path / "x.tar").read_bytes()
    with tarfile.open(tmp_path / "x.tar") as archive:
        end = max(member.offset_data for member in archive) + 512
    for size in range(0, end + 1, 100):
        (tmp_path / "x.tar").write_bytes(whole[:size])
        code, _, errors = run(capsys, "index", tmp_path)
        assert (code, len(errors)) == (2, 1), size
    damaged = bytearray(whole)
    damaged[whole.index(b"b.jpg") + 120] ^= 255  # in a header in the middle: not an end
    (tmp_path / "x.tar").write_bytes(damaged)
    code, _, (error,) = run(capsys, "index", tmp_path)
    assert code == 2 and "damaged or cut short" in error


def test_long_and_strange_names_are_read(tmp_path, capsys):
    """Names beyond a plain header's 100 bytes, in both dialects; a folder; a dot in a folder's name."""
    for number, dialect in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        with tarfile.open(tmp_path / f"{number}.tar", "w", format=dialect) as archive:
            folder = tarfile.TarInfo("v1.0")
            folder.type = tarfile.DIRTYPE
            archive.addfile(folder)
            for name, content in (("v1.0/" + "ä" * 120 + ".jpg", jpeg(3)), ("v1.0/" + "ä" * 120 + ".cls", b"2")):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    assert run(capsys, "index", tmp_path)[0] == 0
    source = ShardsSource(str(tmp_path), 1)
    assert [source.encoded(0), source.encoded(1)] == [jpeg(3)] * 2
    assert source.name(1) == f"{tmp_path}/1.tar/v1.0/" + "ä" * 120 + ".jpg"
    assert source.classes == ("0", "1", "2")


def test_too_few_names_of_classes_are_refused(tmp_path, capsys):
    write_shards(tmp_path / "s", (4,), classes=3)
    (tmp_path / "names").write_text("cat\ndog\n")
    code, _, (error,) = run(capsys, "index", tmp_path / "s", "--classes", tmp_path / "names")
    assert code == 2
    assert error == f"{tmp_path}/names: 2 classes, but the shards have label 2; name all classes"


def test_verify_finds_what_is_damaged(tmp_path, capsys):
    write_shards(tmp_path / "s", (5, 4, 3, 2))
    assert run(capsys, "verify", tmp_path / "s", "--decode")[:2] == (
        0,
        {
            "folder": str(tmp_path / "s"), "shards": 4, "images": 14, "classes": 2, "faults": 0, "named": [],
            "bytes": sum(path.stat().st_size for path in (tmp_path / "s").glob("*.tar")),
        },
    )  # fmt: skip
    source = ShardsSource(str(tmp_path / "s"), 1)
    places = {"image": (0, int(source._offsets[1]) + 20), "padding": (2, int(source._offsets[9] + source._lengths[9]))}
    for shard, place in places.values():
        path = tmp_path / f"s/part-{shard}.tar"
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)
    label = (tmp_path / "s/part-1.tar").read_bytes().replace(b"1\n", b"0\n", 1)
    (tmp_path / "s/part-1.tar").write_bytes(label)
    os.truncate(tmp_path / "s/part-3.tar", 700)
    code, data, errors = run(capsys, "verify", tmp_path / "s")
    assert code == 2
    assert data["faults"] == 4 and data["named"] == errors[:4]
    assert errors[0] == f"{tmp_path}/s/part-0.tar/0001.JPG: not the bytes that the index has the checksum of"
    assert errors[1] == f"{tmp_path}/s/part-1.tar/0005.JPG: label 0, but its index says 1"
    assert errors[2].endswith(
        "part-2.tar: not the bytes that shards.json has the checksum of, but no image is affected"
    )
    assert errors[3].startswith(f"{tmp_path}/s/part-3.tar: 700 bytes, but its index is of")
    assert errors[4] == f"{tmp_path}/s: 4 faults; copy or make these shards again"


def test_verify_names_twenty_and_counts_all(tmp_path, capsys):
    """What no decoder takes, in shards that are otherwise sound."""
    files = [file for n in range(30) for file in ((f"{n}.jpg", jpeg(n)[:-200]), (f"{n}.cls", b"0"))]
    write_tar(tmp_path / "x.tar", files)
    run(capsys, "index", tmp_path)
    assert run(capsys, "verify", tmp_path)[0] == 0
    code, data, errors = run(capsys, "verify", tmp_path, "--decode")
    assert (code, data["faults"], len(data["named"]), len(errors)) == (2, 30, 20, 21)
    assert errors[0].startswith(f"{tmp_path}/x.tar/0.jpg: ")


def test_verify_reads_over_a_network(tmp_path, capsys):
    pytest.importorskip("aiohttp")
    write_shards(tmp_path / "s", (5, 4))
    with serving(tmp_path) as server:
        assert run(capsys, "verify", f"{server.url}/s", "--decode")[0] == 0
        path = tmp_path / "s/part-1.tar"
        path.write_bytes(path.read_bytes().replace(jpeg(7), jpeg(7)[::-1]))
        code, _, errors = run(capsys, "verify", f"{server.url}/s")
        assert code == 2
        assert errors[0] == f"{server.url}/s/part-1.tar/0007.JPG: not the bytes that the index has the checksum of"


def test_a_folder_that_is_not_there_is_an_error(tmp_path, capsys):
    for command in ("index", "verify"):
        code, _, (error,) = run(capsys, command, tmp_path / "gone")
        assert code == 2
        assert error.startswith(f"{tmp_path}/gone")
    (tmp_path / "empty").mkdir()
    assert run(capsys, "index", tmp_path / "empty")[2] == [
        f"{tmp_path}/empty: no .tar files; name the folder that holds the shards"
    ]
    assert LocalFolder(str(tmp_path)).path("x") == f"{tmp_path}/x"


def test_a_wrong_command_line_is_one_line_and_2(capsys):
    for arguments in ([], ["pack", "a", "b", "--quality", "0"], ["pack", "a", "b", "--workers", "0"], ["pack"], ["x"]):
        with pytest.raises(SystemExit) as caught:
            shards.main(arguments)
        assert caught.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_index_that_is_made_anew_keeps_the_names_of_the_classes(classes, tmp_path, capsys):
    """As the message about a missing index advises."""
    out = tmp_path / "out"
    run(capsys, "pack", classes, out, "--images-per-shard", 6, "--workers", 1)
    before = ShardsSource(str(out), 1)
    next(out.glob("*.index")).unlink()
    assert run(capsys, "index", out)[0] == 0
    after = ShardsSource(str(out), 1)
    assert after.classes == before.classes != ("0", "1")
    assert pairs(after) == pairs(before)


def test_one_label_cannot_make_a_billion_classes(tmp_path, capsys):
    write_tar(tmp_path / "a.tar", [("1.jpg", jpeg(1)), ("1.cls", b"999999999")])
    code, _, (error,) = run(capsys, "index", tmp_path)
    assert code == 2
    assert error.startswith(
        f"{tmp_path}: label 999999999, but without --classes FILE there are at most 100,000 classes"
    )


@pytest.mark.parametrize("place", ["http://host/shards", "inside"])
def test_shards_go_neither_to_a_url_nor_among_the_images(classes, capsys, place):
    folder = classes / "cat" / "shards" if place == "inside" else place
    code, _, (error,) = run(capsys, "pack", classes, folder, "--workers", 1)
    assert code == 2
    assert error.startswith(f"{folder}: ")
    assert not (classes / "cat" / "shards").exists()
    if place != "inside":
        assert run(capsys, "index", folder)[0] == 2


def test_processes_that_pack_end_with_the_one_that_asked():
    """Killed, it cannot tell them; they would keep memory, and what it wrote to, for good."""
    program = (
        "import multiprocessing, time\n"
        "from tools import packing\n"
        "def work():\n"
        "    packing._begin(None)\n"
        "    time.sleep(60)\n"
        "child = multiprocessing.get_context('fork').Process(target=work)\n"
        "child.start()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    time.sleep(0.5)
    os.kill(child, 0)
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == "", "ends when the last of them has closed it"
    end = time.monotonic() + 40
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < end:
            os.kill(child, 0)
            time.sleep(0.05)
    parent.stdout.close()
