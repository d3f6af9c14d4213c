"""The section `exchange`: how replicas combine their gradients."""

from typing import Any, ClassVar, Dict, List, Literal, Optional

from pydantic import Field, field_validator, model_validator

from recipe.division import count
from recipe.kinds import Kind
from recipe.optimization import Optimizer

# Keys of the sparse methods that change what is learned: another method refuses them, unless they say what it does.
_ONLY_SPARSE = ("density_warmup", "factor_masking", "dense_1d", "dense_steps")

# At this density a value waits for a hundred updates, at which momentum has long repeated it; at 0.1 for ten.
_MASKED = 0.01


def _few_bits(what: str) -> Any:
    return Field(
        None,
        description=f"bits in which {what}, with a scale for each 256 values; what rounding takes off is sent later; "
        "null: no rounding, or that of wire",
    )


class Exchange(Kind):
    """How replicas combine their gradients, once an update."""

    tag = "method"
    resets = False
    sparse: ClassVar[bool] = False  # whether a replica sends only a share of its gradient
    in_tree: ClassVar[bool] = False  # whether micro batches are added up in one fixed binary tree
    whole_1d: ClassVar[bool] = False  # whether gradients of biases and norms are sent whole, beside a share of the rest
    sent: ClassVar[str] = "float32"  # type of the values that travel
    sent_bits: ClassVar[Optional[int]] = None  # 8 or 4 where these are whole multiples of a scale
    _sends: ClassVar[str] = "gradients"

    method: str = Field("dense", description="what replicas send, and how it is combined")
    density: float = Field(
        0.001,
        gt=0,
        le=1,
        description="share of a gradient's values that a replica sends by topk and gtopk; other methods do not use it, "
        "but predictions for topk and gtopk do",
    )
    delay: int = Field(
        0,
        ge=0,
        le=64,
        description="apply gradients, or means of weights, so many steps late; with 1 the exchange runs beside the "
        "next step's computation",
    )

    @classmethod
    def foreign(cls, key: str, value: Any) -> Optional[str]:
        if key == "order" and value == "tree":
            return f"order tree promises equal bits, which method {cls.default_name()} rounds away; use dense"
        if key in _ONLY_SPARSE and value:
            return f"{key} goes with method topk or gtopk, not {cls.default_name()}"
        return None

    def refused_by(self, method: str) -> Dict[str, Any]:
        """The keys that have to change before another method is taken, with the values that it accepts."""
        other, defaults = self.kinds[method], self.defaults()
        own = [key for key in self.own_keys() if key not in other.model_fields]
        return {key: defaults[key] for key in own if other.foreign(key, getattr(self, key))}

    def to(self, method: str, **changes: Any) -> "Exchange":
        """The section of another method, with the keys that both have and `changes`."""
        known = self.kinds[method].model_fields
        return Exchange(**{**{key: value for key, value in self if key in known}, "method": method, **changes})

    def compresses_update(self, optimizer: Optimizer) -> bool:
        """Whether each replica selects from the update that its own gradient would make, not from that gradient."""
        return False

    def masks(self, optimizer: Optimizer, density: float) -> bool:
        """Whether momentum of what is sent starts again from 0 in an update with that density."""
        return False

    @property
    def beside(self) -> float:
        """Steps, in each step, that the exchange may take while the next ones are computed."""
        return float(self.delay > 0)

    @property
    def variant(self) -> str:
        """The method, with its pattern where there are several."""
        return self.method

    @property
    def label(self) -> str:
        """A name that also tells how much is sent, e.g. `gtopk owners 0.01` or `local 8, 4 bits`."""
        amount = f" {self._amount()}" if self._amount() else ""
        return f"{self.variant}{amount}{f', {self.sent_bits} bits' if self.sent_bits else ''}"

    def _amount(self) -> str:
        return ""

    def describe(self, optimizer: Optimizer) -> str:
        """A few words, e.g. `exchange gtopk (butterfly, float32), density 0.001 of the update, conserving`."""
        late = [f"{self._sends} {count(self.delay, 'step')} late"] if self.delay else []
        return ", ".join([f"exchange {self._form()}", *self._details(optimizer), *late])

    def _form(self) -> str:
        return self.method

    def _details(self, optimizer: Optimizer) -> List[str]:
        return ["order fast"]


class Dense(Exchange):
    """Sends float32."""

    method: Literal["dense"] = "dense"
    order: Literal["fast", "tree"] = Field(
        "fast",
        description="order of the sum over micro batches: fast, as they come; tree, one fixed binary tree, so that "
        "1, 2, 4 ... replicas and any stages give the same bits",
    )
    bits: Optional[Literal[8, 4]] = _few_bits("gradients are sent")

    @model_validator(mode="after")
    def _bits_in_no_tree(self) -> "Dense":
        if self.bits and self.order == "tree":
            raise ValueError(
                "order tree promises equal bits for all topologies, which bits rounds away; use order=fast"
            )
        return self

    @property
    def sent_bits(self) -> Optional[int]:
        return self.bits

    @property
    def in_tree(self) -> bool:
        return self.order == "tree"

    def _details(self, optimizer: Optimizer) -> List[str]:
        return [f"in {self.bits} bits" if self.bits else f"order {self.order}"]


class Half(Exchange):
    """Sends 16 bits and sums in float32."""

    method: Literal["half"] = "half"
    wire: Literal["float16", "bfloat16"] = Field("float16", description="type of the values that travel")

    @property
    def sent(self) -> str:
        return self.wire

    def _form(self) -> str:
        return f"half ({self.wire})"


class _Selecting(Exchange):
    """Keys of the methods that send the largest values of a vector and keep the rest for later steps."""

    compress: Optional[Literal["update", "gradient"]] = Field(
        None,
        description="of what the largest values are sent: update, of what a replica's own gradient would change, with "
        "lars and sgd; gradient, as published; null: update with lars, unless delayed, else gradient",
    )
    sketch: int = Field(
        61,
        ge=1,
        le=1 << 16,
        description="with compress update: values a layer by which replicas find the norm of their mean gradient, to "
        "1 / sqrt(2 sketch); a prime number is best",
    )
    density_warmup: List[float] = Field(
        default_factory=list,
        description="densities of the first epochs, one each, e.g. [0.25, 0.0625, 0.015625, 0.004]",
    )
    dense_steps: int = Field(0, ge=0, description="first steps of a run that send the whole gradient")
    dense_1d: bool = Field(False, description="send the gradients of biases and norms whole, beside the sparse ones")
    factor_masking: Optional[bool] = Field(
        None,
        description="with compress update: momentum of what is sent starts again from 0; null: in updates "
        "with a density of 0.01 or less",
    )
    stage_share: Literal["size", "threshold"] = Field(
        "size",
        description="how stages share the values to send: size, in proportion to their parameters; threshold, to where "
        "the largest of the whole model are",
    )

    @field_validator("density_warmup")
    @classmethod
    def _shares(cls, value: List[float]) -> List[float]:
        if not all(0 < density <= 1 for density in value):
            raise ValueError(f"density_warmup takes shares between 0 and 1, found {value}")
        return value

    @model_validator(mode="after")
    def _momentum_to_mask(self) -> "_Selecting":
        if self.factor_masking and self.compress == "gradient":
            raise ValueError(
                "factor_masking clears momentum that replicas have with compress update; give compress=update"
            )
        return self

    def masks(self, optimizer: Optimizer, density: float) -> bool:
        masks = density <= _MASKED if self.factor_masking is None else self.factor_masking
        return masks and self.compresses_update(optimizer)

    def compresses_update(self, optimizer: Optimizer) -> bool:
        if self.compress is None:
            return optimizer.replica_update and not optimizer.linear and not self.delay
        return self.compress == "update"

    @property
    def whole_1d(self) -> bool:
        return self.dense_1d


class Sparse(_Selecting):
    """Base of the methods that send a share of a gradient."""

    sparse: ClassVar[bool] = True
    _residuals: ClassVar[List[str]] = []  # the rule for what is kept, where there are several
    wire: Literal["float32", "float16"] = Field("float32", description="type of the values that travel")
    bits: Optional[Literal[8, 4]] = _few_bits("values are sent")

    @property
    def sent_bits(self) -> Optional[int]:
        return self.bits

    @property
    def sent(self) -> str:
        return f"int{self.bits}" if self.bits else self.wire

    def _amount(self) -> str:
        return f"{self.density:g}"

    def _form(self) -> str:
        return f"{self.method} ({self.sent})"

    def _details(self, optimizer: Optimizer) -> List[str]:
        warmup = ", ".join(f"{density:g}" for density in self.density_warmup)
        return [
            f"density {self.density:g} of the {'update' if self.compresses_update(optimizer) else 'gradient'}",
            *([f"after {warmup} in the first epochs"] if warmup else []),
            *([f"dense for {self.dense_steps} steps"] if self.dense_steps else []),
            *self._residuals,
            *(["factor masking"] if self.masks(optimizer, self.density) else []),
            *(["dense 1d"] if self.dense_1d else []),
        ]

    def density_at(self, step: int, steps_per_epoch: Optional[int]) -> float:
        """Share of a gradient's values that a replica sends in update `step`, from 0; 1 in the first `dense_steps`."""
        if step < self.dense_steps:
            return 1.0
        epoch = step // steps_per_epoch if self.density_warmup else 0
        return self.density_warmup[epoch] if epoch < len(self.density_warmup) else self.density


class TopK(Sparse):
    """Sends the largest values of each replica's gradient to all."""

    method: Literal["topk"] = "topk"


class _Merging(Exchange):
    """Keys of the methods that keep the largest values of sums."""

    pattern: Literal["tree", "butterfly", "owners"] = Field(
        "tree",
        description="tree adds up to replica 0 and sends back (2 log2 P hops); butterfly adds in pairs on all replicas "
        "at once (log2 P hops, more work for the processors); owners adds everything, a region on each replica, and "
        "keeps the largest of the whole sum (fewest bytes for many replicas)",
    )
    conserve: bool = Field(
        True,
        description="the replica that leaves values out of a sum keeps them for later steps; false is the published "
        "rule, by which a part of them is lost",
    )


class GTopK(_Merging, Sparse):
    """Keeps as many values of the replicas' sum as each replica sends (Shi et al., 1901.04359)."""

    method: Literal["gtopk"] = "gtopk"

    @property
    def variant(self) -> str:
        return f"gtopk {self.pattern}"

    def _form(self) -> str:
        return f"gtopk ({self.pattern}, {self.sent})"

    @property
    def _residuals(self) -> List[str]:
        return ["conserving" if self.conserve else "published residual rule"]


class Local(Exchange):
    """Replicas make some updates alone, then take the mean of their weights (local SGD, DiLoCo)."""

    method: Literal["local"] = "local"
    _sends: ClassVar[str] = "means"
    local_steps: int = Field(8, ge=1, le=10_000, description="updates between two means of the same weights")
    fragments: int = Field(
        1,
        ge=1,
        le=1000,
        description="parts of the weights, whose means are taken at different updates; up to local_steps",
    )
    outer: Literal["mean", "nesterov"] = Field(
        "mean",
        description="what replicas go on from: mean, the mean of their weights; nesterov, a step of Nesterov's "
        "momentum along the way that the mean has moved (DiLoCo)",
    )
    outer_lr: float = Field(0.7, gt=0, le=2, description="with outer nesterov: its learning rate")
    outer_momentum: float = Field(0.9, ge=0, lt=1, description="with outer nesterov: its momentum")
    bits: Optional[Literal[8, 4]] = _few_bits("the way that weights have moved is sent")
    dense_steps: int = Field(0, ge=0, description="first steps of a run that exchange the whole gradient")
    dense_epochs: float = Field(0.0, ge=0, description="first epochs of a run that exchange the whole gradient")

    @model_validator(mode="after")
    def _as_many_fragments_as_steps(self) -> "Local":
        if self.fragments > self.local_steps:
            raise ValueError(f"{self.fragments} fragments need as many updates between two means; raise local_steps")
        if self.delay >= self.local_steps:
            raise ValueError(
                f"a mean that is {count(self.delay, 'step')} late comes after the next one has begun; use a delay "
                f"below local_steps {self.local_steps}"
            )
        return self

    @property
    def sent_bits(self) -> Optional[int]:
        return self.bits

    @property
    def beside(self) -> float:
        return min(1.0, self.delay * self.fragments / self.local_steps)

    def _amount(self) -> str:
        return str(self.local_steps)

    def is_dense(self, step: int, steps_per_epoch: Optional[int]) -> bool:
        """Whether update `step`, from 0, is made of the whole gradient."""
        return step < max(self.dense_steps, self.dense_epochs * (steps_per_epoch or 0))

    def _details(self, optimizer: Optimizer) -> List[str]:
        parts = [f"mean of the weights every {count(self.local_steps, 'step')}"]
        if self.outer == "nesterov":
            parts = [
                f"outer Nesterov {self.outer_lr:g}, {self.outer_momentum:g} every {count(self.local_steps, 'step')}"
            ]
        first = [f"{self.dense_steps:,} steps"] * bool(self.dense_steps)
        first += [f"{self.dense_epochs:g} epochs"] * bool(self.dense_epochs)
        return [
            *parts,
            *([f"in {self.fragments} fragments"] if self.fragments > 1 else []),
            *([f"in {self.bits} bits"] if self.bits else []),
            *([f"dense for {' and '.join(first)}"] if first else []),
        ]


class NoExchange(Exchange):
    """Sends nothing, so that replicas drift apart: for measuring what the exchange costs."""

    method: Literal["none"] = "none"


class Auto(_Merging, _Selecting):
    """Measures the links at the start of a run and takes the method that is predicted to be fastest, of those that
    were measured to keep accuracy."""

    method: Literal["auto"] = "auto"
    accept_loss: float = Field(
        0.5,
        ge=0,
        le=100,
        description="points of top-1 that the method may lose, as far as that was measured (docs/exchange.md); 100 "
        "also admits what was not measured",
    )
    wire: Optional[Literal["float32", "float16"]] = Field(
        None, description="type of the values that travel; null is float16 with half, float32 with the others"
    )

    @property
    def sent(self) -> str:
        return self.wire or "float32"
