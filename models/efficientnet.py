"""EfficientNet with group convolutions (G16) as a list of named blocks, built from timm's model."""

from __future__ import annotations

import functools
import math
from typing import Any, Dict, List, Tuple

import torch
from timm.models._efficientnet_builder import decode_arch_def, round_channels
from timm.models.efficientnet import EfficientNet
from torch import nn

from common.errors import ConfigError
from models.base import FAMILIES, BlockList, Family
from models.normalization import BatchNormAct, GroupNormAct, ProxyNormAct
from models.preprocess import Preprocess
from models.shapes import CHANNEL_DIVISOR, HEAD_CHANNELS, STAGES, STEM_CHANNELS, groups_of
from models.stochastic import Draws, Dropout, DropPath
from recipe import network
from recipe.randomness import key


@FAMILIES.implements(network.EfficientNet)
class EfficientNetFamily(Family):
    """Blocks: `preprocess`, `stem`, `blocks.STAGE.BLOCK`, `head`.

    Parameters and buffers have timm's names behind the block's, so `timm_name` maps a state dict to
    timm's except for `num_batches_tracked` and proxy normalisation. Depthwise with expansion 6 and
    batch normalisation, this is timm's `efficientnet_bN` (padding torch, norm_eps 1e-5) or
    `tf_efficientnet_bN` (padding same, norm_eps 1e-3).

    Source: Tan and Le, 1905.11946; groups of 16 at expansion 4: Masters et al., 2106.03640.
    """

    anchors = ("stem.conv_stem.weight", "conv_stem.weight")

    @staticmethod
    def build(model: network.EfficientNet, seed: int) -> BlockList:
        """Build the network of `model`, a section, with weights drawn by `seed`: see `Family`.

        Weights follow timm's rules, but the classifier's are smaller than timm's where there are
        fewer than 1,000 classes.

        Raises:
            ConfigError: channels do not divide into a norm's groups.
        """
        timms = _drawn_model(model, seed)
        draws = Draws(seed)
        blocks: List[Tuple[str, nn.Module]] = [
            ("preprocess", Preprocess(model.mean, model.std)),
            ("stem", _Stem(timms)),
        ]
        # timm's containers, torch's Sequential, yield their modules in running order.
        for stage_number, stage in enumerate(timms.blocks.children()):
            for number, block in enumerate(stage.children()):
                name = f"blocks.{stage_number}.{number}"
                _use_our_drop_path(block, name, draws)
                blocks.append((name, block))
        assert model.dropout is not None  # the name gives it where the recipe does not
        dropout = Dropout(model.dropout, "head", draws, per_row=timms.num_features)
        blocks.append(("head", Head(timms, dropout)))
        result = BlockList(blocks)
        result.draws = draws
        return result

    @staticmethod
    def timm_name(name: str) -> str:
        """Return timm's `name` of a parameter or buffer: timm has no `stem` and `head`."""
        return name[len("stem.") :] if name.startswith(("stem.", "head.")) else name

    @classmethod
    def depths(cls, section: network.EfficientNet) -> Dict[str, int]:
        """Return depths as timm's: the last convolution is as deep as the last block."""
        depths = super().depths(section)
        classifier = max(depths.values())
        for name in depths:
            if name.startswith(("head.conv_head.", "head.bn2.")):
                depths[name] = classifier - 1
        return depths

    @staticmethod
    def keys_of(shapes: Dict[str, Tuple[int, ...]]) -> Dict[str, Any]:
        """Return width, depth, groups, expansion and norm of an EfficientNet of B0 to B7.

        Args:
            shapes: name of a parameter or buffer, ours or timm's -> its shape.

        Returns:
            Keys of the section with their values: without width and depth where they are those of
            no such model, and none where the weights are of no EfficientNet.
        """
        known = {timm_name(name): shape for name, shape in shapes.items()}
        # The first block with an expansion. Under these names a file may have anything.
        expansion = known.get("blocks.1.0.conv_pw.weight", ())
        convolution = known.get("blocks.1.0.conv_dw.weight", ())
        for shape in (expansion, convolution):
            if len(shape) != 4 or 0 in shape:
                return {}
        # Weights are [out, in / groups, height, width].
        keys: Dict[str, Any] = {
            "group_size": convolution[1],
            "expansion": expansion[0] // expansion[1],
        }
        if any(name.endswith("running_mean") for name in known):
            keys["norm"] = "batch"
        return {**_scale_of(known), **keys}


build = EfficientNetFamily.build
timm_name = EfficientNetFamily.timm_name


def _scale_of(shapes: Dict[str, Tuple[int, ...]]) -> Dict[str, float]:
    """Return width and depth of that of B0 to B7 with as many blocks and channels; {} if none has.

    Args:
        shapes: timm's name of a parameter -> its shape.
    """
    # Names of parameters begin with blocks.STAGE.BLOCK.
    blocks = {tuple(name.split(".")[1:3]) for name in shapes if name.startswith("blocks.")}
    stages = [stage for stage, _ in blocks]
    repeats = [stages.count(str(number)) for number in range(len(STAGES))]
    # A file may have a single number, of shape (), under these names.
    stem_channels = (shapes.get("conv_stem.weight") or (0,))[0]
    head_channels = (shapes.get("conv_head.weight") or (0,))[0]
    # By both: B0 and B1 have one width.
    for scale in network.SCALES.values():
        width = scale["width"]
        depth = scale["depth"]
        same_depth = repeats == [math.ceil(stage.repeats * depth) for stage in STAGES]
        same_stem = stem_channels == round_channels(STEM_CHANNELS, width, CHANNEL_DIVISOR)
        same_head = head_channels == round_channels(HEAD_CHANNELS, width, CHANNEL_DIVISOR)
        if same_depth and same_stem and same_head:
            return {"width": width, "depth": depth}
    return {}


def _use_our_drop_path(block: nn.Module, name: str, draws: Draws) -> None:
    """Replace timm's stochastic depth, which draws from torch's generator, in a block."""
    rate = getattr(getattr(block, "drop_path", None), "drop_prob", None)
    if rate:
        block.drop_path = DropPath(rate, name, draws)


class _Stem(nn.Module):
    """The first convolution and its normalisation.

    Input: [N, 3, H, W]; output: [N, C, ceil(H / 2), ceil(W / 2)].
    """

    def __init__(self, timms: EfficientNet):
        super().__init__()
        self.conv_stem = timms.conv_stem
        self.bn1 = timms.bn1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first block's input for `x`, the preprocessed images."""
        return self.bn1(self.conv_stem(x))


class Head(nn.Module):
    """The last convolution, means over pixels, dropout and the classifier.

    Input: [N, C, H, W]; output: [N, classes].

    Args:
        timms: whose layers these are.
        dropout: of the means.
    """

    def __init__(self, timms: EfficientNet, dropout: Dropout):
        super().__init__()
        self.conv_head = timms.conv_head
        self.bn2 = timms.bn2
        self.dropout = dropout
        self.classifier = timms.classifier

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, [N, classes], for `x`, the last block's output."""
        return self.classifier(self.dropout(self.pooled(x)))

    def pooled(self, x: torch.Tensor) -> torch.Tensor:
        """Return means over pixels, [N, features], of what the convolution makes of `x`."""
        return self.bn2(self.conv_head(x)).mean((2, 3))


def _drawn_model(model: network.EfficientNet, seed: int) -> EfficientNet:
    """Build timm's EfficientNet of a section, with weights drawn by `seed`."""
    # timm draws from torch's generator, which is given back as it was: nothing of ours draws from
    # there, but a program that calls this may.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key("weights", seed) >> 1)
        timms = _timm_model(model)
    # timm, like the authors, draws the classifier's between -1 and 1 over the root of the classes.
    # With ten classes the first loss is then 5 instead of 2.3, and SGD never recovers.
    with torch.no_grad():
        timms.classifier.weight.mul_(min(1.0, model.classes / 1000) ** 0.5)
    return timms


def _timm_model(model: network.EfficientNet) -> EfficientNet:
    """Build timm's EfficientNet of a section, with our normalisation layers."""
    rounded = functools.partial(round_channels, multiplier=model.width, divisor=CHANNEL_DIVISOR)
    stages = decode_arch_def([[stage.describe(model.expansion)] for stage in STAGES], model.depth)

    # Each block has its own group size: timm takes one for all, and refuses channels that it does
    # not divide.
    channels = rounded(STEM_CHANNELS)
    for stage in stages:
        for block in stage:
            expanded = round_channels(channels * block.get("exp_ratio", 1.0), divisor=8)
            block["group_size"] = expanded // groups_of(expanded, model.group_size)
            channels = rounded(block["out_chs"])
    return EfficientNet(
        block_args=stages,
        num_classes=model.classes,
        num_features=rounded(HEAD_CHANNELS),
        stem_size=STEM_CHANNELS,
        round_chs_fn=rounded,
        pad_type="same" if model.padding == "same" else "",
        act_layer=nn.SiLU,
        # A function: of a functools.partial timm takes the keywords only.
        norm_layer=lambda channels, **options: _norm(model, channels, **options),
        drop_path_rate=model.drop_path,
    )


def _norm(
    model: network.EfficientNet,
    channels: int,
    apply_act: bool = True,
    **_: object,
) -> nn.Module:
    """Make a normalisation layer of a section. Options of timm's own are ignored."""
    if model.norm == "batch":
        return BatchNormAct(channels, model.norm_eps, model.norm_momentum, apply_act)
    groups = 1 if model.norm == "layer" else model.norm_groups
    if channels % groups:
        raise ConfigError(
            f"model.norm_groups {groups} does not divide a layer of {channels} channels; "
            f"use model.norm_groups=4 or another width"
        )
    if model.proxy_norm and apply_act:
        return ProxyNormAct(channels, groups, model.norm_eps, model.proxy_eps)
    return GroupNormAct(channels, groups, model.norm_eps, apply_act, shift=not model.proxy_norm)
