"""The schema of a recipe. Annotations are evaluated by pydantic at run time and must work on Python
3.8.
"""

from typing import Dict, Iterator, List, Literal, Optional, Type, Union

from pydantic import Field, field_serializer, field_validator, model_validator

from common.credentials import masked
from recipe.distribution import Parallel
from recipe.exchange import Exchange, Selecting
from recipe.hardware import EngineSection, Ipu
from recipe.images import Data
from recipe.network import Model
from recipe.optimization import Average, Optimizer, Precision, Schedule
from recipe.parts import Parts
from recipe.section import PathText, Section, check_pairs, exactly_one, or_auto


class Run(Section):
    """One run: its name, place, device and length."""

    name: str = Field(
        "run", pattern=r"^\w[\w.-]*$", description="name in logs and of the default output folder"
    )
    output: Optional[PathText] = Field(None, description="run folder; null means runs/NAME")
    device: Literal["auto", "cpu", "cuda", "ipu"] = "auto"
    """auto takes an NVIDIA GPU if there is any, else the CPU; cuda is NVIDIA's only; IPUs are used
    only if named. AMD's (ROCm), Apple's (MPS) and Intel's (XPU) GPUs are not supported: with
    PyTorch for ROCm name cpu"""
    seed: int = Field(0, ge=0, lt=2**63)
    """every random draw of the run is a function of it"""
    epochs: Optional[float] = Field(None, gt=0, le=1e6)
    """length of the run in epochs (or steps, or images)"""
    steps: Optional[int] = Field(None, gt=0, le=10**12)
    """length of the run in steps of batch.global images"""
    images: Optional[int] = Field(None, gt=0, le=10**15)
    """length of the run in training images"""
    resume: Literal["auto", "never"] = "auto"
    """auto continues from the newest good checkpoint of the run folder; never refuses a used
    folder"""
    lock: bool = True
    """lock the run folder against other processes; needs POSIX locks"""
    deterministic: bool = False
    """CUDA runs repeat bit for bit, but slower (CPU runs always do)"""
    threads: Optional[int] = Field(None, gt=0, le=4096)
    """CPU threads of each rank, which change rounding; null: OMP_NUM_THREADS, or the host's cores
    over its ranks"""
    loss_limit: float = Field(10.0, gt=1)
    """the run ends as diverged if three log lines in a row have a loss above this multiple of that
    of guessing: ln classes, with data.loss=bce ln 2, times the classes where these are summed"""

    def faults(self) -> Iterator[str]:
        yield from exactly_one(self, ("epochs", "steps", "images"), required=True)


class BatchSection(Section):
    """Images per step and per forward pass; accumulation follows from them."""

    global_: int = Field(768, alias="global", gt=0, le=10**9)
    """images per step over all replicas; an update is a step, unless schedule makes it several"""
    micro: Optional[int] = Field(3, gt=0, le=10**9, json_schema_extra=or_auto)
    """images per forward pass of one stage; auto (or null) takes the largest that fits a GPU's
    memory, which is tried at the run's begin and then kept, and on a CPU the largest up to 32; with
    group normalisation it changes only which images are mixed with each other, what dropout draws,
    and rounding; refused with batch normalisation, several stages and on IPUs"""
    evaluation: int = Field(64, gt=0, le=10**9, description="images per forward pass in evaluation")
    schedule: Union[Literal["noise"], List[List[float]], None] = None
    """a batch that grows: [images seen, batch] pairs, e.g. [[0, 768], [1.0e+6, 1536]], or noise,
    which doubles it at the end of an epoch if the noise scale is larger; batches are multiples of
    batch.global, which remains the unit of steps, rates and warm-ups; null keeps batch.global"""
    largest: Optional[int] = Field(None, gt=0, le=10**9)
    """the largest batch of batch.schedule=noise"""
    rate_rule: Literal["none", "sqrt", "linear"] = "none"
    """how the learning rate follows a batch of `schedule` above batch.global: not at all, with the
    square root of their ratio, or with the ratio; sqrt suits optimizers that normalise the
    gradient, linear suits sgd"""

    @field_validator("micro", mode="before")
    @classmethod
    def _auto(cls, value: object) -> object:
        """Read the word auto as None, which code asks for."""
        return None if value == "auto" else value

    @field_serializer("micro")
    def _say_auto(self, value: Optional[int]) -> object:
        """Write None as the word auto, which users know."""
        return "auto" if value is None else value

    def faults(self) -> Iterator[str]:
        """Yield faults of a batch that grows."""
        # `largest` belongs to `noise` alone: a list of batches ends by itself.
        largest = self.largest
        if self.schedule == "noise" and largest is None:
            yield "schedule noise needs largest, the bound of the batch; give both or neither"
        if self.schedule != "noise" and largest is not None:
            yield "there is no schedule noise for largest, the bound of the batch; give both or neither"
        if largest is not None and largest < 2 * self.global_:
            yield f"largest {largest} is less than twice global {self.global_}, so the batch cannot grow"
        if self.schedule is None and self.rate_rule != "none":
            yield f"rate_rule {self.rate_rule} has no effect without schedule; give one, or remove it"
        if isinstance(self.schedule, list):
            check_pairs(self.schedule, "images", "batch")
            for _, batch in self.schedule:
                if batch < self.global_ or batch % self.global_:
                    yield f"schedule: {batch:g} is not a multiple of global {self.global_}; correct one"


class Log(Parts):
    """Records of training; each logger adds its keys."""

    every_steps: int = Field(50, gt=0)
    """steps between two log lines, each of which waits for the device"""
    trust_ratios: bool = True
    """write each layer's trust ratio into metrics.jsonl"""
    noise_scale: Union[bool, Literal["auto", "layers"]] = "auto"
    """estimate the gradient noise scale; auto: where a step has several micro batches; layers: also
    by parameter"""
    trace: int = Field(0, ge=0, le=1000)
    """updates, from a session's second on, whose timeline is recorded"""
    profile: int = Field(0, ge=0, le=100)
    """updates, from a session's second on, of which each rank writes a trace of torch.profiler into
    profile/"""
    memory: bool = False
    """each rank writes a snapshot of its CUDA memory into profile/ after the updates of `profile`
    (or the second), or when memory runs out; refused with run.device=cpu and on IPUs"""

    def faults(self) -> Iterator[str]:
        if self.trace and self.profile:
            yield "trace waits for the device at each span, which profile would show; give one of them"


class TensorBoard(Log):
    """TensorBoard files."""

    tensorboard: bool = Field(True, description="write TensorBoard files into the run folder")


class WeightsAndBiases(Log):
    """Weights & Biases."""

    wandb: bool = False
    """also send the numbers to Weights & Biases (package wandb)"""


class MLflow(Log):
    """MLflow."""

    mlflow: bool = False
    """also send the numbers to MLflow (package mlflow-skinny, or mlflow)"""


class Evaluation(Section):
    """When the validation images are scored, besides at the last step."""

    every_epochs: float = Field(1.0, gt=0, le=1e6, description="epochs between evaluations")
    patience: Optional[int] = Field(None, gt=0)
    """end the run after so many evaluations in a row without a better top-1 of the trained weights or
    an average; null: train to the end"""


class Checkpoint(Section):
    """When the run is saved, besides at the last step."""

    every_epochs: float = Field(1.0, gt=0, le=1e6, description="epochs between checkpoints")
    keep_last: int = Field(2, ge=2)
    """newest checkpoints to keep; two, in case the newest is damaged"""
    keep_best: bool = True
    """also keep the checkpoint with the best top-1, which an evaluation that is the best so far
    saves where none is due"""
    mirror: Optional[PathText] = None
    """URL that fsspec knows (s3://bucket/run), or a folder: a copy of the run folder, sent after each
    checkpoint, from which an empty run folder is filled"""

    @field_validator("mirror")
    @classmethod
    def _without_credentials(cls, value: Optional[str]) -> Optional[str]:
        """Refuse credentials in the URL, which would be stored with the recipe."""
        if value is not None and masked(value) != value:
            raise ValueError("has credentials in it; give them as the store's package reads them")
        return value


class Recipe(Section):
    """Everything about a run."""

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

    @model_validator(mode="after")
    def _name_what_is_compressed(self) -> "Recipe":
        """Replace null by what it stands for, which depends on the optimizer."""
        exchange = self.exchange
        if isinstance(exchange, Selecting) and exchange.compress is None:
            compress = "update" if exchange.compresses_update(self.optimizer) else "gradient"
            # Recipes are frozen, also for their validators.
            object.__setattr__(self, "exchange", exchange.model_copy(update={"compress": compress}))
        return self


def _sections() -> Dict[str, Type[Section]]:
    """Return the annotations of the recipe's fields, each of which is a section."""
    sections = {}
    for name, field in Recipe.model_fields.items():
        section = field.annotation
        assert isinstance(section, type) and issubclass(section, Section), name
        sections[name] = section
    return sections


# The class of each section by its name, in the order of a file. Where a section comes in kinds or
# parts it is their base.
SECTIONS = _sections()

# Keys of which a recipe gives one: naming one in a later layer replaces another of an earlier
# layer.
ALTERNATIVES = (
    ("run.epochs", "run.steps", "run.images"),
    ("schedule.peak", "schedule.peak_per_image"),
    ("schedule.warmup_epochs", "schedule.warmup_steps", "schedule.warmup_images"),
)
