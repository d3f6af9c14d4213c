"""Names that bring their keys: defaults, refusals, and what a change of name does to keys of lower layers."""

import itertools
import pickle
import re
from typing import Literal

import pytest
from pydantic import Field

from recipe.config import Recipe
from recipe.errors import ConfigError
from recipe.kinds import Kind, Parts, Registry
from recipe.loading import load, loads
from recipe.optimization import Lars, Optimizer, Sgd
from recipe.section import Section

BASE = "run: {epochs: 3}\nschedule: {peak: 1}\n"
SECTIONS = {name: field.annotation for name, field in Recipe.model_fields.items() if issubclass(field.annotation, Kind)}
KINDS = [(section, name) for section, base in SECTIONS.items() if base.resets for name in base.kinds]


def from_base(*overrides):
    return loads(BASE, "mine.yaml", overrides)


@pytest.mark.parametrize(("section", "name"), KINDS)
def test_a_name_has_its_own_keys_with_their_defaults_and_no_others(section, name):
    base = SECTIONS[section]
    found = getattr(from_base(f"{section}.name={name}"), section)
    assert type(found) is base.kinds[name] and found.name == name
    others = {key for kind in base.kinds.values() for key in kind.fields()}.difference(type(found).fields())
    for key in others:
        assert not hasattr(found, key)
        assert getattr(from_base(f"{section}.name={name}", f"{section}.{key}=null"), section) == found
    for key in found.own_keys():
        assert getattr(from_base(f"{section}.name={name}", f"{section}.{key}=null"), section) == found
    for key in others:
        value = {"trust": "momentum", "nesterov": "true"}.get(key, 0.5)
        with pytest.raises(ConfigError) as refusal:
            from_base(f"{section}.{key}={value}", f"{section}.name={name}")
        assert f"not to {name} (its keys: {', '.join(found.own_keys()) or 'none'}" in str(refusal.value)
        owner = re.search(f"{key} belongs to ([a-z]+)", str(refusal.value)).group(1)
        assert key in base.kinds[owner].fields()


def test_the_order_on_the_command_line_does_not_matter():
    for overrides in itertools.permutations(["name=sgd", "momentum=0.7", "nesterov=true"]):
        recipe = from_base(*(f"optimizer.{override}" for override in overrides))
        assert recipe.optimizer == Sgd(momentum=0.7, nesterov=True)


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / "child.yaml"


def test_a_new_name_drops_the_keys_of_the_old_one(tmp_path):
    """A momentum of 0.5 was meant for LARS; the skip list and the peak are nobody's own and stay."""
    optimizer = "optimizer: {momentum: 0.5, trust: momentum, skip: [bias]}\n"
    base = "run: {epochs: 3}\nschedule: {peak: 1, power: 3}\n" + optimizer
    child = "extends: base.yaml\noptimizer: {name: sgd}\nschedule: {name: cosine}\n"
    recipe = load(write(tmp_path, base=base, child=child))
    assert (recipe.optimizer.momentum, recipe.optimizer.weight_decay) == (0.9, 1e-4)
    assert recipe.optimizer.skip == ["bias"]
    assert (recipe.schedule.name, recipe.schedule.peak, recipe.schedule.final_ratio) == ("cosine", 1, 0)


@pytest.mark.parametrize("named", ["", "name: lars, "])
def test_saying_the_same_name_again_drops_nothing(tmp_path, named):
    base = f"{BASE}optimizer: {{{named}momentum: 0.5}}\n"
    recipe = load(write(tmp_path, base=base, child="extends: base.yaml\noptimizer: {name: lars}"))
    assert recipe.optimizer.momentum == 0.5


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("optimizer.name=adam", "must be 'lars', 'sgd', 'rmsprop', 'lamb' or 'adamw'"),
        ("schedule.reference_batch=768", "reference_batch says nothing without a batch_rule"),
        ("schedule.batch_rule=sqrt", "batch_rule sqrt needs peak and reference_batch"),
        ("model.proxy_norm=true model.norm=batch", "proxy_norm goes with norm group or layer, not with batch"),
        ("optimizer.name=sgd optimizer.momentum=0 optimizer.nesterov=true", "nesterov needs a momentum above 0"),
        ("optimizer.name=lamb optimizer.eps=0", "optimizer.eps: must be greater than 0, found 0"),
        ("data.image_sizes=[[1,8]]", "the first pair must begin at epoch 0"),
        ("data.image_sizes=[[0,8],[0,9]]", "each later one after the one before it"),
        ("data.image_sizes=[[0,8],[2,7]]", "every size must be 8 to 8192 pixels"),
        ("data.image_sizes=[[0,8,9]]", r"must be [first epoch, pixels] pairs"),
        ("data.image_sizes=[]", r"must be [first epoch, pixels] pairs"),
        ("data.cutmix=0.5", "must be greater than or equal to 0.62"),
        ("model.init_weights=epoch_average", "init_weights says nothing without init_from"),
        ("average.step_decay=1", "must be less than 1"),
    ],
)
def test_impossible_combinations_are_one_line(override, fault):
    with pytest.raises(ConfigError) as refusal:
        from_base(*override.split())
    assert fault in str(refusal.value) and "\n" not in str(refusal.value)


class Shape(Kind):
    """Of the tests: a section that comes in kinds."""

    name: str = "circle"
    colour: str = "red"


class Circle(Shape):
    name: Literal["circle"] = "circle"
    radius: float = 1.0


class Report(Parts):
    """Of the tests: a section that has parts."""

    every: int = 1


class Sound(Report):
    sound: bool = False


class Drawing(Section):
    shape: Shape = Field(default_factory=Shape)
    report: Report = Field(default_factory=Report)


def test_a_kind_defined_after_the_recipe_is_a_choice_like_any_other():
    assert Drawing().shape == Shape(name="circle") == Circle() and type(Drawing().shape) is Circle
    try:

        class Square(Shape):
            name: Literal["square", "cube"] = "square"
            side: float = 2.0

        found = Drawing.model_validate({"shape": {"name": "cube", "side": 3.0}}).shape
        assert type(found) is Square and found.model_dump() == {"name": "cube", "colour": "red", "side": 3.0}
        assert set(Shape.fields()) == {"name", "colour", "radius", "side"}
        with pytest.raises(TypeError, match=r"name square is taken by .*Square; choose another"):
            type("Cube", (Square,), {"__module__": __name__})
        with pytest.raises(ValueError, match="radius belongs to circle, not to square"):
            Shape(name="square", radius=1.0)
    finally:
        for name in ("square", "cube"):
            Shape.kinds.pop(name)


def test_a_part_adds_its_keys_to_its_section():
    before = Report()
    assert isinstance(before, Sound) and not hasattr(before, "light")

    class Light(Report):
        light: bool = True

    both = Report(sound=True)
    assert isinstance(both, Sound) and isinstance(both, Light) and both.light
    assert pickle.loads(pickle.dumps(both)) == both
    assert set(Report.fields()) == {"every", "sound", "light"}


class Colour(Kind):
    name: str = "red"


class Red(Colour):
    name: Literal["red"] = "red"
    depth: float = 1.0


class Alarm(Parts):
    every: int = 1


class House(Section):
    colour: Colour = Field(default_factory=Colour)
    alarm: Alarm = Field(default_factory=Alarm)


def test_the_json_schema_has_kinds_and_parts_that_were_defined_after_the_recipe():
    class Blue(Colour):
        name: Literal["blue"] = "blue"
        light: float = 2.0

    class Bell(Alarm):
        bell: bool = True

    assert type(House().colour) is Red and issubclass(type(House().alarm), Bell)
    properties = House.model_json_schema()["properties"]
    red, blue = properties["colour"]["anyOf"]
    assert blue["properties"]["depth"] == {"type": "null"} != red["properties"]["depth"]
    assert set(properties["alarm"]["properties"]) == {"every", "bell"}


def test_a_registry_finds_what_implements_a_section():
    registry = Registry("optimizer")
    registry.implements(Optimizer)("any")
    registry.implements(Lars)("lars")
    assert (registry.of(Lars()), registry.of(Sgd())) == ("lars", "any")
    assert registry.all_of(Lars()) == ["any", "lars"] and registry.items() == [(Optimizer, "any"), (Lars, "lars")]
    with pytest.raises(TypeError, match="Lars has an implementation as optimizer"):
        registry.implements(Lars)("another")
    with pytest.raises(TypeError, match="nothing implements Circle as optimizer"):
        registry.of(Circle())
