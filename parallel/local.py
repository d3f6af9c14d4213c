"""Local steps: replicas make some updates alone, then take the mean of their weights.

Needs no torch until one is created.
"""

from __future__ import annotations

from typing import Sequence, Tuple

from parallel import costs
from parallel.costs import Link
from parallel.exchange import METHODS, Gradient, Method, Running, Setup
from recipe.exchange import Local


@METHODS.implements(Local)
class LocalMethod(Method):
    """All-reduce of the weights, in float32, once in `local_steps` updates; times are the mean over updates."""

    taken = ("local_steps", "bits")

    def seconds(self, link: Link, replicas: int, gradient: Gradient) -> float:
        return self.section.fragments * costs.ring(link, replicas, self._bytes(gradient)) / self.section.local_steps

    def seconds_over(self, levels: Sequence[Tuple[int, Link]], replicas: int, gradient: Gradient, size: int) -> float:
        return self.section.fragments * costs.rings(levels, self._bytes(gradient)) / self.section.local_steps

    def _bytes(self, gradient: Gradient) -> float:
        """Of a fragment."""
        elements, bits = gradient.elements / self.section.fragments, self.section.bits
        return costs.quantized_bytes(elements, bits) if bits else 4 * elements

    def create(self, setup: Setup) -> Running:
        from parallel.local_steps import LocalSteps

        section, alone = self.section, setup.group is None
        return LocalSteps(
            setup.weights,
            None if alone else setup.processes.replica_group,
            every=section.local_steps,
            fragments=section.fragments,
            dense=lambda step: section.is_dense(step, setup.steps_per_epoch),
            bits=section.bits,
            outer=(section.outer_lr, section.outer_momentum) if section.outer == "nesterov" else None,
            delay=section.delay,
            late_group=setup.group,
        )
