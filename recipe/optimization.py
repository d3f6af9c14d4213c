"""The sections that describe how weights change: `precision`, `optimizer`, `schedule` and
`average`.
"""

import math
from typing import ClassVar, Dict, Iterator, List, Literal, NamedTuple, Optional, Tuple

from pydantic import Field

from recipe.kinds import Kind
from recipe.section import Section, exactly_one


class Precision(Section):
    """Number formats: of the arithmetic, and of the weights that persist."""

    compute: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """dtype of activations and working weights; auto: float16 on CUDA, float32 on CPU"""
    weights: Literal["float16", "float32"] = "float16"
    """dtype of persistent weights and momentum"""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """rounding of updates of float16 state"""
    loss_scale: float = Field(128.0, gt=0)
    """factor on the loss; with dynamic_loss_scale, the first one"""
    dynamic_loss_scale: bool = False
    """halve the scale after a non-finite update, double it after 2000 finite ones"""
    max_skipped_steps: int = Field(20, ge=0)
    """consecutive non-finite updates before the run stops"""


class Slot(NamedTuple):
    """A state tensor of each parameter: its first value, and whether it may persist in float16."""

    initial: float = 0.0
    half: bool = True


class Optimizer(Kind):
    """The optimizer; each has keys and defaults of its own."""

    # By the name under which torch's optimizers keep them, all state tensors that some setting of
    # the keys has.
    all_slots: ClassVar[Dict[str, Slot]] = {}
    # Whether each replica may make the update of its own gradient, before it selects what it sends.
    replica_update: ClassVar[bool] = False
    # Whether parts of a gradient, added one after the other, move the weights as the whole would:
    # then what is sent may be selected from gradients.
    linear: ClassVar[bool] = False
    # Whether half weights are stepped in float32 scratch memory, with a copy of each slot.
    scratch: ClassVar[bool] = True

    name: str = Field("lars", description="how a gradient becomes an update")
    skip: List[Literal["bias", "norm"]] = ["bias", "norm"]
    """parameters without trust ratio and weight decay: biases; scales of normalisation layers"""
    clip_norm: Optional[float] = Field(None, gt=0)
    """largest norm of the whole gradient; null: no limit"""
    layer_decay: Optional[float] = Field(None, gt=0, le=1)
    """factor on the learning rate from each block of the model to the one before, the classifier
    having the whole rate, as timm's --layer-decay; null: one rate for all"""

    @property
    def slots(self) -> Dict[str, Slot]:
        """The state tensors that are kept with these keys."""
        return self.all_slots

    @property
    def usual_peaks(self) -> Tuple[float, float]:
        """The lowest and the highest peak rate of nearly all recipes, at any batch of any model.

        A rate outside is hardly ever meant: most often it is another optimizer's.
        """
        return 0.0, math.inf


class Lars(Optimizer):
    """Layer-wise adaptive rates (You et al., 1708.03888), with the defaults of the G16 recipe."""

    all_slots: ClassVar[Dict[str, Slot]] = {"momentum_buffer": Slot()}
    scratch: ClassVar[bool] = False
    replica_update: ClassVar[bool] = True

    name: Literal["lars"] = "lars"
    momentum: float = Field(0.885, ge=0, lt=1, description="momentum coefficient")
    weight_decay: float = Field(2.5e-6, ge=0)
    """weight decay inside the trust ratio; skipped parameters have none"""
    eps: float = Field(0.0, ge=0, description="added to the divisor of the trust ratio")
    trust_coefficient: float = Field(0.001, gt=0)
    """eta: step relative to the weight norm at rate 1"""
    trust: Literal["gradient", "momentum"] = "gradient"
    """norm that the trust ratio divides by: the gradient's (the rate is inside the momentum) or the
    momentum's"""
    nesterov: bool = Field(False, description="Nesterov's momentum; with trust gradient")
    skip_lr_scale: float = Field(1.0, gt=0)
    """learning rate of skipped parameters relative to the others"""

    @property
    def usual_peaks(self) -> Tuple[float, float]:
        """See `Optimizer.usual_peaks`. What counts is the rate times the trust coefficient."""
        return 5e-5 / self.trust_coefficient, 0.1 / self.trust_coefficient

    def faults(self) -> Iterator[str]:
        """Yield faults of Nesterov's momentum."""
        if self.nesterov and not self.momentum:
            yield "nesterov needs a momentum above 0"
        if self.nesterov and self.trust == "momentum":
            yield "nesterov goes with trust gradient only; use trust=gradient, or nesterov=false"


class Sgd(Optimizer):
    """Stochastic gradient descent, with the defaults of Goyal et al., 1706.02677."""

    all_slots: ClassVar[Dict[str, Slot]] = {"momentum_buffer": Slot()}
    replica_update: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    name: Literal["sgd"] = "sgd"
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum coefficient")
    weight_decay: float = Field(1e-4, ge=0)
    """weight decay; skipped parameters have none"""
    nesterov: bool = Field(False, description="Nesterov's momentum")

    @property
    def usual_peaks(self) -> Tuple[float, float]:
        """See `Optimizer.usual_peaks`."""
        return 1e-5, 30.0

    def faults(self) -> Iterator[str]:
        """Yield the fault of Nesterov's momentum without any."""
        if self.nesterov and not self.momentum:
            yield "nesterov needs a momentum above 0"

    @property
    def slots(self) -> Dict[str, Slot]:
        """The momentum, if there is one."""
        return self.all_slots if self.momentum else {}


class RmsProp(Optimizer):
    """TensorFlow's RMSprop: epsilon inside the root, rate inside the momentum. Defaults of Tan and
    Le, 1905.11946.
    """

    # TensorFlow begins with an average of 1, which damps the first steps. Averages of squares fall
    # below the range of float16.
    all_slots: ClassVar[Dict[str, Slot]] = {
        "square_avg": Slot(1.0, half=False),
        "momentum_buffer": Slot(),
    }

    name: Literal["rmsprop"] = "rmsprop"
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum coefficient")
    weight_decay: float = Field(1e-5, ge=0)
    """weight decay; skipped parameters have none"""
    eps: float = Field(1e-3, gt=0, description="added to the average of squared gradients")
    alpha: float = Field(0.9, ge=0, lt=1, description="decay of the average of squared gradients")

    @property
    def usual_peaks(self) -> Tuple[float, float]:
        """See `Optimizer.usual_peaks`."""
        return 1e-5, 3.0

    @property
    def slots(self) -> Dict[str, Slot]:
        """The average of squares, and the momentum if there is one."""
        return {
            name: slot
            for name, slot in self.all_slots.items()
            if self.momentum or name == "square_avg"
        }


class Lamb(Optimizer):
    """Adam with a trust ratio for each layer (You et al., 1904.00962)."""

    all_slots: ClassVar[Dict[str, Slot]] = {
        "exp_avg": Slot(half=False),
        "exp_avg_sq": Slot(half=False),
    }

    name: Literal["lamb"] = "lamb"
    weight_decay: float = Field(0.01, ge=0)
    """weight decay; skipped parameters have none"""
    eps: float = Field(1e-6, gt=0, description="added to the divisor of the step")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the average of gradients")
    beta2: float = Field(0.999, ge=0, lt=1, description="decay of the average of squared gradients")

    @property
    def usual_peaks(self) -> Tuple[float, float]:
        """See `Optimizer.usual_peaks`."""
        return 1e-6, 0.3


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 1711.05101)."""

    all_slots: ClassVar[Dict[str, Slot]] = {
        "exp_avg": Slot(half=False),
        "exp_avg_sq": Slot(half=False),
    }

    name: Literal["adamw"] = "adamw"
    weight_decay: float = Field(0.05, ge=0)
    """weight decay, times the rate; skipped parameters have none"""
    eps: float = Field(1e-8, gt=0, description="added to the divisor of the step")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the average of gradients")
    beta2: float = Field(0.999, ge=0, lt=1, description="decay of the average of squared gradients")

    @property
    def usual_peaks(self) -> Tuple[float, float]:
        """See `Optimizer.usual_peaks`."""
        return 1e-6, 0.1


class Muon(Optimizer):
    """Orthogonal steps for the weights of hidden layers (Jordan et al., 2024), AdamW for all other
    parameters.

    A step is as long as one of AdamW (Liu et al., 2502.16982), so peak rates found for AdamW are of
    use.
    """

    all_slots: ClassVar[Dict[str, Slot]] = {
        "exp_avg": Slot(half=False),
        "exp_avg_sq": Slot(half=False),
    }

    name: Literal["muon"] = "muon"
    momentum: float = Field(0.95, ge=0, lt=1)
    """decay of the average of hidden layers' gradients"""
    nesterov: bool = Field(True, description="Nesterov's momentum for hidden layers")
    ns_steps: int = Field(5, ge=1, le=99)
    """Newton-Schulz steps that make the average orthogonal"""
    weight_decay: float = Field(0.1, ge=0)
    """weight decay, times the rate; skipped parameters have none"""
    adamw_lr_scale: float = Field(1.0, gt=0)
    """learning rate of the parameters that AdamW steps, relative to that of hidden layers"""
    eps: float = Field(1e-8, gt=0, description="added to the divisor of AdamW's steps")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of AdamW's average of gradients")
    beta2: float = Field(0.95, ge=0, lt=1)
    """decay of AdamW's average of squared gradients"""

    @property
    def usual_peaks(self) -> Tuple[float, float]:
        """See `Optimizer.usual_peaks`."""
        return 1e-5, 0.2

    def faults(self) -> Iterator[str]:
        """Yield the fault of Nesterov's momentum without any."""
        if self.nesterov and not self.momentum:
            yield "nesterov needs a momentum above 0; raise momentum, or use nesterov=false"


class Schedule(Kind):
    """Learning rate as a function of the step: a linear warm-up from 0, then what the name says."""

    name: str = Field("polynomial", description="what follows the linear warm-up from 0")
    peak: Optional[float] = Field(None, gt=0)
    """learning rate after the warm-up (or give peak_per_image)"""
    peak_per_image: Optional[float] = Field(None, gt=0)
    """peak learning rate divided by the global batch"""
    batch_rule: Literal["none", "linear", "sqrt"] = "none"
    """how `peak`, meant for reference_batch, grows with the global batch"""
    reference_batch: Optional[int] = Field(None, gt=0)
    """global batch that `peak` is meant for"""
    warmup_epochs: Optional[float] = Field(None, ge=0, le=1e6)
    """length of the warm-up in epochs (or steps, images)"""
    warmup_steps: Optional[int] = Field(None, ge=0, description="length of the warm-up in steps")
    warmup_images: Optional[int] = Field(None, ge=0)
    """length of the warm-up in training images"""

    def faults(self) -> Iterator[str]:
        """Yield faults of peaks, of lengths, and of a rule without the batch that it starts from."""
        yield from exactly_one(self, ("peak", "peak_per_image"), required=True)
        yield from exactly_one(
            self, ("warmup_epochs", "warmup_steps", "warmup_images"), required=False
        )
        if self.batch_rule == "none" and self.reference_batch is not None:
            yield "reference_batch has no effect without batch_rule linear or sqrt; give one, or remove it"
        if self.batch_rule != "none" and (self.peak is None or self.reference_batch is None):
            yield f"batch_rule {self.batch_rule} needs peak, and reference_batch, which peak is meant for"


class Polynomial(Schedule):
    """Decay by a power of what is left of the run."""

    name: Literal["polynomial"] = "polynomial"
    power: float = Field(2.0, gt=0, description="exponent of the decay")
    final_ratio: float = Field(1e-5, ge=0, le=1)
    """last learning rate relative to the peak"""


class Cosine(Schedule):
    """Decay along half a cosine."""

    name: Literal["cosine"] = "cosine"
    final_ratio: float = Field(0.0, ge=0, le=1)
    """last learning rate relative to the peak"""


class Exponential(Schedule):
    """Drops by a factor at equal distances."""

    name: Literal["exponential"] = "exponential"
    decay_rate: float = Field(0.97, gt=0, lt=1, description="factor on the rate every decay_epochs")
    decay_epochs: float = Field(2.4, ge=1e-6, le=1e6)
    """epochs between two drops, counted from the start of the run"""


class Constant(Schedule):
    """The peak until the end."""

    name: Literal["constant"] = "constant"


class Average(Section):
    """Exponential averages of the weights, evaluated and saved beside them."""

    step_decay: Optional[float] = Field(None, gt=0, lt=1)
    """decay of the average over updates; null: none"""
    epoch_decay: Optional[float] = Field(None, gt=0, lt=1)
    """decay of the average over epochs; null: none"""
