"""The form of each optimizer on IPUs: one of poptorch.optim and its arguments, or the reason why
there is none.

Facts are those of PopTorch 3.4 and PopART 3.4, named by file.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping, NamedTuple, Tuple

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
    """Parameters that are stepped alike: the skipped ones (optim.factory.skipped_names), or all
    others.

    lr_scale: factor on the schedule's learning rate. options: what else the group sets. source:
    keys of the recipe.
    """

    skipped: bool
    lr_scale: float
    options: Dict[str, float]
    source: str


class DeviceOptimizer(NamedTuple):
    """An optimizer of poptorch.optim.

    options: arguments of its constructor besides params and lr (which PopTorch compiles in unless
    it is one, too). constant: attributes that are compiled in. sources: the keys of the recipe that
    each option comes from, or "always: " and why. slots: PopART's prefix of each state tensor
    (*decompose.cpp). state: types of all tensors of a parameter's state, also of those that nothing
    reads.
    """

    name: str
    options: Dict[str, object]
    constant: Tuple[str, ...]
    groups: Tuple[Group, Group]
    sources: Dict[str, str]
    slots: Dict[str, str]
    state: Tuple[Name, ...]


FORMS: Registry[Callable[[Any, Precision], DeviceOptimizer]] = Registry("a form on IPUs")
# (value, source) of arguments; those that are None are left out.
_Options = Mapping[str, Tuple[object, str]]
_Groups = Tuple[Group, Group]
_FLOAT = Name("torch.float")
_HALF = Name("torch.half")
_CONSTANT = ("betas", "eps", "momentum", "alpha")  # attributes that never change during a run
# By so much the momentum's form steps shorter: the mean of docs/results/lars_forms.md.
_SHORTER_STEP = 1.75
_FIRST = "first_order_momentum_accum_type"
_SECOND = "second_order_momentum_accum_type"
_BOTH_CAST = (_FLOAT, "always: the first moment is cast to its type")


def optimizer(recipe: Recipe) -> DeviceOptimizer:
    """Return the optimizer that updates as that of `recipe` does, apart from rounding.

    Raises:
        ConfigError: PopTorch has none.
    """
    section = recipe.optimizer
    # Asked of the registry, so that a form of somebody's own is offered, too.
    with_form = [kind for kind, _ in FORMS.items() if issubclass(kind, Optimizer)]
    if not isinstance(section, tuple(with_form)):
        names = ", ".join(kind.default_name() for kind in with_form)
        raise ConfigError(
            f"optimizer.name {section.name} on IPUs: PopTorch has no such optimizer; use one of {names}"
        )
    return FORMS.of(section)(section, recipe.precision)


def _device_optimizer(
    name: str,
    precision: Precision,
    slots: Dict[str, str],
    options: _Options,
    groups: _Groups,
    state: Tuple[Name, ...],
) -> DeviceOptimizer:
    """Return an optimizer of poptorch.optim with the options that all of them have besides."""
    arguments = {key: pair for key, pair in options.items() if pair[0] is not None}
    # Constants are compiled in: a dynamic loss scale must not be one.
    constant = [key for key in arguments if key in _CONSTANT]
    if not precision.dynamic_loss_scale:
        constant.append("loss_scaling")
    arguments["loss_scaling"] = (precision.loss_scale, "precision.loss_scale")
    arguments["accum_type"] = (_FLOAT, "always: gradients add up in float32")
    return DeviceOptimizer(
        name=name,
        options={key: value for key, (value, _) in arguments.items()},
        constant=tuple(constant),
        groups=groups,
        sources={key: source for key, (_, source) in arguments.items()},
        slots=slots,
        state=state,
    )


def _state_type(precision: Precision) -> Name:
    """Return the type of a state tensor that may have that of the weights."""
    return _HALF if precision.weights == "float16" else _FLOAT


def _groups(weight_decay: float, **skipped: float) -> _Groups:
    """Return the parameters with weight decay, and those without, which have the options `skipped`
    besides.
    """
    decay = {"weight_decay": weight_decay}
    no_decay = {"weight_decay": 0.0, **skipped}
    return (
        Group(False, 1.0, decay, "optimizer.weight_decay"),
        Group(True, 1.0, no_decay, "optimizer.skip"),
    )


@FORMS.implements(Lars)
def _lars(section: Lars, precision: Precision) -> DeviceOptimizer:
    """Return LARS with `trust: momentum`, as LAMB whose second moment stays 0 (docs/ipu.md derives
    it).

    With E = eps and wd / E as weight decay LAMB's direction is u = (m + wd w) / E; the trust ratio
    cancels E. With float16 weights PopART adds m / E and wd w / E in float16, where E = 2^-8 keeps
    small momenta clear of the subnormal numbers. A maximum weight norm of 0 makes the ratio 1
    (willow/src/patterns/adamdecompose.cpp): plain momentum.
    """
    _check_lars(section)
    state = _state_type(precision)
    epsilon = 1.0 if state is _FLOAT else 2.0**-8
    betas = (section.momentum, 1.0)
    options = {
        "betas": (betas, "optimizer.momentum; always: 1.0 keeps the second moment at 0"),
        "eps": (epsilon, "precision.weights"),
        "bias_correction": (False, "optimizer.name"),
        _FIRST: (state, "precision.weights"),
        _SECOND: _BOTH_CAST,
    }
    slots = {"momentum_buffer": "Accl1___"}
    groups = _groups_of_lars(section, epsilon)
    # LAMB's second moment is there, though it stays 0.
    return _device_optimizer("LAMB", precision, slots, options, groups, state=(state, _FLOAT))


def _groups_of_lars(section: Lars, epsilon: float) -> _Groups:
    """Return the groups of parameters of `_lars`, with its E as `epsilon`."""
    trusted = Group(
        skipped=False,
        lr_scale=section.trust_coefficient,
        options={"weight_decay": section.weight_decay / epsilon},
        source="optimizer.trust_coefficient, optimizer.weight_decay",
    )
    # Without a trust ratio nothing cancels E, nor the factor 1 - momentum of LAMB's first moment.
    skipped = Group(
        skipped=True,
        lr_scale=section.skip_lr_scale * epsilon / (1 - section.momentum),
        options={"weight_decay": 0.0, "max_weight_norm": 0.0},
        source="optimizer.skip, optimizer.skip_lr_scale",
    )
    return trusted, skipped


def _check_lars(section: Lars) -> None:
    """Raise ConfigError for a form of LARS that LAMB cannot take."""
    # The two forms step alike up to a factor, by which the remedy's coefficient is larger.
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


@FORMS.implements(Lamb)
def _lamb(section: Lamb, precision: Precision) -> DeviceOptimizer:
    """Return LAMB; both moments in float32, as everywhere."""
    options = {
        "betas": ((section.beta1, section.beta2), "optimizer.beta1, optimizer.beta2"),
        "eps": (section.eps, "optimizer.eps"),
        "bias_correction": (True, "optimizer.name"),
        _FIRST: (_FLOAT, "always: averages in float32"),
        _SECOND: _BOTH_CAST,
    }
    slots = {"exp_avg": "Accl1___", "exp_avg_sq": "Accl2___"}
    # A weight norm of at most 0 makes the trust ratio 1; see `_lars`.
    groups = _groups(section.weight_decay, max_weight_norm=0.0)
    return _device_optimizer("LAMB", precision, slots, options, groups, state=(_FLOAT, _FLOAT))


@FORMS.implements(Sgd)
def _sgd(section: Sgd, precision: Precision) -> DeviceOptimizer:
    """Return SGD with accumulator and momentum apart. No learning rate in the momentum, as in torch
    (sgd.hpp: SGD2).
    """
    if section.nesterov:
        fault = "optimizer.nesterov on IPUs: PopART adds a gradient that is not divided by accumulation and replicas"
        raise ConfigError(f"{fault}; use optimizer.nesterov=false")
    velocity = _state_type(precision)
    options = {
        "momentum": (section.momentum or None, "optimizer.momentum"),
        "use_combined_accum": (False, "always: accumulator and momentum apart"),
        "velocity_accum_type": (velocity, "precision.weights"),
    }
    slots = {"momentum_buffer": "Accl1___"}
    groups = _groups(section.weight_decay)
    state = (velocity,) if section.momentum else ()
    return _device_optimizer("SGD", precision, slots, options, groups, state)


@FORMS.implements(RmsProp)
def _rmsprop(section: RmsProp, precision: Precision) -> DeviceOptimizer:
    """Return RMSprop in TensorFlow's form: averages start at 1, the rate is in the momentum.

    The momentum is float32 on IPUs (adaptive.hpp).
    """
    options = {
        "alpha": (section.alpha, "optimizer.alpha"),
        "eps": (section.eps, "optimizer.eps"),
        "momentum": (section.momentum or None, "optimizer.momentum"),
        _FIRST: (_FLOAT, "always: averages of squares in float32"),
        "use_tf_variant": (True, "optimizer.name"),
    }
    slots = {"square_avg": "Accl1___", "momentum_buffer": "Accl3___"}
    groups = _groups(section.weight_decay)
    state = (_FLOAT, _FLOAT) if section.momentum else (_FLOAT,)
    return _device_optimizer("RMSprop", precision, slots, options, groups, state)
