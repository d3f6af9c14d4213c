"""The schema of a recipe: sections, keys, types, units and ranges.

How YAML files become a recipe is in loading.py; the batch arithmetic is in batch.py.
Annotations are evaluated by pydantic at run time and must work on Python 3.8.
"""

from typing import Any, Dict, List, Literal, Optional, Tuple

from pydantic import Field, field_validator, model_validator

from recipe import credentials
from recipe.by_name import COMPOUND_SCALES, fill
from recipe.distribution import Parallel
from recipe.exchange import Exchange
from recipe.hardware import EngineSection, Ipu
from recipe.optimization import Average, Optimizer, Precision, Schedule
from recipe.section import Section, exactly_one


class Run(Section):
    """One run: its name, place, device and length."""

    name: str = Field(
        "run", pattern=r"^\w[\w.-]*$", description="names the run in logs and in the default output folder"
    )
    output: Optional[str] = Field(None, description="run folder; null means runs/NAME")
    device: Literal["auto", "cpu", "cuda", "ipu"] = Field(
        "auto", description="auto takes CUDA where there is one, else the CPU; IPUs are only taken by name"
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
    lock: bool = Field(
        True,
        description="lock the run folder against other processes; false where its file system has no POSIX locks",
    )
    deterministic: bool = Field(
        False, description="CUDA runs repeat bit for bit, at a cost in speed (CPU runs always do)"
    )

    loss_limit: float = Field(
        10.0,
        gt=1,
        description="training loss, in multiples of that of guessing (ln classes), that ends the run as diverged when "
        "it is exceeded in three lines of the log in a row",
    )

    @model_validator(mode="after")
    def _one_length(self) -> "Run":
        exactly_one(self, ("epochs", "steps", "images"), required=True)
        return self


class Model(Section):
    """The network. Width, depth, resolution and dropout follow the name unless they are given."""

    name: Literal[
        "efficientnet_b0", "efficientnet_b1", "efficientnet_b2", "efficientnet_b3",
        "efficientnet_b4", "efficientnet_b5", "efficientnet_b6", "efficientnet_b7",
    ] = Field("efficientnet_b4", description="compound scale: sets width, depth, image size and dropout")  # fmt: skip
    width: Optional[float] = Field(
        None, gt=0, le=100, description="channel multiplier; null takes the name's (B4: 1.4)"
    )
    depth: Optional[float] = Field(None, gt=0, le=10, description="layer multiplier; null takes the name's (B4: 1.8)")
    group_size: int = Field(16, ge=1, description="channels per group of the spatial convolutions; 1 is depthwise")
    expansion: int = Field(4, ge=1, description="expansion of the inverted bottlenecks (4 with G16, 6 in the original)")
    norm: Literal["group", "layer", "batch"] = Field(
        "group",
        description="normalisation over groups of channels, over all channels, or over the micro batch",
    )
    norm_groups: int = Field(4, ge=1, description="groups of a group normalisation")
    norm_eps: float = Field(1e-3, gt=0, description="epsilon of the normalisation")
    norm_momentum: float = Field(
        0.01, gt=0, le=1, description="share of each micro batch in the running statistics of a batch normalisation"
    )
    proxy_norm: bool = Field(
        False, description="proxy normalisation of the activations after a group or layer normalisation"
    )
    proxy_eps: float = Field(0.03, gt=0, description="epsilon of the proxy normalisation")
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

    init_from: Optional[str] = Field(
        None,
        description="weights to start from: run folder, checkpoint, .safetensors, or a timm or torch file; the "
        "classifier starts anew if the classes differ",
    )
    init_weights: Literal["trained", "step_average", "epoch_average"] = Field(
        "trained", description="which weights of a run folder or checkpoint to start from"
    )

    @model_validator(mode="before")
    @classmethod
    def _scale_by_name(cls, values: Any) -> Any:
        return fill(values, COMPOUND_SCALES, "efficientnet_b4")

    @model_validator(mode="after")
    def _proxy_fits(self) -> "Model":
        if self.proxy_norm and self.norm == "batch":
            raise ValueError("proxy_norm goes with norm group or layer, not with batch")
        return self

    @model_validator(mode="after")
    def _weights_of_something(self) -> "Model":
        if self.init_weights != "trained" and self.init_from is None:
            raise ValueError("init_weights says nothing without init_from; name the run folder or checkpoint there")
        return self

    @field_validator("std")
    @classmethod
    def _positive(cls, value: Tuple[float, float, float]) -> Tuple[float, float, float]:
        if min(value) <= 0:
            raise ValueError("every value must be positive")
        return value

    def defaults(self) -> Dict[str, Any]:
        return {**super().defaults(), **COMPOUND_SCALES[self.name]}


class BatchSection(Section):
    """Images per update, and per forward pass. Accumulation follows and is never written."""

    global_: int = Field(768, alias="global", gt=0, description="images per update over all replicas")
    micro: int = Field(3, gt=0, description="images per forward pass of one stage")
    evaluation: int = Field(64, gt=0, description="images per forward pass in evaluation")


class Data(Section):
    """Where images come from and how they are augmented. Everything up to the device is uint8."""

    source: Literal["folder", "shards", "digits", "glyphs"] = Field(
        "folder",
        description="class folders of images, tar shards, the embedded digits, or glyphs drawn as they are asked for",
    )
    root: Optional[str] = Field(
        None,
        description="folder that holds the training and the validation folder; of shards also a URL that fsspec knows, "
        "such as s3://bucket/imagenet; credentials in it are used and never stored",
    )
    train_folder: str = Field("train", description="folder below root with one folder of images per class, or shards")
    validation_folder: str = Field("val", description="likewise, for evaluation")
    train_images: Optional[int] = Field(
        None,
        gt=0,
        le=2**31,
        description="expected training images on disk: another count is an error; glyphs: how many to draw (10,000)",
    )
    validation_images: Optional[int] = Field(
        None, gt=0, le=2**31, description="expected validation images, likewise; glyphs: how many to draw (2,000)"
    )
    glyph_size: int = Field(32, ge=8, le=1024, description="pixels a side that glyphs are drawn at")
    glyph_difficulty: float = Field(
        0.5, ge=0, le=1, description="from centred black glyphs (0) to distorted ones in colour among clutter (1)"
    )
    shuffle_window: int = Field(
        16_384,
        ge=1,
        le=2**31,
        description="images among which those of shards are shuffled: more mix better, fewer read in a row",
    )
    reader: Literal["torch", "dali"] = Field(
        "torch",
        description="what decodes files: worker processes, or NVIDIA DALI, on a GPU where there is one",
    )
    workers: int = Field(
        8,
        ge=0,
        description="processes that decode and augment (threads with DALI); 0 does it in the training process",
    )
    prefetch: int = Field(3, ge=1, description="micro batches each worker keeps ready, and as many again on the device")
    crop_area: Tuple[float, float] = Field(
        (0.05, 1.0), strict=False, description="share of the image's area a random crop takes, low and high"
    )
    crop_aspect: Tuple[float, float] = Field(
        (0.75, 4 / 3), strict=False, description="width over height of a random crop, low and high"
    )
    flip: float = Field(0.5, ge=0, le=1, description="probability of a horizontal flip")
    augment: Literal["none", "randaugment", "autoaugment", "trivialaugment"] = Field(
        "none", description="what else is done to each image after crop and flip"
    )
    randaugment_operations: int = Field(2, ge=1, le=16, description="operations that RandAugment strings together")
    randaugment_magnitude: int = Field(9, ge=0, le=30, description="strength of RandAugment's operations, of 30")
    mixup: float = Field(
        0.0,
        ge=0,
        le=100,
        description="alpha of mixup's Beta distribution, with the image before it in the micro batch; 0 is off",
    )
    cutmix: Optional[float] = Field(
        None,
        ge=0.62,
        le=1,
        description="about the share of an image that is its own under cutmix, as the G16 recipe draws it (0.85); "
        "null is off",
    )
    image_sizes: Optional[List[List[int]]] = Field(
        None,
        description="training image sizes as [first epoch, pixels] pairs, e.g. [[0, 252], [300, 380]]; null trains at "
        "model.image_size, where evaluation always is",
    )
    crop_fraction: float = Field(
        0.875,
        gt=0,
        le=1,
        description="evaluation resizes the short side to image_size / crop_fraction, then crops the centre",
    )
    bad_images: Literal["error", "skip"] = Field(
        "error", description="what an unreadable image does: stop the run, or be left out and counted"
    )
    changed_images: Literal["error", "accept"] = Field(
        "error",
        description="what other images (by name, label or shard) do to a run that is resumed: stop it, or be taken",
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of the target spread evenly over all classes")

    @field_validator("crop_area", "crop_aspect")
    @classmethod
    def _ordered(cls, value: Tuple[float, float]) -> Tuple[float, float]:
        if not 0 < value[0] <= value[1]:
            raise ValueError(f"{list(value)} must be [low, high] with 0 < low <= high")
        return value

    @model_validator(mode="after")
    def _reader_of_files(self) -> "Data":
        if self.reader == "dali" and self.source not in ("folder", "shards"):
            raise ValueError(f"reader dali reads files, but source is {self.source}; use reader torch")
        return self

    @field_validator("crop_area")
    @classmethod
    def _inside(cls, value: Tuple[float, float]) -> Tuple[float, float]:
        if value[1] > 1:
            raise ValueError(f"{list(value)}: a crop cannot exceed the image; the high end is at most 1")
        return value

    @field_validator("root")
    @classmethod
    def _without_credentials(cls, value: Optional[str]) -> Optional[str]:
        return value and credentials.take(value)

    @field_validator("image_sizes")
    @classmethod
    def _rising_epochs(cls, value: Optional[List[List[int]]]) -> Optional[List[List[int]]]:
        if value is None:
            return None
        if not value or any(len(pair) != 2 for pair in value):
            raise ValueError("must be [first epoch, pixels] pairs, e.g. [[0, 252], [300, 380]]")
        epochs = [epoch for epoch, _ in value]
        if epochs[0] != 0 or any(after <= before for before, after in zip(epochs, epochs[1:])):
            raise ValueError("the first pair must begin at epoch 0, and each later one after the one before it")
        if not all(8 <= pixels <= 8192 for _, pixels in value):
            raise ValueError("every size must be 8 to 8192 pixels")
        return value


class Log(Section):
    """What is written down while training."""

    every_steps: int = Field(
        50, gt=0, description="updates between two lines of the log; only these wait for the device"
    )
    tensorboard: bool = Field(True, description="write TensorBoard files into the run folder")
    trust_ratios: bool = Field(True, description="write each layer's trust ratio into metrics.jsonl")
    trace: int = Field(
        0, ge=0, le=1000, description="updates, from a session's second on, whose timeline is drawn and written"
    )
    wandb: bool = Field(False, description="also send the numbers to Weights & Biases (package wandb)")
    mlflow: bool = Field(False, description="also send the numbers to MLflow (package mlflow-skinny, or mlflow)")


class Evaluation(Section):
    """When the validation images are scored. The last step always is."""

    every_epochs: float = Field(1.0, gt=0, description="epochs between evaluations")


class Checkpoint(Section):
    """When the run is saved. The last step always is."""

    every_epochs: float = Field(1.0, gt=0, le=1, description="epochs between checkpoints")
    keep_last: int = Field(2, ge=2, description="newest checkpoints kept; two, so that a damaged one has a predecessor")
    keep_best: bool = Field(True, description="also keep the checkpoint with the best top-1")


class Recipe(Section):
    """Everything that a run is."""

    run: Run = Field(default_factory=Run)
    model: Model = Field(default_factory=Model)
    batch: BatchSection = Field(default_factory=BatchSection)
    parallel: Parallel = Field(default_factory=Parallel)
    exchange: Exchange = Field(default_factory=Exchange)
    precision: Precision = Field(default_factory=Precision)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    schedule: Schedule = Field(default_factory=Schedule)
    data: Data = Field(default_factory=Data)
    average: Average = Field(default_factory=Average)
    log: Log = Field(default_factory=Log)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    engine: EngineSection = Field(default_factory=EngineSection)
    ipu: Ipu = Field(default_factory=Ipu)


# Keys of which a recipe gives one: naming one in a later layer replaces another of an earlier layer.
ALTERNATIVES = (
    ("run.epochs", "run.steps", "run.images"),
    ("schedule.peak", "schedule.peak_per_image"),
    ("schedule.warmup_epochs", "schedule.warmup_steps", "schedule.warmup_images"),
)
