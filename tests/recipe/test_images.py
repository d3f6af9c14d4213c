"""`model.classes: auto`: counted where the images are, before anything is loaded."""

import pytest

from recipe import loading
from recipe.errors import ConfigError
from tests.conftest import QUICKSTART


def folders(root, *names):
    for name in names:
        (root / "train" / name).mkdir(parents=True)
    (root / "val").mkdir(exist_ok=True)
    return [f"data.root={root}", "model.classes=auto"]


def test_auto_counts_the_class_folders(tmp_path):
    given = folders(tmp_path, "a", "b", "c")
    (tmp_path / "train" / "notes.txt").write_text("no class")
    recipe = loading.load(QUICKSTART, ["data.source=folder", *given])
    assert recipe.model.classes == 3
    assert loading.loads(loading.dump(recipe), "again").model.classes == 3, "a run keeps the number"
    assert loading.load(QUICKSTART, ["model.classes=auto"]).model.classes == 10
    assert loading.load(QUICKSTART, ["data.source=folder", "model.classes=auto"]).model.classes == 1000, "a plan"
    (tmp_path / "train" / "shards.json").write_text('{"format": 1, "classes": ["a", "b", "c", "d"], "shards": []}')
    assert loading.load(QUICKSTART, ["data.source=shards", *given]).model.classes == 4


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["data.source=folder", "data.root=/nowhere"], r"/nowhere: no such folder"),
        (["data.source=shards", "data.root=s3://bucket/images"], r"is not read before a run; give a number"),
        (["data.source=glyphs"], r"data.source=glyphs has as many as you like; give a number"),
    ],
)
def test_classes_that_cannot_be_counted_are_asked_for(overrides, why):
    with pytest.raises(ConfigError, match=f"model.classes auto: .*{why}"):
        loading.load(QUICKSTART, ["model.classes=auto", *overrides])


def test_shards_without_a_manifest_and_a_single_class_are_refused(tmp_path):
    given = folders(tmp_path, "only")
    with pytest.raises(ConfigError, match=r"shards\.json"):
        loading.load(QUICKSTART, ["data.source=shards", *given])
    with pytest.raises(ConfigError, match="1 class; a model needs two"):
        loading.load(QUICKSTART, ["data.source=folder", *given])
