"""LARS on float16 state with stochastic rounding, against timm's on float32, torch's SGD, and a copy of the same bytes.

    python -m benchmarks.optimizer [--quick] [--json]

On the CPU, with the shapes of EfficientNet-B4 G16 (19.3 million parameters) and random gradients. The update is the
whole one of a training step: gradients divided by the loss scale and checked, norms, trust ratios, momentum, weight
decay, rounding, and the module's weights renewed. It reads a float32 gradient and two float16 numbers a parameter and
writes these two: 12 bytes, and as many are moved by the copy beside it. Compiled, and uncompiled as it runs where there
is no C++ compiler. Rounding alone is compared with a cast to float16, both compiled. All take turns; figures are
medians, ratios those of neighbouring turns. Most of the time goes into compiling, where nothing is compiled yet.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from training.command import run

    run(__file__)

import statistics
from typing import Callable, Dict, List

import timm.optim
import torch
from torch import nn

from benchmarks import claims
from models.efficientnet import build
from models.normalization import norm_parameters
from optim import factory
from optim.compilation import compiled
from optim.half_weights import WeightState
from optim.layout import ROW, Run, in_parts
from optim.rounding import RoundingBits, round_stochastically
from recipe.config import Model
from recipe.config import Optimizer as Section
from recipe.errors import ConfigError

_TURNS = 21
_LR, _DECAY, _MOMENTUM = 0.1, 2.5e-6, 0.885
_BYTES = 12  # a parameter: gradient read, weight and momentum read and written

Sides = Dict[str, Callable[[int], None]]


def main() -> None:
    as_json = claims.begin(__doc__, takes="4 minutes", quick="3 minutes").json
    parameters = b4_parameters()
    count = sum(parameter.numel() for parameter in parameters.values())
    updates, states = our_updates(parameters)
    sides: Sides = {**updates, **their_updates(parameters), "copy of 12 bytes a parameter": copy_of(count * _BYTES)}
    sides.update(roundings(count))
    times = claims.in_turn(sides, _TURNS, at_most=3)
    claims.report("optimizer", rows(times, count), found(times, states["LARS, float16 state, compiled"]), as_json)


def b4_parameters() -> Dict[str, nn.Parameter]:
    """Initial parameters of EfficientNet-B4 G16, float32."""
    return dict(build(Model(), 0).named_parameters())


def our_updates(parameters: Dict[str, nn.Parameter]) -> tuple:
    """Updates by name, and the WeightState of each. Raises ConfigError where nothing can be compiled."""
    kinds = {
        "LARS, float16 state, compiled": (torch.float16, torch.float16, True),
        "LARS, float16 state, uncompiled": (torch.float16, torch.float16, False),
        "LARS, float16 state, float32 compute, compiled": (torch.float32, torch.float16, True),
        "LARS, float32 state, compiled": (torch.float32, torch.float32, True),
        "LARS, float32 state, uncompiled": (torch.float32, torch.float32, False),
    }
    states = {name: _weight_state(parameters, *kind) for name, kind in kinds.items()}
    for state in states.values():
        if state.notes and "uncompiled" in state.notes[0]:
            raise ConfigError(f"benchmarks.optimizer: {state.notes[0]}")
    divisor = torch.tensor(128.0)
    return {
        name: lambda step, state=state: state.update(step, _LR, divisor, measure=False)
        for name, state in states.items()
    }, states


def _weight_state(
    parameters: Dict[str, nn.Parameter], compute: torch.dtype, dtype: torch.dtype, compile: bool
) -> WeightState:
    section = Section(name="lars", momentum=_MOMENTUM, weight_decay=_DECAY)
    norms = norm_parameters(build(Model(), 0))
    own = {name: nn.Parameter(parameter.detach().to(compute, copy=True)) for name, parameter in parameters.items()}
    state = WeightState(
        own.items(), lambda named: factory.create(section, named, norms),
        dtype=dtype, rounding="stochastic", seed=0, compile=compile,
    )  # fmt: skip
    state.gradients.flat.normal_(0.0, 0.128)
    return state


def their_updates(parameters: Dict[str, nn.Parameter]) -> Sides:
    """The steps of other libraries, on float32 state: gradients come unscaled, and nothing is checked or rounded."""
    makers = {
        "timm Lars, float32": lambda own: timm.optim.Lars(own, lr=_LR, momentum=_MOMENTUM, weight_decay=_DECAY),
        "torch SGD foreach, float32": lambda own: torch.optim.SGD(
            own, lr=_LR, momentum=_MOMENTUM, weight_decay=_DECAY, foreach=True
        ),
    }
    sides: Sides = {}
    for name, make in makers.items():
        own = [nn.Parameter(parameter.detach().clone()) for parameter in parameters.values()]
        for parameter in own:
            parameter.grad = torch.randn_like(parameter) * 1e-3
        optimizer = make(own)
        sides[name] = lambda step, optimizer=optimizer: optimizer.step()
    return sides


def copy_of(moved: int) -> Callable[[int], None]:
    """A copy that reads and writes so many bytes, half of them each."""
    source = torch.ones(moved // 2, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return lambda step: target.copy_(source)


def roundings(count: int) -> Sides:
    """Sides that convert `count` float32 values to float16: a cast, and our stochastic rounding."""
    length = -(-count // ROW) * ROW
    source, out, keep = torch.randn(length), torch.empty(length, dtype=torch.float16), torch.tensor(True)
    bits = RoundingBits({"all": (0, length)}, length, 0, source.device)

    def rounding(run: Run, step: int = 0) -> None:
        round_stochastically(source, bits, step, "weight", out=out, keep=keep, run=run)

    run, note = compiled(rounding)
    if run is in_parts:
        raise ConfigError(f"benchmarks.optimizer: {note}")
    cast = torch.compile(_cast, dynamic=False)
    return {
        "cast to float16, compiled": lambda step: cast(source, out),
        "stochastic rounding, compiled": lambda step: rounding(run, step),
        "stochastic rounding, uncompiled": lambda step: rounding(in_parts, step),
    }


def _cast(source: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(source)


def rows(times: Dict[str, List[float]], count: int) -> List[dict]:
    return [
        {
            "what": name,
            **claims.milliseconds(seconds, low="lowest", high="highest"),
            "ns a parameter": 1e9 * statistics.median(seconds) / count,
        }
        for name, seconds in times.items()
    ]


def found(times: Dict[str, List[float]], state: WeightState) -> List[dict]:
    """The claims."""
    ours = "LARS, float16 state, compiled"

    def ratios(one: str, other: str) -> List[float]:
        return claims.ratios(times[one], times[other])

    rounding, cast = "stochastic rounding, compiled", "cast to float16, compiled"
    return [
        claims.claim("time_over_timm_lars", ratios(ours, "timm Lars, float32"), "x", "<= 1.0"),
        claims.claim("time_over_copy_limit", ratios(ours, "copy of 12 bytes a parameter"), "x", "<= 4"),
        claims.claim("rounding_over_cast", ratios(rounding, cast), "x", "<= 2"),
        claims.claim("state_bytes_per_parameter", [saved_bytes(state)], "bytes", "<= 4"),
    ]


def saved_bytes(state: WeightState) -> float:
    """Bytes of what persists between steps, over the parameters."""
    tensors = list(state.state_dict().values())
    total = sum(tensor.numel() * tensor.element_size() for named in tensors for tensor in named.values())
    return total / sum(tensor.numel() for tensor in tensors[0].values())
