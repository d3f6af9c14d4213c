"""The form of each optimizer on IPUs: one of poptorch.optim and its arguments, or the reason why there is none.

PopTorch runs no Python code of an optimizer. A form registers for the class of its section, as the one of `Sgd` does.
Facts are those of PopTorch 3.4 and PopART 3.4, named by file.
"""

from __future__ import annotations

from typing import Dict, Iterator, NamedTuple, Tuple

from recipe.kinds import Registry
from recipe.optimization import Lamb, Lars, Optimizer, Precision, RmsProp, Sgd


class Name(NamedTuple):
    """Something of poptorch or torch that the engine looks up, e.g. torch.half."""

    path: str

    def __str__(self) -> str:
        return self.path


class Group(NamedTuple):
    """Parameters that are stepped alike: the skipped ones (optim.factory.skipped_names), or all others.

    lr_scale: the group's learning rate is the schedule's times this. options: what else the group sets.
    """

    skipped: bool
    lr_scale: float
    options: Dict[str, float]


class DeviceOptimizer(NamedTuple):
    """An optimizer of poptorch.optim.

    options: arguments of its constructor besides params and lr. The learning rate belongs there, too, lest PopTorch
    compile it in. constant: attributes for `variable_attrs.markAsConstant`, which are compiled in. sources: for each
    option, and for each group, the keys of the recipe that it comes from, or "always: " and why. slots: PopART's prefix
    of each state tensor (willow/src/patterns/*decompose.cpp).
    """

    name: str
    options: Dict[str, object]
    constant: Tuple[str, ...]
    groups: Tuple[Group, ...]
    sources: Dict[str, str]
    group_sources: Tuple[str, ...]
    slots: Dict[str, str]


_FLOAT = Name("torch.float")


class Form:
    """Base of the forms."""

    name = ""  # in poptorch.optim
    slots: Dict[str, str] = {}
    group_sources = ("optimizer.weight_decay", "optimizer.skip")

    def __init__(self, section: Optimizer, precision: Precision):
        self.section, self.precision = section, precision
        self.state = Name("torch.half" if precision.weights == "float16" else "torch.float")

    def refusals(self) -> Iterator[str]:
        """The rules for keys of this section."""
        return iter(())

    def options(self) -> Dict[str, Tuple[object, str]]:
        """(value, source) of the constructor's arguments; those that are None are left out."""
        raise NotImplementedError

    def groups(self) -> Tuple[Group, Group]:
        """The parameters with weight decay, and those without."""
        return Group(False, 1.0, {"weight_decay": self.section.weight_decay}), Group(True, 1.0, {"weight_decay": 0.0})

    def made(self) -> DeviceOptimizer:
        """The optimizer that updates as the recipe's does, apart from rounding."""
        found = {key: (value, source) for key, (value, source) in self.options().items() if value is not None}
        fixed = tuple(key for key in found if key in ("betas", "eps", "momentum", "alpha"))
        found["loss_scaling"] = self.precision.loss_scale, "precision.loss_scale"
        found["accum_type"] = _FLOAT, "always: gradients add up in float32"
        values = {key: value for key, (value, _) in found.items()}
        sources = {key: source for key, (_, source) in found.items()}
        constant = fixed if self.precision.dynamic_loss_scale else (*fixed, "loss_scaling")
        return DeviceOptimizer(self.name, values, constant, self.groups(), sources, self.group_sources, self.slots)


FORMS: Registry[type] = Registry("a form on IPUs")


@FORMS.implements(Lars)
class _Lars(Form):
    """LARS with `trust: momentum`, as LAMB whose second moment stays 0 (docs/ipu.md derives it).

    With E = eps and wd / E as weight decay LAMB's direction is u = (m + wd w) / E; the trust ratio cancels E. With
    float16 weights PopART adds m / E and wd w / E in float16, where E = 2^-8 keeps small momenta clear of the subnormal
    numbers. A maximum weight norm of 0 makes the ratio 1 (willow/src/patterns/adamdecompose.cpp): plain momentum.
    """

    name = "LAMB"
    slots = {"momentum_buffer": "Accl1___"}
    group_sources = ("optimizer.trust_coefficient, optimizer.weight_decay", "optimizer.skip, optimizer.skip_lr_scale")

    def refusals(self) -> Iterator[str]:
        if self.section.trust == "gradient":
            yield (
                "optimizer.trust gradient on IPUs: PopTorch has no LARS, and its LAMB, which stands in for it, "
                "divides by the norm of the momentum; use optimizer.trust=momentum and a trust_coefficient 1.6 to 2 "
                "times as large (docs/results/lars_forms.md)"
            )
        if self.section.eps != 0:
            yield (
                f"optimizer.eps {self.section.eps} on IPUs: LARS runs as PopTorch's LAMB, whose trust ratio has no "
                "epsilon; use optimizer.eps=0"
            )

    @property
    def _epsilon(self) -> float:
        return 2.0**-8 if self.state.path == "torch.half" else 1.0

    def options(self) -> Dict[str, Tuple[object, str]]:
        betas = "optimizer.momentum; always: 1.0 keeps the second moment at 0"
        return {
            "betas": ((self.section.momentum, 1.0), betas),
            "eps": (self._epsilon, "precision.weights"),
            "bias_correction": (False, "optimizer.name"),
            "first_order_momentum_accum_type": (self.state, "precision.weights"),
            "second_order_momentum_accum_type": (_FLOAT, "always: the first moment is cast to its type"),
        }

    def groups(self) -> Tuple[Group, Group]:
        section, epsilon = self.section, self._epsilon
        scale = section.skip_lr_scale * epsilon / (1 - section.momentum)
        trusted = Group(False, section.trust_coefficient, {"weight_decay": section.weight_decay / epsilon})
        return trusted, Group(True, scale, {"weight_decay": 0.0, "max_weight_norm": 0.0})


@FORMS.implements(Lamb)
class _Lamb(Form):
    """LAMB; both moments in float32, as everywhere."""

    name = "LAMB"
    slots = {"exp_avg": "Accl1___", "exp_avg_sq": "Accl2___"}

    def options(self) -> Dict[str, Tuple[object, str]]:
        return {
            "betas": ((self.section.beta1, self.section.beta2), "optimizer.beta1, optimizer.beta2"),
            "eps": (self.section.eps, "optimizer.eps"),
            "bias_correction": (True, "optimizer.name"),
            "first_order_momentum_accum_type": (_FLOAT, "always: averages in float32"),
            "second_order_momentum_accum_type": (_FLOAT, "always: the first moment is cast to its type"),
        }

    def groups(self) -> Tuple[Group, Group]:
        trusted, skipped = super().groups()
        return trusted, skipped._replace(options={**skipped.options, "max_weight_norm": 0.0})


@FORMS.implements(Sgd)
class _Sgd(Form):
    """SGD with accumulator and momentum apart. No learning rate in the momentum, as in torch (sgd.hpp: SGD2)."""

    name = "SGD"
    slots = {"momentum_buffer": "Accl1___"}

    def refusals(self) -> Iterator[str]:
        if self.section.nesterov:
            yield (
                "optimizer.nesterov on IPUs: PopART adds the gradient to Nesterov's step without dividing it by "
                "accumulation and replicas; use optimizer.nesterov=false"
            )

    def options(self) -> Dict[str, Tuple[object, str]]:
        return {
            "momentum": (self.section.momentum or None, "optimizer.momentum"),
            "use_combined_accum": (False, "always: accumulator and momentum apart"),
            "velocity_accum_type": (self.state, "precision.weights"),
        }


@FORMS.implements(RmsProp)
class _RmsProp(Form):
    """TensorFlow's form: averages start at 1, the rate is in the momentum, which is float32 on IPUs (adaptive.hpp)."""

    name = "RMSprop"
    slots = {"square_avg": "Accl1___", "momentum_buffer": "Accl3___"}

    def options(self) -> Dict[str, Tuple[object, str]]:
        return {
            "alpha": (self.section.alpha, "optimizer.alpha"),
            "eps": (self.section.eps, "optimizer.eps"),
            "momentum": (self.section.momentum or None, "optimizer.momentum"),
            "first_order_momentum_accum_type": (_FLOAT, "always: averages of squares in float32"),
            "use_tf_variant": (True, "optimizer.name"),
        }


def refusals(section: Optimizer, precision: Precision) -> Iterator[str]:
    """The rules for an optimizer, among them that it has a form."""
    if FORMS.all_of(section):
        return FORMS.of(section)(section, precision).refusals()
    names = ", ".join(registered.default_name() for registered, _ in FORMS.items())
    return iter([f"optimizer.name {section.name} on IPUs: PopTorch has no such optimizer; use one of {names}"])
