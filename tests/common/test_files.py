"""Files are written whole or not at all; JSON and names of others do no harm."""

import errno
import json
import os

import pytest

from common import json_io
from common.errors import DISK_FULL, ConfigError, UserError
from common.files import checking, replacing, write, write_text, writing
from common.text import printable


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "note"
    write_text(path, "old \udce9")
    assert path.read_text() == "old \\udce9"

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    for name in ("replace", "fsync"):
        with monkeypatch.context() as patch, pytest.raises(OSError) as caught:
            patch.setattr(os, name, fail)
            write(path, b"new", durable=True)
        assert caught.value.filename == str(path)
        assert path.read_text() == "old \\udce9" and os.listdir(tmp_path) == ["note"]
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["note"]
    write(path, b"new", durable=True)
    assert path.read_bytes() == b"new"


def test_processes_do_not_share_what_they_write_a_file_to_and_an_error_keeps_its_name(tmp_path):
    with replacing(tmp_path / "cache", shared=True) as temporary:
        assert str(os.getpid()) in temporary.name
        temporary.write_text("one")
    assert (tmp_path / "cache").read_text() == "one"
    with pytest.raises(OSError) as caught, writing(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device", "/dev/shm/x")
    assert caught.value.filename == "/dev/shm/x"


def test_an_error_of_a_library_keeps_its_text(tmp_path):
    """A store's, that a file is fetched from: with the name of a file Python would print `[Errno
    None] None`."""
    with pytest.raises(OSError, match=r"^the store does not answer$"), writing(tmp_path):
        raise ConnectionError("the store does not answer")


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"a":' * 200_000, b"[" * 200_000, b"\xff\xfe[\0]\0", "", "[1", "nul"]
)
def test_what_is_no_json_or_nested_too_deeply_is_a_value_error(text, tmp_path):
    with pytest.raises(ValueError):
        json_io.parse_json(text)
    path = tmp_path / "a.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError):
        json_io.read_json(path)


def test_json_is_read_as_json_reads_it_up_to_a_bound(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    value = {"a": [1, 2.5, None, True, "ä"], "b": {}}
    path.write_text(json.dumps(value))
    assert json_io.read_json(path) == json_io.parse_json(json.dumps(value)) == value
    monkeypatch.setattr(json_io, "MOST_BYTES", 100)
    path.write_text(json.dumps("x" * 98))
    assert len(json_io.read_json(path)) == 98
    path.write_text(json.dumps("x" * 99))
    with pytest.raises(ValueError, match="101 bytes of JSON, more than 100"):
        json_io.read_json(path)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("café 日本\u3000🦜 c:\\new", "café 日本\u3000🦜 c:\\new"),
        ("\x1b]0;owned\x07\x1b[2J", r"\x1b]0;owned\x07\x1b[2J"),
        ("one\r\ntwo\u2028three\x85", r"one\r\ntwo\u2028three\x85"),
        ("\x9b31m\x7f\0", r"\x9b31m\x7f\x00"),
        ("gpj.\u202eexe", r"gpj.\u202eexe"),
        (os.fsdecode(b"caf\xe9"), r"caf\xe9"),
        ("\ud800", r"\ud800"),
    ],
)
def test_what_steers_a_terminal_is_shown_as_its_escape(text, shown):
    assert printable(text) == shown and printable(text).encode("utf-8")
    assert str(UserError(f"a\nb{text}")).startswith("a b")


def test_a_place_that_cannot_be_written_is_blamed_on_who_named_it_but_not_a_full_disk(tmp_path):
    place = tmp_path / "scores"
    with pytest.raises(ConfigError) as caught, checking(place, "name another folder"):
        raise PermissionError(errno.EACCES, "Permission denied", str(place / "trial"))
    assert (
        str(caught.value) == f"{place}: cannot be written: Permission denied; name another folder"
    )
    for number in DISK_FULL:
        with pytest.raises(OSError) as caught, checking(place, "name another folder"):
            raise OSError(number, os.strerror(number), str(place / "trial"))
        assert caught.value.errno == number and caught.value.filename == str(place)
    with pytest.raises(UserError, match=r"^holds a run$"), checking(place, "name another folder"):
        raise UserError("holds a run")
