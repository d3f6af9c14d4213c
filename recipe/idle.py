"""Keys that somebody named, but that have no effect beside what the recipe has chosen.

Whoever types `data.root=/photos` over a recipe of digits wants those photographs to be read. So a
key is refused if it was named in the top file or on the command line while another key, named there
or before, made it idle. Keys that a recipe inherits may be idle: one override, such as
`data.source=glyphs`, changes the images of any recipe.

Keys that only some hardware, topology or launcher reads (`engine`, `ipu`, stages, elasticity) are
never refused: one recipe runs unchanged on all of them.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping, NamedTuple, Tuple

from common.text import either
from recipe.config import SECTIONS, Recipe
from recipe.images import Data
from recipe.kinds import Kind
from recipe.section import as_yaml

# Read by predictions of other methods than the recipe's, in plans and by the doctor.
PREDICTED = ("exchange.density",)
_LENGTHS = {"epochs", "steps", "images"}
# Keys of `data` that are read only where another key, named first, has this one value.
_READ_WITH = (
    ("augment", "randaugment", ("randaugment_operations", "randaugment_magnitude")),
    ("augment", "augmix", ("augmix_severity",)),
    ("augment", "timm_randaugment", ("timm_randaugment",)),
    ("mixing", "timm", ("mixing_switch", "mixing_probability")),
    ("loss", "bce", ("bce_threshold", "bce_reduction")),
)


class Idle(NamedTuple):
    """A key without effect, the key whose value is the cause, and what to do."""

    key: str
    cause: str
    remedy: str


def is_resolved(layer: Mapping[str, Any]) -> bool:
    """Return whether `layer` has all keys of a recipe, as config.yaml of a run: it names inherited
    ones, too.

    Nobody but `loading.dump` writes all three lengths of a run.
    """
    run = layer.get("run")
    return isinstance(run, dict) and set(run) >= _LENGTHS


def faults(
    recipe: Recipe, merged: Mapping[str, dict], levels: Mapping[str, int], first: int
) -> Iterator[Tuple[str, str]]:
    """Yield the named keys without effect.

    Args:
        recipe: that came of all layers.
        merged: its sections as they were given.
        levels: index of the last layer that named a key, by section.key.
        first: index of the first layer that is the user's own.

    Yields:
        section.key, and the cause with the remedy.
    """
    for idle in [*_of_other_kinds(recipe, merged), *_beside_others(recipe)]:
        section, _, key = idle.key.partition(".")
        value = merged[section].get(key)
        if value is None:
            continue
        # A cause that is given later than the key is meant to make it idle.
        level = levels.get(idle.key, -1)
        if level < max(first, levels.get(idle.cause, -1)):
            continue
        # Writing down what is so anyway misleads nobody. Kinds may have other defaults of a key.
        fields = {**SECTIONS[section].fields(), **getattr(recipe, section).fields()}
        field = fields[key]
        if value == field.get_default(call_default_factory=True):
            continue
        section, _, key = idle.cause.partition(".")
        chosen = as_yaml(getattr(getattr(recipe, section), key))
        yield idle.key, f"has no effect with {idle.cause}={chosen}; {idle.remedy}, or remove it"


def _of_other_kinds(recipe: Recipe, merged: Mapping[str, dict]) -> Iterator[Idle]:
    """Yield the given keys that only other kinds of a section have."""
    for section, content in merged.items():
        part = getattr(recipe, section)
        if not isinstance(part, Kind):
            continue
        known = part.fields()
        tag = f"{section}.{part.tag}"
        others = [key for key in content if key not in known]
        for key in others:
            owners = [name for name, kind in part.kinds.items() if key in kind.fields()]
            # Keys of no kind at all are unknown, which the schema refuses.
            if not owners:
                continue
            choices = either([f"{tag}={name}" for name in owners])
            yield Idle(f"{section}.{key}", tag, f"give {choices}")


def _beside_others(recipe: Recipe) -> Iterator[Idle]:
    """Yield the keys that values of other keys make idle."""
    data = recipe.data
    for cause, value, keys in _READ_WITH:
        if getattr(data, cause) != value:
            for key in keys:
                yield Idle(f"data.{key}", f"data.{cause}", f"give data.{cause}={value}")
    if not data.random_erasing:
        for key in ("random_erasing_mode", "random_erasing_count"):
            yield Idle(f"data.{key}", "data.random_erasing", "give data.random_erasing=0.25")
    # A folder or list that is divided has both splits.
    if getattr(data, "validation_share", 0):
        for key in ("validation_folder", "validation_list"):
            if key in data.fields():
                yield Idle(f"data.{key}", "data.validation_share", "give data.validation_share=0")
    yield from _of_mixing(data)
    yield from _of_model(recipe)
    yield from _of_exchange(recipe)


def _of_mixing(data: Data) -> Iterator[Idle]:
    """Yield keys of mixup and CutMix, beside what `_READ_WITH` says of them."""
    if not data.mixes:
        yield Idle("data.mixing", "data.mixup", "give data.mixup or data.cutmix")
    if data.mixing != "timm":
        return
    # timm's way switches between the two, which takes both.
    if not data.mixes:
        yield Idle("data.mixing_probability", "data.mixup", "give data.mixup or data.cutmix")
        yield Idle("data.mixing_switch", "data.mixup", "give data.mixup and data.cutmix")
    elif not (data.mixup and data.cutmix):
        missing = "cutmix" if data.mixup else "mixup"
        yield Idle("data.mixing_switch", f"data.{missing}", f"give data.{missing}, too")


def _of_model(recipe: Recipe) -> Iterator[Idle]:
    """Yield keys of layers that the model does not have, and of parameters that are not skipped."""
    # With defaults: families and methods of somebody's own need not have these keys.
    model = recipe.model
    norm = getattr(model, "norm", None)
    if norm in ("group", "layer"):
        yield Idle("model.norm_momentum", "model.norm", "give model.norm=batch")
    if norm in ("batch", "layer"):
        yield Idle("model.norm_groups", "model.norm", "give model.norm=group")
    if getattr(model, "proxy_norm", None) is False:
        yield Idle("model.proxy_eps", "model.proxy_norm", "give model.proxy_norm=true")
    if not recipe.optimizer.skip:
        yield Idle("optimizer.skip_lr_scale", "optimizer.skip", "give optimizer.skip=[bias, norm]")


def _of_exchange(recipe: Recipe) -> Iterator[Idle]:
    """Yield keys that only some methods read, or only beside another key."""
    exchange = recipe.exchange
    if not exchange.uses_density:
        yield Idle("exchange.density", "exchange.method", "give exchange.method=topk or gtopk")
    if getattr(exchange, "compress", None) == "gradient":
        yield Idle("exchange.sketch", "exchange.compress", "give exchange.compress=update")
    # Dense gradients have one of the two keys only.
    if exchange.sent_bits:
        yield Idle("exchange.wire", "exchange.bits", "give exchange.bits=null")
    if getattr(exchange, "outer", None) == "mean":
        for key in ("outer_lr", "outer_momentum"):
            yield Idle(f"exchange.{key}", "exchange.outer", "give exchange.outer=nesterov")
