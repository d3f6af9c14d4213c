"""Whether a file can be written is checked without writing it."""

import errno
import os
from pathlib import Path

import pytest

from recipe.errors import ConfigError
from tools import output


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("/proc/model.onnx", "cannot be written: No such file or directory; name another file by --output"),
        ("FOLDER", "is a folder; name a file in it by --output"),
        ("FOLDER/file/new/model.onnx", "cannot be written: Not a directory; name another file by --output"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused(tmp_path, path, fault):
    (tmp_path / "file").write_text("")
    path = path.replace("FOLDER", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        output.check(Path(path))
    assert str(caught.value) == f"{path}: {fault}"


def test_checking_makes_and_changes_nothing(tmp_path, monkeypatch):
    (tmp_path / "old").write_text("before")
    monkeypatch.chdir(tmp_path)
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
