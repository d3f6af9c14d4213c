"""A schedule of one's own: the rate halves every few updates."""

from typing import Literal

from pydantic import Field

from optim.schedule import SCHEDULES, Rate
from recipe.batch import Lengths
from recipe.optimization import Schedule


class Halving(Schedule):
    """Halves the rate again and again."""

    name: Literal["halving"] = "halving"
    every: int = Field(100, gt=0, description="updates between two halvings")


@SCHEDULES.implements(Halving)
def halving(section: Halving, peak: float, lengths: Lengths) -> Rate:
    return lambda step: peak * 0.5 ** (step // section.every)
