"""An exchange method of one's own: a part of the dense sum, for no good reason."""

from typing import ClassVar, Literal, Optional, Sequence, Tuple

import torch
from pydantic import Field

from parallel.costs import Link
from parallel.exchange import METHODS, Gradient, Method, Running, Setup
from recipe.exchange import Exchange


class Part(Exchange):
    """Sends float32 and keeps a part of the sum."""

    grows: ClassVar[bool] = True  # a part of a sum is one, of however many steps

    method: Literal["part"] = "part"
    part: float = Field(0.5, gt=0, le=1, description="part of the sum that is kept")


class PartOfSum(Running):
    def __init__(self, part: float, group: Optional[object]):
        self._part = part
        self._group = group

    def __call__(self, buffer: torch.Tensor, step: int, divisor: torch.Tensor) -> None:
        if self._group is not None:
            torch.distributed.all_reduce(buffer, group=self._group)
        buffer.mul_(self._part)


@METHODS.implements(Part)
class PartMethod(Method):
    def seconds_over(
        self, levels: Sequence[Tuple[int, Link]], replicas: int, gradient: Gradient, size: int
    ) -> float:
        return sum(link.message(4.0 * gradient.elements) for _, link in levels)

    def create(self, setup: Setup) -> Optional[Running]:
        return PartOfSum(self.section.part, setup.group)
