"""The cache of measurements: a file for each key, and none where there is no room."""

from pathlib import Path

from common.json_io import read_json
from engines import cache


def test_each_kind_and_key_has_a_file_of_its_own_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    places = [
        cache.place("engine", "b4", 32),
        cache.place("engine", "b4", 64),
        cache.place("micro", "b4", 32),
    ]
    assert len(set(places)) == 3 and places[0] == cache.place("engine", "b4", 32)
    assert {place.parent for place in places} == {tmp_path / "large-batch-efficientnet"}
    assert [place.name.partition("-")[0] for place in places] == ["engine", "engine", "micro"]
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.place("micro").parent == Path.home() / ".cache" / "large-batch-efficientnet"


def test_what_is_written_is_read_and_a_folder_that_cannot_be_made_is_no_fault(tmp_path):
    cache.write(tmp_path / "a" / "micro.json", {"micro": 3})
    assert read_json(tmp_path / "a" / "micro.json") == {"micro": 3}
    (tmp_path / "file").write_text("in the way")
    cache.write(tmp_path / "file" / "micro.json", {"micro": 3})
    assert [path.name for path in tmp_path.rglob("*.json*")] == ["micro.json"]


def test_programs_are_the_same_from_call_to_call():
    assert cache.programs() == cache.programs() and len(cache.programs()) == 4
