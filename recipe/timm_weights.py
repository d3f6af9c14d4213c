"""timm's pretrained weights: `model.init_from: timm:NAME` or `timm:NAME:FILE`, and the keys that the
name sets, as padding and epsilon are not in a file of weights.

EfficientNet-B0 to B7 are models of our own family, all others those of `model.name: timm`.
"""

import re
from typing import Any, Dict, NamedTuple, Optional

from common import files
from recipe import timm_models

_PREFIX = "timm:"
_ANY = "timm"  # `model.name` of any model of timm
# timm's names are efficientnet_b0, tf_efficientnet_b4_ns, tf_efficientnet_b5.ap_in1k and so on.
_NAME = re.compile(r"(?P<tf>tf_)?(?P<model>efficientnet_b[0-7])(?P<training>[_.](?!pruned)[\w.]+)?")
_OTHER_MEANS = {"ap", "ra4"}  # trained with AdvProp, or by timm's newest rules
_MEANS = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
_UNGIVEN = {"width": None, "depth": None, "image_size": None}  # so that those of the name are taken
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
    epsilon.

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
    # The keys of lower layers must not stay: a width of another size would not fit the file.
    keys = {"name": match["model"], **_UNGIVEN, **_ORIGINAL}
    if match["tf"] is not None:
        keys.update(norm_eps=1e-3, padding="same")
    else:
        keys.update(norm_eps=1e-5, padding="torch")
    training = re.split("[_.]", match["training"] or "")
    if _OTHER_MEANS.intersection(training):
        keys.update(_MEANS)
    return keys
