"""The section `model`: which network is trained; a class for each family of models."""

from typing import Any, Dict, Iterator, List, Literal, Optional, Tuple, Type, Union

from pydantic import Field, ValidationError, field_validator, model_validator

from common.errors import ConfigError
from common.text import count
from recipe import timm_models, timm_weights
from recipe.kinds import Kind
from recipe.section import or_auto

# Compound scaling: Tan and Le, 1905.11946; the figures are those of the authors' published code.
SCALES: Dict[str, Dict[str, Any]] = {
    "efficientnet_b0": {"width": 1.0, "depth": 1.0, "image_size": 224, "dropout": 0.2},
    "efficientnet_b1": {"width": 1.0, "depth": 1.1, "image_size": 240, "dropout": 0.2},
    "efficientnet_b2": {"width": 1.1, "depth": 1.2, "image_size": 260, "dropout": 0.3},
    "efficientnet_b3": {"width": 1.2, "depth": 1.4, "image_size": 300, "dropout": 0.3},
    "efficientnet_b4": {"width": 1.4, "depth": 1.8, "image_size": 380, "dropout": 0.4},
    "efficientnet_b5": {"width": 1.6, "depth": 2.2, "image_size": 456, "dropout": 0.4},
    "efficientnet_b6": {"width": 1.8, "depth": 2.6, "image_size": 528, "dropout": 0.5},
    "efficientnet_b7": {"width": 2.0, "depth": 3.1, "image_size": 600, "dropout": 0.5},
}


CLASSIFIER = "classifier"  # among the blocks of model.train


class Model(Kind):
    """The network; each family has keys of its own, and its names their sizes."""

    name: str = Field("efficientnet_b4", description="family of models and size")
    image_size: Optional[int] = Field(None, ge=8, le=8192)
    """pixels a side in training and evaluation; null takes the name's"""
    classes: int = Field(1000, ge=2, json_schema_extra=or_auto)
    """classes of the data; auto counts class folders, labels of a list, or those that local shards
    name"""
    mean: Tuple[float, float, float] = Field((0.485, 0.456, 0.406), strict=False)
    """subtracted from the RGB values in [0, 1]"""
    std: Tuple[float, float, float] = Field((0.229, 0.224, 0.225), strict=False)
    """divides the RGB values after the mean"""
    init_from: Optional[str] = None
    """weights to start from: run folder, checkpoint, .safetensors, a timm or torch file; timm:NAME
    (downloaded) or timm:NAME:FILE also sets the keys of that model; the classifier starts anew if
    the classes differ, by name"""
    init_weights: Literal["trained", "step_average", "epoch_average", "ema"] = "trained"
    """which weights of a run folder or checkpoint to start from; ema: the averaged ones in a file
    of another program"""

    train: Union[Literal["all", "classifier"], List[str]] = "all"
    """parts that are trained: all, the classifier, or a list of blocks such as [blocks.6, head]; the
    others keep their weights and running statistics and compute as in evaluation"""

    @property
    def batch_statistics(self) -> bool:
        """True where layers normalise by statistics of a micro batch, and keep running ones."""
        return False

    @field_validator("init_from")
    @classmethod
    def _at_home(cls, value: Optional[str]) -> Optional[str]:
        """Expand a leading ~ in the path of weights."""
        return value and timm_weights.expanded(value)

    @classmethod
    def class_for(cls, values: Any) -> Type[Kind]:
        """Return the family that `values` name: see `Kind.class_for`.

        Raises:
            ConfigError: there is none, but timm has such a model.
        """
        name = values.get("name") if isinstance(values, dict) else None
        if isinstance(name, str) and name not in cls.kinds and timm_models.is_known(name):
            remedy = f"use model.name=timm model.architecture={name}"
            raise ConfigError(f"model.name: {name} is a model of timm; {remedy}")
        return super().class_for(values)

    def faults(self) -> Iterator[str]:
        """Yield faults of weights that are not named, and of parts without any."""
        if not self.train:
            yield "train is an empty list; name the blocks to train, or use train=all"
        if self.init_weights != "trained" and self.init_from is None:
            yield "init_weights says nothing without init_from; name the run folder or checkpoint there"

    @field_validator("train", mode="wrap")
    @classmethod
    def _word_or_blocks(cls, value: object, handler: Any) -> object:
        """Validate `train`; an error is one line, where pydantic has one for each type."""
        try:
            return handler(value)
        except ValidationError:
            example = value if isinstance(value, str) else "head"
            fault = f"must be all, classifier or a list of blocks, found {value!r}"
            raise ValueError(f"{fault}; write a list as [{example}]") from None

    @field_validator("std")
    @classmethod
    def _positive(cls, value: Tuple[float, float, float]) -> Tuple[float, float, float]:
        """Check the divisors of the colours."""
        if min(value) <= 0:
            raise ValueError("every value must be positive")
        return value

    def describe(self) -> str:
        """Return the name and what matters of its size, for the plan."""
        return self.name


class EfficientNet(Model):
    """EfficientNet with group convolutions. Width, depth, resolution and dropout follow the name
    unless given.
    """

    name: Literal[
        "efficientnet_b0", "efficientnet_b1", "efficientnet_b2", "efficientnet_b3",
        "efficientnet_b4", "efficientnet_b5", "efficientnet_b6", "efficientnet_b7",
    ] = Field("efficientnet_b4", description="compound scale: sets width, depth, image size and dropout")  # fmt: skip
    width: Optional[float] = Field(None, gt=0, le=100)
    """channel multiplier; null: the name's (B4: 1.4)"""
    depth: Optional[float] = Field(None, gt=0, le=10)
    """layer multiplier; null takes the name's (B4: 1.8)"""
    group_size: int = Field(16, ge=1)
    """channels per group of the spatial convolutions; 1 is depthwise"""
    expansion: int = Field(4, ge=1)
    """expansion of the inverted bottlenecks (4 with G16, 6 in the original)"""
    norm: Literal["group", "layer", "batch"] = "group"
    """normalisation over groups of channels, over all channels, or over the micro batch"""
    norm_groups: int = Field(4, ge=1, description="groups of a group normalisation")
    norm_eps: float = Field(1e-3, gt=0, description="epsilon of the normalisation")
    norm_momentum: float = Field(0.01, gt=0, le=1)
    """share of each micro batch in the running statistics of a batch normalisation"""
    proxy_norm: bool = False
    """proxy normalisation of activations after group or layer norms"""
    proxy_eps: float = Field(0.03, gt=0, description="epsilon of the proxy normalisation")
    padding: Literal["same", "torch"] = "same"
    """same pads as TensorFlow; torch pads symmetrically"""
    dropout: Optional[float] = Field(None, ge=0, lt=1)
    """dropout before the classifier; null: the name's"""
    drop_path: float = Field(0.2, ge=0, lt=1)
    """stochastic depth: block i of n drops its branch at this rate x i / n, the first never"""

    @model_validator(mode="before")
    @classmethod
    def _scale_by_name(cls, values: Any) -> Any:
        """Fill in width, depth, resolution and dropout of the name."""
        if not isinstance(values, dict):
            return values
        # Before the checks: a recipe then has numbers only, which config.yaml of a run stores.
        name = values.get("name", cls.default_name())
        scale = SCALES.get(str(name), {})
        sizes = {key: size for key, size in scale.items() if values.get(key) is None}
        return {**values, **sizes}

    @classmethod
    def implied(cls, values: Dict[str, Any]) -> Dict[str, Any]:
        """Return the width, depth, resolution and dropout of the name: see `Kind.implied`."""
        return SCALES.get(str(values.get("name")), {})

    def faults(self) -> Iterator[str]:
        """Yield faults of norms that do not go together."""
        yield from super().faults()
        if self.proxy_norm and self.norm == "batch":
            yield "proxy_norm goes with norm group or layer, not with batch"

    @property
    def batch_statistics(self) -> bool:
        return self.norm == "batch"

    def describe(self) -> str:
        """Return the name and all that decides on the number of parameters."""
        size = f"width {self.width:g}, depth {self.depth:g}"
        return f"{self.name}, {size}, groups of {count(self.group_size, 'channel')}, expansion {self.expansion}"

    def defaults(self) -> Dict[str, Any]:
        """Return the defaults, with those of the name in the place of null."""
        return {**super().defaults(), **SCALES[self.name]}


class Timm(Model):
    """Any model of timm, by timm's name. Image size, mean and std are the model's unless given."""

    name: Literal["timm"] = Field("timm", description="any model of timm")
    architecture: str = Field("", description="timm's name of the model, as convnext_tiny")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout before the classifier")
    drop_path: float = Field(0.0, ge=0, lt=1)
    """stochastic depth of the last block; timm's models raise it from 0 with the depth"""
    norm_momentum: Optional[float] = Field(None, gt=0, le=1)
    """share of each micro batch in the running statistics of all batch normalisations; null: the
    model's"""

    @model_validator(mode="before")
    @classmethod
    def _values_by_architecture(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        architecture = values.get("architecture")
        if not architecture:
            raise ValueError("model.name timm needs model.architecture; use timm's name of a model")
        if not isinstance(architecture, str):
            return values  # which the key's own check refuses
        known = timm_models.keys(architecture)
        # Null is as good as not given: the architecture's own value takes its place.
        given = {key: value for key, value in values.items() if value is not None}
        return {**values, **known, **given}

    @classmethod
    def implied(cls, values: Dict[str, Any]) -> Dict[str, Any]:
        """Return the values of the architecture: see `Kind.implied`."""
        architecture = values.get("architecture")
        if not architecture or not isinstance(architecture, str):
            return {}
        known = timm_models.keys(architecture)
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in known.items()
        }

    @property
    def batch_statistics(self) -> bool:
        return timm_models.architecture(self.architecture).has_batch_norm

    def describe(self) -> str:
        return f"timm's {self.architecture}"

    def defaults(self) -> Dict[str, Any]:
        return {**super().defaults(), **timm_models.keys(self.architecture)}
