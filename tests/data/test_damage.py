"""Lines about damaged files that are read: one for each file, and only for the first of many."""

import pytest
import torch

from data import damage
from data.folder import FolderSource
from data.loader import EvaluationBatches
from recipe.config import Data
from tests.data.test_decode import encoded, photograph


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch):
    """As in a new process."""
    monkeypatch.setattr(damage, "_known", set())


def test_each_file_is_named_once_and_at_most_twenty_are(capfd):
    damage.report(f"{number}.jpg: damaged" for number in range(20))
    damage.report(f"{number}.jpg: damaged" for number in range(30))
    lines = capfd.readouterr().err.splitlines()
    assert lines[:20] == [f"{number}.jpg: damaged; it is used as it is" for number in range(20)]
    assert lines[20:] == ["there are more such files, which are not named: 20 were"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_file_of_a_folder_is_named_once_however_often_it_is_read(
    tmp_path, capfd, workers
):
    """Also where a worker reads it. The label and the pixels of the image are used."""
    whole = encoded(photograph(), quality=90)
    for name, content in (("a/1.jpg", whole), ("b/2.jpg", whole[:-2] + b"\x12" * 20 + whole[-2:])):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(content)
    data = Data.model_validate({"source": "folder", "root": str(tmp_path), "workers": workers})
    batches = EvaluationBatches(FolderSource(str(tmp_path)), data=data, image_size=32, batch=2)
    try:
        for _ in range(2):
            (batch,) = list(batches)
            assert (batch.valid, batch.labels.tolist()) == (2, [0, 1])
            assert torch.equal(batch.images[0], batch.images[1])
    finally:
        batches.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path}/b/2.jpg: damaged, but can be decoded (Corrupt JPEG data: ")
