"""The blocks of a model, here an EfficientNet, as numbers: parameters, multiply-adds, activations.

Needs no torch.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, NamedTuple, Tuple

from models.balance import BlockCost
from recipe.config import Model
from recipe.kinds import Registry
from recipe.network import EfficientNet, Timm

# Multiply-adds of backward over those of forward: the gradients of input and weights cost one each.
_BACKWARD = 2


class Stage(NamedTuple):
    """A row of EfficientNet-B0's table: `repeats` blocks, the first with `stride`.

    separable: without expansion.
    """

    repeats: int
    kernel: int
    stride: int
    channels: int
    separable: bool = False

    def describe(self, expansion: int) -> str:
        """Return the row in timm's notation, with `expansion` where there is one."""
        kind = "ds_" if self.separable else "ir_"
        factor = 1 if self.separable else expansion
        row = f"r{self.repeats}_k{self.kernel}_s{self.stride}_e{factor}_c{self.channels}"
        return f"{kind}{row}_se{SQUEEZE:g}"


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


# (section, pixels a side of an image) -> block's name -> shape, in running order.
ShapesOf = Callable[[Any, int], Dict[str, BlockShape]]
SHAPES: Registry[ShapesOf] = Registry("the numbers of a model's blocks")


def blocks(model: Model, image_size: int) -> Dict[str, BlockShape]:
    """Return the blocks of the section `model` for images of `image_size` pixels a side.

    Returns:
        Block's name -> shape, in running order.
    """
    return SHAPES.of(model)(model, image_size)


def training_flops(model: Model, image_size: int) -> float:
    """Return the floating-point operations of training on one image.

    It is passed forward once and backward twice, with two operations to a multiply-add.

    Args:
        model: section of the recipe.
        image_size: pixels a side.
    """
    multiply_adds = sum(shape.multiply_adds for shape in blocks(model, image_size).values())
    return 3 * 2 * multiply_adds


def costs(model: Model, image_size: int, micro: int, itemsize: int) -> Dict[str, BlockCost]:
    """Count what each block costs.

    Args:
        model: its section.
        image_size: pixels a side.
        micro: images of a micro batch.
        itemsize: bytes of an activation.

    Returns:
        Block's name -> cost, in running order: multiply-adds, without normalisations and
        activations, and bytes.
    """
    costs_by_block = {}
    for name, shape in blocks(model, image_size).items():
        forward = micro * shape.multiply_adds
        costs_by_block[name] = BlockCost(
            forward=forward,
            backward=forward * _BACKWARD,
            saved=micro * shape.saved * itemsize + 4 * shape.saved_once,
            output=micro * shape.output * itemsize,
            parameters=shape.parameters,
        )
    return costs_by_block


def groups_of(channels: int, group_size: int) -> int:
    """Return the groups of a spatial convolution, at least one.

    channels // group_size, lowered until it divides `channels`.
    """
    groups = max(channels // group_size, 1)
    while channels % groups:
        groups -= 1
    return groups


@SHAPES.implements(EfficientNet)
def _efficientnet(model: EfficientNet, image_size: int) -> Dict[str, BlockShape]:
    """Return the blocks of models/efficientnet.py as numbers: see `blocks`."""
    width, depth = _multipliers(model)
    preprocess = BlockShape(
        multiply_adds=0,
        parameters=0,
        vectors=0,
        saved=0,
        output=3 * image_size**2,
    )
    channels = _divisible(STEM_CHANNELS * width)
    stem = _stem(model, channels, image_size)
    shapes = {"preprocess": preprocess, "stem": stem.shape}

    size = stem.size
    for number, stage in enumerate(STAGES):
        out_channels = _divisible(stage.channels * width)
        for repeat in range(math.ceil(stage.repeats * depth)):
            # The first block of a stage changes size and channels, the others add to their input.
            row = stage if repeat == 0 else stage._replace(stride=1)
            # The very first block drops nothing: rates rise from 0.
            drops = bool(model.drop_path) and len(shapes) > 2
            block = _block(model, row, _Activation(channels, size), out_channels, drops)
            shapes[f"blocks.{number}.{repeat}"] = block.shape
            size = block.size
            channels = out_channels

    shapes["head"] = _head(model, channels, size)
    return shapes


def _multipliers(model: EfficientNet) -> Tuple[float, float]:
    """Return width and depth of a `model`, multipliers of channels and blocks.

    Its name gives them where the recipe does not, so a section that was read has both.
    """
    assert model.width is not None and model.depth is not None
    return model.width, model.depth


class _Activation(NamedTuple):
    """An activation of an image, [channels, size, size]."""

    channels: int
    size: int


class _Sized(NamedTuple):
    """A block, and pixels a side of its output."""

    shape: BlockShape
    size: int


def _stem(model: EfficientNet, channels: int, image_size: int) -> _Sized:
    """Return the stem as numbers, with so many `channels`."""
    layers = _Layers(model)
    size = layers.convolution(3, channels, image_size, kernel=3, stride=2)
    layers.normalisation(channels, size)
    return _Sized(layers.block(channels, size), size)


def _block(
    model: EfficientNet,
    stage: Stage,
    activation: _Activation,
    out_channels: int,
    drops: bool,
) -> _Sized:
    """Return a block of a stage as numbers.

    Args:
        model: section of the recipe.
        stage: its row of the table, with the stride of this block.
        activation: the input.
        out_channels: of the output.
        drops: whether stochastic depth drops it, if it has a branch to drop.
    """
    layers = _Layers(model)
    has_residual = activation.channels == out_channels and stage.stride == 1
    if drops and has_residual:
        layers.saved += 1  # the factor of the image
    size = layers.inverted_bottleneck(stage, activation, out_channels)
    return _Sized(layers.block(out_channels, size), size)


def _head(model: EfficientNet, channels: int, size: int) -> BlockShape:
    """Return the head as numbers: convolution, mean over the pixels, dropout and classifier."""
    layers = _Layers(model)
    features = _divisible(HEAD_CHANNELS * _multipliers(model)[0])
    layers.convolution(channels, features, size)
    layers.normalisation(features, size)
    # A linear layer of a vector counts as a convolution of one pixel.
    layers.convolution(features, model.classes, 1)
    layers.vectors += model.classes
    if model.dropout:
        layers.saved += features  # the factors
    return layers.block(model.classes, 1)


@SHAPES.implements(Timm)
def _timm(model: Timm, image_size: int) -> Dict[str, BlockShape]:
    """Return the blocks of models/timm_model.py as numbers: see `blocks`. Loads torch and timm."""
    from models import timm_model

    return timm_model.shapes(model, image_size)


def _divisible(value: float) -> int:
    """Return the nearest multiple of 8 that is not below nine tenths of `value`."""
    # The rule of timm's `make_divisible`: parameters are to agree with those of its models.
    nearest = int(value + CHANNEL_DIVISOR / 2) // CHANNEL_DIVISOR * CHANNEL_DIVISOR
    result = max(CHANNEL_DIVISOR, nearest)
    return result + CHANNEL_DIVISOR if result < 0.9 * value else result


class _Layers:
    """Adds up the layers of one block, for one image. Its numbers are those of `BlockShape`.

    matrices: of the parameters, those that are no vectors.
    """

    def __init__(self, model: EfficientNet):
        self._model = model
        self.multiply_adds = 0
        self.matrices = 0
        self.vectors = 0
        self.saved = 0
        self.saved_once = 0
        self.layers = 0

    def inverted_bottleneck(
        self,
        stage: Stage,
        activation: _Activation,
        out_channels: int,
    ) -> int:
        """Add timm's block of a row of the table.

        Args:
            stage: the row; its stride is that of the block's spatial convolution.
            activation: the input.
            out_channels: of the output.

        Returns:
            Pixels a side of the output.
        """
        channels, size = activation
        expansion = 1 if stage.separable else self._model.expansion
        expanded = _divisible(channels * expansion)
        if not stage.separable:
            self.convolution(channels, expanded, size)
            self.normalisation(expanded, size)

        size = self.convolution(
            expanded,
            expanded,
            size,
            kernel=stage.kernel,
            stride=stage.stride,
            groups=groups_of(expanded, self._model.group_size),
        )
        self.normalisation(expanded, size)

        # SQUEEZE is of the block's input, which the expansion has multiplied.
        self.squeeze(expanded, round(expanded * SQUEEZE / expansion), size)
        self.convolution(expanded, out_channels, size)
        self.normalisation(out_channels, size, activated=False)
        return size

    def convolution(
        self,
        channels: int,
        out: int,
        size: int,
        kernel: int = 1,
        stride: int = 1,
        groups: int = 1,
    ) -> int:
        """Add a convolution [channels, size, size] -> [out, side, side], and return the side.

        It keeps its input, padded where it is.
        """
        # The same for both kinds of padding: see `models.blocks.geometry`.
        side = -(-size // stride)
        weights = out * channels // groups * kernel**2
        self.multiply_adds += weights * side**2
        self.matrices += weights
        self.layers += 1
        # At stride 2, TensorFlow's padding is uneven, so torch pads a copy; otherwise the kernel
        # pads.
        if stride > 1 and self._model.padding == "same":
            size = max((side - 1) * stride + kernel, size)
        self.saved += channels * size**2
        return side

    def normalisation(self, channels: int, size: int, activated: bool = True) -> None:
        """Add a normalisation of [channels, size, size], `activated` or not.

        It keeps its input and, with an activation, that one's input; proxy normalisation keeps its
        own, too.
        """
        model = self._model
        elements = channels * size**2
        proxy = model.proxy_norm and activated

        # Weight and bias; a proxy's shift and scale. With proxy normalisation, what has no
        # activation has no bias.
        vectors = 4 if proxy else 2
        if model.proxy_norm and not activated:
            vectors = 1
        self.vectors += vectors * channels

        self.saved += elements
        if activated:
            self.saved += elements
        if proxy:
            self.saved += elements
            self.saved_once += _PROXY * channels

        # Statistics are of the whole micro batch, or of each image.
        if model.norm == "batch":
            self.saved_once += _STATISTICS * channels
        else:
            groups = 1 if model.norm == "layer" else model.norm_groups
            self.saved += _STATISTICS * groups

    def squeeze(self, channels: int, reduced: int, size: int) -> None:
        """Add squeeze and excitation of [channels, size, size] by way of `reduced` numbers.

        It keeps what it scales, and a few vectors.
        """
        matrices = 2 * channels * reduced
        self.multiply_adds += matrices
        self.matrices += matrices
        self.layers += 2
        self.vectors += channels + reduced
        self.saved += channels * size**2 + 2 * channels + 2 * reduced

    def block(self, channels: int, size: int) -> BlockShape:
        """Return all of it as a block whose output is [channels, size, size]."""
        return BlockShape(
            multiply_adds=self.multiply_adds,
            parameters=self.matrices + self.vectors,
            vectors=self.vectors,
            saved=self.saved,
            output=channels * size**2,
            saved_once=self.saved_once,
            layers=self.layers,
        )
