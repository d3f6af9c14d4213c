"""A source of images of one's own: stripes, whose number is their class."""

from typing import Literal, Optional

import numpy as np
import torch
from pydantic import Field

from data.base import SOURCES, Source
from recipe.images import Data


class Stripes(Data):
    """Images of stripes."""

    source: Literal["stripes"] = "stripes"
    contrast: int = Field(200, ge=1, le=255, description="brightness of the stripes")

    def images(self, split: str) -> Optional[int]:
        return 96 if split == "train" else 40


@SOURCES.implements(Stripes)
class StripesSource(Source):
    """Image i has as many stripes as its class has."""

    def __init__(self, section: Stripes, classes: int, split: str):
        self.place = "data.source=stripes"
        self.classes = tuple(map(str, range(classes)))
        self.labels = np.arange(section.images(split), dtype=np.int64) % classes
        self._contrast = section.contrast

    def name(self, index: int) -> str:
        return f"stripes/{index}"

    def read(self, index: int) -> torch.Tensor:
        image = torch.zeros(3, 28, 28, dtype=torch.uint8)
        image[:, :, : 2 * (int(self.labels[index]) + 1) : 2] = self._contrast
        return image
