"""The sections of a recipe that say how weights change: number formats, optimizer, schedule, averages."""

from typing import Any, List, Literal, Optional

from pydantic import Field, model_validator

from recipe.by_name import OPTIMIZERS, SCHEDULES, fill, refuse_foreign
from recipe.section import Section, exactly_one


class Precision(Section):
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


class Optimizer(Section):
    """The optimizer. Keys that are null belong to other optimizers, or take the named one's default."""

    name: Literal["lars", "sgd", "rmsprop", "lamb"] = Field(
        "lars", description="rmsprop is TensorFlow's form: epsilon inside the root, rate inside the momentum"
    )
    momentum: Optional[float] = Field(
        None, ge=0, lt=1, description="momentum coefficient (lars: 0.885; sgd, rmsprop: 0.9)"
    )
    weight_decay: Optional[float] = Field(
        None,
        ge=0,
        description="weight decay, none for skipped parameters; lars: inside the trust ratio "
        "(lars: 2.5e-6; sgd: 1e-4; rmsprop: 1e-5; lamb: 0.01)",
    )
    skip: List[Literal["bias", "norm"]] = Field(
        ["bias", "norm"],
        description="parameters without trust ratio and weight decay: biases; scales of normalisation layers",
    )
    clip_norm: Optional[float] = Field(
        None, gt=0, description="largest norm of the whole gradient; a longer one is shortened to it; null: none"
    )
    eps: Optional[float] = Field(
        None, ge=0, description="added to the divisor of the step (lars: 0; rmsprop: 1e-3; lamb: 1e-6)"
    )
    trust_coefficient: Optional[float] = Field(
        None, gt=0, description="lars: eta, step length relative to the weight norm at rate 1 (0.001)"
    )
    trust: Optional[Literal["gradient", "momentum"]] = Field(
        None,
        description="lars: the trust ratio divides by the gradient's norm (rate inside the momentum; the default) "
        "or by the momentum's",
    )
    skip_lr_scale: Optional[float] = Field(
        None, gt=0, description="lars: learning rate of the skipped parameters relative to the others' (1)"
    )
    nesterov: Optional[bool] = Field(None, description="sgd: Nesterov's momentum (false)")
    alpha: Optional[float] = Field(
        None, ge=0, lt=1, description="rmsprop: decay of the average of squared gradients (0.9)"
    )
    beta1: Optional[float] = Field(None, ge=0, lt=1, description="lamb: decay of the average of gradients (0.9)")
    beta2: Optional[float] = Field(
        None, ge=0, lt=1, description="lamb: decay of the average of squared gradients (0.999)"
    )

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, values: Any) -> Any:
        return fill(values, OPTIMIZERS, "lars")

    @model_validator(mode="after")
    def _own_keys(self) -> "Optimizer":
        refuse_foreign(self, OPTIMIZERS)
        if self.eps == 0 and self.name != "lars":
            raise ValueError(f"eps must be above 0 for {self.name}: a gradient of exactly 0 would be divided by 0")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class Schedule(Section):
    """Learning rate as a function of the step. Keys that are null belong to other schedules."""

    name: Literal["polynomial", "cosine", "exponential", "constant"] = Field(
        "polynomial", description="what follows the linear warm-up from 0"
    )
    peak: Optional[float] = Field(
        None, gt=0, description="learning rate at the end of the warm-up (or give peak_per_image)"
    )
    peak_per_image: Optional[float] = Field(None, gt=0, description="peak learning rate divided by the global batch")
    batch_rule: Literal["none", "linear", "sqrt"] = Field(
        "none", description="how `peak`, meant for reference_batch, grows with the global batch"
    )
    reference_batch: Optional[int] = Field(None, gt=0, description="global batch that `peak` is meant for")
    warmup_epochs: Optional[float] = Field(
        None, ge=0, description="length of the warm-up in epochs (or steps, or images)"
    )
    warmup_steps: Optional[int] = Field(None, ge=0, description="length of the warm-up in updates")
    warmup_images: Optional[int] = Field(None, ge=0, description="length of the warm-up in training images")
    power: Optional[float] = Field(None, gt=0, description="polynomial: exponent of the decay (2)")
    final_ratio: Optional[float] = Field(
        None, ge=0, le=1, description="last learning rate relative to the peak (polynomial: 1e-5; cosine: 0)"
    )
    decay_rate: Optional[float] = Field(
        None, gt=0, lt=1, description="exponential: factor on the rate every decay_epochs (0.97)"
    )
    decay_epochs: Optional[float] = Field(
        None, gt=0, description="exponential: epochs between two drops, counted from the start of the run (2.4)"
    )

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, values: Any) -> Any:
        return fill(values, SCHEDULES, "polynomial")

    @model_validator(mode="after")
    def _consistent(self) -> "Schedule":
        refuse_foreign(self, SCHEDULES)
        exactly_one(self, ("peak", "peak_per_image"), required=True)
        exactly_one(self, ("warmup_epochs", "warmup_steps", "warmup_images"), required=False)
        if self.batch_rule == "none":
            if self.reference_batch is not None:
                raise ValueError("reference_batch says nothing without a batch_rule; set batch_rule linear or sqrt")
        elif self.peak is None or self.reference_batch is None:
            raise ValueError(
                f"batch_rule {self.batch_rule} needs peak and reference_batch, the global batch that peak is meant for"
            )
        return self


class Average(Section):
    """Exponential averages of the weights, evaluated and saved beside them."""

    step_decay: Optional[float] = Field(
        None, gt=0, lt=1, description="decay of the average over updates, e.g. 0.9999; null keeps none"
    )
    epoch_decay: Optional[float] = Field(
        None, gt=0, lt=1, description="decay of the average over the ends of epochs (the G16 recipe: 0.97); null: none"
    )
