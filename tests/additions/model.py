"""A family of models of one's own: a convolution and a classifier."""

from typing import Dict, Literal

import torch
from pydantic import Field
from torch import nn

from models.base import FAMILIES, BlockList, Family
from models.preprocess import Preprocess
from models.shapes import SHAPES, BlockShape
from models.stochastic import Draws
from recipe.config import Model


class Patches(Model):
    """Looks at patches of an image, each by itself."""

    name: Literal["patches"] = "patches"
    channels: int = Field(16, ge=1, description="numbers that describe a patch")


@FAMILIES.implements(Patches)
class PatchesFamily(Family):
    @staticmethod
    def build(section: Patches, seed: int) -> BlockList:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            stem = nn.Sequential(nn.Conv2d(3, section.channels, 4, stride=4), nn.SiLU())
            head = nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(section.channels, section.classes)
            )
        model = BlockList(
            [("preprocess", Preprocess(section.mean, section.std)), ("stem", stem), ("head", head)]
        )
        model.draws = Draws(seed)
        return model


@SHAPES.implements(Patches)
def shapes(section: Patches, image_size: int) -> Dict[str, BlockShape]:
    channels = section.channels
    classes = section.classes
    patches = (image_size // 4) ** 2
    pixels = 3 * image_size**2
    described = channels * patches
    return {
        "preprocess": BlockShape(0, 0, 0, 0, pixels),
        "stem": BlockShape(48 * described, 49 * channels, channels, pixels + described, described),
        "head": BlockShape(
            channels * classes, (channels + 1) * classes, classes, channels, classes
        ),
    }
