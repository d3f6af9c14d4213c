"""The schema of a recipe: sections, keys, types, units and ranges.

How YAML files become a recipe is in loading.py; the batch arithmetic is in batch.py.
Annotations are evaluated by pydantic at run time and must work on Python 3.8.
"""

from typing import Any, List, Literal, Optional, Tuple, Union

from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator, model_validator

# Compound scaling: Tan and Le, 1905.11946; the figures are those of the authors' published code.
COMPOUND_SCALES = {
    "efficientnet_b0": {"width": 1.0, "depth": 1.0, "image_size": 224, "dropout": 0.2},
    "efficientnet_b1": {"width": 1.0, "depth": 1.1, "image_size": 240, "dropout": 0.2},
    "efficientnet_b2": {"width": 1.1, "depth": 1.2, "image_size": 260, "dropout": 0.3},
    "efficientnet_b3": {"width": 1.2, "depth": 1.4, "image_size": 300, "dropout": 0.3},
    "efficientnet_b4": {"width": 1.4, "depth": 1.8, "image_size": 380, "dropout": 0.4},
    "efficientnet_b5": {"width": 1.6, "depth": 2.2, "image_size": 456, "dropout": 0.4},
    "efficientnet_b6": {"width": 1.8, "depth": 2.6, "image_size": 528, "dropout": 0.5},
    "efficientnet_b7": {"width": 2.0, "depth": 3.1, "image_size": 600, "dropout": 0.5},
}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Run(_Section):
    """One run: its name, place, device and length."""

    name: str = Field(
        "run", pattern=r"^\w[\w.-]*$", description="names the run in logs and in the default output folder"
    )
    output: Optional[str] = Field(None, description="run folder; null means runs/NAME")
    device: Literal["auto", "cpu", "cuda", "ipu"] = Field(
        "auto", description="auto takes CUDA where there is one, else the CPU; ipu so far only plans (--dry-run)"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="every draw of the run is a function of it")
    epochs: Optional[float] = Field(
        None, gt=0, le=1e6, description="length of the run in epochs (or give steps or images)"
    )
    steps: Optional[int] = Field(None, gt=0, le=10**12, description="length of the run in optimizer updates")
    images: Optional[int] = Field(None, gt=0, le=10**15, description="length of the run in training images")
    resume: Literal["auto", "never"] = Field(
        "auto",
        description="auto continues from the newest good checkpoint of the run folder; never refuses a used folder",
    )
    deterministic: bool = Field(
        False, description="CUDA runs repeat bit for bit, at a cost in speed (CPU runs always do)"
    )

    @model_validator(mode="after")
    def _one_length(self) -> "Run":
        _exactly_one(self, ("epochs", "steps", "images"), required=True)
        return self


class Model(_Section):
    """The network. Width, depth, resolution and dropout follow the name unless they are given."""

    name: Literal[
        "efficientnet_b0", "efficientnet_b1", "efficientnet_b2", "efficientnet_b3",
        "efficientnet_b4", "efficientnet_b5", "efficientnet_b6", "efficientnet_b7",
    ] = Field("efficientnet_b4", description="compound scale: sets width, depth, image size and dropout")  # fmt: skip
    width: Optional[float] = Field(None, gt=0, description="channel multiplier; null takes the name's (B4: 1.4)")
    depth: Optional[float] = Field(None, gt=0, description="layer multiplier; null takes the name's (B4: 1.8)")
    group_size: int = Field(16, ge=1, description="channels per group of the spatial convolutions; 1 is depthwise")
    expansion: int = Field(4, ge=1, description="expansion of the inverted bottlenecks (4 with G16, 6 in the original)")
    norm: Literal["group"] = Field("group", description="normalisation layer")
    norm_groups: int = Field(4, ge=1, description="groups of a group normalisation")
    norm_eps: float = Field(1e-3, gt=0, description="epsilon of the normalisation")
    padding: Literal["same", "torch"] = Field(
        "same", description="same pads as TensorFlow does; torch pads symmetrically"
    )
    image_size: Optional[int] = Field(
        None, ge=8, le=8192, description="pixels a side in training and evaluation; null takes the name's"
    )
    dropout: Optional[float] = Field(
        None, ge=0, lt=1, description="dropout before the classifier; null takes the name's"
    )
    drop_path: float = Field(
        0.2,
        ge=0,
        lt=1,
        description="stochastic depth: block i of n drops its branch at this rate x i / n, the first never",
    )
    classes: int = Field(1000, ge=2, description="classes of the data")
    mean: Tuple[float, float, float] = Field(
        (0.485, 0.456, 0.406), strict=False, description="subtracted from the RGB values in [0, 1]"
    )
    std: Tuple[float, float, float] = Field(
        (0.229, 0.224, 0.225), strict=False, description="divides the RGB values after the mean"
    )

    @model_validator(mode="before")
    @classmethod
    def _scale_by_name(cls, values: Any) -> Any:
        name = values.get("name", "efficientnet_b4") if isinstance(values, dict) else None
        if not isinstance(name, str) or name not in COMPOUND_SCALES:
            return values
        scale = COMPOUND_SCALES[name]
        return {**values, **{key: number for key, number in scale.items() if values.get(key) is None}}

    @field_validator("std")
    @classmethod
    def _positive(cls, value: Tuple[float, float, float]) -> Tuple[float, float, float]:
        if min(value) <= 0:
            raise ValueError("every value must be positive")
        return value


class BatchSection(_Section):
    """Images per update, and per forward pass. Accumulation follows and is never written."""

    global_: int = Field(768, alias="global", gt=0, description="images per update over all replicas")
    micro: int = Field(3, gt=0, description="images per forward pass of one stage")
    evaluation: int = Field(64, gt=0, description="images per forward pass in evaluation")


class Parallel(_Section):
    """How the model is cut and copied."""

    stages: int = Field(1, ge=1, description="pipeline stages of one replica; one process runs all of them itself")
    split: List[str] = Field([], description="block that opens each stage after the first, e.g. [blocks.3.0]")
    replicas: Optional[int] = Field(
        None,
        ge=1,
        description="copies of the model; auto (or null) takes what the launcher started",
        json_schema_extra={"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1}, {"type": "null"}]},
    )

    @field_validator("replicas", mode="before")
    @classmethod
    def _auto(cls, value: object) -> object:
        return None if value == "auto" else value

    @field_serializer("replicas")
    def _say_auto(self, value: Optional[int]) -> Union[int, str]:
        return "auto" if value is None else value

    @model_validator(mode="after")
    def _split_matches(self) -> "Parallel":
        if self.split and len(self.split) != self.stages - 1:
            raise ValueError(
                f"split names {len(self.split)} cut points but {self.stages} stages need {self.stages - 1}"
            )
        return self


class Precision(_Section):
    """Number formats: of the arithmetic, and of the weights that persist."""

    compute: Literal["auto", "float16", "bfloat16", "float32"] = Field(
        "auto",
        description="dtype of activations and working weights; auto: float16 on CUDA, float32 on CPU",
    )
    weights: Literal["float16", "float32"] = Field(
        "float16", description="dtype of the persistent weights and momentum"
    )
    rounding: Literal["stochastic", "nearest"] = Field(
        "stochastic", description="how updates enter float16 weights and momentum"
    )
    loss_scale: float = Field(
        128.0, gt=0, description="factor on the loss; the first one when dynamic_loss_scale is on"
    )
    dynamic_loss_scale: bool = Field(
        False, description="halve the scale after a non-finite step, double it after 2000 finite ones"
    )
    max_skipped_steps: int = Field(
        20, ge=0, description="consecutive non-finite steps that are skipped before the run stops"
    )


class Optimizer(_Section):
    """LARS, in the published form (trust: gradient) or in the one that IPUs can run (trust: momentum)."""

    name: Literal["lars"] = Field("lars", description="optimizer")
    momentum: float = Field(0.885, ge=0, lt=1, description="momentum coefficient")
    weight_decay: float = Field(
        2.5e-6, ge=0, description="weight decay inside the trust ratio; none for skipped parameters"
    )
    trust_coefficient: float = Field(
        0.001, gt=0, description="LARS eta: step length relative to the weight norm at rate 1"
    )
    trust: Literal["gradient", "momentum"] = Field(
        "gradient",
        description="the trust ratio divides by the gradient's norm (rate inside the momentum) or by the momentum's",
    )
    eps: float = Field(0.0, ge=0, description="added to the divisor of the trust ratio")
    skip: List[Literal["bias", "norm"]] = Field(
        ["bias", "norm"],
        description="parameters without trust ratio and weight decay: biases; scales of normalisation layers",
    )
    skip_lr_scale: float = Field(
        1.0, gt=0, description="learning rate of the skipped parameters relative to the others'"
    )


class Schedule(_Section):
    """Learning rate as a function of the step."""

    name: Literal["polynomial"] = Field("polynomial", description="linear warm-up from 0, then polynomial decay")
    peak: Optional[float] = Field(
        None, gt=0, description="learning rate at the end of the warm-up (or give peak_per_image)"
    )
    peak_per_image: Optional[float] = Field(None, gt=0, description="peak learning rate divided by the global batch")
    warmup_epochs: Optional[float] = Field(
        None, ge=0, description="length of the warm-up in epochs (or steps, or images)"
    )
    warmup_steps: Optional[int] = Field(None, ge=0, description="length of the warm-up in updates")
    warmup_images: Optional[int] = Field(None, ge=0, description="length of the warm-up in training images")
    power: float = Field(2.0, gt=0, description="exponent of the decay")
    final_ratio: float = Field(1e-5, ge=0, le=1, description="last learning rate relative to the peak")

    @model_validator(mode="after")
    def _one_of_each(self) -> "Schedule":
        _exactly_one(self, ("peak", "peak_per_image"), required=True)
        _exactly_one(self, ("warmup_epochs", "warmup_steps", "warmup_images"), required=False)
        return self


class Data(_Section):
    """Where images come from and how they are augmented. Everything up to the device is uint8."""

    source: Literal["folder", "digits"] = Field("folder", description="class folders of images, or the embedded digits")
    root: Optional[str] = Field(None, description="folder that holds the training and the validation folder")
    train_folder: str = Field("train", description="folder below root with one folder of images per class")
    validation_folder: str = Field("val", description="likewise, for evaluation")
    train_images: Optional[int] = Field(
        None, gt=0, description="expected training images of a folder: another count is an error"
    )
    validation_images: Optional[int] = Field(None, gt=0, description="expected validation images, likewise")
    workers: int = Field(8, ge=0, description="processes that decode and augment; 0 does it in the training process")
    prefetch: int = Field(3, ge=1, description="micro batches each worker keeps ready")
    crop_area: Tuple[float, float] = Field(
        (0.05, 1.0), strict=False, description="share of the image's area a random crop takes, low and high"
    )
    crop_aspect: Tuple[float, float] = Field(
        (0.75, 4 / 3), strict=False, description="width over height of a random crop, low and high"
    )
    flip: float = Field(0.5, ge=0, le=1, description="probability of a horizontal flip")
    crop_fraction: float = Field(
        0.875,
        gt=0,
        le=1,
        description="evaluation resizes the short side to image_size / crop_fraction, then crops the centre",
    )
    bad_images: Literal["error", "skip"] = Field(
        "error", description="what an unreadable image does: stop the run, or be left out and counted"
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of the target spread evenly over all classes")

    @field_validator("crop_area", "crop_aspect")
    @classmethod
    def _ordered(cls, value: Tuple[float, float]) -> Tuple[float, float]:
        if not 0 < value[0] <= value[1]:
            raise ValueError(f"{list(value)} must be [low, high] with 0 < low <= high")
        return value

    @field_validator("crop_area")
    @classmethod
    def _inside(cls, value: Tuple[float, float]) -> Tuple[float, float]:
        if value[1] > 1:
            raise ValueError(f"{list(value)}: a crop cannot exceed the image; the high end is at most 1")
        return value


class Log(_Section):
    """What is written down while training."""

    every_steps: int = Field(
        50, gt=0, description="updates between two lines of the log; only these wait for the device"
    )
    tensorboard: bool = Field(True, description="write TensorBoard files into the run folder")
    trust_ratios: bool = Field(True, description="write each layer's trust ratio into metrics.jsonl")


class Evaluation(_Section):
    """When the validation images are scored. The last step always is."""

    every_epochs: float = Field(1.0, gt=0, description="epochs between evaluations")


class Checkpoint(_Section):
    """When the run is saved. The last step always is."""

    every_epochs: float = Field(1.0, gt=0, le=1, description="epochs between checkpoints")
    keep_last: int = Field(2, ge=2, description="newest checkpoints kept; two, so that a damaged one has a predecessor")
    keep_best: bool = Field(True, description="also keep the checkpoint with the best top-1")


class Recipe(_Section):
    """Everything that a run is."""

    run: Run = Field(default_factory=Run)
    model: Model = Field(default_factory=Model)
    batch: BatchSection = Field(default_factory=BatchSection)
    parallel: Parallel = Field(default_factory=Parallel)
    precision: Precision = Field(default_factory=Precision)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    schedule: Schedule = Field(default_factory=Schedule)
    data: Data = Field(default_factory=Data)
    log: Log = Field(default_factory=Log)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)


# Keys of which a recipe gives one: naming one in a later layer replaces another of an earlier layer.
ALTERNATIVES = (
    ("run.epochs", "run.steps", "run.images"),
    ("schedule.peak", "schedule.peak_per_image"),
    ("schedule.warmup_epochs", "schedule.warmup_steps", "schedule.warmup_images"),
)


def _exactly_one(section: BaseModel, names: Tuple[str, ...], required: bool) -> None:
    given = [name for name in names if getattr(section, name) is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are both given; keep one")
    if required and not given:
        raise ValueError(f"one of {', '.join(names)} is needed")
