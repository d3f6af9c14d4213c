"""The section of a recipe that says how replicas combine their gradients, and what its keys ask of other sections."""

from __future__ import annotations

from typing import TYPE_CHECKING, List, Literal, Optional

from pydantic import Field, model_validator

from recipe.division import count
from recipe.errors import ConfigError
from recipe.section import Section

if TYPE_CHECKING:
    from recipe.config import Recipe

SPARSE = ("topk", "gtopk")
# Keys that other methods have no use for.
ONLY_SPARSE = (
    "density_warmup", "momentum_correction", "factor_masking", "dense_1d", "dense_steps",
)  # fmt: skip


class Exchange(Section):
    """How replicas combine their gradients, once an update."""

    method: Literal["dense", "half", "topk", "gtopk", "none", "auto"] = Field(
        "dense",
        description="dense sends float32; half sends 16 bits and sums in float32; topk and gtopk send the share "
        "`density` of a gradient, the largest, and keep the rest for later steps: topk gathers all replicas', gtopk "
        "keeps as many of their sum; auto measures the links at the start of a run and takes the method that is "
        "predicted to be fastest; none sends nothing, so that replicas drift apart: for measuring what the exchange "
        "costs",
    )
    order: Literal["fast", "tree"] = Field(
        "fast",
        description="order of the sum over micro batches: fast, as they come; tree, one fixed binary tree, so that "
        "1, 2, 4 ... replicas and any stages give the same bits",
    )
    wire: Optional[Literal["float32", "float16", "bfloat16"]] = Field(
        None,
        description="half, topk, gtopk: what a value travels as; null is float16 with half, float32 with the others",
    )
    density: float = Field(
        0.001, gt=0, le=1, description="topk, gtopk: share of a gradient's values that a replica sends"
    )
    density_warmup: List[float] = Field(
        default_factory=list,
        description="topk, gtopk: densities of the first epochs, one each, e.g. [0.25, 0.0625, 0.015625, 0.004]",
    )
    dense_steps: int = Field(0, ge=0, description="topk, gtopk: first steps of a run that send the whole gradient")
    dense_1d: bool = Field(
        False, description="topk, gtopk: send the gradients of biases and norms whole, beside the sparse ones"
    )
    pattern: Literal["tree", "butterfly"] = Field(
        "tree",
        description="gtopk: tree adds up to replica 0 and sends back (2 log2 P hops); butterfly adds in pairs on all "
        "replicas at once (log2 P hops, more work for the processors)",
    )
    conserve: bool = Field(
        True,
        description="gtopk: the replica that leaves values out of a sum keeps them for later steps; false is the "
        "published rule, by which a part of them is lost",
    )
    momentum_correction: bool = Field(
        False,
        description="topk, gtopk: momentum is applied by each replica before it selects, not by the optimizer",
    )
    factor_masking: bool = Field(False, description="momentum_correction: momentum of what is sent starts again from 0")
    stage_share: Literal["size", "threshold"] = Field(
        "size",
        description="topk, gtopk: how stages share the values to send: size, in proportion to their parameters; "
        "threshold, to where the largest of the whole model are",
    )
    delay: int = Field(
        0,
        ge=0,
        le=64,
        description="apply gradients so many steps late; with 1 the exchange runs beside the next step's computation",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Exchange:
        if self.order == "tree" and self.method != "dense":
            raise ValueError(f"order tree promises equal bits, which method {self.method} rounds away; use dense")
        if not all(0 < density <= 1 for density in self.density_warmup):
            raise ValueError(f"density_warmup takes shares between 0 and 1, found {self.density_warmup}")
        if self.method == "half" and self.wire == "float32":
            raise ValueError("wire float32 is what method dense sends; use dense, or wire float16 or bfloat16")
        if self.method not in (*SPARSE, "auto"):
            key = next((key for key in ONLY_SPARSE if getattr(self, key)), None)
            if key:
                raise ValueError(f"{key} goes with method topk or gtopk, not {self.method}")
        elif self.wire == "bfloat16":
            raise ValueError(f"method {self.method} sends float32 or float16; give wire=float16")
        if self.factor_masking and not self.momentum_correction:
            raise ValueError("factor_masking clears the momentum of momentum_correction; give momentum_correction=true")
        return self

    @property
    def sparse(self) -> bool:
        """Whether a replica sends only a share of its gradient."""
        return self.method in SPARSE

    @property
    def sent(self) -> str:
        """The type of the values that travel."""
        return self.wire or ("float16" if self.method == "half" else "float32")

    def describe(self) -> str:
        """A few words, e.g. `exchange gtopk (butterfly, float32), density 0.001, conserving`."""
        if not self.sparse:
            wire = f" ({self.sent})" if self.method == "half" else ""
            parts = [f"exchange {self.method}{wire}", f"order {self.order}"]
        else:
            pattern = f"{self.pattern}, " if self.method == "gtopk" else ""
            warmup = ", ".join(f"{density:g}" for density in self.density_warmup)
            parts = [f"exchange {self.method} ({pattern}{self.sent})", f"density {self.density:g}"]
            parts += [f"after {warmup} in the first epochs"] if warmup else []
            parts += [f"dense for {self.dense_steps} steps"] if self.dense_steps else []
            parts += ["conserving" if self.conserve else "published residual rule"] if self.method == "gtopk" else []
            switches = ("momentum_correction", "factor_masking", "dense_1d")
            parts += [name.replace("_", " ") for name in switches if getattr(self, name)]
        return ", ".join(parts + ([f"gradients {count(self.delay, 'step')} late"] if self.delay else []))

    def density_at(self, step: int, steps_per_epoch: Optional[int]) -> float:
        """Share of a gradient's values that a replica sends in update `step`, from 0; 1 in the first `dense_steps`."""
        if step < self.dense_steps:
            return 1.0
        epoch = step // steps_per_epoch if self.density_warmup else 0
        return self.density_warmup[epoch] if epoch < len(self.density_warmup) else self.density


def bound_to_cut(recipe: Recipe, replicas: int) -> str:
    """Why another cut into stages would change what `replicas` replicas learn; nothing where it changes no bit.

    An all-reduce adds in an order that depends on an element's place in the stage's buffer, which of two replicas'
    numbers is no matter. `half` and the tree add each element in the order of replicas, wherever it lies.
    """
    exchange = recipe.exchange
    if exchange.sparse:
        return f"{exchange.method} selects within each stage"
    if replicas > 2 and (exchange.method, exchange.order) == ("dense", "fast"):
        return f"exchange.order fast adds {replicas} replicas' gradients as they lie in a stage"
    if replicas > 2 and exchange.method != "none" and recipe.model.norm == "batch":
        return f"running statistics of {replicas} replicas are added as they lie in a stage"
    return ""


def check(recipe: Recipe) -> None:
    """Raises ConfigError where the section's keys do not go with those of others."""
    exchange, optimizer = recipe.exchange, recipe.optimizer
    if exchange.momentum_correction and not optimizer.replica_momentum:
        raise ConfigError(
            "exchange.momentum_correction takes over the momentum of sgd without nesterov or of lars with trust "
            f"gradient, but the optimizer is {optimizer.form()}; use one of these, or "
            "exchange.momentum_correction=false"
        )
    if exchange.delay and recipe.model.norm == "batch":
        raise ConfigError(
            "exchange.delay and model.norm batch: running statistics would be ahead of the weights; use "
            "model.norm=group or exchange.delay=0"
        )
    if exchange.delay and recipe.precision.dynamic_loss_scale:
        raise ConfigError(
            "exchange.delay and precision.dynamic_loss_scale: a gradient that overflows would lower the scale of steps "
            "that are computed already; use dynamic_loss_scale=false"
        )
