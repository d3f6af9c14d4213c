"""Keys that are auto in a file and settled when it is loaded: `model.classes` and `parallel.stages`."""

import pytest

from recipe.errors import ConfigError
from recipe.loading import dump, load, loads
from tests.conftest import QUICKSTART, ROOT

POD256 = ROOT / "configs" / "pod256.yaml"


@pytest.fixture
def given(monkeypatch):
    """given(2): poprun gives each replica two IPUs; given(None): poprun started nothing."""
    name = "POPDIST_NUM_IPUS_PER_REPLICA"
    return lambda number: monkeypatch.setenv(name, str(number)) if number else monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("number", "stages", "split"), [(None, 1, None), (1, 1, None), (2, 2, ["blocks.3.0"]), (4, 4, None)]
)
def test_auto_takes_what_the_launcher_gives_and_else_one(given, number, stages, split):
    """The recipe's one cut, which is for two stages, gives way where there are others."""
    given(number)
    parallel = load(POD256, ["parallel.stages=auto"]).parallel
    assert parallel.stages == stages and type(parallel.stages) is int and parallel.split == split


def test_what_is_written_or_resolved_does_not_give_way(given):
    """A checkpoint's recipe is read where another launcher, or none, started the process."""
    given(4)
    assert load(POD256).parallel.stages == 2
    text = dump(load(POD256, ["parallel.stages=auto"]))
    given(None)
    assert loads(text, "checkpoint").parallel.stages == 4


def folders(root, *names):
    for name in names:
        (root / "train" / name).mkdir(parents=True)
    (root / "val").mkdir(exist_ok=True)
    return [f"data.root={root}", "model.classes=auto"]


def test_auto_counts_the_class_folders(tmp_path):
    given = folders(tmp_path, "a", "b", "c")
    (tmp_path / "train" / "notes.txt").write_text("no class")
    recipe = load(QUICKSTART, ["data.source=folder", *given])
    assert recipe.model.classes == 3
    assert loads(dump(recipe), "again").model.classes == 3, "a run keeps the number"
    assert load(QUICKSTART, ["model.classes=auto"]).model.classes == 10
    assert load(QUICKSTART, ["data.source=folder", "model.classes=auto"]).model.classes == 1000, "a plan"
    (tmp_path / "train" / "shards.json").write_text('{"format": 1, "classes": ["a", "b", "c", "d"], "shards": []}')
    assert load(QUICKSTART, ["data.source=shards", *given]).model.classes == 4


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
        load(QUICKSTART, ["model.classes=auto", *overrides])


def test_shards_without_a_manifest_and_a_single_class_are_refused(tmp_path):
    given = folders(tmp_path, "only")
    with pytest.raises(ConfigError, match=r"shards\.json"):
        load(QUICKSTART, ["data.source=shards", *given])
    with pytest.raises(ConfigError, match="1 class; a model needs two"):
        load(QUICKSTART, ["data.source=folder", *given])
