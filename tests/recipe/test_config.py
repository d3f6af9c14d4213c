"""What a recipe may say: defaults, ranges, and the keys that depend on each other.

Refusals are in test_refusals.py.
"""

import pytest
import timm

from common.errors import ConfigError
from recipe.config import Model, Parallel, Recipe
from recipe.loading import dump, load, loads
from recipe.network import SCALES
from tests.conftest import QUICKSTART, ROOT

SECTIONS = {name: field.annotation for name, field in Recipe.model_fields.items()}


def test_every_section_and_key_has_a_description():
    for section in SECTIONS.values():
        assert section.__doc__.rstrip().endswith(".")
        for key, field in section.fields().items():
            assert field.description and not field.description.endswith("."), key


@pytest.mark.parametrize(
    ("key", "inside", "outside"),
    [
        ("run.steps", "1", "0"),
        ("run.seed", str(2**63 - 1), str(2**63)),
        ("model.width", "1e-300", "0"),
        ("model.classes", "2", "1"),
        ("optimizer.momentum", "0.999", "1"),
        ("optimizer.weight_decay", "0", "-1e-9"),
        ("checkpoint.every_epochs", "1.001", "0"),
        ("data.crop_area", "[1e-300, 1]", "[0, 1]"),
        ("data.crop_area", "[1, 1]", "[1, 1.001]"),
        ("ipu.io_tiles", "192", "194"),
    ],
)
def test_ends_of_ranges(tiny, key, inside, outside):
    """configs/schema.json has all ranges: a change is seen there."""
    device = ["run.device=ipu"] if key.startswith("ipu.") else []
    tiny(f"{key}={inside}", *device)
    with pytest.raises(ConfigError, match=rf"^command line: {key}: "):
        tiny(f"{key}={outside}")


@pytest.mark.parametrize("name", SCALES)
def test_resolutions_are_timms(name):
    """Width and depth are compared in tests/models/test_efficientnet.py, by the parameters they
    lead to."""
    _, height, width = timm.get_pretrained_cfg(f"tf_{name}").input_size
    assert Model(name=name).image_size == height == width


def test_the_name_scales_what_is_not_given():
    assert (Model().width, Model().depth, Model().image_size, Model().dropout) == (
        1.4,
        1.8,
        380,
        0.4,
    )
    given = Model(name="efficientnet_b0", depth=0.5, image_size=None, dropout=0.0)
    assert (given.width, given.depth, given.image_size, given.dropout) == (1.0, 0.5, 224, 0.0)


def test_auto_is_null_in_the_program_and_auto_in_files():
    assert (
        Parallel(stages=3, split="auto", replicas="auto")
        == Parallel(stages=3, split=None)
        == Parallel(stages=3)
    )
    assert Parallel(stages=3).model_dump()["split"] == Parallel().model_dump()["replicas"] == "auto"


def test_an_interleaved_schedule_has_several_parts_on_each_device():
    assert Parallel(stages=2, schedule="interleaved").virtual_stages == 2
    assert Parallel(stages=2, schedule="interleaved", virtual_stages=3).parts == 6
    assert (
        Parallel(stages=3, split=["blocks.1.0", "blocks.3.0"]).parts == 3
        and Parallel(split=[]).parts == 1
    )


def test_a_run_is_named_by_letters_digits_and_harmless_signs(tiny):
    """The name becomes a folder below runs/: it must not lead out of there, nor hide."""
    for name in ("b4_g16", "a", "6144", "α-1.5"):
        assert tiny(f"run.name='{name}'").run.name == name
    for name in ("", "..", ".", ".hidden", "-x", "a/b", "a b", "a\n", "..\\\\x"):
        with pytest.raises(ConfigError, match=r"^command line: run\.name: must match pattern"):
            tiny(f'run.name="{name}"'.replace("\n", "\\n"))


POD256 = ROOT / "configs" / "pod256.yaml"
IPUS = "POPDIST_NUM_IPUS_PER_REPLICA"


@pytest.mark.parametrize(
    ("number", "split"), [(None, None), (1, None), (2, ["blocks.3.0"]), (4, None)]
)
def test_auto_takes_what_the_launcher_gives_and_else_one(monkeypatch, number, split):
    """The recipe's one cut, which is for two stages, gives way where there are others; what is
    resolved does not."""
    monkeypatch.delenv(IPUS, raising=False)
    if number:
        monkeypatch.setenv(IPUS, str(number))
    recipe = load(POD256, ["parallel.stages=auto"])
    assert recipe.parallel.stages == (number or 1) and recipe.parallel.split == split
    monkeypatch.setenv(IPUS, "8")
    assert load(POD256).parallel.stages == 2
    assert loads(dump(recipe), "checkpoint") == recipe


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
    assert load(QUICKSTART, ["data.source=folder", "model.classes=auto"]).model.classes == 1000, (
        "a plan"
    )
    (tmp_path / "train" / "shards.json").write_text(
        '{"format": 1, "classes": ["a", "b", "c", "d"], "shards": []}'
    )
    assert load(QUICKSTART, ["data.source=shards", *given]).model.classes == 4


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["data.source=folder", "data.root=/nowhere"], r"/nowhere: no such folder"),
        (
            ["data.source=shards", "data.root=s3://bucket/images"],
            r"is not read before a run; give a number",
        ),
        (["data.source=glyphs"], r"data.source=glyphs has as many as you like; give a number"),
        (["data.source=shards"], r"shards\.json"),
        (["data.source=folder"], "1 class; a model needs two"),
    ],
)
def test_classes_that_cannot_be_counted_are_asked_for(tmp_path, overrides, why):
    with pytest.raises(ConfigError, match=f"model.classes auto: .*{why}"):
        load(QUICKSTART, [*folders(tmp_path, "only"), *overrides])
