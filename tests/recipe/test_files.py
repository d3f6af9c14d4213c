"""Files are written whole or not at all, and an error names the file."""

import errno
import os

import pytest

from recipe.files import replacing, write, write_text, writing


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


def test_processes_that_share_a_file_do_not_share_what_they_write_it_to(tmp_path):
    with replacing(tmp_path / "cache", shared=True) as temporary:
        assert str(os.getpid()) in temporary.name
        temporary.write_text("one")
    assert (tmp_path / "cache").read_text() == "one"


def test_an_error_that_names_a_file_keeps_its_name(tmp_path):
    with pytest.raises(OSError) as caught, writing(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device", "/dev/shm/x")
    assert caught.value.filename == "/dev/shm/x"
