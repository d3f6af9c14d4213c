"""LARS on float16 state with stochastic rounding, against timm's on float32, torch's SGD, and a copy of the same bytes.

    python -m benchmarks.optimizer [--quick] [--json]

On the CPU, with the shapes of EfficientNet-B4 G16 (19.3 million parameters) and random gradients.
The update is the whole one of a training step: it reads a float32 gradient and two float16 numbers
a parameter and writes these two, 12 bytes, which the copy beside it moves. Compiled, and uncompiled
as where there is no C++ compiler. Rounding alone is compared with a cast to float16, both compiled.
All take turns. With ATEN_CPU_CAPABILITY=avx2 in the environment a machine with AVX-512 shows what
it would do without.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import functools
import math
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

import timm.optim
import torch
from torch import nn

from benchmarks import claims
from common.errors import ConfigError
from models.efficientnet import build
from models.normalization import norm_parameters
from optim import factory
from optim.base import HasSlots
from optim.compilation import compiled
from optim.layout import ROW, Buffers, Run, in_parts
from optim.rounding import RoundingBits, round_stochastically
from optim.weight_state import WeightState
from recipe.network import EfficientNet
from recipe.optimization import Lars

_TURNS = 21
_LR = 0.1
_DECAY = 2.5e-6
_MOMENTUM = 0.885
_BYTES = 12  # a parameter: gradient read, weight and momentum read and written

OURS = "LARS, float16 state, compiled"
TIMM = "timm Lars, float32"
COPY = "copy of 12 bytes a parameter"
ROUNDING = "stochastic rounding, compiled"
CAST = "cast to float16, compiled"

Parameters = Mapping[str, nn.Parameter]
Side = Callable[[int], object]  # takes the number of the turn
Sides = Dict[str, Side]


class Kind(NamedTuple):
    """A kind of update by our LARS.

    compute: dtype of the parameters.
    dtype: of weights and momentum.
    """

    compute: torch.dtype
    dtype: torch.dtype
    is_compiled: bool


KINDS = {
    OURS: Kind(torch.float16, torch.float16, is_compiled=True),
    "LARS, float16 state, uncompiled": Kind(torch.float16, torch.float16, is_compiled=False),
    "LARS, float16 state, float32 compute, compiled": Kind(
        torch.float32, torch.float16, is_compiled=True
    ),
    "LARS, float32 state, compiled": Kind(torch.float32, torch.float32, is_compiled=True),
    "LARS, float32 state, uncompiled": Kind(torch.float32, torch.float32, is_compiled=False),
}


def main() -> None:
    """Measure all updates in turn; print the table and the claims."""
    as_json = claims.begin(__doc__, takes="4 minutes", quick="3 minutes").json
    parameters = b4_parameters()
    count = sum(parameter.numel() for parameter in parameters.values())
    updates, state = our_updates(parameters)
    sides: Sides = {
        **updates,
        **their_updates(parameters),
        COPY: copy_of(count * _BYTES),
        **roundings(count),
    }
    times = claims.in_turn(sides, _TURNS)
    rows = []
    for name, seconds in times.items():
        rows.append({"what": name, **claims.milliseconds(seconds)})
    claims.report("optimizer", rows, claims_of(times, state), as_json)


def b4_parameters() -> Dict[str, nn.Parameter]:
    """Return the initial parameters of EfficientNet-B4 G16, float32, by name."""
    return dict(build(EfficientNet(), 0).named_parameters())


# Updates ------------------------------------------------------------------------------------------


def our_updates(parameters: Parameters) -> Tuple[Sides, WeightState]:
    """Return all kinds of our updates by name, and the state of the first.

    Args:
        parameters: by name, whose values are copied.

    Raises:
        ConfigError: nothing can be compiled.
    """
    # Where one is not compiled there is nothing to claim.
    states = {}
    for name, kind in KINDS.items():
        state = weight_state(parameters, kind.compute, kind.dtype)
        note = state.compile_update() if kind.is_compiled else ""
        if "uncompiled" in note:
            raise ConfigError(f"benchmarks.optimizer: {note}")
        states[name] = state
    sides = {name: updating(state) for name, state in states.items()}
    return sides, states[OURS]


def weight_state(
    parameters: Parameters,
    compute: torch.dtype,
    dtype: torch.dtype,
) -> WeightState:
    """Return the state of LARS, with random gradients, on the device of the parameters.

    Args:
        parameters: by name, whose values are copied.
        compute: dtype of the copies.
        dtype: of weights and momentum.
    """
    section = Lars(momentum=_MOMENTUM, weight_decay=_DECAY)
    norms = norm_parameters(build(EfficientNet(), 0))

    def create(named: Dict[str, nn.Parameter]) -> HasSlots:
        """Return LARS for `named` parameters."""
        return factory.create(section, named, norms)

    # The state moves parameters into its own memory.
    copies = {}
    for name, parameter in parameters.items():
        values = parameter.detach().to(compute, copy=True)
        copies[name] = nn.Parameter(values)
    state = WeightState(copies.items(), create, dtype=dtype, rounding="stochastic", seed=0)
    state.gradients.flat.normal_(0.0, 0.128)
    return state


def updating(state: WeightState) -> Side:
    """Return a side that updates a state.

    Args:
        state: of LARS, with gradients.
    """
    # The divisor is the loss scale, for one micro batch.
    divisor = torch.tensor(128.0, device=state.flat.device)

    def update(step: int) -> object:
        """Make the update of a `step`."""
        return state.update(step, _LR, divisor, measure=False)

    return update


def their_updates(parameters: Parameters) -> Sides:
    """Return the steps of other libraries, on float32 state, by name.

    Their gradients come unscaled, and nothing is checked or rounded.

    Args:
        parameters: by name, whose values are copied.
    """
    lars = timm.optim.Lars(
        _with_gradients(parameters),
        lr=_LR,
        momentum=_MOMENTUM,
        weight_decay=_DECAY,
    )
    sgd = torch.optim.SGD(
        _with_gradients(parameters),
        lr=_LR,
        momentum=_MOMENTUM,
        weight_decay=_DECAY,
        foreach=True,
    )
    return {TIMM: _stepping(lars), "torch SGD foreach, float32": _stepping(sgd)}


def _with_gradients(parameters: Parameters) -> List[nn.Parameter]:
    """Return copies of the parameters that have random gradients."""
    copies = []
    for parameter in parameters.values():
        copied = nn.Parameter(parameter.detach().clone())
        copied.grad = torch.randn_like(copied) * 1e-3
        copies.append(copied)
    return copies


def _stepping(optimizer: torch.optim.Optimizer) -> Side:
    """Return a side that makes a step of an optimizer."""
    return lambda turn: optimizer.step()


def copy_of(moved: int, device: str = "cpu") -> Side:
    """Return a side that copies.

    Args:
        moved: bytes, of which a half is read and a half is written.
        device: on which they are.
    """
    source = torch.ones(moved // 2, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return lambda turn: target.copy_(source)


# Roundings ----------------------------------------------------------------------------------------


def roundings(count: int) -> Sides:
    """Return sides that convert float32 values to float16: a cast, and our stochastic rounding.

    Args:
        count: of the values.

    Raises:
        ConfigError: nothing can be compiled.
    """
    # Our rounding takes whole rows.
    length = math.ceil(count / ROW) * ROW
    source = torch.randn(length)
    out = torch.empty(length, dtype=torch.float16)
    run, note = compiled(Buffers(source, out, out, {}), stochastic=True)
    if run is in_parts:
        raise ConfigError(f"benchmarks.optimizer: {note}")
    bits = RoundingBits({"all": (0, length)}, length, seed=0, device=source.device)
    keep = torch.tensor(True)

    def rounding(run: Run, step: int) -> None:
        """Round the values by the random bits of a `step`; `run` runs the pass."""
        round_stochastically(source, bits, step, "weight", out=out, keep=keep, run=run)

    return {
        CAST: _casting(source, out),
        ROUNDING: functools.partial(rounding, run),
        "stochastic rounding, uncompiled": functools.partial(rounding, in_parts),
    }


def _casting(source: torch.Tensor, out: torch.Tensor) -> Side:
    """Return a side that copies into another dtype, compiled."""
    options: Optional[Dict[str, Any]] = None
    # The compiler does not know by itself that torch was told to do without AVX-512.
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        options = {"cpp.simdlen": 256}
    cast = torch.compile(_cast, dynamic=False, options=options)
    return lambda turn: cast(source, out)


def _cast(source: torch.Tensor, out: torch.Tensor) -> None:
    """Copy a tensor into one of another dtype."""
    out.copy_(source)


# Claims -------------------------------------------------------------------------------------------


def claims_of(times: Dict[str, List[float]], state: WeightState) -> List[dict]:
    """Return the claims.

    Args:
        times: of all sides.
        state: of our update.
    """
    # AVX-512 takes half the instructions for the same bytes.
    copy_goal = "<= 4"
    cast_goal = "<= 2.5"
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        copy_goal = "<= 3.3"
        cast_goal = "<= 2"
    over_timm = claims.ratios(times[OURS], times[TIMM])
    over_copy = claims.ratios(times[OURS], times[COPY])
    over_cast = claims.ratios(times[ROUNDING], times[CAST])
    return [
        claims.claim("time_over_timm_lars", over_timm, "x", "<= 0.6"),
        claims.claim("time_over_copy_limit", over_copy, "x", copy_goal),
        claims.claim("rounding_over_cast", over_cast, "x", cast_goal),
        claims.claim("state_bytes_per_parameter", [saved_bytes(state)], "bytes", "<= 4"),
    ]


def saved_bytes(state: WeightState) -> float:
    """Return the bytes of what persists between steps, over the number of parameters.

    Args:
        state: of our update.
    """
    saved = state.state_dict()
    total = 0
    for tensors in saved.values():
        for tensor in tensors.values():
            total += tensor.numel() * tensor.element_size()
    count = sum(tensor.numel() for tensor in saved["weights"].values())
    return total / count
