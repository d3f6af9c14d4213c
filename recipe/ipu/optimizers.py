"""The form of each optimizer on IPUs: one of poptorch.optim and its arguments, or the reason why there is none.

Facts are those of PopTorch 3.4 and PopART 3.4, named by file.
"""

from __future__ import annotations

from typing import Callable, Dict, NamedTuple, Tuple

from common.errors import ConfigError
from recipe.config import Recipe
from recipe.kinds import Registry
from recipe.optimization import Lamb, Lars, Optimizer, Precision, RmsProp, Sgd


class Name(NamedTuple):
    """Something of poptorch or torch that the engine looks up, e.g. torch.half."""

    path: str

    def __str__(self) -> str:
        return self.path


class Group(NamedTuple):
    """Parameters that are stepped alike: the skipped ones (optim.factory.skipped_names), or all others.

    lr_scale: factor on the schedule's learning rate. options: what else the group sets. source: keys of the recipe.
    """

    skipped: bool
    lr_scale: float
    options: Dict[str, float]
    source: str


class DeviceOptimizer(NamedTuple):
    """An optimizer of poptorch.optim. options: arguments of its constructor besides params and lr (which PopTorch
    compiles in unless it is one, too). constant: attributes that are compiled in. sources: the keys of the recipe that
    each option comes from, or "always: " and why. slots: PopART's prefix of each state tensor (*decompose.cpp)."""

    name: str
    options: Dict[str, object]
    constant: Tuple[str, ...]
    groups: Tuple[Group, Group]
    sources: Dict[str, str]
    slots: Dict[str, str]


FORMS: Registry[Callable[[Optimizer, Precision], DeviceOptimizer]] = Registry("a form on IPUs")
_Options = Dict[str, Tuple[object, str]]  # (value, source) of arguments; those that are None are left out
_Groups = Tuple[Group, Group]
_FLOAT = Name("torch.float")
_SHORTER_STEP = 1.75  # by so much the momentum's form steps shorter: the mean of docs/results/lars_forms.md
_FIRST, _SECOND = "first_order_momentum_accum_type", "second_order_momentum_accum_type"
_BOTH_CAST = (_FLOAT, "always: the first moment is cast to its type")


def optimizer(recipe: Recipe) -> DeviceOptimizer:
    """The optimizer that updates as the recipe's does, apart from rounding. Raises ConfigError where there is none."""
    section = recipe.optimizer
    if not any(isinstance(section, registered) for registered, _ in FORMS.items()):
        names = ", ".join(registered.default_name() for registered, _ in FORMS.items())
        raise ConfigError(f"optimizer.name {section.name} on IPUs: PopTorch has no such optimizer; use one of {names}")
    return FORMS.of(section)(section, recipe.precision)


def _device(
    name: str, precision: Precision, slots: Dict[str, str], options: _Options, groups: _Groups
) -> DeviceOptimizer:
    found = {key: pair for key, pair in options.items() if pair[0] is not None}
    fixed = tuple(key for key in found if key in ("betas", "eps", "momentum", "alpha"))
    found["loss_scaling"] = precision.loss_scale, "precision.loss_scale"
    found["accum_type"] = _FLOAT, "always: gradients add up in float32"
    values, sources = ({key: pair[number] for key, pair in found.items()} for number in (0, 1))
    constant = fixed if precision.dynamic_loss_scale else (*fixed, "loss_scaling")
    return DeviceOptimizer(name, values, constant, groups, sources, slots)


def _state(precision: Precision) -> Name:
    return Name("torch.half") if precision.weights == "float16" else _FLOAT


def _groups(section: Optimizer, **skipped: float) -> _Groups:
    """The parameters with weight decay, and those without, which have the options `skipped` besides."""
    return (
        Group(False, 1.0, {"weight_decay": section.weight_decay}, "optimizer.weight_decay"),
        Group(True, 1.0, {"weight_decay": 0.0, **skipped}, "optimizer.skip"),
    )


@FORMS.implements(Lars)
def _lars(section: Lars, precision: Precision) -> DeviceOptimizer:
    """LARS with `trust: momentum`, as LAMB whose second moment stays 0 (docs/ipu.md derives it).

    With E = eps and wd / E as weight decay LAMB's direction is u = (m + wd w) / E; the trust ratio cancels E. With
    float16 weights PopART adds m / E and wd w / E in float16, where E = 2^-8 keeps small momenta clear of the subnormal
    numbers. A maximum weight norm of 0 makes the ratio 1 (willow/src/patterns/adamdecompose.cpp): plain momentum.
    """
    if section.trust == "gradient":
        coefficient = f"{section.trust_coefficient * _SHORTER_STEP:.6g}"
        fault = "PopTorch has no LARS, and its LAMB divides by the momentum's norm"
        remedy = f"optimizer.trust=momentum optimizer.trust_coefficient={coefficient}"
        if section.nesterov:
            fault = f"{fault} and has no Nesterov momentum"
            remedy = f"optimizer.nesterov=false {remedy}"
        raise ConfigError(
            f"optimizer.trust gradient on IPUs: {fault}; use {remedy} ({_SHORTER_STEP} times as large: "
            "docs/results/lars_forms.md)"
        )
    if section.eps != 0:
        fault = f"optimizer.eps {section.eps} on IPUs: LARS runs as LAMB, whose trust ratio has no epsilon"
        raise ConfigError(f"{fault}; use optimizer.eps=0")
    state = _state(precision)
    epsilon = 1.0 if state is _FLOAT else 2.0**-8
    options = {
        "betas": ((section.momentum, 1.0), "optimizer.momentum; always: 1.0 keeps the second moment at 0"),
        "eps": (epsilon, "precision.weights"),
        "bias_correction": (False, "optimizer.name"),
        _FIRST: (state, "precision.weights"),
        _SECOND: _BOTH_CAST,
    }
    decay, plain = {"weight_decay": section.weight_decay / epsilon}, {"weight_decay": 0.0, "max_weight_norm": 0.0}
    scale, sources = section.skip_lr_scale * epsilon / (1 - section.momentum), "optimizer.skip, optimizer.skip_lr_scale"
    trusted = "optimizer.trust_coefficient, optimizer.weight_decay"
    groups = Group(False, section.trust_coefficient, decay, trusted), Group(True, scale, plain, sources)
    return _device("LAMB", precision, {"momentum_buffer": "Accl1___"}, options, groups)


@FORMS.implements(Lamb)
def _lamb(section: Lamb, precision: Precision) -> DeviceOptimizer:
    """LAMB; both moments in float32, as everywhere."""
    options = {
        "betas": ((section.beta1, section.beta2), "optimizer.beta1, optimizer.beta2"),
        "eps": (section.eps, "optimizer.eps"),
        "bias_correction": (True, "optimizer.name"),
        _FIRST: (_FLOAT, "always: averages in float32"),
        _SECOND: _BOTH_CAST,
    }
    slots = {"exp_avg": "Accl1___", "exp_avg_sq": "Accl2___"}
    return _device("LAMB", precision, slots, options, _groups(section, max_weight_norm=0.0))


@FORMS.implements(Sgd)
def _sgd(section: Sgd, precision: Precision) -> DeviceOptimizer:
    """SGD with accumulator and momentum apart. No learning rate in the momentum, as in torch (sgd.hpp: SGD2)."""
    if section.nesterov:
        fault = "optimizer.nesterov on IPUs: PopART adds a gradient that is not divided by accumulation and replicas"
        raise ConfigError(f"{fault}; use optimizer.nesterov=false")
    options = {
        "momentum": (section.momentum or None, "optimizer.momentum"),
        "use_combined_accum": (False, "always: accumulator and momentum apart"),
        "velocity_accum_type": (_state(precision), "precision.weights"),
    }
    return _device("SGD", precision, {"momentum_buffer": "Accl1___"}, options, _groups(section))


@FORMS.implements(RmsProp)
def _rmsprop(section: RmsProp, precision: Precision) -> DeviceOptimizer:
    """TensorFlow's form: averages start at 1, the rate is in the momentum, which is float32 on IPUs (adaptive.hpp)."""
    options = {
        "alpha": (section.alpha, "optimizer.alpha"),
        "eps": (section.eps, "optimizer.eps"),
        "momentum": (section.momentum or None, "optimizer.momentum"),
        _FIRST: (_FLOAT, "always: averages of squares in float32"),
        "use_tf_variant": (True, "optimizer.name"),
    }
    slots = {"square_avg": "Accl1___", "momentum_buffer": "Accl3___"}
    return _device("RMSprop", precision, slots, options, _groups(section))
