"""parallel.stages: auto, which takes the IPUs that poprun gives a replica: settled when a recipe is loaded."""

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


def test_auto_or_a_number_from_one_is_taken():
    for word in ("many", "0"):
        with pytest.raises(ConfigError, match="stages"):
            load(QUICKSTART, [f"parallel.stages={word}"])
