"""python -m tools.shards: packed shards hold the images of the folders; damage and danger are
refused in one line."""

import io
import json
import os
import tarfile

import numpy as np
import pytest
from PIL import Image

from common.files import write
from data import shard_index
from data.local import LocalFolder
from data.shards import ShardsSource
from data.sources import class_names
from recipe.config import Data
from tests.data.tar_shards import jpeg, pairs, run, tar_bytes, write_shards, write_tar
from tests.data.test_decode import given_up, png
from tests.world import fork_server
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


def pack(capsys, images, out, *options, workers=1):
    return run(capsys, "pack", images, out, "--images-per-shard", 6, "--workers", workers, *options)


def test_packed_images_are_those_of_the_folders_also_for_tarfile(classes, tmp_path, capsys):
    code, data, _ = pack(capsys, classes, tmp_path / "out")
    assert code == 0
    source = ShardsSource(str(tmp_path / "out"), 10)
    tars = sorted((tmp_path / "out").glob("*.tar"))
    counts = {"shards": 4, "images": 21, "classes": 3, "kept": 0, "skipped": 0, "named": []}
    assert data == {
        "folder": str(tmp_path / "out"),
        **counts,
        "bytes": sum(path.stat().st_size for path in tars),
    }
    assert pairs(source) == sorted(
        (path.parent.name, path.read_bytes()) for path in classes.glob("*/*")
    )
    assert set(source.labels[:6].tolist()) > {0}, "shards hold classes in a mixture"
    found = []
    for path in tars:
        with tarfile.open(path) as archive:
            members = {member.name: archive.extractfile(member).read() for member in archive}
        images = [name for name in members if not name.endswith(".cls")]
        found += [(members[f"{name.rpartition('.')[0]}.cls"], members[name]) for name in images]
    assert found == [(b"%d" % source.labels[n], source.encoded(n)) for n in range(21)]


def test_indexes_can_be_made_anew(classes, tmp_path, capsys):
    """Also what pack knew stays: a further call of it finds its own shards."""
    pack(capsys, classes, tmp_path / "out")
    before = contents(tmp_path / "out")
    (tmp_path / "names").write_text("cat\ndog\nemu\n\n\n")
    for options in ((), ("--classes", tmp_path / "names")):
        # without names those of the manifest stay
        (tmp_path / "out/000001.tar.index").unlink()
        os.truncate(tmp_path / "out/000002.tar.index", 300)
        assert run(capsys, "index", tmp_path / "out", *options)[0] == 0
        assert contents(tmp_path / "out") == before
    assert pack(capsys, classes, tmp_path / "out")[1]["kept"] == 4


def test_an_index_that_is_made_anew_is_of_no_plan_where_that_is_not_known(
    classes, tmp_path, capsys
):
    """One shard is another by now, and so it is not known of what the one without an index is
    made."""
    pack(capsys, classes, tmp_path / "out")
    before = contents(tmp_path / "out")
    (tmp_path / "out/000001.tar").write_bytes(WHOLE)
    (tmp_path / "out/000002.tar.index").unlink()
    assert run(capsys, "index", tmp_path / "out")[0] == 0
    plans = [
        shard_index.stored_index(LocalFolder(str(tmp_path / "out")), f"00000{n}.tar").plan
        for n in range(4)
    ]
    plan = shard_index.decode_index(before["000000.tar.index"], "").plan
    assert plan and plans == [plan, "", "", plan]


@pytest.mark.parametrize("packed_before", [True, False], ids=["whole", "interrupted"])
def test_an_index_of_anothers_tar_is_of_no_plan_so_that_pack_does_not_keep_it(
    classes, tmp_path, capsys, packed_before
):
    """It has the name of a shard of ours. Where pack was interrupted there is no manifest yet."""
    out = tmp_path / "out"
    pack(capsys, classes, out)
    (out / "000001.tar").write_bytes(WHOLE)
    (out / "000001.tar.index").unlink()
    if not packed_before:
        (out / "shards.json").unlink()
    assert run(capsys, "index", out)[0] == 0
    assert shard_index.stored_index(LocalFolder(str(out)), "000001.tar").plan == ""
    code, _, (error,) = pack(capsys, classes, out)
    assert code == 2 and "000001.tar: packed from other images" in error
    assert (out / "000001.tar").read_bytes() == WHOLE


def class_order(folder):
    """Whether the classes of shards are known to be numbered in the order of their names."""
    return class_names(
        Data(source="shards", root=str(folder.parent), train_folder=folder.name), "train"
    ).sorted


def without_sorted(manifest):
    """Make a manifest as versions wrote it that did not store whether classes are sorted."""
    content = json.loads(manifest.read_text())
    del content["sorted"]
    manifest.write_text(json.dumps(content))


def test_indexes_of_packed_shards_say_whether_labels_follow_the_names(classes, tmp_path, capsys):
    """Class folders do. Other names for the same labels need not, nor those of shards of others."""
    out = tmp_path / "out"
    pack(capsys, classes, out)
    # Editors of Windows write a mark of the byte order in front of the first name.
    for text, options in (
        ("", ()),
        ("cat\ndog\nemu\n", ("--classes",)),
        ("\ufeffcat\ndog\nemu\n", ("--classes",)),
    ):
        (tmp_path / "names").write_text(text, encoding="utf-8")
        assert (
            run(capsys, "index", out, *options, *([tmp_path / "names"] if options else []))[0] == 0
        )
        assert class_order(out)
    (tmp_path / "names").write_text("zebra\nant\nbee\n")
    assert run(capsys, "index", out, "--classes", tmp_path / "names")[0] == 0
    assert not class_order(out)
    write_shards(tmp_path / "strange", (2,))
    assert not class_order(tmp_path / "strange")


def test_shards_of_versions_that_stored_no_order_of_classes_have_that_of_their_names(
    classes, tmp_path, capsys
):
    """And the same digest, so that runs on them go on."""
    out = tmp_path / "out"
    digests = set()
    for names in ("cat\ndog\nemu\n", "dog\ncat\nemu\n"):
        (tmp_path / "names").write_text(names)
        pack(capsys, classes, out)
        digests.add(ShardsSource(str(out), 1).digest)
        without_sorted(out / "shards.json")
        digests.add(ShardsSource(str(out), 1).digest)
        assert len(digests) == 1
        manifest = json.loads((out / "shards.json").read_text())
        (out / "shards.json").write_text(json.dumps({**manifest, "classes": names.split()}))
        assert class_order(out) == names.startswith("cat")


@pytest.mark.parametrize(
    ("names", "line"), [("cat\n\ndog\nemu\n", 2), ("\ncat\ndog\n", 1), ("cat\ndog\n \t\n\nemu", 3)]
)
def test_a_blank_line_among_the_names_of_classes_is_refused(tmp_path, capsys, names, line):
    """Left out, it would give all later names to other labels."""
    (tmp_path / "x.tar").write_bytes(WHOLE)
    (tmp_path / "names").write_text(names)
    code, _, (error,) = run(capsys, "index", tmp_path, "--classes", tmp_path / "names")
    assert code == 2
    assert (
        error
        == f"{tmp_path}/names: line {line} is blank; name the class with label {line - 1} there"
    )


def test_names_of_classes_do_not_become_numbers_without_a_word(classes, tmp_path, capsys):
    """Where the manifest that has them is damaged, or has too few for a new shard."""
    out = tmp_path / "out"
    pack(capsys, classes, out)
    manifest = (out / "shards.json").read_bytes()
    (out / "shards.json").write_bytes(manifest[:-20])
    code, _, (error,) = run(capsys, "index", out)
    assert code == 2 and error.startswith(
        f"{out}/shards.json: damaged, and the names of the classes with it; give --cl"
    )
    (out / "shards.json").write_bytes(manifest)
    write_tar(out / "new.tar", [IMAGE, ("a.cls", b"3")])
    code, _, (error,) = run(capsys, "index", out)
    assert code == 2
    fault = (
        "names 3 classes, but the shards have label 3; give --classes FILE with the names of all"
    )
    assert error == f"{out}/shards.json: {fault}"
    assert (out / "shards.json").read_bytes() == manifest
    (out / "shards.json").write_bytes(manifest[:-20])
    (tmp_path / "names").write_text("cat\ndog\nemu\nfox\n")
    assert run(capsys, "index", out, "--classes", tmp_path / "names")[0] == 0
    assert ShardsSource(str(out), 1).classes == ("cat", "dog", "emu", "fox")


def test_numbers_of_classes_go_on_with_a_new_shard(tmp_path, capsys):
    write_shards(tmp_path / "s", (4,))
    write_tar(tmp_path / "s/new.tar", [IMAGE, ("a.cls", b"3")])
    assert run(capsys, "index", tmp_path / "s")[0] == 0
    assert ShardsSource(str(tmp_path / "s"), 1).classes == ("0", "1", "2", "3")


def test_the_bytes_depend_on_the_seed_but_not_on_the_number_of_workers(
    classes, tmp_path, capsys, monkeypatch
):
    context = fork_server()  # which has loaded torch
    monkeypatch.setattr(packing.parent_death, "context", lambda method: context)
    for number in (1, 2):
        assert pack(capsys, classes, tmp_path / f"{number} workers", workers=number)[0] == 0
    assert pack(capsys, classes, tmp_path / "seed", "--seed", 1)[0] == 0
    found = contents(tmp_path / "1 workers")
    archive = next((tmp_path / "seed").glob("*.tar")).read_bytes()
    # two empty blocks end it, as in every shard so far
    assert len(archive) - len(archive.rstrip(b"\0")) < 2048
    assert found == contents(tmp_path / "2 workers") and found != contents(tmp_path / "seed")
    assert pairs(ShardsSource(str(tmp_path / "seed"), 1)) == pairs(
        ShardsSource(str(tmp_path / "1 workers"), 1)
    )


def test_an_interrupted_call_is_continued(classes, tmp_path, capsys, monkeypatch):
    pack(capsys, classes, tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    out = tmp_path / "out"
    made = []
    original = packing._pack_shard

    def counting(task, name, images):
        made.append(name)
        return original(task, name, images)

    def failing(path, content, durable):
        write(path, content, durable)
        if len(made) == 3:
            monkeypatch.setattr(packing, "write", write)
            raise KeyboardInterrupt

    monkeypatch.setattr(packing, "_pack_shard", counting)
    monkeypatch.setattr(packing, "write", failing)
    code, _, errors = pack(capsys, classes, out)
    assert code == 1
    assert errors == ["interrupted; rerun the same command: it goes on where it was"]
    files = [f"00000{number}.tar{ending}" for number in range(2) for ending in ("", ".index")]
    assert sorted(contents(out)) == [*files, "000002.tar.index"], "an index comes before its shard"
    code, data, _ = pack(capsys, classes, out)
    assert (code, data["kept"]) == (0, 2)
    assert made[3:] == ["000002.tar", "000003.tar"]
    assert contents(out) == whole
    os.truncate(out / "000001.tar", 600)
    assert pack(capsys, classes, out)[1]["kept"] == 3
    assert contents(out) == whole


def test_shards_of_another_plan_are_not_overwritten(classes, tmp_path, capsys):
    out = tmp_path / "out"
    pack(capsys, classes, out)
    before = contents(out)
    for other in (("--seed", 1), ("--short-side", 8), ("--images-per-shard", 30)):
        code, _, (error,) = pack(capsys, classes, out, *other)
        assert code == 2
        assert "packed from other images or with other options; name an empty folder" in error
    (classes / "cat/new.jpg").write_bytes(jpeg(99))
    assert pack(capsys, classes, out)[0] == 2
    assert contents(out) == before
    write_shards(tmp_path / "strange", (2,))
    assert pack(capsys, classes, tmp_path / "strange")[0] == 2


def test_a_tar_without_an_index_is_not_overwritten(classes, tmp_path, capsys):
    """It may be somebody else's, of a name that pack gives, too."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "000000.tar").write_bytes(WHOLE)
    code, _, (error,) = pack(capsys, classes, out)
    assert (code, error) == (
        2,
        f"{out}/000000.tar: not packed by this command; name an empty folder",
    )
    assert contents(out) == {"000000.tar": WHOLE}


def test_only_images_with_a_longer_short_side_are_made_smaller(tmp_path, capsys):
    folder = tmp_path / "images/one"
    folder.mkdir(parents=True)
    rows, columns = np.mgrid[0:600, 0:900]
    image = Image.fromarray(
        np.stack([rows // 3, columns // 4, 255 - rows // 3], 2).astype(np.uint8)
    )
    exif = Image.Exif()
    exif[0x0112] = 6  # stored on its side
    image.save(folder / "turned.jpg", exif=exif)
    image.resize((90, 60)).save(folder / "small.jpg", exif=exif)
    pack(capsys, tmp_path / "images", tmp_path / "out", "--short-side", 60, "--quality", 95)
    source = ShardsSource(str(tmp_path / "out"), 1)
    found = {source.name(n).rpartition("-")[2]: n for n in range(2)}
    assert source.encoded(found["small.jpg"]) == (folder / "small.jpg").read_bytes()
    upright = source.read(found["turned.jpg"]).numpy().astype(int)
    assert upright.shape == (3, 90, 60)
    expected = np.rot90(np.asarray(image.resize((90, 60), Image.Resampling.BICUBIC)), -1).transpose(
        2, 0, 1
    )
    # of slopes that span 200 levels; JPEG at quality 95 twice
    assert np.abs(upright - expected).max() < 8


def test_bad_images_end_the_command_or_are_left_out_named_and_counted(classes, tmp_path, capsys):
    """One is cut short, one would hang, one would swell; and one is of another kind."""
    bad = classes / "cat/im.0.jpg"
    bad.write_bytes(bad.read_bytes()[:-100])
    code, _, (error,) = pack(capsys, classes, tmp_path / "out")
    assert code == 2 and error.startswith(f"{bad}: ")
    os.mkfifo(classes / "cat/pipe.jpg")
    (classes / "dog/large.png").write_bytes(png(1, 178_956_970, 8, 0, [b"\0" * 9]))
    (classes / "dog/other.webp").write_bytes(b"pixels")
    command = (
        "pack",
        classes,
        tmp_path / "new",
        "--images-per-shard",
        6,
        "--workers",
        1,
        "--skip-bad",
        "--json",
    )
    assert shards.main([str(argument) for argument in command]) == 0
    captured = capsys.readouterr()
    assert (
        f"{classes}: left out images that are not named .jpg, .jpeg or .png: 1 .webp"
        in captured.out
    )
    data = json.loads(captured.out.splitlines()[-1])
    assert (data["images"], data["skipped"]) == (20, 3)
    assert captured.err.splitlines() == [f"left out: {reason}" for reason in data["named"]]
    named = sorted(reason.partition(": ")[0] for reason in data["named"])
    assert named == [str(bad), f"{classes}/cat/pipe.jpg", f"{classes}/dog/large.png"]
    assert pack(capsys, classes, tmp_path / "new", "--skip-bad")[1]["kept"] == 4
    assert pack(capsys, classes, tmp_path / "new")[0] == 2


def test_an_image_that_is_too_long_for_a_jpeg_is_named_and_left_out(classes, tmp_path, capsys):
    """Pillow says no more than that an encoder failed."""
    long = classes / "cat/long.png"
    Image.new("L", (70_000, 20)).save(long)
    code, _, (error,) = pack(capsys, classes, tmp_path / "out", "--short-side", 19)
    assert code == 2
    assert error.startswith(
        f"{long}: 66,500 pixels long when made smaller, but a JPEG has at most 65,500; give a sm"
    )
    code, data, _ = pack(capsys, classes, tmp_path / "new", "--short-side", 19, "--skip-bad")
    assert (code, data["skipped"], data["images"]) == (0, 1, 21)
    assert data["named"][0].startswith(f"{long}: 66,500 pixels long")


LABEL = ("a.cls", b"1")
IMAGE = ("a.jpg", jpeg(0))


def special(kind):
    """A tar with a link or device."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        info = tarfile.TarInfo("a.jpg")
        info.type = kind
        info.linkname = "/etc/passwd"
        archive.addfile(info)
    return stream.getvalue()


NO_FILES = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE)
WHOLE = tar_bytes([IMAGE, LABEL, ("b.jpg", jpeg(1)), ("b.cls", b"0")])
DAMAGED = WHOLE.replace(b"b.jpg\0", b"b.jpg\1")  # a header in the middle, which is not the end


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (tar_bytes([IMAGE]), "'a' has no a.cls, its label"),
        (tar_bytes([IMAGE, LABEL, ("b.cls", b"1")]), "'b' has no image"),
        (tar_bytes([IMAGE, LABEL, ("a.png", b"x")]), "'a' has a second image"),
        (tar_bytes([IMAGE, LABEL, LABEL]), "'a' has a second label"),
        *(
            (tar_bytes([IMAGE, ("a.cls", text)]), "'a.cls' holds no label")
            for text in (b"-1", b"1.0", b"9" * 40)
        ),
        (tar_bytes([IMAGE, LABEL, ("../b.txt", b"")]), "'../b.txt' leads out of the archive"),
        (tar_bytes([IMAGE, LABEL, ("/b.txt", b"")]), "'/b.txt' leads out of the archive"),
        (tar_bytes([]), "no images"),
        *((special(kind), "'a.jpg' is no plain file") for kind in NO_FILES),
        (
            tar_bytes([IMAGE, ("a.cls", b"2")]),
            "names: 2 classes, but the shards have label 2; name all classes",
        ),
        (DAMAGED, "damaged or cut short"),
        # In a header, in an image, in a label, before the end's mark, of which a part may be
        # missing.
        *((WHOLE[:size], "") for size in range(0, WHOLE.index(b"b.cls") + 1025, 450)),
        # Without names, one label cannot make a billion classes.
        (
            tar_bytes([IMAGE, ("a.cls", b"9" * 9)]),
            "label 999999999, but without --classes FILE there are at most 100,0",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "tar",
)
def test_what_a_shard_must_not_hold_is_refused(tmp_path, capsys, content, message):
    (tmp_path / "x.tar").write_bytes(content)
    (tmp_path / "names").write_text("cat\ndog\n")
    options = ("--classes", tmp_path / "names") if "names:" in message else ()
    code, _, (error,) = run(capsys, "index", tmp_path, *options)
    assert code == 2 and error.startswith(str(tmp_path)) and message in error
    assert not (tmp_path / "x.tar.index").exists()


def test_long_and_strange_names_are_read(tmp_path, capsys):
    """Names beyond a plain header's 100 bytes; a folder; a dot in a folder's name."""
    with tarfile.open(tmp_path / "1.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        folder = tarfile.TarInfo("v1.0")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for ending, content in (("jpg", jpeg(3)), ("cls", b"2")):
            info = tarfile.TarInfo(f"v1.0/{'ä' * 120}.{ending}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    assert run(capsys, "index", tmp_path)[0] == 0
    source = ShardsSource(str(tmp_path), 1)
    assert source.encoded(0) == jpeg(3)
    assert source.name(0) == f"{tmp_path}/1.tar/v1.0/" + "ä" * 120 + ".jpg"
    assert source.classes == ("0", "1", "2")


def test_verify_finds_damage(tmp_path, capsys):
    folder = tmp_path / "s"
    write_shards(folder, (5, 4, 3, 2))
    size = sum(path.stat().st_size for path in folder.glob("*.tar"))
    sound = {
        "folder": str(folder),
        "shards": 4,
        "images": 14,
        "classes": 2,
        "faults": 0,
        "named": [],
        "bytes": size,
    }
    assert run(capsys, "verify", folder, "--decode")[:2] == (0, sound)
    source = ShardsSource(str(folder), 1)
    for shard, place in (
        (0, int(source._offsets[1]) + 20),
        (2, int(source._offsets[9] + source._lengths[9])),
    ):
        path = folder / f"part-{shard}.tar"  # in an image, in the padding behind one
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)
    (folder / "part-1.tar").write_bytes(
        (folder / "part-1.tar").read_bytes().replace(b"1\n", b"0\n", 1)
    )
    os.truncate(folder / "part-3.tar", 700)
    code, data, errors = run(capsys, "verify", folder)
    assert (code, data["faults"], data["named"]) == (2, 4, errors[:4])
    expected = (
        "/part-0.tar/0001.JPG: not the bytes that the index has the checksum of",
        "/part-1.tar/0005.JPG: label 0, but its index says 1",
        "/part-2.tar: not the bytes that shards.json has the checksum of, but no image is affected",
        "/part-3.tar: 700 bytes, but its index is of",
        ": 4 faults; copy or make these shards again",
    )
    for error, start in zip(errors, expected, strict=True):
        assert error.startswith(f"{folder}{start}")


def test_verify_names_an_image_at_which_the_decoder_gives_up(tmp_path, capsys):
    """Its bytes are those of the index, and pack refuses it."""
    (tmp_path / "images/cat").mkdir(parents=True)
    (tmp_path / "images/cat/a.jpg").write_bytes(given_up())
    write_tar(tmp_path / "x.tar", [IMAGE, LABEL, ("b.jpg", given_up()), ("b.cls", b"0")])
    assert run(capsys, "index", tmp_path)[0] == 0
    assert run(capsys, "verify", tmp_path)[0] == 0
    code, data, _ = run(capsys, "verify", tmp_path, "--decode")
    assert (code, data["named"]) == (2, [f"{tmp_path}/x.tar/b.jpg: Unsupported marker type 0x18"])
    code, _, (error,) = pack(capsys, tmp_path / "images", tmp_path / "out")
    assert (code, error) == (2, f"{tmp_path}/images/cat/a.jpg: Unsupported marker type 0x18")


URL = "http://host/shards"


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ("index gone", "gone: "),
        ("verify gone", "gone"),
        ("index empty", "empty: "),
        (f"index {URL}", URL),
        (f"pack images {URL}", URL),
        *(
            (arguments, "")
            for arguments in ("", "pack a b --quality 0", "pack a b --workers 0", "x")
        ),
    ],
)
def test_wrong_folders_and_command_lines_are_one_line_and_2(
    tmp_path, call, monkeypatch, arguments, fault
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    code, _, (error,) = call(shards.main, *arguments.split())
    assert code == 2 and error.startswith(fault)
