"""Named files and folders as a source: their order, and what is left out."""

import pytest
from PIL import Image

from common.errors import DataError
from data.named_files import NamedFiles


def draw(path, color):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 3), color).save(path)
    return path


def test_folders_stand_for_their_images_at_any_depth_sorted_by_path(tmp_path, monkeypatch):
    draw(tmp_path / "one.png", (1, 0, 0))
    for name, shade in (("b.jpg", 9), ("a/z.png", 3), ("a.png", 4)):
        draw(tmp_path / "folder" / name, (shade, shade, shade))
    (tmp_path / "folder" / "notes.txt").write_text("no image")
    draw(tmp_path / "folder" / "old.bmp", (0, 0, 0))
    draw(tmp_path / "folder" / ".hidden" / "x.png", (0, 0, 0))
    monkeypatch.chdir(tmp_path)
    source = NamedFiles(["one.png", "folder", "folder/a.png"])
    names = [source.name(index) for index in range(len(source))]
    assert names == ["one.png", "folder/a.png", "folder/a/z.png", "folder/b.jpg", "folder/a.png"]
    assert source.read(2).shape == (3, 3, 4) and (source.read(2) == 3).all()
    assert source.has_folders and not NamedFiles(["one.png"]).has_folders
    assert any(".bmp" in note and "old.bmp" in note for note in source.notes)
    assert [NamedFiles(["."]).name(index) for index in (0, 3)] == ["./folder/a.png", "./one.png"]


def test_a_folder_without_images_is_refused_and_a_file_read_late(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        DataError, match=r"empty: no \.jpg, \.jpeg or \.png files in it; name a folder"
    ):
        NamedFiles([str(tmp_path / "empty")])
    assert len(NamedFiles([str(tmp_path / "nowhere.png")])) == 1
