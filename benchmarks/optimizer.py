"""LARS on float16 state with stochastic rounding, against timm's on float32, torch's SGD, and a copy of the same bytes.

    python -m benchmarks.optimizer [--quick] [--json]

On the CPU, with the shapes of EfficientNet-B4 G16 (19.3 million parameters) and random gradients. The update is the
whole one of a training step: it reads a float32 gradient and two float16 numbers a parameter and writes these two,
12 bytes, which the copy beside it moves. Compiled, and uncompiled as where there is no C++ compiler. Rounding alone is
compared with a cast to float16, both compiled. All take turns. With ATEN_CPU_CAPABILITY=avx2 in the environment a
machine with AVX-512 shows what it would do without.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

from typing import Callable, Dict, List, Mapping, Tuple

import timm.optim
import torch
from torch import nn

from benchmarks import claims
from common.errors import ConfigError
from models.efficientnet import build
from models.normalization import norm_parameters
from optim import factory
from optim.compilation import compiled
from optim.layout import ROW, Buffers, Run, in_parts
from optim.rounding import RoundingBits, round_stochastically
from optim.weight_state import WeightState
from recipe.config import Model
from recipe.config import Optimizer as Section

_TURNS = 21
_LR, _DECAY, _MOMENTUM = 0.1, 2.5e-6, 0.885
_BYTES = 12  # a parameter: gradient read, weight and momentum read and written

OURS, TIMM = "LARS, float16 state, compiled", "timm Lars, float32"
COPY = "copy of 12 bytes a parameter"
ROUNDING, CAST = "stochastic rounding, compiled", "cast to float16, compiled"

Parameters = Mapping[str, nn.Parameter]
Sides = Dict[str, Callable[[int], object]]


def main() -> None:
    as_json = claims.begin(__doc__, takes="4 minutes", quick="3 minutes").json
    parameters = b4_parameters()
    count = sum(parameter.numel() for parameter in parameters.values())
    updates, state = our_updates(parameters)
    sides = {**updates, **their_updates(parameters), COPY: copy_of(count * _BYTES), **roundings(count)}
    times = claims.in_turn(sides, _TURNS)
    rows = [{"what": name, **claims.milliseconds(seconds)} for name, seconds in times.items()]
    claims.report("optimizer", rows, found(times, state), as_json)


def b4_parameters() -> Dict[str, nn.Parameter]:
    """Initial parameters of EfficientNet-B4 G16, float32."""
    return dict(build(Model(), 0).named_parameters())


def our_updates(parameters: Parameters) -> Tuple[Sides, WeightState]:
    """Updates by name, and the state of the first. Raises ConfigError where nothing can be compiled."""
    kinds = {
        OURS: (torch.float16, torch.float16, True),
        "LARS, float16 state, uncompiled": (torch.float16, torch.float16, False),
        "LARS, float16 state, float32 compute, compiled": (torch.float32, torch.float16, True),
        "LARS, float32 state, compiled": (torch.float32, torch.float32, True),
        "LARS, float32 state, uncompiled": (torch.float32, torch.float32, False),
    }
    states = {}
    for name, (compute, dtype, is_compiled) in kinds.items():
        states[name] = weight_state(parameters, compute, dtype)
        note = states[name].compile_update() if is_compiled else ""
        if "uncompiled" in note:
            raise ConfigError(f"benchmarks.optimizer: {note}")
    return {name: updating(state) for name, state in states.items()}, states[OURS]


def weight_state(parameters: Parameters, compute: torch.dtype, dtype: torch.dtype) -> WeightState:
    """LARS on copies of the parameters in `compute`, on their device; `dtype`: of weights and momentum."""
    section = Section(name="lars", momentum=_MOMENTUM, weight_decay=_DECAY)
    norms = norm_parameters(build(Model(), 0))
    own = {name: nn.Parameter(parameter.detach().to(compute, copy=True)) for name, parameter in parameters.items()}
    state = WeightState(
        own.items(), lambda named: factory.create(section, named, norms),
        dtype=dtype, rounding="stochastic", seed=0,
    )  # fmt: skip
    state.gradients.flat.normal_(0.0, 0.128)
    return state


def updating(state: WeightState) -> Callable[[int], object]:
    """A side that updates the state."""
    divisor = torch.tensor(128.0, device=state.flat.device)
    return lambda step: state.update(step, _LR, divisor, measure=False)


def their_updates(parameters: Parameters) -> Sides:
    """The steps of other libraries, on float32 state: gradients come unscaled, and nothing is checked or rounded."""
    options = {"lr": _LR, "momentum": _MOMENTUM, "weight_decay": _DECAY}
    makers = {
        TIMM: lambda own: timm.optim.Lars(own, **options),
        "torch SGD foreach, float32": lambda own: torch.optim.SGD(own, foreach=True, **options),
    }
    sides: Sides = {}
    for name, make in makers.items():
        own = [nn.Parameter(parameter.detach().clone()) for parameter in parameters.values()]
        for parameter in own:
            parameter.grad = torch.randn_like(parameter) * 1e-3
        optimizer = make(own)
        sides[name] = lambda step, optimizer=optimizer: optimizer.step()
    return sides


def copy_of(moved: int, device: str = "cpu") -> Callable[[int], object]:
    """A copy that reads and writes so many bytes, half of them each."""
    source = torch.ones(moved // 2, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return lambda step: target.copy_(source)


def roundings(count: int) -> Sides:
    """Sides that convert `count` float32 values to float16: a cast, and our stochastic rounding."""
    length = -(-count // ROW) * ROW
    source, out, keep = torch.randn(length), torch.empty(length, dtype=torch.float16), torch.tensor(True)
    bits = RoundingBits({"all": (0, length)}, length, 0, source.device)

    def rounding(run: Run, step: int = 0) -> None:
        round_stochastically(source, bits, step, "weight", out=out, keep=keep, run=run)

    run, note = compiled(Buffers(source, out, out, {}), stochastic=True)
    if run is in_parts:
        raise ConfigError(f"benchmarks.optimizer: {note}")
    narrow = torch.backends.cpu.get_cpu_capability() == "AVX2"  # by its own means the compiler does not know
    cast = torch.compile(_cast, dynamic=False, options={"cpp.simdlen": 256} if narrow else None)
    return {
        CAST: lambda step: cast(source, out),
        ROUNDING: lambda step: rounding(run, step),
        "stochastic rounding, uncompiled": lambda step: rounding(in_parts, step),
    }


def _cast(source: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(source)


def found(times: Dict[str, List[float]], state: WeightState) -> List[dict]:
    """The claims."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"  # half the instructions for the same bytes
    copy_goal, cast_goal = ("<= 3.3", "<= 2") if wide else ("<= 4", "<= 2.5")
    return [
        claims.claim("time_over_timm_lars", claims.ratios(times[OURS], times[TIMM]), "x", "<= 0.6"),
        claims.claim("time_over_copy_limit", claims.ratios(times[OURS], times[COPY]), "x", copy_goal),
        claims.claim("rounding_over_cast", claims.ratios(times[ROUNDING], times[CAST]), "x", cast_goal),
        claims.claim("state_bytes_per_parameter", [saved_bytes(state)], "bytes", "<= 4"),
    ]


def saved_bytes(state: WeightState) -> float:
    """Bytes of what persists between steps, over the parameters."""
    tensors = list(state.state_dict().values())
    total = sum(tensor.numel() * tensor.element_size() for named in tensors for tensor in named.values())
    return total / sum(tensor.numel() for tensor in tensors[0].values())
