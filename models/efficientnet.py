"""EfficientNet with group convolutions (G16) as a flat list of named blocks, built from timm's model."""

from __future__ import annotations

import functools
import math
from typing import Any, Dict, Tuple

import torch
from timm.models._efficientnet_builder import decode_arch_def, round_channels
from timm.models.efficientnet import EfficientNet
from torch import nn

from models.normalization import BatchNormAct, GroupNormAct, ProxyNormAct
from models.preprocess import Preprocess
from models.shapes import CHANNEL_DIVISOR, HEAD_CHANNELS, STAGES, STEM_CHANNELS, groups_of
from models.stages import FAMILIES, BlockList, Family
from models.stochastic import Draws, Dropout, DropPath
from recipe import network
from recipe.errors import ConfigError
from recipe.randomness import key


@FAMILIES.implements(network.EfficientNet)
class EfficientNetFamily(Family):
    """Blocks: `preprocess`, `stem`, `blocks.STAGE.BLOCK`, `head`.

    Parameters and buffers have timm's names behind the block's, so `timm_name` maps a state dict to timm's except for
    `num_batches_tracked` and proxy normalisation. Depthwise with expansion 6 and batch normalisation, this is timm's
    `efficientnet_bN` (padding torch, norm_eps 1e-5) or `tf_efficientnet_bN` (padding same, norm_eps 1e-3).

    Source: Tan and Le, 1905.11946; groups of 16 at expansion 4: Masters et al., 2106.03640.
    """

    anchors = ("stem.conv_stem.weight", "conv_stem.weight")

    @staticmethod
    def build(model: network.EfficientNet, seed: int) -> BlockList:
        """See `Family.build`. Initial weights follow timm's rules, but the classifier's are smaller than timm's where
        there are fewer than 1,000 classes. Raises ConfigError: channels do not divide into a norm's groups."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key("weights", seed) >> 1)
            theirs = _timm_model(model)
        with torch.no_grad():
            # timm, like the authors, draws them between -1 and 1 over the root of the classes. With ten classes the
            # first loss is then 5 instead of 2.3, and SGD never recovers.
            theirs.classifier.weight.mul_(min(1.0, model.classes / 1000) ** 0.5)
        draws = Draws(seed)
        inner = [(f"blocks.{i}.{j}", block) for i, stage in enumerate(theirs.blocks) for j, block in enumerate(stage)]
        for name, block in inner:  # ours in the place of timm's stochastic depth, which draws from torch's generator
            rate = getattr(getattr(block, "drop_path", None), "drop_prob", None)
            if rate:
                block.drop_path = DropPath(rate, name, draws)
        first = [("preprocess", Preprocess(model.mean, model.std)), ("stem", _Stem(theirs))]
        head = Head(theirs, Dropout(model.dropout, "head", draws, theirs.num_features))
        result = BlockList([*first, *inner, ("head", head)])
        result.draws = draws
        return result

    @staticmethod
    def timm_name(name: str) -> str:
        """See `Family.timm_name`: timm's EfficientNet has no `stem` and `head`."""
        return name[len("stem.") :] if name.startswith(("stem.", "head.")) else name

    @staticmethod
    def keys_of(shapes: Dict[str, Tuple[int, ...]]) -> Dict[str, Any]:
        """Width, depth, groups, expansion and norm of an EfficientNet of B0 to B7: see `Family.keys_of`."""
        known = {timm_name(name): shape for name, shape in shapes.items()}
        wide, grouped = known.get("blocks.1.0.conv_pw.weight"), known.get("blocks.1.0.conv_dw.weight")
        if any(shape is None or len(shape) != 4 or 0 in shape for shape in (wide, grouped)):
            return {}
        batch = any(name.endswith("running_mean") for name in known)
        found = {"group_size": grouped[1], "expansion": wide[0] // wide[1], **({"norm": "batch"} if batch else {})}
        blocks = {tuple(name.split(".")[1:3]) for name in known if name.startswith("blocks.")}
        repeats = [sum(stage == str(number) for stage, _ in blocks) for number in range(len(STAGES))]
        stem, head = (known.get(f"{name}.weight", (0,))[0] for name in ("conv_stem", "conv_head"))
        for scale in network.SCALES.values():
            rounded = functools.partial(round_channels, multiplier=scale["width"], divisor=CHANNEL_DIVISOR)
            depths = [math.ceil(stage.repeats * scale["depth"]) for stage in STAGES]
            if (depths, rounded(STEM_CHANNELS), rounded(HEAD_CHANNELS)) == (repeats, stem, head):
                return {"width": scale["width"], "depth": scale["depth"], **found}
        return found


build, timm_name = EfficientNetFamily.build, EfficientNetFamily.timm_name


class _Stem(nn.Module):
    def __init__(self, theirs: EfficientNet):
        super().__init__()
        self.conv_stem, self.bn1 = theirs.conv_stem, theirs.bn1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn1(self.conv_stem(x))


class Head(nn.Module):
    """The last convolution, means over pixels, dropout and the classifier: [N, C, H, W] -> [N, classes]."""

    def __init__(self, theirs: EfficientNet, dropout: Dropout):
        super().__init__()
        self.conv_head, self.bn2 = theirs.conv_head, theirs.bn2
        self.dropout, self.classifier = dropout, theirs.classifier

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.dropout(self.pooled(x)))

    def pooled(self, x: torch.Tensor) -> torch.Tensor:
        """Means over pixels, [N, features]."""
        return self.bn2(self.conv_head(x)).mean((2, 3))


def _timm_model(model: network.EfficientNet) -> EfficientNet:
    rounded = functools.partial(round_channels, multiplier=model.width, divisor=CHANNEL_DIVISOR)
    arguments = decode_arch_def([[stage.describe(model.expansion)] for stage in STAGES], model.depth)
    # Each block has its own group size: timm takes one for all, and refuses channels that it does not divide.
    channels = rounded(STEM_CHANNELS)
    for block in (block for stage in arguments for block in stage):
        expanded = round_channels(channels * block.get("exp_ratio", 1.0), divisor=8)
        block["group_size"] = expanded // groups_of(expanded, model.group_size)
        channels = rounded(block["out_chs"])
    return EfficientNet(
        block_args=arguments,
        num_classes=model.classes,
        num_features=rounded(HEAD_CHANNELS),
        stem_size=STEM_CHANNELS,
        round_chs_fn=rounded,
        pad_type="same" if model.padding == "same" else "",
        act_layer=nn.SiLU,
        norm_layer=lambda channels, **options: _norm(model, channels, **options),
        drop_path_rate=model.drop_path,
    )


def _norm(model: network.EfficientNet, channels: int, apply_act: bool = True, **_: object) -> nn.Module:
    groups = 1 if model.norm == "layer" else model.norm_groups
    if model.norm == "batch":
        return BatchNormAct(channels, model.norm_eps, model.norm_momentum, apply_act)
    if channels % groups:
        raise ConfigError(
            f"model.norm_groups {groups} does not divide a layer of {channels} channels; "
            f"use model.norm_groups=4 or another width"
        )
    if model.proxy_norm and apply_act:
        return ProxyNormAct(channels, groups, model.norm_eps, model.proxy_eps)
    return GroupNormAct(channels, groups, model.norm_eps, apply_act, shift=not model.proxy_norm)
