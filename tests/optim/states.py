"""Weights of four shapes, every optimizer that steps them, and LARS in float64, shared by the tests
of optim/."""

import platform
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from optim import compilation, factory, lars_formula
from optim.lars_formula import Hyperparameters
from optim.weight_state import WeightState
from recipe.config import Optimizer

HALF = torch.float16
BRAIN = torch.bfloat16
SINGLE = torch.float32
SHAPES = {
    "conv.weight": (6, 3, 3, 3),
    "norm.weight": (6,),
    "head.weight": (10, 6),
    "head.bias": (10,),
}
SKIPPED = ("norm.weight", "head.bias")
# State, its rounding, and what is computed in. A float32 state on a CPU that computes in float32 is
# stepped in place.
FORMATS = [
    (HALF, "stochastic", HALF),
    (HALF, "stochastic", SINGLE),
    (HALF, "nearest", BRAIN),
    (SINGLE, "nearest", HALF),
    (SINGLE, "nearest", SINGLE),
]
CONTROLS = {
    "sgd": {"name": "sgd", "momentum": 0.8, "weight_decay": 0.01},
    "sgd, Nesterov": {"name": "sgd", "momentum": 0.8, "weight_decay": 0.01, "nesterov": True},
    "sgd without momentum": {"name": "sgd", "momentum": 0.0, "weight_decay": 0.01},
    "rmsprop": {
        "name": "rmsprop",
        "momentum": 0.8,
        "weight_decay": 0.01,
        "alpha": 0.7,
        "eps": 1e-3,
    },
    "rmsprop without momentum": {
        "name": "rmsprop",
        "momentum": 0.0,
        "weight_decay": 0.01,
        "alpha": 0.7,
        "eps": 1e-3,
    },
    "lamb": {"name": "lamb", "weight_decay": 0.05, "beta1": 0.8, "beta2": 0.95, "eps": 1e-5},
    "lamb without decay": {
        "name": "lamb",
        "weight_decay": 0.0,
        "beta1": 0.8,
        "beta2": 0.95,
        "eps": 1e-5,
    },
    "adamw": {"name": "adamw", "weight_decay": 0.05, "beta1": 0.8, "beta2": 0.95, "eps": 1e-5},
}
LARS = {
    "name": "lars",
    "momentum": 0.8,
    "weight_decay": 0.01,
    "trust_coefficient": 0.1,
    "skip_lr_scale": 0.5,
}
MUON = {
    "name": "muon",
    "momentum": 0.8,
    "weight_decay": 0.05,
    "beta1": 0.8,
    "beta2": 0.95,
    "eps": 1e-5,
}
# Of LARS, as arguments and as keys of the section.
FORMS = {"gradient": {}, "momentum": {"trust": "momentum"}, "nesterov": {"nesterov": True}}
SECTIONS = {
    "lars": LARS,
    "lars, momentum": {**LARS, **FORMS["momentum"]},
    **CONTROLS,
    "muon": MUON,
    "lars, Nesterov": {**LARS, **FORMS["nesterov"]},
}
INSTRUCTIONS = ["native", "x86-64", "x86-64-v3", "x86-64-v4"]  # the second converts no float16
# By Linux's names, of the levels of the x86-64 ABI.
_OF_V3 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"}
_NEEDED = {
    "x86-64": set(),
    "x86-64-v3": _OF_V3,
    "x86-64-v4": _OF_V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}
HIDDEN = {"conv.weight": 2}  # matrices of Muon: the groups of a convolution
_OF_ADAM = ("exp_avg", "exp_avg_sq")
_MOMENTS = {"lamb": _OF_ADAM, "adamw": _OF_ADAM, "muon": _OF_ADAM, "rmsprop": ("square_avg",)}
IN_FLOAT32 = ("exp_avg", "exp_avg_sq", "square_avg")


def slots_of(section):
    """Names of the state tensors that an optimizer keeps."""
    buffer = section.get("momentum") and section["name"] != "muon"
    return {*_MOMENTS.get(section["name"], ()), *(["momentum_buffer"] if buffer else [])}


def random_values(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def module_parameters(compute=SINGLE, names=tuple(SHAPES)):
    """Of float16 values in any dtype, so that states of all dtypes start from the same weights."""
    values = random_values(0)
    return {name: nn.Parameter(values[name].half().to(compute)) for name in names}


def weight_state(
    parameters,
    section=LARS,
    dtype=HALF,
    rounding="stochastic",
    seed=3,
    foreach=None,
    clip_norm=None,
):
    def create(named):
        optimizer = factory.create(Optimizer(**section), named, ["norm.weight"], HIDDEN)
        for group in optimizer.param_groups:
            group["foreach"] = foreach
        return optimizer

    return WeightState(
        parameters.items(), create, dtype=dtype, rounding=rounding, seed=seed, clip_norm=clip_norm
    )


def rate(step):
    """0 first, as in a warm-up; then up and down."""
    return 0.02 * step if step < 8 else 0.3 / step


def loss(parameters, step):
    """Its gradient depends on the weights: an error in one step shows in all that follow."""
    drawn = random_values(1 + step)
    return sum((w * drawn[name].to(w.dtype) + 0.2 * w * w).sum() for name, w in parameters.items())


def take_step(
    state, parameters, step, factor=1.0, gradients=None, lr=None, divisor=1.0, micro_batches=1
):
    """An update by the gradient of `loss` times a factor, or by given gradients."""
    state.gradients.zero()
    for _ in range(micro_batches):
        if gradients is None:
            (factor * loss(parameters, step)).backward()
        else:
            sum(
                (w * gradients[name].to(w.dtype)).sum() for name, w in parameters.items()
            ).backward()
        state.gradients.accumulate()
    return state.update(step, rate(step) if lr is None else lr, torch.tensor(divisor), measure=True)


def lars_step(form, w, g, m, lr, decay=0.0, adapt=True, mu=0.885, eta=0.01, eps=0.0):
    """The reference, optim/lars_formula.py, in float64 and with NumPy: new weights, new momentum,
    trust ratio."""
    settings = Hyperparameters(
        **FORMS[form], momentum=mu, weight_decay=decay, trust_coefficient=eta, eps=eps, adapt=adapt
    )
    tensors = [torch.from_numpy(np.asarray(values, np.float64)) for values in (w, m, g)]
    after = lars_formula.updated(*tensors, lr, settings)
    return (
        after.weight.numpy(),
        after.momentum.numpy(),
        None if after.ratio is None else after.ratio.item(),
    )


def compile_for(monkeypatch, instructions):
    """Have C++ compiled for one of INSTRUCTIONS, or skip the test where this processor has them
    not."""
    if instructions != "native" and platform.machine() != "x86_64":
        pytest.skip("of x86-64")
    if instructions != "native":
        has = set(Path("/proc/cpuinfo").read_text().split())
        if not _NEEDED[instructions] <= has:
            pytest.skip(f"no {instructions} here")
    flags = tuple(
        f"-march={instructions}" if flag.startswith("-march") else flag
        for flag in compilation._FLAGS
    )
    monkeypatch.setattr(compilation, "_FLAGS", flags)
