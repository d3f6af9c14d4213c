"""Add a family of models and train it by a recipe, like the models that come with the repository.

    python -m examples.own_model                                # further overrides may follow

`docs/recipes.md` (Add your own) says what else can be added; `tests/additions/` adds one of each.
"""

import sys
from typing import Dict, Literal

import torch
from pydantic import Field
from torch import nn

import train
from models.base import FAMILIES, BlockList, Family
from models.preprocess import Preprocess
from models.shapes import SHAPES, BlockShape
from models.stochastic import Draws
from recipe.config import Model


class Perceptron(Model):
    """The section `model` of a recipe that says `model: {name: perceptron}`."""

    name: Literal["perceptron"] = "perceptron"
    hidden: int = Field(64, ge=1, description="units of the hidden layer")


@FAMILIES.implements(Perceptron)
class PerceptronFamily(Family):
    """A hidden layer and a classifier."""

    @staticmethod
    def build(section: Perceptron, seed: int) -> BlockList:
        """Return the model, whose blocks a pipeline may divide; weights depend on `seed` only."""
        assert section.image_size is not None  # the quickstart says it
        inputs = 3 * section.image_size**2
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            hidden = nn.Sequential(nn.Flatten(), nn.Linear(inputs, section.hidden), nn.SiLU())
            head = nn.Linear(section.hidden, section.classes)
        preprocess = Preprocess(section.mean, section.std)
        model = BlockList([("preprocess", preprocess), ("hidden", hidden), ("head", head)])
        model.draws = Draws(seed)  # of layers that drop at random, of which this model has none
        return model


@SHAPES.implements(Perceptron)
def shapes(section: Perceptron, image_size: int) -> Dict[str, BlockShape]:
    """Return what a block costs with images of `image_size` pixels a side: `--dry-run` needs it."""
    inputs = 3 * image_size**2
    hidden = section.hidden
    classes = section.classes
    return {
        "preprocess": BlockShape(multiply_adds=0, parameters=0, vectors=0, saved=0, output=inputs),
        "hidden": BlockShape(
            multiply_adds=inputs * hidden,
            parameters=(inputs + 1) * hidden,
            vectors=hidden,
            saved=inputs + hidden,
            output=hidden,
            layers=1,
        ),
        "head": BlockShape(
            multiply_adds=hidden * classes,
            parameters=(hidden + 1) * classes,
            vectors=classes,
            saved=hidden,
            output=classes,
            layers=1,
        ),
    }


def main():
    """Train the quickstart's digits, and return the exit code."""
    recipe = ["--config", "configs/quickstart.yaml", "run.name=own_model", "model.name=perceptron"]
    return train.main([*recipe, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
