"""The section `exchange`: how replicas combine their gradients."""

from typing import Any, ClassVar, Dict, Iterator, List, Literal, Optional

from pydantic import AfterValidator, Field
from typing_extensions import Annotated

from common.text import count
from recipe.kinds import Kind
from recipe.optimization import Optimizer
from recipe.section import shares

# Keys of the sparse methods that change what is learned: another method refuses them, unless they
# say what it does.
_ONLY_SPARSE = ("density_warmup", "dense_1d", "dense_steps")


class Exchange(Kind):
    """How replicas combine their gradients, once an update."""

    tag = "method"
    resets = False
    # A method of one's own overrides those of the following that it does not fit. The defaults
    # promise least: what they forbid is refused, not trained wrongly.
    # Whether a replica sends only a share of its gradient.
    sparse: ClassVar[bool] = False
    # Whether `density` says how much a replica sends.
    uses_density: ClassVar[bool] = False
    # Whether replicas make updates alone, so that their weights differ in between.
    is_local: ClassVar[bool] = False
    # Whether an update is of the gradients of all replicas, not of each one's own.
    sums: ClassVar[bool] = True
    # Whether an update may take several steps, as with a batch that grows.
    grows: ClassVar[bool] = False
    # Whether the order in which an element is added up depends on its place in a stage's buffer.
    adds_by_place: ClassVar[bool] = True

    method: str = Field("dense", description="what replicas send, and how it is combined")
    density: float = Field(0.001, gt=0, le=1)
    """share of a gradient's values that a replica sends by topk and gtopk, and that their
    predictions assume"""
    delay: int = Field(0, ge=0, le=64)
    """steps by which gradients, or means of weights, are late; with 1 the exchange runs beside the
    next step"""

    @classmethod
    def foreign(cls, key: str, value: Any) -> Optional[str]:
        """Return why the method refuses a `key` with this `value`: see `Kind.foreign`."""
        # Only keys that change what is learned: a sweep over methods may leave all others in place.
        if key == "order" and value == "tree":
            return f"order tree promises equal bits, which method {cls.default_name()} rounds away; use dense"
        if key in _ONLY_SPARSE and value:
            return f"{key} goes with method topk or gtopk, not {cls.default_name()}"
        return None

    def refused_by(self, method: str) -> Dict[str, Any]:
        """Return the keys that have to change before another method takes the section, with the
        values that it accepts.

        Args:
            method: name of the other method.
        """
        other = self.kinds[method]
        defaults = self.defaults()
        unknown = [key for key in self.own_keys() if key not in other.model_fields]
        return {key: defaults[key] for key in unknown if other.foreign(key, getattr(self, key))}

    def to(self, method: str, **changes: Any) -> "Exchange":
        """Return the section of another method, with the keys that both have.

        Args:
            method: its name.
            changes: keys with other values.
        """
        # Not by model_copy: the other section is checked, and gets defaults for its further keys.
        known = self.kinds[method].model_fields
        keys = {key: value for key, value in self if key in known}
        keys.update(changes, method=method)
        return Exchange(**keys)

    def compresses_update(self, optimizer: Optimizer) -> bool:
        """Return whether a replica selects from the update that `optimizer` would make of its own
        gradient.
        """
        return False

    # Keys that only some methods have are asked for here with a default: engines and plans need not
    # know which methods there are.

    @property
    def in_tree(self) -> bool:
        """True where micro batches are added up in one fixed binary tree."""
        return getattr(self, "order", "fast") == "tree"

    @property
    def whole_1d(self) -> bool:
        """True where gradients of biases and norms are sent whole, beside a share of the rest."""
        return getattr(self, "dense_1d", False)

    @property
    def sent(self) -> str:
        """Type of the values that travel."""
        return getattr(self, "wire", None) or "float32"

    @property
    def sent_bits(self) -> Optional[int]:
        """8 or 4 where the values that travel are whole multiples of a scale."""
        return getattr(self, "bits", None)

    @property
    def counts_epochs(self) -> bool:
        """True where what is sent depends on the epoch."""
        keys = ("density_warmup", "dense_epochs")
        return any(getattr(self, key, None) for key in keys)

    @property
    def beside(self) -> float:
        """Steps, in each step, that the exchange may take while the next ones are computed."""
        return float(self.delay > 0)

    @property
    def variant(self) -> str:
        """The method, with its pattern where there are several."""
        if self.sparse and hasattr(self, "pattern"):
            return f"{self.method} {self.pattern}"
        return self.method

    @property
    def label(self) -> str:
        """A name that also tells how much is sent, e.g. `gtopk owners 0.01` or `local 8, 4 bits`."""
        amount = f"{self.density:g}" if self.sparse else getattr(self, "local_steps", "")
        label = f"{self.variant} {amount}".rstrip()
        return f"{label}, {self.sent_bits} bits" if self.sent_bits else label


class Dense(Exchange):
    """Sends the whole gradient, in float32 or few bits."""

    grows: ClassVar[bool] = True

    method: Literal["dense"] = "dense"
    order: Literal["fast", "tree"] = "fast"
    """order of sums: as micro batches come, or one binary tree, so that any replicas give the same
    bits"""
    bits: Optional[Literal[8, 4]] = None
    """bits in which gradients are sent, with a scale for each 256 values; rounding errors are sent
    later"""

    def faults(self) -> Iterator[str]:
        """Yield the fault of tree order beside rounding."""
        if self.bits and self.order == "tree":
            yield (
                "order tree promises equal bits for all topologies, which bits rounds away; use order=fast"
            )


class Half(Exchange):
    """Sends 16 bits and sums in float32."""

    adds_by_place: ClassVar[bool] = False  # each element in the order of replicas

    method: Literal["half"] = "half"
    wire: Literal["float16", "bfloat16"] = "float16"
    """type of the values that travel"""


class Selecting(Exchange):
    """Keys of the methods that send the largest values of a vector and keep the rest for later
    steps.
    """

    uses_density: ClassVar[bool] = True

    compress: Optional[Literal["update", "gradient"]] = None
    """of what the largest values are sent: update, of what a replica's own gradient would change,
    with lars and sgd; gradient, as published; null: update with lars, unless delayed, else
    gradient"""
    sketch: int = Field(61, ge=1, le=1 << 16)
    """with compress update: values a layer that tell the norm of the mean gradient, to 1 / sqrt(2
    sketch); a prime"""
    density_warmup: Annotated[List[float], AfterValidator(shares)] = Field(default_factory=list)
    """densities of the first epochs, one each, e.g. [0.25, 0.0625, 0.015625, 0.004]"""
    dense_steps: int = Field(0, ge=0)
    """first steps of a run that send the whole gradient"""
    dense_1d: bool = False
    """send the gradients of biases and norms whole, beside the sparse ones"""
    stage_share: Literal["size", "threshold"] = "size"
    """values that a stage sends: in proportion to its parameters (size), or to the largest of the
    model (threshold)"""

    def compresses_update(self, optimizer: Optimizer) -> bool:
        """Return whether `compress` is update, or would be by default with this `optimizer`."""
        # A linear optimizer makes of a gradient in parts what it would make of the whole, so parts
        # of gradients may travel. With a delay the weights of the update's step are gone.
        if self.compress is None:
            return optimizer.replica_update and not optimizer.linear and not self.delay
        return self.compress == "update"


class Sparse(Selecting):
    """Base of the methods that send a share of a gradient."""

    sparse: ClassVar[bool] = True
    wire: Literal["float32", "float16"] = "float32"
    """type of the values that travel"""
    bits: Optional[Literal[8, 4]] = None
    """bits in which values are sent, with a scale for each 256; rounding errors are sent later;
    null: as wire"""

    @property
    def sent(self) -> str:
        return f"int{self.bits}" if self.bits else self.wire

    def density_at(self, step: int, steps_per_epoch: Optional[int]) -> float:
        """Return the share of a gradient's values that a replica sends in an update; 1 in the
        first `dense_steps`.

        Args:
            step: of the run, from 0.
            steps_per_epoch: None only without a `density_warmup`.
        """
        if step < self.dense_steps:
            return 1.0
        if not self.density_warmup:
            return self.density
        assert steps_per_epoch is not None, "density_warmup has a density for each epoch"
        epoch = step // steps_per_epoch
        return self.density_warmup[epoch] if epoch < len(self.density_warmup) else self.density


class TopK(Sparse):
    """Sends the largest values of each replica's gradient to all."""

    method: Literal["topk"] = "topk"


class _Merging(Exchange):
    """Keys of the methods that keep the largest values of sums."""

    pattern: Literal["tree", "butterfly", "owners"] = "tree"
    """tree adds up to replica 0 and sends back (2 log2 P hops); butterfly adds in pairs on all
    replicas at once (log2 P hops, more work for the processors); owners adds everything, a region
    on each replica, and keeps the largest of the whole sum (fewest bytes for many replicas)"""
    conserve: bool = True
    """keep values that are left out of a sum for later steps; false: the published rule, which
    loses a part of them"""


class GTopK(_Merging, Sparse):
    """Keeps as many values of the replicas' sum as each replica sends (Shi et al., 1901.04359)."""

    method: Literal["gtopk"] = "gtopk"


class Local(Exchange):
    """Replicas make some updates alone, then take the mean of their weights (local SGD, DiLoCo)."""

    is_local: ClassVar[bool] = True

    method: Literal["local"] = "local"
    local_steps: int = Field(8, ge=1, le=10_000)
    """updates between two means of the same weights"""
    fragments: int = Field(1, ge=1, le=1000)
    """parts of the weights, whose means are taken at different updates; up to local_steps"""
    outer: Literal["mean", "nesterov"] = "mean"
    """replicas go on from the mean of weights, or from a step of Nesterov's momentum along its
    movement (DiLoCo)"""
    outer_lr: float = Field(0.7, gt=0, le=2, description="with outer nesterov: its learning rate")
    outer_momentum: float = Field(0.9, ge=0, lt=1, description="with outer nesterov: its momentum")
    bits: Optional[Literal[8, 4]] = None
    """bits in which movements of weights are sent, with a scale for each 256; rounding errors are
    sent later"""
    dense_steps: int = Field(0, ge=0)
    """first steps of a run that exchange the whole gradient"""
    dense_epochs: float = Field(0.0, ge=0, le=1e6)
    """first epochs of a run that exchange the whole gradient"""

    def faults(self) -> Iterator[str]:
        """Yield faults of means that would be due before the last ones have arrived."""
        if self.fragments > self.local_steps:
            yield f"{self.fragments} fragments need as many updates between two means; raise local_steps"
        if self.delay >= self.local_steps:
            late = count(self.delay, "step")
            yield (
                f"a mean {late} late comes after the next; use a delay below local_steps {self.local_steps}"
            )

    @property
    def beside(self) -> float:
        # Each fragment is exchanged once in local_steps, and may take `delay` of them.
        return min(1.0, self.delay * self.fragments / self.local_steps)

    def is_dense(self, step: int, steps_per_epoch: Optional[int]) -> bool:
        """Return whether update `step`, from 0, is made of the whole gradient.

        Args:
            step: of the run.
            steps_per_epoch: None where epochs do not count.
        """
        return step < max(self.dense_steps, self.dense_epochs * (steps_per_epoch or 0))


class NoExchange(Exchange):
    """Sends nothing, so that replicas drift apart: for measuring what the exchange costs."""

    sums: ClassVar[bool] = False
    grows: ClassVar[bool] = True
    adds_by_place: ClassVar[bool] = False

    method: Literal["none"] = "none"


class Auto(_Merging, Selecting):
    """Measures the links at the start of a run and takes the method that is predicted to be
    fastest, of those that were measured to keep accuracy.
    """

    grows: ClassVar[bool] = True  # it takes a method that does, too
    adds_by_place: ClassVar[bool] = False  # to be asked of the method that is taken

    method: Literal["auto"] = "auto"
    accept_loss: float = Field(0.5, ge=0, le=100)
    """points of top-1 that the method may lose, as measured (docs/exchange.md); 100: even if not
    measured"""
    wire: Optional[Literal["float32", "float16"]] = None
    """type of the values that travel; null is float16 with half, float32 with the others"""
