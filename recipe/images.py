"""The section `data`: where images come from, without opening any of them."""

import os
from pathlib import Path
from typing import Any, ClassVar, Dict, Iterator, List, Literal, Optional, Tuple

from pydantic import Field, ValidationInfo, field_validator, model_validator

from common import credentials
from common.errors import ConfigError, DataError
from common.json_io import read_json
from common.text import count, printable
from recipe import image_lists, torchvision_sets
from recipe.class_folders import class_folder_around, class_folders
from recipe.kinds import Kind
from recipe.section import PathText, check_pairs
from recipe.torchvision_sets import SETS, SetName

_UNKNOWN_CLASSES = 1000  # for a plan without images: a run needs data.root
_DEFAULT_MIXING = "g16"
# rand, then parts such as m9, n2, p0.5, mstd0.5, mmax10, inc1.
_TIMM_RANDAUGMENT = r"^rand(-(m\d+|n[1-9]\d*|p[01](\.\d+)?|mstd\d+(\.\d+)?|mmax[1-9]\d*|inc[01]))*$"
MANIFEST = "shards.json"  # beside tar shards, with the names of their classes
# Names of folders that are the parts of a data set. Where all class folders are called so, they are
# no classes.
_SPLIT_FOLDERS = frozenset(["train", "training", "val", "valid", "validation", "test"])


class Data(Kind):
    """Where images come from and how they are augmented. Everything up to the device is uint8."""

    tag = "source"
    resets = False
    # Whether images are files, which DALI can read, too.
    files: ClassVar[bool] = False
    # Whether images are decoded when they are read.
    encoded: ClassVar[bool] = False

    source: str = Field("folder", description="where images come from")
    reader: Literal["torch", "dali"] = "torch"
    """decodes files in worker processes (torch) or by NVIDIA DALI, on a GPU if there is one"""
    workers: int = Field(8, ge=0, le=10**4)
    """processes (DALI: threads) that decode; 0: the training process does"""
    prefetch: int = Field(3, ge=1, le=10**6)
    """micro batches each worker keeps ready, and as many again on the device"""
    crop_area: Tuple[float, float] = Field((0.05, 1.0), strict=False)
    """share of the area of a random crop"""
    crop_aspect: Tuple[float, float] = Field((0.75, 4 / 3), strict=False)
    """width over height of a crop"""
    flip: float = Field(0.5, ge=0, le=1, description="probability of a horizontal flip")
    augment: Literal[
        "none",
        "randaugment",
        "autoaugment",
        "trivialaugment",
        "augmix",
        "three_augment",
        "timm_randaugment",
    ] = "none"
    """what else is done to each image after crop and flip: a policy of torchvision, that of DeiT
    III (three_augment: grey, solarised or blurred), or timm's RandAugment"""
    randaugment_operations: int = Field(2, ge=1, le=16)
    """operations that RandAugment strings together"""
    randaugment_magnitude: int = Field(
        9, ge=0, le=30, description="strength of RandAugment's operations (timm's m9: 27)"
    )
    augmix_severity: int = Field(3, ge=1, le=10, description="strength of AugMix's operations")
    timm_randaugment: str = Field("rand-m9-mstd0.5-inc1", pattern=_TIMM_RANDAUGMENT)
    """timm's text for augment timm_randaugment (its --aa): magnitude m of 10, mstd its deviation, n
    operations, each applied with probability p"""
    color_jitter: float = Field(0.0, ge=0, le=1)
    """strength of random brightness, contrast and saturation after augment (timm's --color-jitter);
    0 is off"""
    random_erasing: float = Field(0.0, ge=0, le=1)
    """probability that random rectangles of an image are erased (timm's reprob)"""
    random_erasing_mode: Literal["const", "pixel"] = "const"
    """rectangles are filled with the model's mean (const), or with noise (pixel): timm's remode"""
    random_erasing_count: int = Field(1, ge=1, le=16)
    """most rectangles of an image, which share the area (timm's recount)"""
    mixing: Optional[Literal["g16", "timm"]] = None
    """rule of mixup and cutmix: g16 is that of the published G16 recipe, where both may happen to
    an image; timm draws one of the two, and one share, for a micro batch; null: g16"""
    mixup: float = Field(0.0, ge=0, le=100)
    """alpha of mixup's Beta distribution, with the image before it in the micro batch; 0 is off"""
    cutmix: Optional[float] = Field(None, ge=0, le=100)
    """mixing timm: alpha of cutmix's Beta distribution, stronger the larger it is (timm's --cutmix
    1); mixing g16: 0.62 to 1 as the G16 recipe writes it (0.85), where smaller is stronger: on
    average 0.62 replaces 23 % of the pixels, 0.85 15 %, 1 only 9 %; null is off"""
    mixing_switch: float = Field(0.5, ge=0, le=1)
    """mixing timm with mixup and cutmix: probability that a micro batch gets cutmix"""
    mixing_probability: float = Field(1.0, ge=0, le=1)
    """mixing timm: probability that a micro batch is mixed at all"""
    image_sizes: Optional[List[List[int]]] = None
    """[first epoch, pixels] pairs of training sizes, e.g. [[0, 252], [300, 380]]; null, and
    evaluation: image_size"""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """how crops are resized, with antialiasing, in training and evaluation; DALI: bilinear only"""
    crop_fraction: float = Field(0.875, gt=0, le=1)
    """evaluation resizes the short side to image_size / crop_fraction, then crops the centre"""
    crop_mode: Literal["center", "squash"] = "center"
    """evaluation resizes the short side and keeps the aspect (center), or makes both sides as long
    (squash, as timm does for some models)"""
    crop_rounding: Literal["nearest", "down"] = "nearest"
    """how image_size / crop_fraction becomes whole pixels; timm rounds down"""
    balance: Literal["none", "sampling", "loss"] = "none"
    """classes with few images: sampling shows as many images of each class in an epoch, rare ones
    several times with other draws, and some of a frequent class; loss weighs the cross entropy of a
    class by images / (classes x images of the class); on IPUs sampling only"""
    repeats: int = Field(1, ge=1, le=64)
    """times that each image is shown within a step, with other draws each time; an epoch has as many
    steps as without, and shows one image in so many"""
    bad_images: Literal["error", "skip"] = "error"
    """an unreadable image: error stops the run, skip leaves the image out and counts it"""
    changed_images: Literal["error", "accept"] = "error"
    """a resumed run finds other images (names, labels or shards): error stops it, accept continues,
    also with other train_images and validation_images; other classes are always an error"""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """share of the target spread evenly over all classes"""
    loss: Literal["cross_entropy", "bce"] = "cross_entropy"
    """training loss: softmax cross entropy, or a binary cross entropy for each class, as timm's
    recipes A1 and A2 have it; not on IPUs; evaluation reports the cross entropy"""
    bce_threshold: Optional[float] = Field(None, ge=0, lt=1)
    """loss bce: targets above this count as 1, others as 0, after mixing and smoothing; null: as
    they are (timm's bce_target_thresh)"""
    bce_reduction: Literal["mean", "sum"] = "mean"
    """loss bce: mean over classes, or their sum (timm's bce_sum)"""

    @field_validator("crop_area", "crop_aspect")
    @classmethod
    def _ordered(cls, value: Tuple[float, float], info: ValidationInfo) -> Tuple[float, float]:
        """Check that a pair has its low end first, and that a crop is part of its image."""
        if not 0 < value[0] <= value[1]:
            raise ValueError(f"{list(value)} must be [low, high] with 0 < low <= high")
        if info.field_name == "crop_area" and value[1] > 1:
            raise ValueError(
                f"{list(value)}: a crop cannot exceed the image; the high end is at most 1"
            )
        return value

    def faults(self) -> Iterator[str]:
        """Yield faults of a reader that cannot make these images."""
        if self.reader == "dali" and not self.files:
            yield f"reader dali reads files, but source is {self.source}; use reader torch"
        # That DALI's cubic filter makes the same pixels, overshoot beside edges included, was not
        # shown.
        if self.reader == "dali" and self.interpolation != "bilinear":
            yield f"reader dali resizes bilinear only, not {self.interpolation}; use reader torch"
        # Weights of classes would weigh what an image is not just as what it is.
        if self.balance == "loss" and self.loss == "bce":
            yield "balance loss weighs the cross entropy, but loss is bce; use balance sampling"
        yield from self._faults_of_cutmix()

    def _faults_of_cutmix(self) -> Iterator[str]:
        """Yield faults of a cutmix that another program's users would take for something else."""
        cutmix = self.cutmix
        if cutmix is None or self.mixing == "timm":
            return
        if not 0.62 <= cutmix <= 1:
            rule = "with mixing g16 it is 0.62 to 1, or null, and smaller is stronger"
            yield f"cutmix {cutmix:g}: {rule}; use mixing timm for the alpha of a Beta distribution"
        # By the published rule 1 is the weakest cutmix, elsewhere the usual one.
        if cutmix == 1 and self.mixing is None:
            weakest = "with mixing g16 that is the weakest, with mixing timm Beta(1, 1)"
            yield f"cutmix 1: {weakest}; say which by data.mixing=g16 or data.mixing=timm"

    @model_validator(mode="after")
    def _name_mixing(self) -> "Data":
        """Replace null by the rule that it stands for, once `faults` has seen that nobody said it."""
        if self.mixing is None:
            # Sections are frozen, also for their validators.
            object.__setattr__(self, "mixing", _DEFAULT_MIXING)
        return self

    def defaults(self) -> Dict[str, Any]:
        """Return the defaults, with the rule of mixing in the place of null."""
        return {**super().defaults(), "mixing": _DEFAULT_MIXING}

    @field_validator("image_sizes")
    @classmethod
    def _rising_epochs(cls, value: Optional[List[List[int]]]) -> Optional[List[List[int]]]:
        """Check that sizes begin at epoch 0 and follow one another."""
        if value is not None:
            check_pairs(value, "epochs", "pixels")
            if not all(8 <= pixels <= 8192 for _, pixels in value):
                raise ValueError("every size must be 8 to 8192 pixels")
        return value

    @classmethod
    def foreign(cls, key: str, value: Any) -> Optional[str]:
        """Refuse no `key` of another source: one override changes the images of any recipe."""
        return None

    @property
    def possible_classes(self) -> range:
        """Numbers of classes that a model of these images may have."""
        return range(2, 2**31)

    @property
    def mixes(self) -> bool:
        """True where images of a micro batch are mixed with each other."""
        return bool(self.mixup) or bool(self.cutmix)

    @property
    def place(self) -> str:
        """Folder, URL or name of the images."""
        return getattr(self, "root", None) or self.source

    def images(self, split: str) -> Optional[int]:
        """Return the images of a split that the recipe alone gives; None: those that are found.

        Args:
            split: "train" or "validation".
        """
        return getattr(self, f"{split}_images", None)

    def located(self, split: str) -> Optional[str]:
        """Return the file or folder of this machine that holds the images; None: none does.

        Args:
            split: "train" or "validation".

        Raises:
            DataError: it is missing.
        """
        return None

    def check_splits(self) -> None:
        """Raise DataError where the images of validation would be trained on, too."""

    def address(self, split: str) -> Optional[str]:
        """Return the path or URL that names the images of a split, whether they are there or not.

        Args:
            split: "train" or "validation".

        Returns:
            None where the recipe names no place for the split.
        """
        return None

    def check_classes(self, classes: int) -> None:
        """Raise ConfigError where a model of so many `classes` cannot learn the images."""
        possible = self.possible_classes
        if classes not in possible:
            at_most = " at most" if len(possible) > 1 else ""
            fault = f"data.source={self.source}: {possible[-1]} classes{at_most}, but model.classes is {classes}"
            raise ConfigError(f"{fault}; set model.classes={possible[-1]}")

    def count_classes(self) -> int:
        """Return the classes of the training images, for `model.classes: auto`.

        Raises:
            ConfigError: they cannot be known.
        """
        # Sources of files count theirs instead.
        if len(self.possible_classes) == 1:
            return self.possible_classes[0]
        raise ConfigError(
            f"model.classes auto: data.source={self.source} has as many as you like; give a number"
        )


class Stored(Data):
    """Keys of the sources whose images are stored somewhere: how many there are is seen there."""

    root: Optional[PathText] = None
    """folder that holds the training and the validation folder, or the files of data.dataset (null:
    where packages and downloads put them); for shards also a URL that fsspec knows, such as
    s3://bucket/imagenet; credentials in it are used and never stored"""
    train_images: Optional[int] = Field(None, gt=0, le=2**31)
    """expected training images: another count is an error; null: as many as are found, or as
    torchvision's set has"""
    validation_images: Optional[int] = Field(None, gt=0, le=2**31)
    """the same, for evaluation"""

    @field_validator("root")
    @classmethod
    def _without_credentials(cls, value: Optional[str]) -> Optional[str]:
        """Take credentials out of a URL, before anything stores or prints it."""
        return value and credentials.take(value)


class Divisible(Stored):
    """Keys of the sources that can take the validation images from the training images."""

    validation_share: float = Field(0.0, ge=0, lt=1)
    """share of the training images that validates instead, chosen by a hash of each image's name:
    the same on every machine, and files that are added or removed move no other; each class keeps a
    training image; 0: validation images have a folder or list of their own"""


class Files(Stored):
    """Keys of the sources that read files in folders."""

    files: ClassVar[bool] = True
    encoded: ClassVar[bool] = True
    # Whether root may be a URL.
    urls: ClassVar[bool] = False
    train_folder: PathText = Field(
        "train", description="folder below root with one folder of images per class, or shards"
    )
    validation_folder: PathText = "val"
    """the same, for evaluation; classes may be missing"""

    def located(self, split: str) -> Optional[str]:
        """Return the folder of a `split`; None where it is a URL."""
        folder = split_folder(self, split)
        return None if "://" in folder else folder

    def count_classes(self) -> int:
        """Count the classes of the training images; a thousand where the recipe names none yet."""
        if self.root is None:
            return _UNKNOWN_CLASSES
        try:
            classes = self._classes_in(split_folder(self, "train"))
        # The last three: a manifest that is no JSON, or has another form.
        except (DataError, OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"model.classes auto: {error}") from None
        return _at_least_two(classes, self.root)

    def folder_key(self, split: str) -> str:
        """Return the key that names the folder of a split, "train" or "validation"."""
        return f"{split}_folder"

    def address(self, split: str) -> Optional[str]:
        """Return the folder, or the URL, of a `split`: see `Data.address`."""
        return None if self.root is None else split_place(self, split)

    def _classes_in(self, folder: str) -> int:
        """Return the number of classes of the images in a folder, or behind a URL."""
        raise NotImplementedError


class Folder(Divisible, Files):
    """Class folders of images."""

    source: Literal["folder"] = "folder"

    def folder_key(self, split: str) -> str:
        """Return the key that names the folder of a `split`: one folder may have both splits."""
        return "train_folder" if self.validation_share else super().folder_key(split)

    def check_splits(self) -> None:
        """Raise DataError where the validation folder is, or lies in, a class folder to train on."""
        if self.validation_share:
            return
        train = split_folder(self, "train")
        validation = split_place(self, "validation")
        name = class_folder_around(train, validation)
        if name is not None:
            fault = f"its class folder {name!r} holds the validation images {validation}"
            remedy = "set data.train_folder to a folder without them, such as train"
            raise DataError(
                printable(
                    f"{train}: {fault}; {remedy}, or divide one folder by data.validation_share"
                )
            )

    def _classes_in(self, folder: str) -> int:
        self.check_splits()
        names = class_folders(folder)
        if self.validation_share and _SPLIT_FOLDERS.issuperset(map(str.lower, names)):
            fault = f"{', '.join(names)} are parts of a data set, not classes"
            raise DataError(
                f"{folder}: {fault}; set data.train_folder to the one to divide, or data.validation_share=0"
            )
        return len(names)


class Shards(Files):
    """Tar shards, on disk or behind a URL."""

    urls: ClassVar[bool] = True
    source: Literal["shards"] = "shards"
    shuffle_window: int = Field(16_384, ge=1, le=2**31)
    """images of shards that are shuffled together"""

    def _classes_in(self, folder: str) -> int:
        if "://" in folder:
            raise DataError(f"{folder}: is not read before a run; give a number")
        return len(read_json(Path(folder, MANIFEST))["classes"])


class Digits(Data):
    """The 1,797 digits that come along."""

    source: Literal["digits"] = "digits"

    @property
    def possible_classes(self) -> range:
        return range(10, 11)

    def images(self, split: str) -> Optional[int]:
        """Return the images of a `split`: data/digits.py has every fifth of a class validate."""
        return 1437 if split == "train" else 360


class Glyphs(Data):
    """Glyphs that are drawn when they are needed."""

    source: Literal["glyphs"] = "glyphs"
    train_images: int = Field(10_000, gt=0, le=2**31, description="training images to draw")
    validation_images: int = Field(2_000, gt=0, le=2**31, description="validation images to draw")
    glyph_size: int = Field(32, ge=8, le=1024, description="pixels a side that glyphs are drawn at")
    glyph_difficulty: float = Field(0.5, ge=0, le=1)
    """from centred black glyphs (0) to distorted ones in colour among clutter (1)"""

    @property
    def possible_classes(self) -> range:
        return range(2, 1001)

    def images(self, split: str) -> int:
        """Return how many glyphs of a `split` are drawn."""
        return self.train_images if split == "train" else self.validation_images


class Torchvision(Stored):
    """A data set of torchvision that it holds in memory, such as CIFAR10."""

    source: Literal["torchvision"] = "torchvision"
    dataset: Optional[SetName] = None
    """name of a data set: a class of torchvision, such as FashionMNIST"""
    download: bool = False
    """download the files of a data set of torchvision that are missing"""

    @property
    def place(self) -> str:
        return self.root or self.dataset or self.source

    @property
    def possible_classes(self) -> range:
        classes = SETS[self.named()].classes
        return range(classes, classes + 1)

    def named(self) -> SetName:
        """Return the name of the data set.

        Raises:
            ConfigError: the recipe has none.
        """
        if self.dataset is None:
            raise ConfigError(
                f"data.dataset is not set; name a data set of torchvision: {', '.join(SETS)}"
            )
        return self.dataset

    def located(self, split: str) -> Optional[str]:
        """Return the first file of a `split`: see `Data.located`."""
        return torchvision_sets.find(self.named(), split, self.root)[0]

    def images(self, split: str) -> Optional[int]:
        """Return the images of a split, "train" or "validation": as many as are expected, else as
        the set has.
        """
        # A number in the recipe is checked against the files, as for other sources.
        expected = super().images(split)
        if expected or self.dataset is None:
            return expected
        return SETS[self.dataset].images[split]


class HuggingFace(Stored):
    """A data set of the Hugging Face hub, or parquet files of one, read by the package datasets."""

    encoded: ClassVar[bool] = True
    source: Literal["huggingface"] = "huggingface"
    dataset: Optional[str] = None
    """name of a data set on the hub, such as ILSVRC/imagenet-1k"""
    subset: Optional[str] = None
    """configuration of a data set of the hub that has several"""
    train_split: str = "train"
    """split of a data set of the hub with the training images"""
    validation_split: Optional[str] = None
    """split of a data set of the hub for evaluation; null: validation, else test"""
    image_column: Optional[str] = None
    """column of the images; null: the only one that holds images"""
    label_column: Optional[str] = None
    """column of the labels; null: the only one of class labels, else the one called label"""

    def address(self, split: str) -> Optional[str]:
        """Return a URL of a `split` of a data set of the hub: see `Data.address`."""
        name = self.train_split if split == "train" else self.validation_split
        if self.dataset is None or name is None:
            return None
        return f"hf://datasets/{self.dataset}/{self.subset or ''}/{name}"

    def faults(self) -> Iterator[str]:
        """Yield the fault of two places for the images."""
        yield from super().faults()
        if self.dataset is not None and self.root is not None:
            yield "dataset and root are both given; keep one: data.root=null or data.dataset=null"

    @property
    def place(self) -> str:
        return self.root or self.dataset or self.source

    def located(self, split: str) -> Optional[str]:
        """Check that there is a folder of parquet files, if one is named; the rows of a `split` are
        not counted here.
        """
        if self.root is not None and not os.path.isdir(self.root):
            raise DataError(f"{self.root}: no such folder of parquet files; correct data.root")
        return None

    def count_classes(self) -> int:
        """Refuse to count: opening the data set could download it."""
        raise ConfigError(
            "model.classes auto: data.source=huggingface is not read before a run; give a number"
        )


class ImageList(Divisible):
    """Images that a CSV file lists with their classes."""

    files: ClassVar[bool] = True
    encoded: ClassVar[bool] = True
    source: Literal["list"] = "list"
    train_list: PathText = "train.csv"
    """CSV file below root with the path and the label of each training image; paths in it are
    relative to root, or without root to the folder of the file"""
    validation_list: PathText = "val.csv"
    """the same, for evaluation; classes may be missing"""

    @property
    def place(self) -> str:
        return self.list_file("train")

    def list_file(self, split: str) -> str:
        """Return the path of the file that lists the images of a split, there or not.

        Args:
            split: "train" or "validation".
        """
        is_own = split == "validation" and not self.validation_share
        name = self.validation_list if is_own else self.train_list
        return os.path.join(self.root or "", name)

    def list_folder(self, file: str) -> str:
        """Return the folder to which the paths in a list, `file`, are relative."""
        return self.root or os.path.dirname(file)

    def address(self, split: str) -> Optional[str]:
        """Return the file that lists the images of a `split`: see `Data.address`."""
        return self.list_file(split)

    def located(self, split: str) -> Optional[str]:
        """Return the list of a `split`: see `Data.located`."""
        file = self.list_file(split)
        if not os.path.isfile(file):
            is_own = split == "validation" and not self.validation_share
            key = "validation_list" if is_own else "train_list"
            raise DataError(
                f"{file}: no such file; set data.{key} to the list of the {split} images"
            )
        return file

    def count_classes(self) -> int:
        """Count the labels in the list of the training images."""
        try:
            file = self.located("train")
            assert file is not None, "a list is a file of this machine"
            rows = image_lists.read(file, self.list_folder(file))
        except DataError as error:
            raise ConfigError(f"model.classes auto: {error}") from None
        return _at_least_two(len({row.label for row in rows}), file)


def _at_least_two(classes: int, place: Optional[str]) -> int:
    """Return the number of classes found at a place. Raises ConfigError for fewer than two."""
    if classes < 2:
        few = count(classes, "class", "classes")
        raise ConfigError(f"model.classes auto: {place}: {few}; a model needs two")
    return classes


def scores_training_images(trained: Data, scored: Data) -> bool:
    """Return whether images are scored that a model was trained on, as far as their addresses tell.

    Args:
        trained: section of the recipe with the training images.
        scored: section of the recipe with the validation images; the same for a run's own scores.
    """
    place = trained.address("train")
    other = scored.address("validation")
    if place is None or other is None or not _is_same(place, other):
        return False
    # One folder or list has both. A smaller share of it is a part of every larger one, so only a
    # larger share, or all images, hold some that were trained on.
    share = getattr(scored, "validation_share", 0.0)
    return not share or share > getattr(trained, "validation_share", 0.0)


def _is_same(place: str, other: str) -> bool:
    """Return whether two paths, or URLs, lead to the same place."""
    if "://" in place or "://" in other:
        return place.rstrip("/") == other.rstrip("/")
    return os.path.realpath(place) == os.path.realpath(other)


def split_folder(data: Files, split: str) -> str:
    """Return the folder, or the URL, of the images of a split.

    Args:
        data: the section of the recipe.
        split: "train" or "validation".

    Raises:
        DataError: there is no such folder.
    """
    if data.root is None:
        raise DataError(
            "data.root is not set; name the folder of the images: data.root=/path/to/images"
        )
    # Faults from the outside in: the key to correct is another where root itself is missing.
    folder = split_place(data, split)
    if data.urls and "://" in data.root:
        return folder  # its manifest shows whether it is there
    if not os.path.isdir(data.root):
        raise DataError(f"{data.root}: no such folder; correct data.root")
    if not os.path.isdir(folder):
        key = data.folder_key(split)
        name = getattr(data, key)
        where = f"the folder of the {split} images (. for data.root itself)"
        raise DataError(f"{data.root}: no folder {name!r}; set data.{key} to {where}")
    return folder


def split_place(data: Files, split: str) -> str:
    """Return the folder or URL of the images of a split, there or not.

    Args:
        data: a section with `root`.
        split: "train" or "validation".
    """
    return below(str(data.root), getattr(data, data.folder_key(split)))


def below(root: str, name: str) -> str:
    """Return the folder `name` in the folder, or below the URL, `root`."""
    if name == ".":
        return root
    # os.path.join would let an absolute name take the place of a URL.
    if "://" in root:
        return f"{root.rstrip('/')}/{name}"
    return os.path.join(root, name)
