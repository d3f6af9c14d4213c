"""timm's pretrained weights: `model.init_from: timm:NAME` or `timm:NAME:FILE`, and the keys that the
name sets, as padding, epsilon and the size of images are not in a file of weights.

EfficientNet-B0 to B7 are models of our own family, all others those of `model.name: timm`.
"""

import re
from typing import Any, Dict, List, NamedTuple, Optional

from common import files
from recipe import timm_models
from recipe.section import Section, as_yaml

_PREFIX = "timm:"
_ANY = "timm"  # `model.name` of any model of timm
# timm's names are efficientnet_b0, tf_efficientnet_b4_ns, tf_efficientnet_b5.ap_in1k and so on.
_NAME = re.compile(r"(?P<tf>tf_)?(?P<model>efficientnet_b[0-7])(?P<training>[_.](?!pruned)[\w.]+)?")
_OTHER_MEANS = {"ap", "ra4"}  # trained with AdvProp, or by timm's newest rules
_MEANS = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
_UNGIVEN = {"width": None, "depth": None, "image_size": None}  # so that those of the name are taken
_USUAL_MEANS = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
_ORIGINAL = {"group_size": 1, "expansion": 6, "norm": "batch"}


class TimmWeights(NamedTuple):
    """Weights of timm. name: of the model. file: that holds them; None for those that timm
    downloads.
    """

    name: str
    file: Optional[str]


def parse(init_from: Optional[str]) -> Optional[TimmWeights]:
    """Return the weights of timm that `init_from` names; None for other weights."""
    # Called with what a file gives, before it is checked.
    if not isinstance(init_from, str) or not init_from.startswith(_PREFIX):
        return None
    name, _, file = init_from[len(_PREFIX) :].partition(":")
    return TimmWeights(name, file or None)


def image_keys(name: str) -> Dict[str, Dict[str, Any]]:
    """Return the keys with which images are those that timm scores its weights by.

    Args:
        name: of weights, `resnet50.a1_in1k`.

    Returns:
        Keys of the sections `model` and `data`; none for weights that timm has no configuration of.

    Raises:
        ConfigError: timm prepares these images in a way that is not made here.
    """
    scoring = timm_models.scoring(name)
    if scoring is None:
        return {}
    model = {
        "image_size": scoring.test_size,
        "mean": list(scoring.mean),
        "std": list(scoring.std),
    }
    data = {
        "interpolation": scoring.interpolation,
        "crop_fraction": scoring.crop_fraction,
        "crop_mode": scoring.crop_mode,
        "crop_rounding": "down",
        "image_sizes": training_sizes(name),
    }
    return {"model": model, "data": data}


def training_sizes(name: str) -> Optional[List[List[int]]]:
    """Return `data.image_sizes` of weights `name`; None where timm scores them at the size that
    they were trained at, or does not know them.
    """
    scoring = timm_models.scoring(name)
    if scoring is None or scoring.train_size == scoring.test_size:
        return None
    return [[0, scoring.train_size]]


def preparation(model: Section, data: Section) -> Optional[str]:
    """Return a line about how images are prepared for weights of timm: the keys that have timm's
    values, and those that have others.

    Args:
        model: section of the recipe, with `init_from`.
        data: section of the recipe.

    Returns:
        None for other weights, and for those that timm has no configuration of.
    """
    values = {"model": model.model_dump(mode="json"), "data": data.model_dump(mode="json")}
    weights = parse(values["model"]["init_from"])
    if weights is None:
        return None
    # Asked of the finished recipe: overrides may have changed what the name has set.
    taken = []
    given = []
    for section, keys in image_keys(weights.name).items():
        for key, theirs in keys.items():
            ours = values[section][key]
            if ours == theirs:
                # Null on both sides says nothing of the images, so the line leaves it out.
                if ours is not None:
                    taken.append(f"{section}.{key}={as_yaml(ours)}")
            else:
                given.append(f"{section}.{key}={as_yaml(ours)} (timm: {as_yaml(theirs)})")
    if not taken and not given:
        return None
    line = f"images as timm's {weights.name}: {', '.join(taken) or 'no key'}"
    return f"{line}; given: {', '.join(given)}" if given else line


def expanded(init_from: str) -> str:
    """Return `model.init_from` with the home folder in the place of a leading `~`. Raises
    ValueError: no such user.
    """
    # A name without a file has no ~, so that what follows the last colon may always be expanded.
    prefix, colon, file = (
        init_from.rpartition(":") if init_from.startswith(_PREFIX) else ("", "", init_from)
    )
    return f"{prefix}{colon}{files.expanded(file)}"


def keys(name: str, family: Optional[str] = None) -> Dict[str, Any]:
    """Return the keys of the section `model` with which it is timm's model called `name`.

    Source: timm/models/efficientnet.py. Models with `tf_` pad as TensorFlow does and have its
    epsilon. Mean and deviation are those of `image_keys` where timm knows the weights; those given
    here are for tags that it does not know.

    Args:
        name: of weights, `tf_efficientnet_b5.ap_in1k` or `convnext_tiny.fb_in1k`.
        family: `model.name` of the recipe, which may want timm's own EfficientNet.

    Raises:
        ConfigError: timm has no such model.
    """
    match = _NAME.fullmatch(name)
    if match is None or family == _ANY:
        architecture = name.partition(".")[0]
        timm_models.architecture(architecture)  # refuses what timm does not know
        own = {"image_size": None, "mean": None, "std": None}  # those of the architecture
        return {"name": _ANY, "architecture": architecture, **own}
    # The keys of lower layers must not stay: a width of another size would not fit the file, and
    # images would be normalised as for other weights.
    keys = {"name": match["model"], **_UNGIVEN, **_ORIGINAL, **_USUAL_MEANS}
    if match["tf"] is not None:
        keys.update(norm_eps=1e-3, padding="same")
    else:
        keys.update(norm_eps=1e-5, padding="torch")
    training = re.split("[_.]", match["training"] or "")
    if _OTHER_MEANS.intersection(training):
        keys.update(_MEANS)
    return keys
