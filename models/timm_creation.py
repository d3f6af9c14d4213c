"""Creates timm's models by the keys of a recipe."""

from __future__ import annotations

import importlib.util
from typing import Any, Dict

import timm
from torch import nn

from common.errors import ConfigError, first_line
from recipe import network, timm_models
from recipe.settled import image_size

TRACED_IMAGES = 2  # of a pass that is only looked at; not 1, which torch may take for a constant
_RATES = ("drop_rate", "drop_path_rate")  # options of timm's models, which some lack


def create(section: network.Timm) -> nn.Module:
    """Create the model of a `section`, with its stochastic depth, but without dropout.

    Raises:
        ConfigError: torch is too old, or the model does not take a key of the section.
    """
    if importlib.util.find_spec("torch.utils.flop_counter") is None:
        raise ConfigError(
            "model.name timm needs torch 2.1 or newer; install it, or use an EfficientNet"
        )
    # Rates are given also where they are 0: some models have others by default.
    options: Dict[str, Any] = {
        "num_classes": section.classes,
        "drop_rate": 0.0,
        "drop_path_rate": section.drop_path,
    }
    if timm_models.architecture(section.architecture).is_fixed:
        options["img_size"] = image_size(section)
    try:
        return _create_by(section.architecture, options)
    except TypeError as error:
        if "drop_path_rate" not in str(error):
            raise
        fault = f"timm's {section.architecture} has no stochastic depth; use model.drop_path=0"
        raise ConfigError(f"model.drop_path {section.drop_path:g}: {fault}") from None
    except (AssertionError, ValueError, RuntimeError) as error:
        raise wrong_size(section, image_size(section), error) from None


def _create_by(architecture: str, options: Dict[str, Any]) -> nn.Module:
    """Create timm's model by its options, but for rates of 0 that it has no option for.

    Raises:
        TypeError: timm's, for another option that the model does not have.
    """
    while True:
        try:
            return timm.create_model(architecture, **options)
        except TypeError as error:
            # The message names one option at a time.
            zeros = [rate for rate in _RATES if options.get(rate) == 0]
            unknown = [rate for rate in zeros if f"'{rate}'" in str(error)]
            if not unknown:
                raise
        options = {name: value for name, value in options.items() if name not in unknown}


def wrong_size(section: network.Timm, pixels: int, error: Exception) -> ConfigError:
    """Return the error of a model that does not take images of a size.

    Args:
        section: of the model.
        pixels: a side of the images.
        error: what the model raised.
    """
    made_for = timm_models.architecture(section.architecture).image_size
    fault = f"timm's {section.architecture} does not take it ({first_line(error)})"
    return ConfigError(
        f"model.image_size {pixels}: {fault}; its own size is model.image_size={made_for}"
    )
