"""Names that bring their keys: defaults, refusals, and what a change of name does to keys of lower
layers."""

import itertools
import re
from typing import Literal, Optional

import pytest
from pydantic import Field

from common.errors import ConfigError
from recipe.config import Log, Recipe
from recipe.kinds import Kind, Registry
from recipe.loading import load, loads
from recipe.optimization import Lars, Optimizer, Sgd
from recipe.section import Section

BASE = "run: {epochs: 3}\nschedule: {peak: 1}\n"
SECTIONS = {
    name: field.annotation
    for name, field in Recipe.model_fields.items()
    if issubclass(field.annotation, Kind)
}
KINDS = [
    (section, name) for section, base in SECTIONS.items() if base.resets for name in base.kinds
]


# A kind without a default for one of its keys, which every recipe with that kind names.
NEEDED = {"timm": ("model.architecture=resnet10t",)}


def from_base(*overrides):
    return loads(BASE, "mine.yaml", overrides)


@pytest.mark.parametrize(("section", "name"), KINDS)
def test_a_name_has_its_own_keys_with_their_defaults_and_no_others(section, name):
    base = SECTIONS[section]
    given = (f"{section}.name={name}", *NEEDED.get(name, ()))
    needed = {override.split(".")[1].split("=")[0] for override in given}
    found = getattr(from_base(*given), section)
    assert type(found) is base.kinds[name] and found.name == name
    others = {key for kind in base.kinds.values() for key in kind.fields()}.difference(
        type(found).fields()
    )
    for key in {*others, *found.own_keys()} - needed:
        assert getattr(from_base(*given, f"{section}.{key}=null"), section) == found
    for key in others:
        assert not hasattr(found, key)
        value = {"trust": "momentum", "nesterov": "true"}.get(key, 0.5)
        with pytest.raises(ConfigError) as refusal:
            from_base(f"{section}.{key}={value}", *given)
        kind = type(found).default_name()
        assert f"not to {kind} (its keys: {', '.join(found.own_keys()) or 'none'}" in str(
            refusal.value
        )
        owner = re.search(f"{key} belongs to ([a-z_0-9]+)", str(refusal.value)).group(1)
        assert key in base.kinds[owner].fields()


def test_the_order_on_the_command_line_does_not_matter():
    for overrides in itertools.permutations(["name=sgd", "momentum=0.7", "nesterov=true"]):
        recipe = from_base(*(f"optimizer.{override}" for override in overrides))
        assert recipe.optimizer == Sgd(momentum=0.7, nesterov=True)


def test_a_new_name_drops_the_keys_of_the_old_one(tmp_path):
    """A momentum of 0.5 was meant for LARS; the skip list and the peak are common to all names and
    stay."""
    base = [
        "run: {epochs: 3}",
        "schedule: {peak: 1, power: 3}",
        "optimizer: {momentum: 0.5, trust: momentum, skip: [bias]}",
    ]
    (tmp_path / "base.yaml").write_text("\n".join(base))
    child = tmp_path / "child.yaml"
    child.write_text("extends: base.yaml\noptimizer: {name: sgd}\nschedule: {name: cosine}\n")
    recipe = load(child)
    assert recipe.optimizer == Sgd(momentum=0.9, weight_decay=1e-4, skip=["bias"])
    assert (recipe.schedule.name, recipe.schedule.peak, recipe.schedule.final_ratio) == (
        "cosine",
        1,
        0,
    )
    child.write_text("extends: base.yaml\noptimizer: {name: lars}\n")
    assert load(child).optimizer.momentum == 0.5, "the same name drops nothing"


class Shape(Kind):
    """Of the tests: a section that comes in kinds."""

    name: str = "circle"
    colour: str = "red"


class Circle(Shape):
    name: Literal["circle"] = "circle"
    radius: float = 1.0


class Drawing(Section):
    shape: Shape = Field(default_factory=Shape)


def test_kinds_that_are_defined_after_the_recipe_are_like_any_other():
    assert Drawing().shape == Shape(name="circle") == Circle() and type(Drawing().shape) is Circle

    class Square(Shape):
        name: Literal["square", "cube"] = "square"
        side: float = 2.0

    found = Drawing.model_validate({"shape": {"name": "cube", "side": 3.0}}).shape
    assert type(found) is Square and found.model_dump() == {
        "name": "cube",
        "colour": "red",
        "side": 3.0,
    }
    assert set(Shape.fields()) == {"name", "colour", "radius", "side"}
    with pytest.raises(TypeError, match=r"name square is taken by .*Square; choose another"):
        type("Cube", (Square,), {"__module__": __name__})
    with pytest.raises(ValueError, match="radius belongs to circle, not to square"):
        Shape(name="square", radius=1.0)


def test_keys_of_a_part_that_is_defined_after_they_were_asked_for_have_its_types(monkeypatch):
    monkeypatch.setattr(Log, "parts", list(Log.parts))
    monkeypatch.setattr(Log, "whole", Log.whole)
    with pytest.raises(ConfigError, match="unknown key"):
        from_base("log.further=5")

    class Further(Log):
        """A part of the section."""

        further: Optional[int] = Field(3, description="a number")

    for text, value in (("5", 5), ("null", None)):
        assert from_base(f"log.further={text}").log.further == value


def test_a_registry_finds_what_implements_a_section():
    registry = Registry("optimizer")
    registry.implements(Optimizer)("any")
    registry.implements(Lars)("lars")
    assert (registry.of(Lars()), registry.of(Sgd())) == ("lars", "any")
    assert registry.items() == [(Optimizer, "any"), (Lars, "lars")]
    with pytest.raises(TypeError, match="Lars has an implementation as optimizer"):
        registry.implements(Lars)("another")
    with pytest.raises(TypeError, match="nothing implements Circle as optimizer"):
        registry.of(Circle())
