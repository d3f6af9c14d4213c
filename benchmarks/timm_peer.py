"""The G16 model as timm alone makes it: what our model and our loop are compared with."""

from __future__ import annotations

import functools

from timm.layers import GroupNormAct
from timm.models._efficientnet_builder import decode_arch_def, round_channels
from timm.models.efficientnet import EfficientNet
from torch import nn

# EfficientNet-B0 with expansion 4, in timm's notation.
_ARCHITECTURE = [
    ["ds_r1_k3_s1_e1_c16_se0.25"],
    ["ir_r2_k3_s2_e4_c24_se0.25"],
    ["ir_r2_k5_s2_e4_c40_se0.25"],
    ["ir_r3_k3_s2_e4_c80_se0.25"],
    ["ir_r3_k5_s1_e4_c112_se0.25"],
    ["ir_r4_k5_s2_e4_c192_se0.25"],
    ["ir_r1_k3_s1_e4_c320_se0.25"],
]


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
