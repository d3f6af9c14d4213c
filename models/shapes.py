"""The blocks of a model, here an EfficientNet, as numbers: parameters, multiply-adds, activations. Needs no torch."""

from __future__ import annotations

import math
from typing import Callable, Dict, NamedTuple

from models.balance import BlockCost
from recipe.config import Model
from recipe.kinds import Registry
from recipe.network import EfficientNet

_BACKWARD = 2  # backward in forward passes, in multiply-adds: the gradients of input and weights cost one each


class Stage(NamedTuple):
    """A row of EfficientNet-B0's table: `repeats` blocks, the first with `stride`; `separable`: without expansion."""

    repeats: int
    kernel: int
    stride: int
    channels: int
    separable: bool = False

    def describe(self, expansion: int) -> str:
        """In timm's notation."""
        kind, factor = ("ds", 1) if self.separable else ("ir", expansion)
        return f"{kind}_r{self.repeats}_k{self.kernel}_s{self.stride}_e{factor}_c{self.channels}_se{SQUEEZE:g}"


# Tan and Le, 1905.11946, table 1.
STAGES = (
    Stage(1, 3, 1, 16, separable=True),
    Stage(2, 3, 2, 24),
    Stage(2, 5, 2, 40),
    Stage(3, 3, 2, 80),
    Stage(3, 5, 1, 112),
    Stage(4, 5, 2, 192),
    Stage(1, 3, 1, 320),
)
STEM_CHANNELS = 32
HEAD_CHANNELS = 1280
CHANNEL_DIVISOR = 8
SQUEEZE = 0.25  # of a block's input channels, in squeeze and excitation

_STATISTICS = 2  # float32 numbers that a normalisation keeps of each group or channel
_PROXY = 98  # and a proxy of each channel: three at each of its 32 points, mean and variance


class BlockShape(NamedTuple):
    """Numbers of one block, for one image."""

    multiply_adds: int  # of the forward pass, convolutions and linear layers
    parameters: int
    vectors: int  # of the parameters, those that are one-dimensional, which optimizers skip
    saved: int  # elements that autograd keeps for the backward pass
    output: int  # elements for the next block
    saved_once: int = 0  # float32 numbers that normalisation keeps of a micro batch
    layers: int = 0  # parameters that are no vectors


# By section class: block's name -> shape, in running order, for images of so many pixels a side.
SHAPES: Registry[Callable[[Model, int], Dict[str, BlockShape]]] = Registry("the numbers of a model's blocks")


def blocks(model: Model, image_size: int) -> Dict[str, BlockShape]:
    """Block's name -> shape, in running order, for images of `image_size` pixels a side."""
    return SHAPES.of(model)(model, image_size)


@SHAPES.implements(EfficientNet)
def _efficientnet(model: EfficientNet, image_size: int) -> Dict[str, BlockShape]:
    found = {"preprocess": BlockShape(0, 0, 0, 0, 3 * image_size**2)}
    channels, layers = _divisible(STEM_CHANNELS * model.width), _Layers(model)
    size = layers.convolution(3, channels, image_size, kernel=3, stride=2)
    layers.normalisation(channels, size)
    found["stem"] = layers.block(channels, size)
    for number, stage in enumerate(STAGES):
        for repeat in range(math.ceil(stage.repeats * model.depth)):
            layers = _Layers(model)
            stride = stage.stride if repeat == 0 else 1
            given, channels = channels, _divisible(stage.channels * model.width)
            expansion = 1 if stage.separable else model.expansion
            expanded = _divisible(given * expansion)
            if not stage.separable:
                layers.convolution(given, expanded, size)
                layers.normalisation(expanded, size)
            groups = groups_of(expanded, model.group_size)
            size = layers.convolution(expanded, expanded, size, stage.kernel, stride, groups)
            layers.normalisation(expanded, size)
            layers.squeeze(expanded, round(expanded * SQUEEZE / expansion), size)
            layers.convolution(expanded, channels, size)
            layers.normalisation(channels, size, activated=False)
            drops = model.drop_path and given == channels and stride == 1 and len(found) > 2
            layers.saved += bool(drops)  # the factor of the image
            found[f"blocks.{number}.{repeat}"] = layers.block(channels, size)
    layers, features = _Layers(model), _divisible(HEAD_CHANNELS * model.width)
    layers.convolution(channels, features, size)
    layers.normalisation(features, size)
    layers.convolution(features, model.classes, 1)  # the classifier, behind a mean over the pixels
    layers.vectors += model.classes
    layers.saved += features if model.dropout else 0  # the factors
    found["head"] = layers.block(model.classes, 1)
    return found


def costs(model: Model, image_size: int, micro: int, itemsize: int) -> Dict[str, BlockCost]:
    """Multiply-adds (without normalisations and activations) and bytes, `itemsize` an activation, of each block."""
    found = {}
    for name, shape in blocks(model, image_size).items():
        forward, saved = micro * shape.multiply_adds, micro * shape.saved * itemsize + 4 * shape.saved_once
        output = micro * shape.output * itemsize
        found[name] = BlockCost(forward, forward * _BACKWARD, saved, output, shape.parameters)
    return found


def groups_of(channels: int, group_size: int) -> int:
    """Groups of a spatial convolution: channels // group_size, at least one, lowered until it divides `channels`."""
    return next(groups for groups in range(max(channels // group_size, 1), 0, -1) if channels % groups == 0)


def _divisible(value: float) -> int:
    """The nearest multiple of 8 that is not below nine tenths of the value."""
    result = max(CHANNEL_DIVISOR, int(value + CHANNEL_DIVISOR / 2) // CHANNEL_DIVISOR * CHANNEL_DIVISOR)
    return result + CHANNEL_DIVISOR if result < 0.9 * value else result


class _Layers:
    """Adds up the layers of one block."""

    def __init__(self, model: EfficientNet):
        self._model = model
        self.multiply_adds = self.matrices = self.vectors = self.saved = self.once = self.layers = 0

    def convolution(self, channels: int, out: int, size: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> int:
        """[channels, size, size] -> [out, side, side]; the side. Keeps its input, padded where it is."""
        side = -(-size // stride)
        weights = out * channels // groups * kernel**2
        self.multiply_adds += weights * side**2
        self.matrices += weights
        self.layers += 1
        # At stride 2, TensorFlow's padding is uneven, so torch pads a copy; otherwise the kernel pads.
        padded = stride > 1 and self._model.padding == "same"
        self.saved += channels * ((max((side - 1) * stride + kernel, size) if padded else size) ** 2)
        return side

    def normalisation(self, channels: int, size: int, activated: bool = True) -> None:
        """Keeps its input and, with an activation, that one's input; proxy normalisation keeps its own, too."""
        model = self._model
        proxy = model.proxy_norm and activated
        self.vectors += channels * ((4 if proxy else 2) - (model.proxy_norm and not activated))
        self.saved += channels * size**2 * (1 + activated + proxy)
        self.once += _PROXY * channels * proxy
        if model.norm == "batch":
            self.once += _STATISTICS * channels
        else:
            self.saved += _STATISTICS * (1 if model.norm == "layer" else model.norm_groups)

    def squeeze(self, channels: int, reduced: int, size: int) -> None:
        """Keeps what it scales, and a few vectors."""
        self.multiply_adds += 2 * channels * reduced
        self.matrices += 2 * channels * reduced
        self.layers += 2
        self.vectors += channels + reduced
        self.saved += channels * size**2 + 2 * channels + 2 * reduced

    def block(self, channels: int, size: int) -> BlockShape:
        """All of it, with an output of [channels, size, size]."""
        parameters = self.matrices + self.vectors
        output = channels * size**2
        return BlockShape(self.multiply_adds, parameters, self.vectors, self.saved, output, self.once, self.layers)
