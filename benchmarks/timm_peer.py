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

from recipe import network
from recipe.config import Model

# EfficientNet-B0 with expansion 4, in timm's notation.
_STAGES = (
    "ds_r1_k3_s1_e1_c16",
    "ir_r2_k3_s2_e4_c24",
    "ir_r2_k5_s2_e4_c40",
    "ir_r3_k3_s2_e4_c80",
    "ir_r3_k5_s1_e4_c112",
    "ir_r4_k5_s2_e4_c192",
    "ir_r1_k3_s1_e4_c320",
)
_ARCHITECTURE = [[f"{stage}_se0.25"] for stage in _STAGES]
_GROUP_SIZE = 16  # channels


def create_g16(
    classes: int,
    width: float = 1.0,
    depth: float = 1.0,
    drop: float = 0.0,
    drop_path: float = 0.0,
) -> EfficientNet:
    """Create timm's EfficientNet with expansion 4, groups of 16 channels, and timm's GroupNorm.

    GroupNorm has 4 groups. The model takes normalised float images [N, 3, H, W].

    Args:
        classes: of the logits.
        width: multiplier of B0's channels.
        depth: multiplier of B0's blocks.
        drop: rate of the dropout before the classifier.
        drop_path: rate of stochastic depth in the last block.
    """
    rounded = functools.partial(round_channels, multiplier=width)
    stages = decode_arch_def(_ARCHITECTURE, depth)
    # Each block has its own group size: timm takes one for all, and refuses channels that it does
    # not divide.
    channels = rounded(32)
    for stage in stages:
        for block in stage:
            expanded = round_channels(channels * block.get("exp_ratio", 1), divisor=8)
            block["group_size"] = expanded // max(expanded // _GROUP_SIZE, 1)
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


def _create_model(section: Model) -> nn.Module:
    """Return timm's model of a section: timm's own where the group size is 1, else one of G16."""
    assert isinstance(section, network.EfficientNet), f"no peer of {section.name}"
    # The name gives these where a recipe does not.
    assert section.width is not None
    assert section.depth is not None
    assert section.dropout is not None
    if section.group_size == 1:
        return timm.create_model(
            section.name,
            num_classes=section.classes,
            drop_rate=section.dropout,
            drop_path_rate=section.drop_path,
        )
    return create_g16(
        section.classes,
        section.width,
        section.depth,
        drop=section.dropout,
        drop_path=section.drop_path,
    )


class Loop:
    """timm's model, Lars, loss, meter, and on a GPU its scaler."""

    def __init__(
        self,
        section: Model,
        lr: float,
        device: str = "cpu",
        dtype: Optional[torch.dtype] = None,
        layout: torch.memory_format = torch.contiguous_format,
        compile: bool = False,
    ):
        """
        Args:
            section: of a recipe with an EfficientNet; a group size of 1 means timm's own, which is
                depthwise.
            lr: learning rate.
            device: that computes.
            dtype: of autocast; None: float32 without it.
            layout: of images and weights.
            compile: let torch compile the model.
        """
        model = _create_model(section)
        self._layout = layout
        self._model = model.to(device).to(memory_format=layout)
        self._forward = torch.compile(self._model) if compile else self._model
        is_mixed = dtype is not None
        self._autocast = functools.partial(torch.autocast, device, dtype, enabled=is_mixed)
        self._optimizer = create_optimizer_v2(
            self._model,
            opt="lars",
            lr=lr,
            momentum=0.885,
            weight_decay=2.5e-6,
            filter_bias_and_bn=True,
        )
        self._loss = nn.CrossEntropyLoss(label_smoothing=0.1)
        self._scaler = NativeScaler(device=device) if dtype == torch.float16 else None
        self._losses = AverageMeter()

    def update(self, batches: Sequence[Tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Make one update. Losses are divided by the number of batches, gradients added up.

        Args:
            batches: normalised images, float32 [N, 3, H, W], and labels, int64 [N].
        """
        for number, (images, labels) in enumerate(batches, start=1):
            is_last = number == len(batches)
            # No copy where images have the layout already.
            images = images.contiguous(memory_format=self._layout)
            with self._autocast():
                loss = self._loss(self._forward(images), labels) / len(batches)
            # The scaler makes backward pass and step itself.
            if self._scaler is not None:
                self._scaler(loss, self._optimizer, need_update=is_last)
            else:
                loss.backward()
                if is_last:
                    self._optimizer.step()
            self._losses.update(loss.item() * len(batches), len(images))
        self._optimizer.zero_grad()
