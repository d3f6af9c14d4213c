"""Shards behind URLs: the same images, and an end to every call whatever a server does."""

import pickle
import resource
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("aiohttp", reason="fsspec needs it for http")

import fsspec

from data import remote, shard_index
from data.base import UnreadableImage
from data.loader import training_batches
from data.local import MissingFile, Range
from data.remote import RemoteFolder
from data.shards import ShardsSource
from recipe.config import Data
from recipe.errors import DataError
from tests.data.http_server import serving
from tests.data.tar_shards import write_shards

COUNTS = (5, 1, 9, 4, 7)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(remote, "_PAUSE", 0.01)


@pytest.fixture
def images(tmp_path):
    return write_shards(tmp_path / "train", COUNTS)


@pytest.fixture
def server(tmp_path, images):
    with serving(tmp_path) as running:
        yield running


def everything(source):
    return [image.encoded for image in source.open_all(range(len(source)))]


@pytest.mark.parametrize("kind", ["file", "memory", "http", "simplecache::http"])
def test_every_kind_of_url_gives_the_images(kind, tmp_path, images, server):
    place = {
        "file": f"file://{tmp_path}/train",
        "memory": "memory://bucket/train",
        "http": f"{server.url}/train/",
        "simplecache::http": f"simplecache::{server.url}/train",
    }[kind]
    if kind == "memory":
        for path in (tmp_path / "train").iterdir():
            fsspec.filesystem("memory").pipe(f"/bucket/train/{path.name}", path.read_bytes())
    source = ShardsSource(place, 10)
    assert everything(source) == images
    assert source.encoded(7) == images[7]
    assert pickle.loads(pickle.dumps(source)).encoded(7) == images[7]
    assert source.name(7) == f"{place.rstrip('/')}/part-2.tar/0007.JPG"
    assert source.order(1, 2).tolist() == ShardsSource(str(tmp_path / "train"), 10).order(1, 2).tolist()


def test_a_cache_asks_for_each_shard_once(server, images):
    source = ShardsSource(f"simplecache::{server.url}/train", 10)
    del server.asked[:]
    assert everything(source) == everything(source) == images
    assert sorted(server.asked) == [f"train/part-{shard}.tar" for shard in range(5)]


def test_a_cache_is_asked_by_one_thread_that_has_time_to_fetch_whole_shards(server, images, monkeypatch):
    """Caches do not say that they bear threads, and an attribute of theirs is that of what they stand before."""
    asked, together = [], remote._together
    monkeypatch.setattr(remote, "_together", lambda *arguments: asked.append(arguments) or together(*arguments))
    for place, calls in ((f"{server.url}/train", 5), (f"simplecache::{server.url}/train", 1)):
        source = ShardsSource(place, 10)
        del asked[:]
        assert everything(source) == images
        (arguments,) = asked
        assert (len(arguments[0]), arguments[1][0] > 60) == (calls, calls == 1)


def test_a_cache_that_takes_too_long_is_not_asked_again(server, monkeypatch):
    """It goes on fetching; a second fetch would write to the same file."""
    monkeypatch.setattr(remote, "_PATIENCE_WITH_CACHES", 0.5)
    server.always["train/shards.json"] = "hang"
    with pytest.raises(DataError, match="no answer within"):
        ShardsSource(f"simplecache::{server.url}/train", 10)
    assert server.asked == ["train/shards.json"]


def test_shards_are_asked_at_once(server, images, monkeypatch):
    """Each answers only when all five have been asked: one after the other, the barrier would break."""
    source = ShardsSource(f"{server.url}/train", 10)
    together, ask = threading.Barrier(5, timeout=60), remote._ranges
    monkeypatch.setattr(remote, "_ranges", lambda *arguments: together.wait() >= 0 and ask(*arguments))
    numbers = [0, 5, 6, 15, 19]
    assert [image.encoded for image in source.open_all(numbers)] == [images[number] for number in numbers]


def test_workers_read_what_the_parent_has_read_before(server, images):
    """fsspec works in a thread, of which a fork has none."""
    source = ShardsSource(f"{server.url}/train", 10)
    assert everything(source) == images
    batches = training_batches(
        source, data=Data(source="shards", workers=2), image_size=12, global_batch=13, micro=13, seed=0,
        first_step=0, last_step=4,
    )  # fmt: skip
    start = time.monotonic()
    seen = [index for batch in batches for index in batch.indices.tolist()]
    assert sorted(seen) == sorted(list(range(26)) * 2)
    assert time.monotonic() - start < 25
    assert everything(source) == images


def test_what_fails_twice_is_tried_a_third_time(server, images):
    server.faults["train/shards.json"] = [500, 503]
    source = ShardsSource(f"{server.url}/train", 10)
    server.faults["train/part-0.tar"] = [500, 503]
    assert source.encoded(0) == images[0]
    assert not any(server.faults.values())


def test_a_server_that_always_fails_is_tried_three_times_and_then_once_until_it_answers(server, images):
    source = ShardsSource(f"{server.url}/train", 10)
    del server.asked[:]
    server.always["train/part-0.tar"] = 500
    for tries in (3, 1, 1):
        with pytest.raises(UnreadableImage, match=rf"^{server.url}/train/part-0\.tar/0000\.JPG: .*500"):
            source.encoded(0)
        assert server.asked == ["train/part-0.tar"] * tries
        del server.asked[:]
    opened = source.open_all([0, 5])
    assert isinstance(opened[0], UnreadableImage)
    assert opened[1].encoded == images[5]
    del server.always["train/part-0.tar"], server.asked[:]
    assert source.encoded(0) == images[0]
    server.faults["train/part-0.tar"] = [500, 500]
    assert source.encoded(0) == images[0]


def test_pauses_grow_and_differ_between_processes(monkeypatch, server):
    paused = []
    monkeypatch.setattr(remote, "_PAUSE", 0.5)
    monkeypatch.setattr(remote.time, "sleep", paused.append)
    server.always["train/part-0.tar"] = 500
    folder = RemoteFolder(f"{server.url}/train")
    for process in (1, 2):
        monkeypatch.setattr(remote.os, "getpid", lambda process=process: process)
        folder._failing.clear()
        folder._connection = folder._connection._replace(process=process)
        folder.ranges([Range("part-0.tar", 0, 5)])
    first, second, third, fourth = paused
    assert 0.25 <= first < 0.75 and 0.5 <= second < 1.5
    assert (first, second) != (third, fourth)


def test_a_server_that_never_answers_is_given_up_and_holds_up_no_other_shard(server, images, monkeypatch):
    monkeypatch.setattr(remote, "_PATIENCE", 0.5)
    source = ShardsSource(f"{server.url}/train", 10)
    server.always["train/part-0.tar"] = "hang"
    start = time.monotonic()
    opened = source.open_all([0, 5])
    assert time.monotonic() - start < 20, "the server itself gives up after 30"
    assert str(opened[0]).startswith(f"{server.url}/train/part-0.tar/0000.JPG: no answer within ")
    assert opened[1].encoded == images[5]


def test_a_shard_that_has_not_answered_before_is_not_waited_for_as_long_again(server, images, monkeypatch):
    """Or every micro batch that needs it would take as long."""
    monkeypatch.setattr(remote, "_PATIENCE", 2.0)
    monkeypatch.setattr(remote, "_TRIES", 1)
    monkeypatch.setattr(remote, "_LITTLE_PATIENCE", 0.1)
    source = ShardsSource(f"{server.url}/train", 10)
    server.always["train/part-0.tar"] = "hang"
    seconds = []
    for _ in range(2):
        start = time.monotonic()
        assert isinstance(source.open_all([0])[0], UnreadableImage)
        seconds.append(time.monotonic() - start)
    assert seconds[0] >= 2 > seconds[1]
    del server.always["train/part-0.tar"]
    assert source.open_all([0])[0].encoded == images[0]


def test_a_manifest_that_never_comes_is_an_error(server, monkeypatch):
    monkeypatch.setattr(remote, "_PATIENCE", 0.3)
    server.always["train/shards.json"] = "hang"
    with pytest.raises(DataError, match=r"/train/shards\.json: no answer within"):
        ShardsSource(f"{server.url}/train", 10)


def test_the_worst_server_costs_half_a_minute():
    """Three times the patience and two pauses, an image at a time."""
    worst = 3 * (remote._PATIENCE + 100_000 / remote._RATE) + (1 + 2) * 1.5 * 0.5
    assert worst < 30


def test_a_missing_file_is_asked_for_once(server):
    with pytest.raises(MissingFile, match=rf"^{server.url}/nowhere/shards\.json: no such file; make it: python -m"):
        ShardsSource(f"{server.url}/nowhere", 10)
    assert server.asked == ["nowhere/shards.json"]


def test_a_server_without_byte_ranges_gives_no_wrong_bytes(server, images):
    source = ShardsSource(f"{server.url}/train", 10)
    server.always["train/part-0.tar"] = "whole"
    with pytest.raises(UnreadableImage, match=r"more than [\d,]+ bytes came; the server does not know byte ranges$"):
        source.encoded(0)
    server.faults["train/part-2.tar"] = ["whole"]
    assert source.encoded(7) == images[7]


@pytest.mark.parametrize("fault", ["endless", "swelling"])
def test_answers_are_not_read_further_than_they_were_asked_for(server, images, fault, monkeypatch):
    """What unpacks to 512 MiB, or never ends: neither is taken in, nor waited for."""
    monkeypatch.setattr(remote, "_PATIENCE", 60.0)
    source = ShardsSource(f"{server.url}/train", 10)
    server.always["train/part-0.tar"] = fault
    before = peak_memory()  # the server packs within this process, a little at a time
    with pytest.raises(UnreadableImage, match=r"more than [\d,]+ bytes came; the server does not know byte ranges$"):
        source.encoded(0)
    for name in ("shards.json", "part-0.tar.index"):
        monkeypatch.setattr(shard_index, "_MOST_OF_MANIFEST", 2**20)
        monkeypatch.setattr(shard_index, "MOST_OF_INDEX", 2**20)
        server.always[f"train/{name}"] = fault
        with pytest.raises(DataError, match=rf"{name}: more than 1,048,576 bytes came; there is another file"):
            ShardsSource(f"{server.url}/train", 10)
        del server.always[f"train/{name}"]
    assert peak_memory() - before < 256e6


def peak_memory():
    """Bytes that this process ever had at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_shard_that_shrank_is_named(server, tmp_path):
    source = ShardsSource(f"{server.url}/train", 10)
    with open(tmp_path / "train/part-0.tar", "r+b") as file:
        file.truncate(int(source._offsets[0]) + 3)
    with pytest.raises(UnreadableImage, match=r"part-0\.tar/0000\.JPG: 3 bytes came instead of"):
        source.encoded(0)


def test_a_server_that_is_not_there_is_an_error():
    with pytest.raises(DataError, match=r"^http://127\.0\.0\.1:1/train/shards\.json: "):
        ShardsSource("http://127.0.0.1:1/train", 10)


def test_a_missing_package_is_named():
    code = """
import sys
from data.shards import open_folder
from recipe.errors import DataError
for module, place in (("fsspec", "http://x/y"), ("aiohttp", "http://x/y"), ("s3fs", "s3://bucket/y")):
    sys.modules[module] = None
    try:
        open_folder(place)
    except DataError as error:
        print(error)
    del sys.modules[module]
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = ended.stdout.splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == [
        f"pip install {name}" for name in ("fsspec", "aiohttp", "s3fs")
    ]


def test_an_unknown_kind_of_url_is_an_error():
    with pytest.raises(DataError, match=r"^what://x: Protocol not known: what$"):
        RemoteFolder("what://x")


def test_folders_on_this_machine_do_without_fsspec(tmp_path, images):
    code = f"""
import sys
from data.shards import ShardsSource
ShardsSource({str(tmp_path / "train")!r}, 10).encoded(0)
assert not any(name.startswith(("fsspec", "aiohttp", "data.remote")) for name in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
