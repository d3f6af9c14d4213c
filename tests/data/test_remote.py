"""Shards behind URLs: the same images, and an end to every call whatever a server does."""

import pickle
import resource
import sys
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("aiohttp", reason="fsspec needs it for http")

from common.errors import DataError
from data import remote
from data.base import UnreadableImage
from data.loader import EvaluationBatches
from data.local import MissingFile, Range
from data.remote import RemoteFolder
from data.shards import ShardsSource, open_folder
from recipe.config import Data
from tests.data.http_server import serving
from tests.data.tar_shards import write_shards
from tools import shards
from tools.indexing import _CHUNK

COUNTS = (5, 1, 9, 4, 7)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(remote, "_PAUSE", 0.01)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder above a folder of shards, and their images."""
    folder = tmp_path_factory.mktemp("remote")
    return folder, write_shards(folder / "train", COUNTS)


@pytest.fixture
def images(written):
    return written[1]


@pytest.fixture
def server(written):
    with serving(written[0]) as running:
        yield running


@pytest.fixture
def source(server):
    """Opened, with no request on the server's list."""
    opened = ShardsSource(f"{server.url}/train", 10)
    del server.asked[:]
    return opened


def everything(source):
    return [image.encoded for image in source.open_all(range(len(source)))]


@pytest.mark.parametrize("kind", ["file", "http", "simplecache::http"])
def test_every_kind_of_url_gives_the_images(kind, written, server):
    """A cache fetches each shard once."""
    folder, images = written
    place = {"file": f"file://{folder}/train", "http": f"{server.url}/train/"}.get(
        kind, f"{kind[:-4]}{server.url}/train"
    )
    source = ShardsSource(place, 10)
    del server.asked[:]
    assert everything(source) == everything(source) == images
    if kind == "simplecache::http":
        assert sorted(server.asked) == [f"train/part-{shard}.tar" for shard in range(5)]
    assert pickle.loads(pickle.dumps(source)).encoded(7) == images[7]
    assert source.name(7) == f"{place.rstrip('/')}/part-2.tar/0007.JPG"


@pytest.mark.parametrize(("kind", "tries"), [("", 3), ("simplecache::", 1)])
def test_a_manifest_that_never_comes_is_an_error(server, monkeypatch, kind, tries):
    """A cache is not asked again: it goes on fetching, and a second fetch would write to the same
    file."""
    for name, value in (("_PATIENCE", 0.2), ("_PATIENCE_WITH_CACHES", 0.2), ("_RATE", 1e9)):
        monkeypatch.setattr(remote, name, value)
    server.always["train/shards.json"] = "hang"
    with pytest.raises(DataError, match=r"/train/shards\.json: no answer within"):
        ShardsSource(f"{kind}{server.url}/train", 10)
    assert server.asked == ["train/shards.json"] * tries


def test_a_whole_file_of_any_length_comes_in_pieces_and_no_longer_one(tmp_path, monkeypatch):
    """The server refuses ranges that begin at the end of a file, as servers do."""
    monkeypatch.setattr(remote, "_PIECE", 100)
    with serving(tmp_path) as server:
        for length in (1, 99, 100, 101, 198, 199, 200, 1000):
            (tmp_path / "file").write_bytes(bytes(number % 251 for number in range(length)))
            folder = RemoteFolder(server.url)
            assert (
                folder.read("file", length)
                == folder.read("file", 2**20)
                == (tmp_path / "file").read_bytes()
            )
            if length > 1:
                with pytest.raises(
                    DataError,
                    match=f"file: more than {length - 1} bytes came; there is another file",
                ):
                    folder.read("file", length - 1)


def test_a_slow_server_is_waited_for_by_the_bytes_asked_for_also_of_whole_files(
    written, server, monkeypatch
):
    """The manifest takes longer than the patience with a server that sends nothing."""
    for name, value in (("_PATIENCE", 0.02), ("_TRIES", 1), ("_RATE", 50_000)):
        monkeypatch.setattr(remote, name, value)
    manifest = written[0] / "train/shards.json"
    assert manifest.stat().st_size > 100
    server.always["train/shards.json"] = "slow"
    assert RemoteFolder(f"{server.url}/train").read("shards.json", 2**25) == manifest.read_bytes()


def test_few_shards_are_read_from_end_to_end_at_once(server, monkeypatch, capsys):
    """Their patience is for a share of the least rate."""
    threads = set()
    scan = shards.scan
    monkeypatch.setattr(shards.cores, "available", lambda: 16)
    monkeypatch.setattr(
        shards,
        "scan",
        lambda *args, **kwargs: threads.add(threading.get_ident()) or scan(*args, **kwargs),
    )
    assert shards.main(["verify", f"{server.url}/train"]) == 0
    assert len(threads) <= RemoteFolder.most_streams == 2
    assert capsys.readouterr().out.endswith("0 faults\n")


def test_a_server_at_the_least_rate_is_waited_for_by_all_that_read_from_it(server):
    """Shards that are read from end to end, each in a thread of its own, and images that are
    requested together."""
    folder = RemoteFolder(f"{server.url}/train")
    stream = [Range("000000.tar", 0, _CHUNK)]
    images = [Range(f"{number:06d}.tar", 0, 2**20) for number in range(folder.at_once)]
    for wanted, readers in ((stream, folder.most_streams), (images, 1)):
        seconds = readers * sum(each.length for each in wanted) / 1e6
        assert seconds + 8 == pytest.approx(folder._patience(wanted[0].name, wanted, exact=True))


def test_shards_are_asked_at_once(source, images, monkeypatch):
    """Each answers only when all five have been asked: one after the other, the barrier would
    break."""
    together = threading.Barrier(5, timeout=60)
    ask = RemoteFolder._fetch
    monkeypatch.setattr(
        RemoteFolder, "_fetch", lambda *arguments: together.wait() >= 0 and ask(*arguments)
    )
    numbers = [0, 5, 6, 15, 19]
    assert [image.encoded for image in source.open_all(numbers)] == [
        images[number] for number in numbers
    ]


def test_ranges_without_bytes_are_not_requested(server, source, images):
    """Servers answer them with the whole file, or with an error."""
    name, start, length = source._range(7)
    assert source._folder.ranges([Range(name, start, 0)]) == [b""] and server.asked == []
    wanted = [Range(name, start, 0), Range(name, start, length), Range("gone.tar", 0, 0)]
    assert source._folder.ranges(wanted) == [b"", images[7], b""] and len(server.asked) == 1


def test_workers_read_from_the_server_that_the_parent_has_read_from(source, images):
    """fsspec works in a thread, of which a fork has none."""
    assert everything(source) == images
    batches = EvaluationBatches(
        source, data=Data(source="shards", workers=2), image_size=12, batch=13
    )
    assert [batch.indices.tolist() for batch in batches] == [list(range(13)), list(range(13, 26))]
    batches.close()


def test_a_server_that_fails_is_tried_three_times_and_then_once_until_it_answers(
    server, images, monkeypatch
):
    paused = []
    # Of this module alone: threads of others sleep, too.
    monkeypatch.setattr(
        remote, "time", SimpleNamespace(monotonic=time.monotonic, sleep=paused.append)
    )
    server.faults["train/shards.json"] = [500, 503]
    source = ShardsSource(f"{server.url}/train", 10)
    assert [
        0.5 <= pause / remote._PAUSE / 2**number < 1.5 for number, pause in enumerate(paused)
    ] == [True, True]
    del server.asked[:]
    server.always["train/part-0.tar"] = 500
    for tries in (3, 1, 1):
        with pytest.raises(
            UnreadableImage, match=rf"^{server.url}/train/part-0\.tar/0000\.JPG: .*500"
        ):
            source.encoded(0)
        assert server.asked == ["train/part-0.tar"] * tries
        del server.asked[:]
    assert source.open_all([0, 5])[1].encoded == images[5]
    del server.always["train/part-0.tar"]
    assert source.encoded(0) == images[0]
    server.faults["train/part-0.tar"] = [500, 503]
    assert source.encoded(0) == images[0]
    assert not any(server.faults.values())


def test_a_server_that_hangs_is_given_up_sooner_next_time_and_holds_up_no_other_shard(
    server, source, images, monkeypatch
):
    """Or every micro batch that needs it would take as long."""
    for name, value in (("_TRIES", 1), ("_PATIENCE", 3.0), ("_LITTLE_PATIENCE", 0.1)):
        monkeypatch.setattr(remote, name, value)
    server.always["train/part-0.tar"] = "hang"
    for least, most in ((3, 60), (0.1, 3)):
        start = time.monotonic()
        opened = source.open_all([0, 5])
        assert least <= time.monotonic() - start < most
        assert str(opened[0]).startswith(
            f"{server.url}/train/part-0.tar/0000.JPG: no answer within "
        )
        assert opened[1].encoded == images[5]


@pytest.mark.parametrize("fault", ["whole", "endless", "swelling"])
def test_answers_are_not_read_further_than_they_were_requested(
    server, source, images, fault, monkeypatch
):
    """The whole file, one that never ends, 512 MiB when unpacked: none is taken in, nor waited
    for."""
    monkeypatch.setattr(remote, "_PATIENCE", 60.0)
    server.always["train/part-0.tar"] = fault
    before = resource.getrusage(
        resource.RUSAGE_SELF
    ).ru_maxrss  # kB; the server packs within this process
    with pytest.raises(
        UnreadableImage, match=r"more than [\d,]+ bytes came; the server does not know byte ranges$"
    ):
        source.encoded(0)
    server.faults["train/part-2.tar"] = [fault]
    assert source.encoded(7) == images[7], "tried once more"
    for name in ("shards.json", "part-0.tar.index") if fault != "whole" else ():
        server.always[f"train/{name}"] = fault
        with pytest.raises(
            DataError, match=rf"{name}: more than 262,144 bytes came; the server does not know byte"
        ):
            ShardsSource(f"{server.url}/train", 10)
        del server.always[f"train/{name}"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256_000


def test_a_shard_that_shrank_is_named(source):
    source._lengths[25] += 100_000
    with pytest.raises(
        UnreadableImage, match=r"part-4\.tar/0025\.JPG: [\d,]+ bytes came instead of 10[01],"
    ):
        source.encoded(25)


def test_places_that_are_not_there_are_errors(server):
    """A missing file is asked for once."""
    with pytest.raises(
        MissingFile, match=rf"^{server.url}/nowhere/shards\.json: no such file; make it: python -m"
    ):
        ShardsSource(f"{server.url}/nowhere", 10)
    assert server.asked == ["nowhere/shards.json"]
    with pytest.raises(DataError, match=r"^what://x: Protocol not known: what$"):
        ShardsSource("what://x", 10)


@pytest.mark.parametrize(
    ("package", "place"), [("fsspec", "http"), ("aiohttp", "http"), ("s3fs", "s3")]
)
def test_folders_on_this_machine_do_without_fsspec_and_a_missing_package_is_named(
    written, monkeypatch, package, place
):
    # loaded before
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "http", raising=False)
    for loaded in ("fsspec.implementations.http", "data.http", "data.remote"):
        monkeypatch.delitem(sys.modules, loaded, raising=False)
    monkeypatch.delattr("data.remote", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    ShardsSource(str(written[0] / "train"), 10).encoded(0)
    assert "data.remote" not in sys.modules
    with pytest.raises(DataError, match=rf": pip install {package}$"):
        open_folder(f"{place}://x/y")
