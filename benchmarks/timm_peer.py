"""timm as the peer: its model with groups of 16 channels, and the body of the loop in its train.py."""

import functools
from typing import Optional, Sequence, Tuple

import timm
import torch
from timm.layers import GroupNormAct
from timm.models._efficientnet_builder import decode_arch_def, round_channels
from timm.models.efficientnet import EfficientNet
from timm.optim import create_optimizer_v2
from timm.utils import AverageMeter, NativeScaler
from torch import nn

from recipe.config import Model

# EfficientNet-B0 with expansion 4, in timm's notation.
_STAGES = """ds_r1_k3_s1_e1_c16 ir_r2_k3_s2_e4_c24 ir_r2_k5_s2_e4_c40 ir_r3_k3_s2_e4_c80 ir_r3_k5_s1_e4_c112
ir_r4_k5_s2_e4_c192 ir_r1_k3_s1_e4_c320"""
_ARCHITECTURE = [[f"{stage}_se0.25"] for stage in _STAGES.split()]


def create_g16(classes: int, width: float = 1.0, depth: float = 1.0, drop: float = 0.0, drop_path: float = 0.0):
    """timm's EfficientNet with groups of 16 channels at expansion 4 and timm's GroupNorm in 4 groups.

    Takes normalised float images [N, 3, H, W]. A group size is written per block, because timm refuses one for
    all where it does not divide the channels.
    """
    rounded = functools.partial(round_channels, multiplier=width)
    stages = decode_arch_def(_ARCHITECTURE, depth)
    channels = rounded(32)
    for block in (block for stage in stages for block in stage):
        expanded = round_channels(channels * block.get("exp_ratio", 1), divisor=8)
        block["group_size"] = expanded // max(expanded // 16, 1)
        channels = rounded(block["out_chs"])
    return EfficientNet(
        stages,
        num_classes=classes,
        num_features=rounded(1280),
        round_chs_fn=rounded,
        pad_type="same",
        act_layer=nn.SiLU,
        norm_layer=functools.partial(GroupNormAct, num_groups=4, eps=1e-3),
        drop_rate=drop,
        drop_path_rate=drop_path,
    )


class Loop:
    """timm's model, Lars, loss, meter, and on a GPU its scaler."""

    def __init__(
        self,
        plan: Model,
        lr: float,
        device: str = "cpu",
        dtype: Optional[torch.dtype] = None,
        layout: torch.memory_format = torch.contiguous_format,
        compile: bool = False,
    ):
        """Args: dtype: of autocast; None: float32 without it. plan: a group size of 1 means timm's own EfficientNet."""
        if plan.group_size == 1:
            options = {"drop_rate": plan.dropout, "drop_path_rate": plan.drop_path}
            model = timm.create_model(plan.name, num_classes=plan.classes, **options)
        else:
            model = create_g16(plan.classes, plan.width, plan.depth, plan.dropout, plan.drop_path)
        self._layout = layout
        self._model = model.to(device).to(memory_format=layout)
        self._forward = torch.compile(self._model) if compile else self._model
        self._autocast = functools.partial(torch.autocast, device, dtype, enabled=dtype is not None)
        self._optimizer = create_optimizer_v2(
            self._model, opt="lars", lr=lr, momentum=0.885, weight_decay=2.5e-6, filter_bias_and_bn=True
        )
        self._loss = nn.CrossEntropyLoss(label_smoothing=0.1)
        self._scaler = NativeScaler(device=device) if dtype == torch.float16 else None
        self._losses = AverageMeter()

    def update(self, batches: Sequence[Tuple[torch.Tensor, torch.Tensor]]) -> None:
        """One update from normalised images and labels: losses are accumulated, divided by the number of batches."""
        for number, (images, labels) in enumerate(batches, start=1):
            images = images.contiguous(memory_format=self._layout)  # no copy where they have it already
            with self._autocast():
                loss = self._loss(self._forward(images), labels) / len(batches)
            if self._scaler is not None:
                self._scaler(loss, self._optimizer, need_update=number == len(batches))
            else:
                loss.backward()
                if number == len(batches):
                    self._optimizer.step()
            self._losses.update(loss.item() * len(batches), len(images))
        self._optimizer.zero_grad()
