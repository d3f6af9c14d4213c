"""Any model of timm by its name: what a recipe must know of it before the run begins.

This is the one file here that loads timm, and only for a recipe that names such a model or its
weights: nothing else knows whether a model has batch normalisation, or for which pixels it was
made.
"""

from __future__ import annotations

import difflib
import functools
from typing import Any, Dict, NamedTuple, Optional, Tuple

from common.errors import ConfigError
from common.text import either

_MOMENTUM = 0.1  # torch's own


class Architecture(NamedTuple):
    """Facts about a model of timm, known without its weights.

    image_size: pixels a side, as timm's configuration of the model says.
    mean, std: of RGB in [0, 1], likewise.
    is_fixed: whether it is built for one size of images.
    has_batch_norm: whether it normalises with statistics of a micro batch.
    norm_momentum: share of a micro batch in the running statistics of its batch normalisation, if
        it has any; they may differ from layer to layer, then that of the first.
    classifier: name of the module with a row for each class; "" where there are several.
    """

    image_size: int
    mean: Tuple[float, float, float]
    std: Tuple[float, float, float]
    is_fixed: bool
    has_batch_norm: bool
    norm_momentum: float
    classifier: str


class Scoring(NamedTuple):
    """How timm prepares images to score pretrained weights.

    train_size: pixels a side that the weights were trained at.
    test_size: pixels a side that they are scored at.
    mean, std: of RGB in [0, 1], which may differ between weights of one architecture.
    interpolation: `bilinear` or `bicubic`.
    crop_fraction: share of the resized image's side that is shown.
    crop_mode: `center` or `squash`.
    classes: that the weights tell apart.
    """

    train_size: int
    test_size: int
    mean: Tuple[float, float, float]
    std: Tuple[float, float, float]
    interpolation: str
    crop_fraction: float
    crop_mode: str
    classes: int


def is_known(name: str) -> bool:
    """Return whether timm has a model of this name."""
    import timm

    return timm.is_model(name)


@functools.lru_cache(maxsize=None)
def architecture(name: str) -> Architecture:
    """Return what is known of timm's model `name`, e.g. `convnext_tiny`.

    The model is built without memory for its weights, which takes a second.

    Raises:
        ConfigError: timm has no such model, or cannot build it.
    """
    import timm
    import torch

    # What follows a dot is a tag of weights, which an architecture does not have.
    if "." in name or not timm.is_model(name):
        raise ConfigError(f"model.architecture: timm has no model {name!r}{_meant(name)}")
    # Without memory; the number of classes changes nothing that is asked below.
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=2)
    configuration: Dict[str, Any] = vars(model)["pretrained_cfg"]
    classifier = configuration["classifier"]
    # By torch's private base class, which timm's own batch norms have, too.
    batch_norms = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
    ]
    # Torch's None is a plain mean over all batches, which the recipe's key cannot express.
    momenta = [norm.momentum for norm in batch_norms if norm.momentum is not None]
    return Architecture(
        image_size=configuration["input_size"][-1],
        mean=tuple(configuration["mean"]),
        std=tuple(configuration["std"]),
        is_fixed=bool(configuration.get("fixed_input_size")),
        classifier=classifier if isinstance(classifier, str) else "",
        has_batch_norm=bool(batch_norms),
        norm_momentum=momenta[0] if momenta else _MOMENTUM,
    )


def keys(name: str) -> Dict[str, Any]:
    """Return the keys of the section `model` that follow from the name of a model of timm."""
    known = architecture(name)
    return {
        "image_size": known.image_size,
        "mean": known.mean,
        "std": known.std,
        "norm_momentum": known.norm_momentum,
    }


@functools.lru_cache(maxsize=None)
def scoring(name: str) -> Optional[Scoring]:
    """Return how timm scores its weights `name`, e.g. `resnet50.a1_in1k`.

    Source: the pretrained configuration in timm's code, read as timm's validate.py does, which
    prefers the sizes for tests.

    Args:
        name: of a model, with or without the tag of its weights; also one that timm has renamed.

    Returns:
        None where timm has no configuration of these weights.

    Raises:
        ConfigError: timm prepares images in a way that is not made here.
    """
    import timm

    current = timm.models.get_deprecated_models().get(name) or name
    # Asked for by its default tag too: that is what timm itself then takes.
    model_name, _, tag = current.partition(".")
    try:
        configuration = timm.get_pretrained_cfg(current if tag else model_name)
    except RuntimeError:  # a tag that timm does not have
        return None
    if configuration is None:
        return None
    train_height, train_width = configuration.input_size[1:]
    test_height, test_width = (configuration.test_input_size or configuration.input_size)[1:]
    # `model.image_size` is one number, so it can only be a square's side.
    if train_height != train_width or test_height != test_width:
        raise ConfigError(f"model.init_from: timm's {name} takes images that are not square")
    # Refused and not replaced: scores with other pixels would not be timm's.
    for key, value, known in (
        ("interpolation", configuration.interpolation, ("bilinear", "bicubic")),
        ("crop_mode", configuration.crop_mode, ("center", "squash")),
    ):
        if value not in known:
            made = either(list(known))
            raise ConfigError(f"model.init_from: timm's {name} has {key} {value}, not {made}")
    red, green, blue = configuration.mean
    red_deviation, green_deviation, blue_deviation = configuration.std
    return Scoring(
        train_size=train_height,
        test_size=test_height,
        mean=(red, green, blue),
        std=(red_deviation, green_deviation, blue_deviation),
        interpolation=configuration.interpolation,
        crop_fraction=configuration.test_crop_pct or configuration.crop_pct,
        crop_mode=configuration.crop_mode,
        classes=configuration.num_classes,
    )


def _meant(name: str) -> str:
    """Return the names that may have been meant by an unknown one, as the end of an error."""
    import timm

    known = timm.list_models()
    base = name.partition(".")[0]
    if base in known:
        return f"; its weights are named by model.init_from=timm:{name}, the model by {base}"
    similar = difflib.get_close_matches(name, known, n=3)
    if similar:
        return f"; did you mean {either(similar)}?"
    return "; timm.list_models() names all"
