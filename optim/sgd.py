"""SGD: torch's own steps, with a state that WeightState keeps."""

from __future__ import annotations

import torch

from optim.base import OPTIMIZERS, HasSlots
from optim.lars import LARS
from optim.lars_update import Rules
from recipe.optimization import Sgd


@OPTIMIZERS.implements(Sgd)
class SGD(HasSlots, torch.optim.SGD):
    """torch's SGD without dampening: m = mu m + g + wd w;  w = w - lr m, with Nesterov w = w - lr (g + wd w + mu m).

    Without momentum it keeps no state. With Nesterov's momentum and no weight decay torch's multi-tensor form, which
    runs on GPUs, leaves its step in the gradients.

    Source: Goyal et al., 1706.02677, whose momentum holds no learning rate either (remark 2).
    """

    @classmethod
    def of(cls, section: Sgd, groups: list) -> SGD:
        made = cls(groups, lr=0.0, momentum=section.momentum, nesterov=section.nesterov)
        made.slots = section.slots
        return made

    def replica_rules(self, parameters: dict, device: torch.device) -> Rules:
        groups = [{**group, "adapt": False, "decays": True} for group in self.param_groups]
        return Rules(LARS(groups, lr=0.0, momentum=self.defaults["momentum"]), parameters, device)
