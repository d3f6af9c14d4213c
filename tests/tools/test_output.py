"""Whether a file can be written is checked without writing it."""

import errno
import os
from pathlib import Path

import pytest

from recipe.errors import ConfigError
from tools import output


def test_a_path_that_cannot_be_written_is_refused_and_one_that_can_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "old").write_text("before")
    monkeypatch.chdir(tmp_path)
    for path, fault in (
        (Path("/proc/model.onnx"), "cannot be written: No such file or directory; name another file by --output"),
        (tmp_path, "is a folder; name a file in it by --output"),
        (tmp_path / "old" / "new" / "model.onnx", "cannot be written: Not a directory; name another file by --output"),
    ):
        with pytest.raises(ConfigError) as caught:
            output.check(path)
        assert str(caught.value) == f"{path}: {fault}"
    for path in (tmp_path / "new" / "newer" / "m.onnx", tmp_path / "old", Path("m.onnx")):
        output.check(path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old", "before")]


def test_a_full_disk_is_no_fault_of_the_input(monkeypatch, tmp_path):
    def full(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "something of the system's")

    monkeypatch.setattr(output.tempfile, "TemporaryFile", full)
    with pytest.raises(OSError, match="No space left") as caught:
        output.check(tmp_path / "m.onnx")
    assert caught.value.filename == str(tmp_path / "m.onnx")
